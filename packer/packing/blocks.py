"""Best-fit decreasing in blocks of the stream: where short pieces are scarce beside long ones.

Each block is packed longest first, which gives every long piece the closest fit that is there. Its bad packs
are taken apart again, and their pieces come once more with the next block.

Worst are the packs without a long piece: they get what suited no room beside one, and small pieces for want
of better ones. So now and then a block is packed like that to see how many pieces of each length are left
over so. As many are then picked beforehand and put into full packs of three, and only the rest is packed
longest first. Where that saves nothing it is left out, until a block is looked at again.
"""

from __future__ import annotations

import numpy as np

from packer.packing.closing import EVEN, Closing
from packer.packing.decreasing import best_fit_decreasing
from packer.packing.shuffle import layout_of, sorted_by
from packer.packing.values import Int64, Layout, joined

_BAD = 32  # a pack is taken apart if more than one token in so many is missing
_LOOKED_AT = 8  # one block in so many
_CLASSES = 128  # of the lengths up to half a pack
_SHORTEST = 8  # pieces of under one eighth of a pack are not picked: they close gaps
_ONE = 1 << 16  # a share of all


def in_blocks(sizes: Int64, capacity: int, block: int) -> Layout:
    """Pack `sizes`, each in [1, capacity], `block` at a time. O(log block) for a piece."""
    done: list[Layout] = []
    waiting, left_over = np.zeros(0, np.int64), np.zeros(_CLASSES, np.int64)
    for number, arrived in enumerate(range(0, len(sizes), block)):
        stop = min(len(sizes), arrived + block)
        here = np.concatenate([waiting, np.arange(arrived, stop)])
        if number % _LOOKED_AT:
            made = _threes_first(sizes[here], capacity, left_over)
        else:
            made, left_over = _looked_at(sizes[here], capacity)
        made = made.of(here)
        if stop < len(sizes):
            made, waiting = _without_bad(made, sizes, capacity, arrived)
        done.append(made)
    return joined(done)


def _looked_at(sizes: Int64, capacity: int) -> tuple[Layout, Int64]:
    """The packs of a block; and of the pieces of each class the share that is left over, of _ONE."""
    plain = best_fit_decreasing(sizes, capacity)
    none = np.zeros(_CLASSES, np.int64)
    if _most_alone(sizes, capacity) <= 0:
        return plain, none
    longest = np.maximum.reduceat(sizes[plain.order], plain.offsets[:-1])
    alone = plain.order[np.repeat(2 * longest <= capacity, np.diff(plain.offsets))]
    short = np.flatnonzero(2 * sizes <= capacity)
    here = np.bincount(_class(sizes[short], capacity), minlength=_CLASSES)
    left_over = np.bincount(_class(sizes[alone], capacity), minlength=_CLASSES) * _ONE // np.maximum(here, 1)
    made = _threes_first(sizes, capacity, left_over)
    return (made, left_over) if made.num_packs <= plain.num_packs else (plain, none)


def _most_alone(sizes: Int64, capacity: int) -> int:
    """Packs without a long piece that the tokens ask for; below 0 where the long ones are packs enough."""
    return int(sizes.sum()) // capacity - int(np.count_nonzero(2 * sizes > capacity))


def _class(sizes: Int64, capacity: int) -> Int64:
    return sizes * (2 * _CLASSES) // (capacity + 1)


def _threes_first(sizes: Int64, capacity: int, left_over: Int64) -> Layout:
    """Full packs of three of the shares `left_over`, then the rest longest first."""
    short = np.flatnonzero((2 * sizes <= capacity) & (sizes * _SHORTEST >= capacity))
    most = _most_alone(sizes, capacity)
    threes = Layout(short[:0], np.zeros(1, np.int64))
    if most > 0 and left_over.any():
        short = short[sorted_by(sizes[short], capacity.bit_length(), None)]
        so_far = np.cumsum(left_over[_class(sizes[short], capacity)]) // _ONE
        threes = _threes(short[np.diff(so_far, prepend=0) > 0], sizes, capacity, most)
    others = np.ones(len(sizes), np.bool_)
    others[threes.order] = False
    rest = np.flatnonzero(others)
    return joined([threes, best_fit_decreasing(sizes[rest], capacity).of(rest)])


def _threes(picked: Int64, sizes: Int64, capacity: int, most: int) -> Layout:
    """At most so many packs of three of the pieces `picked`, rising by size. Every third begins one."""
    firsts, pool = picked[1::3][:most], np.delete(picked, np.s_[1::3])
    pack, place = Closing(capacity - sizes[firsts], sizes[pool], EVEN).exact()
    closed = np.unique(pack)
    return layout_of(np.concatenate([closed, pack]), np.concatenate([firsts[closed], pool[place]]))


def _without_bad(made: Layout, sizes: Int64, capacity: int, arrived: int) -> tuple[Layout, Int64]:
    """The packs that are good or hold a piece from before `arrived`; and the pieces of the others, rising."""
    begins, counts = made.offsets[:-1], np.diff(made.offsets)
    missing = capacity - np.add.reduceat(sizes[made.order], begins)
    kept = missing * _BAD <= capacity
    kept |= np.minimum.reduceat(made.order, begins) < arrived
    of_piece = np.repeat(kept, counts)
    offsets = np.concatenate([[0], np.cumsum(counts[kept])])
    return Layout(made.order[of_piece], offsets), np.sort(made.order[~of_piece])
