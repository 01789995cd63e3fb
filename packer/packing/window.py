"""Best fit over a bounded window of waiting pieces: the default, for streams and partitions.

The packs of a window are made at once. Each begins with the oldest pieces as they come, until so little room
is left that choosing matters; the rest is chosen among all that wait (see closing), so that a pack is full
to the last token wherever that can be had. A tenth of the window's tokens is left over, which keeps the
choice wide, and a pack that did not close well is taken apart again. What is left begins the packs of the
next window, so none waits for ever: most of a pack keeps the order of the stream.

When the stream is over, what waits is packed longest first, or all of the last window is, if that is better.

Where many pieces are over half a pack and short ones are scarce, this would give the short ones away too
early. There best-fit decreasing packs the stream in blocks (see blocks).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from packer.packing.blocks import in_blocks
from packer.packing.closing import EVEN, UNEVEN, Closing
from packer.packing.decreasing import best_fit_decreasing
from packer.packing.histogram import histogram_best_fit, lower_bound_of
from packer.packing.in_order import next_fit
from packer.packing.shuffle import in_stream_order, layout_of, sorted_by
from packer.packing.values import Int64, Layout, joined

WINDOW = 8192
_LAST = 1024  # pieces that need no window: of a short stream, or left over in the end
_KEPT = 0.1  # of a window's tokens: for the next
_CHOSEN_PIECES = 1.5  # of mean length: the room that is filled by choice
_OPEN = 2048  # a pack is closed if at most one token in so many is missing
_WIDE = 2  # times as long as the tenth shortest is the tenth longest, of ten
_PATIENCE = 2  # windows that a piece waits for a pack that closes well
_MOSTLY_LARGE = 0.8  # of packs have a piece over half a pack: short ones are scarce
_SOME_LARGE = 0.1  # of packs: else no short pieces are scarce, and blocks are no better than windows
_MOSTLY_CLOSED = 0.75  # of the packs of windows: else they are not good enough
_GOOD = 1.001  # packs over the lower bound


def window_best_fit(sizes: Int64, capacity: int, window: int = WINDOW) -> Layout:
    """Pack `sizes`, each in [1, capacity], in one pass over them.

    window: how many pieces are looked at together. O(log window) for a piece, in numpy.
    """
    if not len(sizes):
        return Layout(np.zeros(0, np.int64), np.zeros(1, np.int64))
    # What no other piece fits beside is a pack as it is, and would only take up places in the window.
    alone = sizes > capacity - sizes.min()
    shared, single = np.flatnonzero(~alone), np.flatnonzero(alone)
    packed = _packed(sizes[shared], capacity, window).of(shared)
    return in_stream_order(joined([packed, Layout(single, np.arange(len(single) + 1))]))


def _packed(sizes: Int64, capacity: int, window: int) -> Layout:
    if len(sizes) <= min(window, _LAST):
        return histogram_best_fit(sizes, capacity)
    bound = -(-int(sizes.sum()) // capacity)
    num_large = int(np.count_nonzero(2 * sizes > capacity))
    if num_large > _MOSTLY_LARGE * bound:
        return in_blocks(sizes, capacity, window)
    # Lengths that are all alike close badly too, and longest first they are far worse: four of a kind may
    # fill a pack, but not the four longest.
    layout = _in_windows(sizes, capacity, window, _MOSTLY_CLOSED if num_large > _SOME_LARGE * bound else 0)
    if layout is not None and _is_good(layout, sizes, capacity):
        return layout
    blocks = in_blocks(sizes, capacity, window)
    return layout if layout is not None and layout.num_packs <= blocks.num_packs else blocks


def _is_good(layout: Layout, sizes: Int64, capacity: int) -> bool:
    """Whether no more than one pack, or next to none, could be saved."""
    bound = -(-int(sizes.sum()) // capacity)
    if layout.num_packs <= max(bound + 1, bound * _GOOD):
        return True
    bound = _bound(sizes, capacity)  # higher, but slower to find
    return layout.num_packs <= max(bound + 1, bound * _GOOD)


def _bound(sizes: Int64, capacity: int) -> int:
    return lower_bound_of(np.bincount(sizes), capacity)


def _in_windows(sizes: Int64, capacity: int, window: int, least_closed: float) -> Layout | None:
    """None where fewer than this share of packs close well: short pieces are scarce."""
    edges = np.linspace(0, len(sizes), -(-len(sizes) // window) + 1).astype(np.int64).tolist()
    waiting, made = np.zeros(0, np.int64), list[Layout]()
    last, num_before, num_begun, num_closed = waiting, 0, 0, 0
    while edges[1:] or len(waiting) > _LAST:
        if edges[1:]:
            arrived = edges.pop(0)
            waiting = np.concatenate([waiting, np.arange(arrived, edges[0])])
            last, num_before = waiting, len(made)
        num_old = int(np.searchsorted(waiting, arrived - _PATIENCE * window))
        packed = _one_window(sizes[waiting], capacity, num_old)
        num_begun, num_closed = num_begun + packed.num_begun, num_closed + packed.num_closed
        if num_closed < least_closed * num_begun:
            return None
        made.append(packed.packs.of(waiting))
        waiting = waiting[packed.left]
        if not edges[1:] and 2 * packed.num_closed <= packed.num_begun:
            break
    ended = joined([*made[num_before:], *_rest(waiting, sizes, capacity)])
    return joined([*made[:num_before], _ended(ended, last, sizes, capacity)])


def _rest(waiting: Int64, sizes: Int64, capacity: int) -> list[Layout]:
    """Packs of what is left of all windows."""
    if not len(waiting):
        return []
    packed, bound = best_fit_decreasing(sizes[waiting], capacity), _bound(sizes[waiting], capacity)
    # Where long pieces make the packs, a search that has to save several takes long and finds nothing.
    long = int(np.count_nonzero(2 * sizes[waiting] > capacity))
    if packed.num_packs == bound + 1 or (packed.num_packs > bound and 2 * long < bound):
        searched = histogram_best_fit(sizes[waiting], capacity)
        packed = searched if searched.num_packs < packed.num_packs else packed
    return [packed.of(waiting)]


def _ended(ended: Layout, last: Int64, sizes: Int64, capacity: int) -> Layout:
    """The packs of the last window's pieces: as they are, or longest first if that saves more than one pack.

    It does where long pieces are left over together: they need packs of their own, though the window's tokens
    would do with fewer. But it puts like with like.
    """
    if ended.num_packs <= _bound(sizes[last], capacity) + 1:
        return ended
    other = best_fit_decreasing(sizes[last], capacity).of(last)
    return other if other.num_packs < ended.num_packs - 1 else ended


def _part(pool: Int64) -> int:
    """What the longer of a pair is to take of its room; `pool` rises. Alike ones make few uneven pairs."""
    tenth = len(pool) // 10
    return UNEVEN if len(pool) and pool[-1 - tenth] > _WIDE * pool[tenth] else EVEN


class _Made(NamedTuple):
    """The packs of a window, what is left of it (places in it, rising), and how many packs closed well."""

    packs: Layout
    left: Int64
    num_begun: int
    num_closed: int


def _one_window(sizes: Int64, capacity: int, num_old: int) -> _Made:
    """Pack the pieces of a window, but for a rest.

    num_old: the first so many have waited long enough: their packs are closed as they are.
    """
    tokens = int(sizes.sum())
    reserve = int(_CHOSEN_PIECES * tokens / len(sizes))
    num_packs = int(tokens * (1 - _KEPT)) // capacity
    begins = next_fit(sizes, max(1, capacity - reserve), num_packs)
    num_packs = len(begins) - 1
    streamed = int(begins[-1])
    by_size = streamed + sorted_by(sizes[streamed:], capacity.bit_length(), None)
    ends = np.concatenate([[0], np.cumsum(sizes[:streamed])])
    rooms = capacity - np.diff(ends[begins])
    packs, chosen = Closing(rooms, sizes[by_size], _part(sizes[by_size])).run()
    pack = np.concatenate([np.repeat(np.arange(num_packs), np.diff(begins)), packs])
    piece = np.concatenate([np.arange(streamed), by_size[chosen]])
    missing = capacity - np.bincount(pack, weights=sizes[piece], minlength=num_packs)
    closed = missing * _OPEN <= capacity
    num_closed = int(np.count_nonzero(closed))
    closed[pack[piece < num_old]] = True
    kept = closed[pack]
    pack, piece = pack[kept], piece[kept]
    left = np.ones(len(sizes), np.bool_)
    left[piece] = False
    return _Made(layout_of(pack, piece), np.flatnonzero(left), num_packs, num_closed)
