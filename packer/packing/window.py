"""Best fit over a bounded window of waiting pieces: the default, for streams and partitions.

The packs of a window are made at once. Each begins with the oldest pieces as they come, until so little room
is left that choosing matters; the rest is chosen among all that wait (see closing), so that a pack is full
to the last token wherever that can be had. A tenth of the window's tokens is left over, which keeps the
choice wide, and a pack that did not close well is taken apart again. What is left begins the packs of the
next window, so none waits for ever: most of a pack keeps the order of the stream.

When the stream is over, what waits is packed by the histogram engine, which leaves no poor packs at the end.

Where many pieces are over half a pack and short ones are scarce, this would give the short ones away too
early. There best-fit decreasing packs the stream in blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from packer.packing.blocks import in_blocks
from packer.packing.closing import Closing
from packer.packing.histogram import histogram_best_fit, lower_bound_of
from packer.packing.in_order import next_fit
from packer.packing.shuffle import in_stream_order
from packer.packing.values import Int64, Layout

WINDOW = 8192
_LAST = 1024  # pieces that the histogram engine packs in the end
_KEPT = 0.1  # of a window's tokens: for the next
_CHOSEN_PIECES = 1.5  # of mean length: the room that is filled by choice
_OPEN = 2048  # a pack is closed if at most one token in so many is missing
_PATIENCE = 2  # windows that a piece waits for a pack that closes well
_MOSTLY_LARGE = 0.8  # of packs have a piece over half a pack: short ones are scarce
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
    if alone.any():
        shared = np.flatnonzero(~alone)
        packed = window_best_fit(sizes[shared], capacity, window)
        return _merged(Layout(shared[packed.order], packed.offsets), np.flatnonzero(alone))
    if len(sizes) <= min(window, _LAST):
        return in_stream_order(histogram_best_fit(sizes, capacity))
    bound = -(-int(sizes.sum()) // capacity)
    if int(np.count_nonzero(2 * sizes > capacity)) > _MOSTLY_LARGE * bound:
        return in_blocks(sizes, capacity, window)
    layout = _in_windows(sizes, capacity, window)
    if layout is not None and _is_good(layout, sizes, capacity):
        return layout
    blocks = in_blocks(sizes, capacity, window)
    return layout if layout is not None and len(layout.offsets) <= len(blocks.offsets) else blocks


def _is_good(layout: Layout, sizes: Int64, capacity: int) -> bool:
    """Whether no more than one pack, or next to none, could be saved."""
    num_packs = len(layout.offsets) - 1
    bound = -(-int(sizes.sum()) // capacity)
    if num_packs <= max(bound + 1, bound * _GOOD):
        return True
    bound = lower_bound_of(np.bincount(sizes, minlength=capacity + 1), capacity)  # higher, but slower to find
    return num_packs <= max(bound + 1, bound * _GOOD)


def _in_windows(sizes: Int64, capacity: int, window: int) -> Layout | None:
    """None where too few packs close well: short pieces are scarce."""
    orders, counts = [], [np.zeros(1, np.int64)]
    waiting, arrived, num_begun, num_closed = np.zeros(0, np.int64), 0, 0, 0
    while arrived < len(sizes) or len(waiting) > _LAST:
        stop = min(len(sizes), arrived + window)
        waiting = np.concatenate([waiting, np.arange(arrived, stop)])
        num_old = int(np.searchsorted(waiting, arrived - _PATIENCE * window))
        made = _one_window(sizes[waiting], capacity, num_old)
        num_begun, num_closed = num_begun + made.num_begun, num_closed + made.num_closed
        if num_closed < _MOSTLY_CLOSED * num_begun:
            return None
        orders.append(waiting[made.packs.order])
        counts.append(np.diff(made.packs.offsets))
        waiting, arrived = waiting[made.left], stop
        if arrived == len(sizes) and 2 * made.num_closed <= made.num_begun:
            break
    if len(waiting):
        rest = in_stream_order(histogram_best_fit(sizes[waiting], capacity))
        orders.append(waiting[rest.order])
        counts.append(np.diff(rest.offsets))
    return Layout(np.concatenate(orders), np.cumsum(np.concatenate(counts)))


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
    by_size = streamed + np.argsort(sizes[streamed:], kind="stable")
    ends = np.concatenate([[0], np.cumsum(sizes[:streamed])])
    rooms = capacity - np.diff(ends[begins])
    packs, chosen = Closing(rooms, sizes[by_size]).run()
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
    counts = np.bincount(pack, minlength=num_packs)
    offsets = np.concatenate([[0], np.cumsum(counts[counts > 0])])
    packs_made = Layout(piece[np.argsort(pack, kind="stable")], offsets)
    return _Made(packs_made, np.flatnonzero(left), num_packs, num_closed)


def _merged(shared: Layout, alone: Int64) -> Layout:
    """Packs of several pieces, in the order of their first, and packs of one piece: in stream order."""
    firsts = np.concatenate([shared.order[shared.offsets[:-1]], alone])
    counts = np.concatenate([np.diff(shared.offsets), np.ones(len(alone), np.int64)])
    packs = np.argsort(firsts, kind="stable")
    place = np.empty(len(packs), np.int64)
    place[packs] = np.arange(len(packs))
    pieces = np.argsort(np.repeat(place, counts), kind="stable")
    order = np.concatenate([shared.order, alone])[pieces]
    return Layout(order, np.concatenate([[0], np.cumsum(counts[packs])]))
