"""Best fit over a bounded window of waiting pieces: the default, for streams and partitions.

Each pack is seeded with the oldest waiting piece, so that none waits for ever; then takes the longest
that fits, again and again; and closes the last gap with the best pair. The window is refilled in whole
runs: sorting a sorted window and a new run is one merge in C, and the bit sets that answer "which pair
fills this gap exactly" are built once a run. Pieces leave a run's bit sets lazily, when met.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from packer.packing.values import Int64, Layout

DEFAULT_WINDOW = 256
_LONG_WINDOW = 1024  # where packs hold few pieces there are fewer ways to fill a gap
_FEW_PIECES = 4


def window_size(sizes: Int64, capacity: int) -> int:
    """How many pieces wait at once: more where they are long against a pack."""
    if len(sizes) and int(sizes.sum()) * _FEW_PIECES > capacity * len(sizes):
        return _LONG_WINDOW
    return DEFAULT_WINDOW


def window_best_fit(sizes: Int64, capacity: int, window: int | None = None) -> Layout:
    """Pack `sizes` in one pass. O(n log window) comparisons, memory of one window beside the result."""
    window = window or window_size(sizes, capacity)
    num_pieces = len(sizes)
    length_of = sizes.tolist()
    shift = max(1, num_pieces.bit_length())
    low = (1 << shift) - 1
    keys = ((sizes << shift) | (low - np.arange(num_pieces))).tolist()  # among equals the oldest is last
    waiting: list[int] = []
    order: list[int] = []
    offsets = [0]
    taken = bytearray(num_pieces + 1)
    arrived = oldest = waiting_tokens = 0
    while len(order) < num_pieces:
        if arrived < num_pieces and (len(waiting) < window or waiting_tokens < capacity):
            run = keys[arrived : arrived + window]
            waiting_tokens += sum(length_of[arrived : arrived + window])
            arrived += len(run)
            waiting += run
            waiting.sort()
            continue
        while taken[oldest]:
            oldest += 1
        room = capacity
        piece = oldest
        index = bisect_left(waiting, keys[piece])
        while True:
            del waiting[index]
            taken[piece] = 1
            order.append(piece)
            room -= length_of[piece]
            index = bisect_left(waiting, (room + 1) << shift) - 1
            if index < 0:
                break
            piece = low - (waiting[index] & low)
        waiting_tokens -= capacity - room
        offsets.append(len(order))
    return Layout(np.array(order, np.int64), np.array(offsets, np.int64))
