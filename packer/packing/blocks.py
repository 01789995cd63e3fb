"""Best-fit decreasing in blocks of the stream: where short pieces are scarce beside long ones.

Each block is packed longest first, which gives every long piece the closest fit that is there. Its bad packs
are taken apart again, and their pieces come once more with the next block.

Most bad packs hold short pieces alone, which suited no room beside a long one. So these may be dealt with
before the next block is: as many packs as the tokens ask for beyond the long pieces begin with one of them
each, and are closed exactly by two of all that are short. Whether that saves packs depends on the lengths;
it is tried on the first block, in quarters.
"""

from __future__ import annotations

import numpy as np

from packer.packing.closing import EVEN, Closing
from packer.packing.decreasing import best_fit_decreasing
from packer.packing.shuffle import layout_of, sorted_by
from packer.packing.values import Int64, Layout, joined

_BAD = 32  # a pack is taken apart if more than one token in so many is missing


def in_blocks(sizes: Int64, capacity: int, block: int) -> Layout:
    """Pack `sizes`, each in [1, capacity], `block` at a time. O(log block) for a piece."""
    first, quarter = sizes[:block], -(-block // 4)
    begun = len(sizes) > block and (
        _in_blocks(first, capacity, quarter, begun=True).num_packs
        <= _in_blocks(first, capacity, quarter, begun=False).num_packs
    )
    return _in_blocks(sizes, capacity, block, begun=begun)


def _in_blocks(sizes: Int64, capacity: int, block: int, *, begun: bool) -> Layout:
    """begun: whether short pieces of bad packs begin packs before the next block is packed."""
    done: list[Layout] = []
    waiting = np.zeros(0, np.int64)
    for arrived in range(0, len(sizes), block):
        stop = min(len(sizes), arrived + block)
        here = np.concatenate([waiting, np.arange(arrived, stop)])
        if begun:
            closed = _begun_with_waiting(sizes[here], capacity, len(waiting)).of(here)
            done.append(closed)
            here = here[~np.isin(here, closed.order, assume_unique=True)]
        made = best_fit_decreasing(sizes[here], capacity).of(here)
        if stop < len(sizes):
            made, waiting = _without_bad(made, sizes, capacity, arrived)
        done.append(made)
    return joined(done)


def _begun_with_waiting(sizes: Int64, capacity: int, num_waiting: int) -> Layout:
    """Full packs of short pieces alone, three in each, one of them of the first `num_waiting`."""
    short = 2 * sizes <= capacity
    most = int(sizes.sum()) // capacity - int(np.count_nonzero(~short))
    firsts = np.flatnonzero(short[:num_waiting])[: max(0, most)]
    short[firsts] = False
    pool = np.flatnonzero(short)
    pool = pool[sorted_by(sizes[pool], capacity.bit_length(), None)]
    packs, places = Closing(capacity - sizes[firsts], sizes[pool], EVEN).exact()
    used = np.unique(packs)
    return layout_of(np.concatenate([used, packs]), np.concatenate([firsts[used], pool[places]]))


def _without_bad(made: Layout, sizes: Int64, capacity: int, arrived: int) -> tuple[Layout, Int64]:
    """The packs that are good or hold a piece from before `arrived`; and the pieces of the others, rising."""
    begins, counts = made.offsets[:-1], np.diff(made.offsets)
    missing = capacity - np.add.reduceat(sizes[made.order], begins)
    kept = missing * _BAD <= capacity
    kept |= np.minimum.reduceat(made.order, begins) < arrived
    of_piece = np.repeat(kept, counts)
    offsets = np.concatenate([[0], np.cumsum(counts[kept])])
    return Layout(made.order[of_piece], offsets), np.sort(made.order[~of_piece])
