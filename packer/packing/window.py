"""Best fit over a bounded window of waiting pieces: the default, for streams and partitions.

Each pack is seeded with the oldest waiting piece, so that none waits for ever. Then come the next pieces
of the stream as they are, until so little room is left that choosing matters. The rest is chosen among
the waiting pieces: one or two that fill the room exactly where there are such, else the longest that fits
(best fit), and again. So most of a pack keeps the order of the stream, and only its last pieces are picked.

When the stream is over, what waits is packed by the histogram engine, which leaves no poor packs at the end.

The window is refilled in whole runs: sorting a sorted window and a new run is one merge in C, and the bit
sets that tell which pairs fill a room exactly are built once a run. A piece that has left is taken out of
the bit sets when it is met.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from packer.packing.bits import bit_sets, exact_pairs
from packer.packing.histogram import histogram_best_fit, lower_bound_of
from packer.packing.shuffle import in_stream_order
from packer.packing.values import Int64, Layout

WINDOW = 256
LONG_WINDOW = 1024  # where packs hold few pieces, there are fewer ways to fill a gap
_FEW_PIECES = 4
_CHOSEN_PIECES = 2  # of mean length: the room that is filled by choice
_BLOCK = 8192  # pieces that are packed at once where a window will not do
_GOOD = 1.001  # packs over the lower bound


def window_best_fit(sizes: Int64, capacity: int, window: int | None = None) -> Layout:
    """Pack `sizes`, each in [1, capacity], in one pass over them.

    window: how many pieces wait at once; None takes WINDOW, or LONG_WINDOW where packs hold few pieces, and
    looks whether that was good enough: where many pieces are over half a pack and short ones are scarce, a
    window gives them away too early, and the histogram engine takes over, a block of the stream at a time.
    O(log window) comparisons a piece and O(longest waiting piece / 64) words a pack.
    """
    if not len(sizes):
        return Layout(np.zeros(0, np.int64), np.zeros(1, np.int64))
    # What no other piece fits beside is a pack as it is, and would only take up places in the window.
    alone = sizes > capacity - sizes.min()
    if alone.any():
        shared = np.flatnonzero(~alone)
        packed = window_best_fit(sizes[shared], capacity, window)
        return _merged(Layout(shared[packed.order], packed.offsets), np.flatnonzero(alone))
    if window is not None:
        return _Window(sizes, capacity, window).run()
    few = int(sizes.sum()) * _FEW_PIECES > capacity * len(sizes)
    layout = _Window(sizes, capacity, LONG_WINDOW if few else WINDOW).run()
    if _is_good(layout, sizes, capacity):
        return layout
    blocks = _in_blocks(sizes, capacity)
    return blocks if len(blocks.offsets) < len(layout.offsets) else layout


def _is_good(layout: Layout, sizes: Int64, capacity: int) -> bool:
    """Whether no more than one pack, or next to none, could be saved."""
    num_packs = len(layout.offsets) - 1
    bound = -(-int(sizes.sum()) // capacity)
    if num_packs <= max(bound + 1, bound * _GOOD):
        return True
    bound = lower_bound_of(np.bincount(sizes, minlength=capacity + 1), capacity)  # higher, but slower to find
    return num_packs <= max(bound + 1, bound * _GOOD)


def _in_blocks(sizes: Int64, capacity: int) -> Layout:
    orders, counts = [], [np.zeros(1, np.int64)]
    for first in range(0, len(sizes), _BLOCK):
        block = in_stream_order(histogram_best_fit(sizes[first : first + _BLOCK], capacity))
        orders.append(block.order + first)
        counts.append(np.diff(block.offsets))
    return Layout(np.concatenate(orders), np.cumsum(np.concatenate(counts)))


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


class _Window:
    """The state of one pass. A key is (size, age), so that among equals the oldest sorts last."""

    def __init__(self, sizes: Int64, capacity: int, window: int) -> None:
        num_pieces = len(sizes)
        self.sizes = sizes
        self.capacity, self.window, self.num_pieces = capacity, window, num_pieces
        self.reserve = _CHOSEN_PIECES * int(sizes.sum()) // num_pieces
        self.shift = num_pieces.bit_length()
        self.low = (1 << self.shift) - 1
        self.keys: list[int] = ((sizes << self.shift) | (self.low - np.arange(num_pieces))).tolist()
        self.ends: list[int] = np.cumsum(sizes).tolist()
        self.waiting: list[int] = []
        self.taken = bytearray(num_pieces)
        self.order: list[int] = []
        self.arrived = 0
        self.longest = self.forward = self.backward = 0

    def run(self) -> Layout:
        offsets, oldest, shift = [0], 0, self.shift
        waiting, keys, taken, order = self.waiting, self.keys, self.taken, self.order
        while True:
            while len(waiting) < self.window:
                if self.arrived == self.num_pieces:
                    return self._drained(offsets)
                self._refill()
            while taken[oldest]:
                oldest += 1
            key = keys[oldest]
            del waiting[bisect_left(waiting, key)]
            taken[oldest] = 1
            order.append(oldest)
            room = self.capacity - (key >> shift)
            if room > self.reserve:
                room = self._stream(room)
            if room:
                self._choose(room)
            offsets.append(len(order))

    def _drained(self, offsets: list[int]) -> Layout:
        """Pack all that waits; the stream is over."""
        left = np.sort(self.low - (np.array(self.waiting, np.int64) & self.low))
        rest = in_stream_order(histogram_best_fit(self.sizes[left], self.capacity))
        return Layout(
            np.concatenate([np.array(self.order, np.int64), left[rest.order]]),
            np.concatenate([np.array(offsets, np.int64), offsets[-1] + rest.offsets[1:]]),
        )

    def _refill(self) -> None:
        self.waiting += self.keys[self.arrived : self.arrived + self.window]
        self.arrived = min(self.num_pieces, self.arrived + self.window)
        self.waiting.sort()
        self.longest = self.waiting[-1] >> self.shift
        lengths = np.array(self.waiting) >> self.shift
        self.forward, self.backward = bit_sets(lengths, self.longest)

    def _stream(self, room: int) -> int:
        """Take the next pieces of the stream while they leave `reserve`. Returns the room left."""
        first = self.arrived
        if first == self.num_pieces:
            return room
        before = self.ends[first - 1]
        stop = bisect_left(self.ends, before + room - self.reserve + 1, first)
        if stop > first:
            self.order += range(first, stop)
            self.taken[first:stop] = b"\1" * (stop - first)
            self.arrived = stop
            room -= self.ends[stop - 1] - before
        return room

    def _choose(self, room: int) -> None:
        """Fill `room` from the waiting pieces until none fits."""
        waiting, shift, low, taken, append = self.waiting, self.shift, self.low, self.taken, self.order.append
        while room:
            index = bisect_left(waiting, (room + 1) << shift) - 1
            if index < 0:
                return
            size = waiting[index] >> shift
            if size < room <= 2 * size:
                pair = self._exact_pair(room)
                if pair:
                    index, second = pair
                    size = room
                    piece = low - (waiting.pop(second) & low)  # the shorter: stands before `index`
                    index -= 1
                    taken[piece] = 1
                    append(piece)
            piece = low - (waiting.pop(index) & low)
            taken[piece] = 1
            append(piece)
            room -= size

    def _exact_pair(self, room: int) -> tuple[int, int] | None:
        """Places of two waiting pieces, the longer first, that fill `room` exactly: the most even pair."""
        waiting, shift = self.waiting, self.shift
        half = (room + 1) // 2
        pairs = exact_pairs(self.forward, self.backward, room=room, longest=self.longest)
        while pairs:
            lowest = pairs & -pairs
            pairs ^= lowest
            longer = lowest.bit_length() - 1 + half
            shorter = room - longer
            first = bisect_left(waiting, (longer + 1) << shift) - 1
            if first < 0 or waiting[first] >> shift != longer:
                self._gone(longer)
                continue
            if shorter == longer:
                if first and waiting[first - 1] >> shift == longer:
                    return first, first - 1
                continue
            second = bisect_left(waiting, (shorter + 1) << shift, 0, first) - 1
            if second >= 0 and waiting[second] >> shift == shorter:
                return first, second
            self._gone(shorter)
        return None

    def _gone(self, size: int) -> None:
        self.forward ^= 1 << size
        self.backward ^= 1 << (self.longest - size)
