"""Best fit for a few pieces, as an optimiser step has them."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from packer.packing.histogram import histogram_best_fit
from packer.packing.values import Int64, Layout


def fewest_packs(sizes: Int64, capacity: int) -> Layout:
    """Pack `sizes`, each in [1, capacity], into as few packs as either algorithm finds.

    Best-fit decreasing is quick and mostly as good as can be; the slower search of the histogram engine
    runs only where a simple bound says that fewer packs may do.
    """
    layout = best_fit_decreasing(sizes, capacity)
    num_packs = len(layout.offsets) - 1
    bound = max(-(-int(sizes.sum()) // capacity), int(np.count_nonzero(2 * sizes > capacity)))
    if num_packs == bound:
        return layout
    other = histogram_best_fit(sizes, capacity)
    return other if len(other.offsets) - 1 < num_packs else layout


def best_fit_decreasing(sizes: Int64, capacity: int) -> Layout:
    """Longest first, each into the fullest pack that still takes it (Johnson 1973). O(n log n)."""
    by_size = np.argsort(-sizes, kind="stable")
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, pack), rising
    for piece, size in zip(by_size.tolist(), sizes[by_size].tolist(), strict=True):
        index = bisect_left(rooms, (size, 0))
        if index == len(rooms):
            room, pack = capacity, len(packs)
            packs.append([])
        else:
            room, pack = rooms.pop(index)
        packs[pack].append(piece)
        insort(rooms, (room - size, pack))
    order = np.array([piece for pack in packs for piece in pack], np.int64)
    return Layout(order, np.cumsum([0, *map(len, packs)]).astype(np.int64))
