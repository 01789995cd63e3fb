"""Seeded orders: of equal pieces, of packs, and of the segments in a pack.

Equal pieces are drawn by 16 pseudo-random bits, packs by 32, then by place: the same order on every machine.
A radix sort does that, 16 bits a pass from the lowest, each a stable argsort of 16-bit numbers, for which
numpy counts. Where the arrays are larger than a cache, its lookups cost more than numpy's vectorised sort of
one 64-bit number an element, which holds all three: then that is taken, and needs no second array. Segments
need no sort at all: each pack is read from a place of its own on in steps of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.order import derive_seed
from packer.packing.values import Int64, Layout

_EQUALS, _PACKS, _SEGMENTS, _GROUPS = 1, 2, 3, 4  # what a derived seed is for
_GOLDEN = 0x9E3779B97F4A7C15  # the golden ratio's fraction, times 2**64
_BLOCK = 1 << 18  # elements that are hashed at once: what a core's cache holds
_DIGIT = 16  # bits a pass, and random bits of a piece
_LARGE = 1 << 22  # elements from which one sort is faster than passes
_PRIMES = np.array([p for p in range(2, 128) if all(p % q for q in range(2, p))], np.uint32)
_WIDE = 1 << 25  # times any of the primes stays below 2**32
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
    drawn = _hashed(np.arange(num_packs, dtype=np.uint64), derive_seed(seed, _PACKS))
    packs = _argsort(drawn >> np.uint64(32), 32, None)
    if groups is not None:
        packs = packs[np.argsort(groups[packs], kind="stable")]
    counts = np.diff(layout.offsets)[packs]
    offsets = np.zeros(num_packs + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    narrow = layout.order.astype(np.min_scalar_type(len(layout.order)))  # the more of it a cache holds
    order = np.empty(len(narrow), np.int64)
    a = 0
    while a < num_packs:
        b = max(a + 1, int(np.searchsorted(offsets, offsets[a] + _BLOCK, side="right")) - 1)
        source = _turned(packs[a:b], layout.offsets, derive_seed(seed, _SEGMENTS))
        order[offsets[a] : offsets[b]] = narrow[source]
        a = b
    return Layout(order, offsets)


def _turned(packs: Int64, offsets: Int64, seed: int) -> Int64:
    """Places of the pieces of `packs`, pack after pack, those of each in an order of its own.

    A pack of w pieces is read from a drawn piece on in steps of a drawn prime, modulo w: each piece is as
    likely to stand anywhere. (A full shuffle takes a sort of all pieces, several times as long.)
    """
    drawn = _hashed(packs.astype(np.uint64), seed)
    begins = offsets[packs]
    counts = offsets[packs + 1] - begins
    widths = counts.astype(np.uint32)
    steps = _PRIMES[(drawn >> np.uint64(56)) % np.uint64(len(_PRIMES))]
    steps[(widths % steps == 0) | (widths > _WIDE)] = 1
    shift = (((drawn & np.uint64(0xFFFFFFFF)) * widths) >> np.uint64(32)).astype(np.uint32)
    # Numbers of 32 bits, modulo 2**32 before the modulus is taken: half the memory, a third of the time.
    shift -= (np.cumsum(counts) - counts).astype(np.uint32) * steps
    turned = np.arange(int(counts.sum()), dtype=np.uint32)
    turned *= np.repeat(steps, counts)
    turned += np.repeat(shift, counts)
    turned %= np.repeat(widths, counts)
    return np.repeat(begins, counts) + turned


def in_stream_order(layout: Layout, *, groups: Int64 | None = None) -> Layout:
    """Packs by their oldest piece, pieces by age: as near to the stream as these packs can be laid."""
    num_packs = len(layout.offsets) - 1
    if num_packs < 1:
        return layout
    oldest = np.minimum.reduceat(layout.order, layout.offsets[:-1])
    if groups is None:
        begins = np.zeros(len(layout.order), np.bool_)
        begins[oldest] = True
        place = (np.cumsum(begins) - 1)[oldest]
    else:
        place = _inverse(np.lexsort((oldest, groups)))
    counts = np.diff(layout.offsets)
    of_piece = np.empty(len(layout.order), np.int64)
    of_piece[layout.order] = np.repeat(place, counts)
    offsets = np.zeros(num_packs + 1, np.int64)
    offsets[place + 1] = counts
    return Layout(_argsort(of_piece, num_packs.bit_length(), None), np.cumsum(offsets))


def layout_of(pack: Int64, piece: Int64) -> Layout:
    """Packs from the number of the pack that each piece is in; numbers without a piece have none."""
    counts = np.bincount(pack)
    offsets = np.concatenate([[0], np.cumsum(counts[counts > 0])])
    return Layout(piece[_argsort(pack, len(counts).bit_length(), None)], offsets)


def _inverse(order: Int64) -> Int64:
    inverse = np.empty(len(order), np.int64)
    inverse[order] = np.arange(len(order))
    return inverse


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


def _argsort(values: NDArray[Any], num_bits: int, seed: int | None) -> Int64:
    num_random = 0 if seed is None else _DIGIT
    if len(values) >= _LARGE and num_bits + num_random + len(values).bit_length() <= 64:
        return _argsort_large(values, seed)
    order = None if seed is None else np.argsort(_random_digits(0, len(values), seed), kind="stable")
    for shift in range(0, num_bits, _DIGIT):
        digits = (values >> shift).astype(np.uint16)
        if order is None:
            order = np.argsort(digits, kind="stable")
        else:
            order = order[np.argsort(digits[order], kind="stable")]
    return np.arange(len(values)) if order is None else order


def _argsort_large(values: NDArray[Any], seed: int | None) -> Int64:
    """As the passes order them."""
    n = len(values)
    place_bits = np.uint64(n.bit_length())
    keys = values.astype(np.uint64)
    if seed is not None:
        keys <<= np.uint64(_DIGIT)
        for a in range(0, n, _BLOCK):
            b = min(n, a + _BLOCK)
            keys[a:b] |= _random_digits(a, b, seed)
    keys <<= place_bits
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << place_bits) - np.uint64(1)
    return keys.view(np.int64)


def _random_digits(start: int, stop: int, seed: int) -> NDArray[np.uint16]:
    """16 pseudo-random bits for each of the places [start, stop)."""
    digits = np.empty(stop - start, np.uint16)
    for a in range(start, stop, _BLOCK):
        numbers = np.arange(a, min(stop, a + _BLOCK), dtype=np.uint64)
        digits[a - start : a - start + _BLOCK] = _hashed(numbers, seed) >> np.uint64(64 - _DIGIT)
    return digits


def _hashed(x: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) over x + seed, in place."""
    x += np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x
