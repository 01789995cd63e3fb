"""Best fit for a few pieces, as an optimiser step has them."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from packer.packing.histogram import histogram_best_fit
from packer.packing.shuffle import layout_of, sorted_by
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
    by_size = sorted_by(capacity - sizes, capacity.bit_length(), None)
    falling = sizes[by_size]
    # A piece over half a pack opens one: none of those before it takes it. Their rooms rise.
    num_packs = int(np.count_nonzero(2 * falling > capacity))
    bits = len(sizes).bit_length()
    rooms: list[int] = ((capacity - falling[:num_packs] << bits) | np.arange(num_packs)).tolist()
    low, smallest = (1 << bits) - 1, int(falling[-1]) << bits if len(sizes) else 0
    pack_of = list(range(num_packs))
    for size in falling[num_packs:].tolist():
        index = bisect_left(rooms, size << bits)
        if index == len(rooms):
            key = capacity << bits | num_packs
            num_packs += 1
        else:
            key = rooms.pop(index)
        pack_of.append(key & low)
        key -= size << bits
        if key >= smallest:  # else nothing fits any more
            insort(rooms, key)
    of_piece = np.array(pack_of, np.int64)
    return layout_of(of_piece, by_size)
