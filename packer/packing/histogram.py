"""Best fit over the whole histogram of lengths: `scope="global"`, `estimate` and the steps of "step".

One pack pattern at a time, repeated as often as the counts allow. Every pattern uses up a length, so there
are at most as many patterns as lengths, and planning costs the same for a million pieces as for a billion.

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
from packer.packing.shuffle import sorted_by
from packer.packing.values import Int64, Layout

_NODES = 64  # of the search for one pattern
_PAIRS = 8  # exact pairs looked at before the search goes on


class Pattern(NamedTuple):
    """`repeats` packs that hold the same lengths: pairs of (length, how many of it in each pack)."""

    repeats: int
    lengths: tuple[tuple[int, int], ...]


def histogram_best_fit(sizes: Int64, capacity: int, seed: int | None = None) -> Layout:
    """Pack `sizes`, each in [1, capacity]. Equal sizes are drawn in an order by `seed`."""
    counts = np.bincount(sizes, minlength=capacity + 1)
    found = patterns(counts, capacity)
    by_size = sorted_by(sizes, capacity.bit_length(), seed)
    following = (np.cumsum(counts) - counts).tolist()  # the next unused piece of each size
    order = np.empty(len(sizes), np.int64)
    written, widths = 0, []
    for repeats, lengths in found:
        width = sum([copies for _, copies in lengths])
        widths.append(width)
        rows = order[written : written + repeats * width].reshape(repeats, width)
        column = 0
        for length, copies in lengths:
            first = following[length]
            following[length] = first + repeats * copies
            rows[:, column : column + copies] = by_size[first : following[length]].reshape(repeats, copies)
            column += copies
        written += repeats * width
    repeats_of = np.array([p.repeats for p in found], np.int64)
    offsets = np.zeros(int(repeats_of.sum()) + 1, np.int64)
    np.cumsum(np.repeat(np.array(widths, np.int64), repeats_of), out=offsets[1:])
    return Layout(order, offsets)


def patterns(counts: Int64, capacity: int) -> list[Pattern]:
    """Patterns that use up `counts`, (capacity + 1,) int64: how many pieces there are of each length."""
    bound = lower_bound_of(counts, capacity)
    best: list[Pattern] = []
    fewest = -1
    for closing in ("even", "uneven", "none"):
        found = _Search(counts, capacity, closing).run()
        num_packs = sum(pattern.repeats for pattern in found)
        if fewest < 0 or num_packs < fewest:
            best, fewest = found, num_packs
        if fewest == bound:
            break
    return best


def lower_bound_of(counts: Int64, capacity: int) -> int:
    """The packs that no packer can go below, from the histogram (capacity + 1,) int64.

    L2 of Martello and Toth (1990), the best over all thresholds at once: for each, pieces over half a
    pack need packs of their own, and pieces from the threshold on must fit beside them.
    """
    length = np.arange(capacity + 1)
    number = np.concatenate([[0], np.cumsum(counts)])  # of pieces shorter than each length
    tokens = np.concatenate([[0], np.cumsum(length * counts)])
    half = capacity // 2
    threshold = np.arange(half + 1)
    alone = number[-1] - number[capacity - threshold + 1]
    large = number[capacity - threshold + 1] - number[half + 1]
    room = large * capacity - (tokens[capacity - threshold + 1] - tokens[half + 1])
    small = tokens[half + 1] - tokens[threshold]
    return int((alone + large + np.maximum(0, -(-(small - room) // capacity))).max(initial=0))


class _Search:
    """The lengths that are left, and the pack being made from them.

    closing: which of several exact pairs closes a pack, the most "even" or the most "uneven"; "none" takes
    the longest that fits to the end and searches no further.
    """

    def __init__(self, counts: Int64, capacity: int, closing: str) -> None:
        there = np.flatnonzero(counts)
        self.capacity, self.closing = capacity, closing
        self.max_nodes = 0 if closing == "none" else _NODES
        self.present: list[int] = there.tolist()
        self.left: dict[int, int] = dict(zip(self.present, counts[there].tolist(), strict=True))
        self.longest = self.present[-1] if self.present else 0
        self.forward, self.backward = bit_sets(there, self.longest)

    def run(self) -> list[Pattern]:
        found = []
        while self.present:
            lengths = self._fullest()
            repeats = min(self.left[length] // copies for length, copies in lengths.items())
            for length, copies in lengths.items():
                self.left[length] -= repeats * copies
                if not self.left[length]:
                    del self.present[bisect_left(self.present, length)]
                    self.forward ^= 1 << length
                    self.backward ^= 1 << (self.longest - length)
            found.append(Pattern(repeats, tuple(lengths.items())))
        return found

    def _fullest(self) -> dict[int, int]:
        """The lengths of the fullest pack found with the longest length in it: {length: copies}."""
        longest = self.present[-1]
        used, taken, room = {longest: 1}, [longest], self.capacity - longest
        best, slack, nodes, limit = dict(used), room, 0, longest
        while True:
            while room:
                nodes += 1
                top = self._fitting(room, used)
                closing = self._closing(room, used) if self.max_nodes and room <= 2 * top else ()
                if closing:
                    for length in closing:
                        used[length] = used.get(length, 0) + 1
                    return {length: copies for length, copies in used.items() if copies}
                length = self._fitting(min(room, limit), used)
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
            if not slack or nodes >= self.max_nodes:
                return best
            room, limit = self._lower_last(taken, used, room)
            if not limit:
                return best

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
