"""Best fit over the whole histogram of lengths: `scope="global"`, `estimate` and the steps of "step".

What stands in packs is decided on the histogram alone, as patterns that are repeated (see bin_slack), in as
good as no time: so much for a million pieces as for a billion. Where these packs are further from the lower
bound than a linear programme may bring them, they are made again from its solution (see cutting_stock), and
the fewest packs win. Then the pieces are counted out, equal ones in an order by seed.
"""

from __future__ import annotations

import numpy as np

from packer.packing.bin_slack import Pattern, packs_of, slack_patterns
from packer.packing.cutting_stock import cutting_stock
from packer.packing.shuffle import sorted_by
from packer.packing.values import Int64, Layout

_NEAR = 1.0002  # packs over the lower bound that are not worth a linear programme
_MOST_LENGTHS = 1024  # in a linear programme: a step costs the square
_FEWEST_PIECES = 8  # of each length on average: else fractions of packs cost what it saves
_BLOCK = 1 << 18  # pieces counted out at once: what a core's cache holds


def histogram_best_fit(sizes: Int64, capacity: int, seed: int | None = None) -> Layout:
    """Pack `sizes`, each in [1, capacity]. Equal sizes are drawn in an order by `seed`."""
    # More room than there are tokens changes nothing but the cost.
    capacity = max(1, min(capacity, int(sizes.sum())))
    counts = np.bincount(sizes, minlength=capacity + 1)
    found = patterns(counts, capacity)
    return _counted_out(found, sorted_by(sizes, capacity.bit_length(), seed))


def patterns(counts: Int64, capacity: int) -> list[Pattern]:
    """Patterns that use up `counts`, (capacity + 1,) int64: how many pieces there are of each length."""
    bound = lower_bound_of(counts, capacity)
    greedy = slack_patterns(counts, capacity, bound)
    if packs_of(greedy) <= bound * _NEAR:
        return greedy
    lengths = np.flatnonzero(counts)
    shared = lengths[lengths <= capacity - lengths[0]]
    if not 1 < len(shared) <= min(_MOST_LENGTHS, int(counts[shared].sum()) // _FEWEST_PIECES):
        return greedy
    refined = cutting_stock(counts, capacity, greedy)
    return refined if packs_of(refined) < packs_of(greedy) else greedy


def lower_bound_of(counts: Int64, capacity: int) -> int:
    """The packs that no packer can go below, from the histogram, int64: (longest + 1,) or more.

    L2 of Martello and Toth (1990), the best over all thresholds at once: for each, pieces over half a
    pack need packs of their own, and pieces from the threshold on must fit beside them.
    """
    length = np.flatnonzero(counts)
    # Between two lengths a higher threshold leaves less room and as many small pieces: lengths are enough.
    half = capacity // 2
    threshold = np.append(length[length <= half], half)
    number = np.concatenate([[0], np.cumsum(counts[length])])  # of pieces shorter than each length
    tokens = np.concatenate([[0], np.cumsum(length * counts[length])])
    shortest = np.searchsorted(length, threshold)
    fitting = np.searchsorted(length, capacity - threshold, side="right")  # beside the threshold
    small_end = int(np.searchsorted(length, half, side="right"))
    alone = number[-1] - number[fitting]
    large = number[fitting] - number[small_end]
    room = large * capacity - (tokens[fitting] - tokens[small_end])
    small = tokens[small_end] - tokens[shortest]
    return int((alone + large + np.maximum(0, -(-(small - room) // capacity))).max(initial=0))


def _counted_out(found: list[Pattern], by_size: Int64) -> Layout:
    """The packs of patterns that use up all pieces; `by_size`: their places, shortest first.

    A column is one piece of a pattern, in all its packs: the next pieces of its length, as many as packs.
    """
    repeats = np.array([pattern.repeats for pattern in found], np.int64)
    entries = np.array([entry for pattern in found for entry in pattern.lengths], np.int64).reshape(-1, 2)
    num_entries = np.array([len(pattern.lengths) for pattern in found], np.int64)
    pattern = np.repeat(np.arange(len(found)), num_entries)
    length, pattern = np.repeat(entries[:, 0], entries[:, 1]), np.repeat(pattern, entries[:, 1])
    widths = np.bincount(pattern, minlength=len(found))
    first = np.cumsum(widths) - widths
    begins = np.cumsum(repeats * widths) - repeats * widths
    place = begins[pattern] + np.arange(len(pattern)) - first[pattern]  # of each column in the first pack
    rising = np.argsort(length, kind="stable")
    place, width, rows = place[rising], widths[pattern[rising]], repeats[pattern[rising]]
    ends = np.cumsum(rows)
    order = np.empty(len(by_size), np.int64)
    a = 0
    while a < len(rows):
        start = int(ends[a] - rows[a])
        b = max(a + 1, int(np.searchsorted(ends, start + _BLOCK, side="right")))
        stop = int(ends[b - 1])
        begin = place[a:b] - (ends[a:b] - rows[a:b] - start) * width[a:b]
        target = np.repeat(begin, rows[a:b])
        target += np.arange(stop - start) * np.repeat(width[a:b], rows[a:b])
        order[target] = by_size[start:stop]
        a = b
    offsets = np.zeros(int(repeats.sum()) + 1, np.int64)
    np.cumsum(np.repeat(widths, repeats), out=offsets[1:])
    return Layout(order, offsets)
