"""Many packs at once are filled up from one pool of pieces: the vectorised core of the window engine.

A pack is closed exactly where that can be had: by one piece, else by two. For two, each pack reserves a
piece of some part of its room, no piece twice, and looks for the other one among the rest; what finds none
looks again with a shorter one, as long as many packs close so. That is the two-item form of minimum bin slack
(Gupta and Ho 1999), for all packs in a few numpy calls of O(n log n). The packs that are left look at all
pairs, one room after the other. What cannot be closed takes the longest piece that fits (best fit).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from packer.packing.bits import bit_sets
from packer.packing.shuffle import sorted_by
from packer.packing.values import Int64

_STRIDE = 3  # places in the pool between the pieces that are reserved in one try and in the next
_WORTH = 64  # packs that a try must close to be cheaper than looking at all their pairs
_NEAR = (1 << 512) - 1  # the pairs that are looked into first
EVEN, UNEVEN = 4, 5


class Closing:
    """Packs that still have room, rising by room, and the pieces that are left for them, rising by size."""

    def __init__(self, rooms: Int64, pool: Int64, eighths: int) -> None:
        """rooms: (num_packs,) int64. pool: (num_pieces,) int64, sizes that never fall.

        eighths: of a room that the longer of a pair takes at least, where it can be had. EVEN keeps the
        shortest pieces for later; with UNEVEN the lengths in a pack say less about each other.
        """
        self.eighths = eighths
        self.packs = _by_value(rooms)
        self.rooms = rooms[self.packs]
        self.pieces, self.sizes = np.arange(len(pool)), pool
        self._taken: list[tuple[Int64, Int64]] = []

    def run(self) -> tuple[Int64, Int64]:
        """Fill until nothing fits. Returns (pack, place in the pool) of each piece that was taken."""
        while self._has_work():
            self._close()
            if self._has_work():
                self._best_fit()
        return self._result()

    def exact(self) -> tuple[Int64, Int64]:
        """As `run`, but only what fills a pack to the last token is taken: one piece or two."""
        if self._has_work():
            self._close()
        return self._result()

    def _close(self) -> None:
        self._singles()
        closed, shift = _WORTH, 0
        while closed >= _WORTH and self._has_work():
            closed = self._pairs(shift)
            shift += _STRIDE
        if self._has_work():
            self._searched_pairs()

    def _result(self) -> tuple[Int64, Int64]:
        none = np.zeros(0, np.int64)
        packs, pieces = zip((none, none), *self._taken, strict=True)
        return np.concatenate(packs), np.concatenate(pieces)

    def _has_work(self) -> bool:
        if len(self.sizes):
            useful = int(np.searchsorted(self.rooms, self.sizes[0]))  # packs below are full
            self.packs, self.rooms = self.packs[useful:], self.rooms[useful:]
        return bool(len(self.sizes) and len(self.rooms))

    def _singles(self) -> None:
        closed, pieces = _equals(self.rooms, self.sizes)
        self._take(closed, pieces)
        self.packs, self.rooms = self.packs[~closed], self.rooms[~closed]

    def _pairs(self, shift: int) -> int:
        """Close packs with two pieces. Returns how many."""
        low = np.searchsorted(self.rooms, 2 * self.sizes[0])
        high = np.searchsorted(self.rooms, 2 * self.sizes[-1], side="right")
        wanted = self.rooms[low:high] * self.eighths // 8
        reserved = _rising(np.searchsorted(self.sizes, wanted, side="right") - 1 - shift)
        looking = np.flatnonzero(reserved >= 0) + low
        reserved = reserved[reserved >= 0]
        if len(reserved) < _WORTH:
            return 0
        others = np.ones(len(self.sizes), np.bool_)
        others[reserved] = False
        others_at = np.flatnonzero(others)
        needed = self.rooms[looking] - self.sizes[reserved]
        by_needed = _by_value(needed)
        found, at = _equals(needed[by_needed], self.sizes[others_at])
        which = by_needed[found]
        closed = np.zeros(len(self.rooms), np.bool_)
        closed[looking[which]] = True
        # Both pieces of all packs at once; the order of packs within `closed` is that of the rooms.
        order = np.argsort(which)
        self._take(closed, others_at[at][order], reserved[which][order])
        self.packs, self.rooms = self.packs[~closed], self.rooms[~closed]
        return len(which)

    def _searched_pairs(self) -> None:
        """Look at all pairs for the packs that found none, in bit sets, one room after the other."""
        low = int(np.searchsorted(self.rooms, 2 * self.sizes[0]))
        high = int(np.searchsorted(self.rooms, 2 * self.sizes[-1], side="right"))
        if low == high:
            return
        runs = _exact_pairs(self.sizes, self.rooms[low:high], self.eighths)
        place, repeats, longer, shorter = runs.T
        within = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        closed = np.zeros(len(self.rooms), np.bool_)
        closed[low + np.repeat(place, repeats) + within] = True
        self._take(closed, np.repeat(longer, repeats) + within, np.repeat(shorter, repeats) + within)
        self.packs, self.rooms = self.packs[~closed], self.rooms[~closed]

    def _best_fit(self) -> None:
        """Each pack takes the longest piece that fits, no piece twice; packs are done that find none."""
        at = _rising(np.searchsorted(self.sizes, self.rooms, side="right") - 1)
        fits = at >= 0
        at = at[fits]
        rooms = self.rooms[fits] - self.sizes[at]
        self._take(fits, at)
        by_room = _by_value(rooms)
        self.packs, self.rooms = self.packs[fits][by_room], rooms[by_room]

    def _take(self, packs: NDArray[np.bool_], *places: Int64) -> None:
        """Pieces at `places` of what is left go to the marked packs, each array one to a pack."""
        of = self.packs[packs]
        left = np.ones(len(self.sizes), np.bool_)
        for at in places:
            self._taken.append((of, self.pieces[at]))
            left[at] = False
        self.pieces, self.sizes = self.pieces[left], self.sizes[left]


def _exact_pairs(sizes: Int64, rooms: Int64, eighths: int) -> Int64:
    """Two of `sizes` for each of `rooms`, which they fill, as far as there are any. Both rising.

    Returns (runs, 4) int64: rooms that follow each other and take pieces that do: the first room, how many
    there are, and the first piece of the one size and of the other. One room after the other, equal rooms as
    one question; of several pairs the most even one whose longer piece takes the `eighths` of the room.
    """
    starts = np.flatnonzero(np.diff(sizes, prepend=-1))
    kinds = sizes[starts]
    longest = int(kinds[-1])
    forward, backward = bit_sets(kinds, longest)
    following = dict(zip(kinds.tolist(), starts.tolist(), strict=True))  # the next piece of each size
    end = dict(zip(kinds.tolist(), [*starts[1:].tolist(), len(sizes)], strict=True))
    begins = np.flatnonzero(np.diff(rooms, prepend=-1))
    numbers = begins.tolist()
    runs: list[int] = []
    # The busiest loop of the window engine: written out, for calls would take half as long again.
    for room, place, stop in zip(rooms[begins].tolist(), numbers, [*numbers[1:], len(rooms)], strict=True):
        shift, half = longest - room, (room + 1) >> 1
        least = room * eighths >> 3
        for low in (least, half) if least > half else (half,):
            # Bit i: sizes low + i and room - low - i are there (see bits).
            pairs = (forward & (backward >> shift if shift >= 0 else backward << -shift)) >> low
            while pairs:
                near = pairs & _NEAR or pairs  # a short number is faster to look into
                lowest = near & -near
                longer = lowest.bit_length() - 1 + low
                shorter = room - longer
                repeats, one, last = stop - place, following[longer], end[longer]
                if longer != shorter:
                    other = following[shorter]
                    most = end[shorter] - other
                    if most < repeats:
                        repeats = most
                    if last - one < repeats:
                        repeats = last - one
                    following[shorter] = other + repeats
                    used = following[longer] = one + repeats
                    if repeats == most:
                        forward ^= 1 << shorter
                        backward ^= 1 << longest - shorter
                else:
                    repeats = min(repeats, (last - one) >> 1)
                    other = one + repeats
                    used = following[longer] = other + repeats
                if used == last:
                    forward ^= 1 << longer
                    backward ^= 1 << longest - longer
                if repeats:
                    runs += (place, repeats, one, other)
                    place += repeats
                    if place == stop:
                        break
                pairs ^= lowest
            if place == stop:
                break
    return np.array(runs, np.int64).reshape(-1, 4)


def _by_value(values: Int64) -> Int64:
    return sorted_by(values, int(values.max(initial=0)).bit_length(), None)


def _equals(wanted: Int64, there: Int64) -> tuple[NDArray[np.bool_], Int64]:
    """Which of `wanted` have an equal in `there`, each of its own; and the places of these. Both rising."""
    if not len(there):
        return np.zeros(len(wanted), np.bool_), np.zeros(0, np.int64)
    number = np.arange(len(wanted))
    first = np.zeros(len(wanted), np.int64)  # of the wanted that are equal
    np.multiply(number[1:], wanted[1:] != wanted[:-1], out=first[1:])
    at = np.searchsorted(there, wanted) + number - np.maximum.accumulate(first)
    found = there[np.minimum(at, len(there) - 1)] == wanted
    found &= at < len(there)
    return found, at[found]


def _rising(places: Int64) -> Int64:
    """The largest strictly rising sequence that is nowhere over `places` (never falling): may go below 0."""
    number = np.arange(len(places))
    return np.minimum.accumulate((places - number)[::-1])[::-1] + number
