"""Seeded orders: of equal pieces, of packs, and of the segments in a pack.

Large arrays are ordered by sorting one 64-bit number an element: what to sort by, then pseudo-random
bits, then the element's own place. All numbers differ, so every machine and every sorting algorithm gives
the same order, and numpy's vectorised sort needs no second array.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from packer.order import derive_seed, permute
from packer.packing.values import Int64, Layout

_EQUALS, _PACKS, _SEGMENTS, _GROUPS = 1, 2, 3, 4  # what a derived seed is for
_GOLDEN = 0x9E3779B97F4A7C15  # the golden ratio's fraction, times 2**64
_BLOCK = 1 << 18  # elements that are hashed at once: what a core's cache holds
BALANCE_GROUP = 128  # packs that cost about the same and stand side by side


def sorted_by(values: Int64, num_bits: int, seed: int | None) -> Int64:
    """Places of `values` (each under 2**num_bits) in rising order, equals by seed. (n,) int64."""
    return _argsort(values, num_bits, None if seed is None else derive_seed(seed, _EQUALS))


def shuffle(
    layout: Layout,
    seed: int | None,
    *,
    groups: Int64 | None = None,
    costs: Int64 | None = None,
) -> Layout:
    """Packs in a seeded order, and the segments of each pack too; None keeps the order of creation.

    groups: (num_packs,) int64, never falling; packs stay within their group. costs: (num_packs,) int64;
    packs of about equal cost are put side by side (then None counts as 0: there is no order to keep).
    """
    num_packs = len(layout.offsets) - 1
    if costs is not None:
        seed = seed or 0
        groups = _groups_of_equal_cost(costs, seed)
    if seed is None or num_packs < 1:
        return layout
    rank = permute(np.arange(num_packs), num_packs, derive_seed(seed, _PACKS))
    packs = np.argsort(rank) if groups is None else np.lexsort((rank, groups))
    place = np.empty(num_packs, np.int64)
    place[packs] = np.arange(num_packs)
    counts = np.diff(layout.offsets)
    within = _argsort(np.repeat(place, counts), num_packs.bit_length(), derive_seed(seed, _SEGMENTS))
    offsets = np.zeros(num_packs + 1, np.int64)
    np.cumsum(counts[packs], out=offsets[1:])
    return Layout(layout.order[within], offsets)


def in_stream_order(layout: Layout, *, groups: Int64 | None = None) -> Layout:
    """Packs by their oldest piece, pieces by age: as near to the stream as these packs can be laid."""
    num_packs = len(layout.offsets) - 1
    if num_packs < 1:
        return layout
    oldest = np.minimum.reduceat(layout.order, layout.offsets[:-1])
    packs = np.argsort(oldest) if groups is None else np.lexsort((oldest, groups))
    place = np.empty(num_packs, np.int64)
    place[packs] = np.arange(num_packs)
    counts = np.diff(layout.offsets)
    place_bits = len(layout.order).bit_length()
    keys = (np.repeat(place, counts) << place_bits) | layout.order
    keys.sort()
    return Layout(keys & ((1 << place_bits) - 1), np.concatenate([[0], np.cumsum(counts[packs])]))


def _groups_of_equal_cost(costs: Int64, seed: int) -> Int64:
    """The place of each pack's group: BALANCE_GROUP neighbours in cost make a group.

    Groups are laid out by multiples of the golden ratio modulo 1, shifted by seed (a Kronecker sequence),
    so that any run of groups holds dear and cheap ones evenly and cost says nothing about position.
    """
    num_packs = len(costs)
    num_groups = max(1, -(-num_packs // BALANCE_GROUP))
    spread = np.arange(num_groups, dtype=np.uint64) * np.uint64(_GOLDEN)
    spread += np.uint64(derive_seed(seed, _GROUPS))
    place = np.empty(num_groups, np.int64)
    place[np.argsort(spread)] = np.arange(num_groups)
    # The group that is not full stands last, so that it does not shift the others against the steps.
    sizes = np.full(num_groups, BALANCE_GROUP)
    sizes[place == num_groups - 1] -= num_groups * BALANCE_GROUP - num_packs
    groups = np.empty(num_packs, np.int64)
    groups[np.argsort(costs, kind="stable")] = np.repeat(place, sizes)
    return groups


def _argsort(values: Int64, num_bits: int, seed: int | None) -> Int64:
    n = len(values)
    place_bits = n.bit_length()
    random_bits = max(0, 64 - num_bits - place_bits)
    keys = values.astype(np.uint64)
    if seed is None:
        keys <<= np.uint64(place_bits)
    else:
        keys <<= np.uint64(random_bits)
        if random_bits:
            for a in range(0, n, _BLOCK):
                block = _hashed(np.arange(a, min(n, a + _BLOCK), dtype=np.uint64), seed)
                keys[a : a + _BLOCK] |= block >> np.uint64(64 - random_bits)
        keys <<= np.uint64(place_bits)
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()
    keys &= np.uint64((1 << place_bits) - 1)
    return keys.view(np.int64)


def _hashed(x: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) over x + seed, in place."""
    x += np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x
