"""Many packs at once are filled up from one pool of pieces: the vectorised core of the window engine.

A pack is closed exactly where that can be had: by one piece, else by two. For two, each pack reserves a
piece of about half its room, no piece twice, and looks for the other half among the rest; what finds none
looks again with a shorter one. That is the two-item form of minimum bin slack (Gupta and Ho 1999), for all
packs in a few numpy calls of O(n log n). The packs that are left after some tries look at all pairs, one
after the other. What cannot be closed takes the longest piece that fits (best fit).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from packer.packing.bits import bit_sets, exact_pairs
from packer.packing.values import Int64

_TRIES = 4  # halves that all packs look at together
_STRIDE = 3  # places in the pool between two of them
_RANK_BITS = 24  # of equal values, to tell them apart: the pool has fewer pieces


class Closing:
    """Packs that still have room, rising by room, and the pieces that are left for them, rising by size."""

    def __init__(self, rooms: Int64, pool: Int64) -> None:
        """rooms: (num_packs,) int64. pool: (num_pieces,) int64, sizes that never fall."""
        self.packs = np.argsort(rooms, kind="stable")
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
        for number in range(_TRIES):
            if not self._has_work() or not self._pairs(number * _STRIDE):
                break
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

    def _pairs(self, shift: int) -> bool:
        """Close packs with two pieces. False where no pack has a half to look at any more."""
        low = np.searchsorted(self.rooms, 2 * self.sizes[0])
        high = np.searchsorted(self.rooms, 2 * self.sizes[-1], side="right")
        half = _rising(np.searchsorted(self.sizes, self.rooms[low:high] // 2, side="right") - 1 - shift)
        looking = np.flatnonzero(half >= 0) + low
        half = half[half >= 0]
        if not len(half):
            return False
        others = np.ones(len(self.sizes), np.bool_)
        others[half] = False
        others_at = np.flatnonzero(others)
        needed = self.rooms[looking] - self.sizes[half]
        by_needed = np.argsort(needed, kind="stable")
        found, at = _equals(needed[by_needed], self.sizes[others_at])
        which = by_needed[found]
        closed = np.zeros(len(self.rooms), np.bool_)
        closed[looking[which]] = True
        # Both pieces of all packs at once; the order of packs within `closed` is that of the rooms.
        order = np.argsort(which, kind="stable")
        self._take(closed, others_at[at][order], half[which][order])
        self.packs, self.rooms = self.packs[~closed], self.rooms[~closed]
        return True

    def _searched_pairs(self) -> None:
        """Look at all pairs for the packs that found none, one pack after the other, in bit sets."""
        low = int(np.searchsorted(self.rooms, 2 * self.sizes[0]))
        high = int(np.searchsorted(self.rooms, 2 * self.sizes[-1], side="right"))
        starts = np.flatnonzero(np.diff(self.sizes, prepend=0))
        kinds = self.sizes[starts]
        longest = int(kinds[-1])
        forward, backward = bit_sets(kinds, longest)
        following = dict(zip(kinds.tolist(), starts.tolist(), strict=True))  # the next piece of each size
        left = dict(zip(kinds.tolist(), np.diff(starts, append=len(self.sizes)).tolist(), strict=True))
        closed: list[int] = []
        taken: list[int] = []
        for place, room in enumerate(self.rooms[low:high].tolist(), low):
            half = (room + 1) // 2
            pairs = exact_pairs(forward, backward, room=room, longest=longest)
            while pairs:
                lowest = pairs & -pairs
                longer = lowest.bit_length() - 1 + half
                shorter = room - longer
                if longer != shorter or left[longer] > 1:
                    closed.append(place)
                    for size in (longer, shorter):
                        taken.append(following[size])
                        following[size] += 1
                        left[size] -= 1
                        if not left[size]:
                            forward ^= 1 << size
                            backward ^= 1 << (longest - size)
                    break
                pairs ^= lowest
        mask = np.zeros(len(self.rooms), np.bool_)
        mask[closed] = True
        both = np.array(taken, np.int64).reshape(-1, 2)
        self._take(mask, both[:, 0], both[:, 1])
        self.packs, self.rooms = self.packs[~mask], self.rooms[~mask]

    def _best_fit(self) -> None:
        """Each pack takes the longest piece that fits, no piece twice; packs are done that find none."""
        at = _rising(np.searchsorted(self.sizes, self.rooms, side="right") - 1)
        fits = at >= 0
        at = at[fits]
        rooms = self.rooms[fits] - self.sizes[at]
        self._take(fits, at)
        by_room = np.argsort(rooms, kind="stable")
        self.packs, self.rooms = self.packs[fits][by_room], rooms[by_room]

    def _take(self, packs: NDArray[np.bool_], *places: Int64) -> None:
        """Pieces at `places` of what is left go to the marked packs, each array one to a pack."""
        of = self.packs[packs]
        left = np.ones(len(self.sizes), np.bool_)
        for at in places:
            self._taken.append((of, self.pieces[at]))
            left[at] = False
        self.pieces, self.sizes = self.pieces[left], self.sizes[left]


def _equals(wanted: Int64, there: Int64) -> tuple[NDArray[np.bool_], Int64]:
    """Which of `wanted` have an equal in `there`, each of its own; and the places of these. Both rising."""
    if not len(there):
        return np.zeros(len(wanted), np.bool_), np.zeros(0, np.int64)
    numbered = _numbered(there)
    keys = _numbered(wanted)
    at = np.searchsorted(numbered, keys)
    at[at == len(numbered)] = 0
    found = numbered[at] == keys
    return found, at[found]


def _numbered(values: Int64) -> Int64:
    """Rising values made different: the k-th of several equals has k in its lower bits."""
    place = np.arange(len(values))
    first = np.zeros(len(values), np.int64)
    np.multiply(place[1:], values[1:] != values[:-1], out=first[1:])
    return (values << _RANK_BITS) + (place - np.maximum.accumulate(first))


def _rising(places: Int64) -> Int64:
    """The largest strictly rising sequence that is nowhere over `places` (never falling): may go below 0."""
    number = np.arange(len(places))
    return np.minimum.accumulate((places - number)[::-1])[::-1] + number
