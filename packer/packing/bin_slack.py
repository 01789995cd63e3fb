"""Patterns of packs by minimum bin slack, from a histogram of lengths.

One pattern at a time, repeated as often as the counts allow. Every pattern uses up a length, so there are
about as many patterns as lengths, and planning costs the same for a million pieces as for a billion.

A pattern is chosen by minimum bin slack (Gupta and Ho 1999): the longest length that is left stands in it;
then the longest that fits, again and again (first-fit decreasing, Johnson 1973), until one or two pieces
fill what is left exactly. Of several exact pairs the most even one is taken: it keeps the short lengths,
which can close any gap, for the end. If a pack does not close, a depth-first search lowers its last
pieces, within a bounded number of nodes, and the fullest pack seen is the pattern.

Where that misses the lower bound, it is done again with the least even pairs and as first-fit decreasing
alone, and the fewest packs win; so no plan has more packs than first-fit decreasing's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np

from packer.packing.bits import bit_sets, exact_pairs
from packer.packing.values import Int64

_NODES = 64  # of the search for one pattern
_PAIRS = 8  # exact pairs looked at before the search goes on


class Pattern(NamedTuple):
    """`repeats` packs that hold the same lengths: pairs of (length, how many of it in each pack)."""

    repeats: int
    lengths: tuple[tuple[int, int], ...]


def packs_of(found: list[Pattern]) -> int:
    return sum(pattern.repeats for pattern in found)


def slack_patterns(counts: Int64, capacity: int, bound: int = 0) -> list[Pattern]:
    """Patterns that use up `counts`, (capacity + 1,) int64: how many pieces there are of each length.

    bound: packs that none can go below, so that no other way is tried where one reaches it.
    """
    there = np.flatnonzero(counts)
    tokens = int(there @ counts[there])
    best = _Search(counts, capacity, "even").run()
    for closing in ("none", "uneven"):
        fewest = packs_of(best)
        if fewest <= bound:
            break
        best = _Search(counts, capacity, closing).run((fewest - 1) * capacity - tokens) or best
    return best


class _Search:
    """The lengths that are left, and the pack being made from them.

    closing: which of several exact pairs closes a pack, the most "even" or the most "uneven"; "none" takes
    the longest that fits to the end and searches no further.
    """

    def __init__(self, counts: Int64, capacity: int, closing: str) -> None:
        there = np.flatnonzero(counts)
        self.capacity, self.closing = capacity, closing
        self.present: list[int] = there.tolist()
        self.left: dict[int, int] = dict(zip(self.present, counts[there].tolist(), strict=True))
        self.longest = self.present[-1] if self.present else 0
        self.forward, self.backward = bit_sets(there, self.longest)

    def run(self, spare: int | None = None) -> list[Pattern]:
        """Patterns until no length is left; none at all once their packs leave over `spare` tokens empty."""
        found, left = [], self.left
        choose = self._longest if self.closing == "none" else self._fullest
        while self.present:
            lengths, room = choose()
            repeats = min([left[length] // copies for length, copies in lengths.items()])
            if spare is not None:
                spare -= repeats * room
                if spare < 0:
                    return []
            for length, copies in lengths.items():
                left[length] -= repeats * copies
                if not left[length]:
                    del self.present[bisect_left(self.present, length)]
                    self.forward ^= 1 << length
                    self.backward ^= 1 << (self.longest - length)
            found.append(Pattern(repeats, tuple(lengths.items())))
        return found

    def _longest(self) -> tuple[dict[int, int], int]:
        """The longest length, then the longest that fits, to the end: {length: copies}, and the room left."""
        present, left, room = self.present, self.left, self.capacity
        used = {}
        index = len(present)
        while index:
            length = present[index - 1]
            used[length] = copies = min(left[length], room // length)
            room -= copies * length
            index = bisect_right(present, room, 0, index - 1)
        return used, room

    def _fullest(self) -> tuple[dict[int, int], int]:
        """The fullest pack found with the longest length in it: {length: copies}, and the room left."""
        longest = self.present[-1]
        used, taken, room = {longest: 1}, [longest], self.capacity - longest
        best, slack, nodes, limit = dict(used), room, 0, longest
        while True:
            while room:
                nodes += 1
                top = self._fitting(room, used)
                closing = self._closing(room, used) if room <= 2 * top else ()
                if closing:
                    for length in closing:
                        used[length] = used.get(length, 0) + 1
                    return {length: copies for length, copies in used.items() if copies}, 0
                length = top if top <= limit else self._fitting(limit, used)
                if not length:
                    break
                # Several copies at once while no pair could close the pack anyway.
                copies = max(1, min(self.left[length] - used.get(length, 0), (room - 2 * top) // length))
                used[length] = used.get(length, 0) + copies
                taken += [length] * copies
                room -= length * copies
                limit = length
            if room < slack:
                best, slack = {length: copies for length, copies in used.items() if copies}, room
            if not slack or nodes >= _NODES:
                return best, slack
            room, limit = self._lower_last(taken, used, room)
            if not limit:
                return best, slack

    def _lower_last(self, taken: list[int], used: dict[int, int], room: int) -> tuple[int, int]:
        """Put the next shorter length in the place of the last. Returns (room, that length; 0: none)."""
        while len(taken) > 1:
            last = taken.pop()
            used[last] -= 1
            room += last
            shorter = self._fitting(last - 1, used)
            if shorter:
                used[shorter] = used.get(shorter, 0) + 1
                taken.append(shorter)
                return room - shorter, shorter
        return room, 0

    def _fitting(self, at_most: int, used: dict[int, int]) -> int:
        """The longest length up to `at_most` of which one is left beside `used`; 0 if there is none."""
        index = bisect_right(self.present, at_most) - 1
        while index >= 0:
            length = self.present[index]
            if self.left[length] > used.get(length, 0):
                return length
            index -= 1
        return 0

    def _closing(self, room: int, used: dict[int, int]) -> tuple[int, ...]:
        """One or two lengths that fill `room` exactly; () if none was found."""
        if self.left.get(room, 0) > used.get(room, 0):
            return (room,)
        pairs = exact_pairs(self.forward, self.backward, room=room, longest=self.longest)
        half = (room + 1) // 2
        for _ in range(_PAIRS):
            if not pairs:
                break
            bit = (pairs & -pairs if self.closing == "even" else pairs).bit_length() - 1
            pairs ^= 1 << bit
            longer = bit + half
            shorter = room - longer
            needed = 2 if longer == shorter else 1
            if shorter and all(self.left[x] >= needed + used.get(x, 0) for x in (longer, shorter)):
                return longer, shorter
        return ()
