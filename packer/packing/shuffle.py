"""The seeded order of packs and of the segments in a pack."""

from __future__ import annotations

import numpy as np

from packer.order import derive_seed, permute
from packer.packing.values import Int64, Layout

_PACKS, _SEGMENTS = 1, 2  # what a derived seed is for


def shuffle(layout: Layout, seed: int | None, *, groups: Int64 | None = None) -> Layout:
    """Packs in a seeded order, and the segments of each pack too; None keeps the order of creation.

    groups: (num_packs,) int64, never falling; packs stay within their group.
    """
    if seed is None or not len(layout.order):
        return layout
    num_packs, num_pieces = len(layout.offsets) - 1, len(layout.order)
    rank = permute(np.arange(num_packs), num_packs, derive_seed(seed, _PACKS))
    packs = np.argsort(rank) if groups is None else np.lexsort((rank, groups))
    counts = np.diff(layout.offsets)
    place = np.empty(num_packs, np.int64)
    place[packs] = np.arange(num_packs)
    within = permute(np.arange(num_pieces), num_pieces, derive_seed(seed, _SEGMENTS))
    order = np.lexsort((within, np.repeat(place, counts)))
    return Layout(layout.order[order], np.concatenate([[0], np.cumsum(counts[packs])]))
