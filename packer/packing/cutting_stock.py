"""Fewer packs than a greedy search finds, where lengths are few and many packs do not close.

The cutting-stock linear programme (Gilmore and Gomory 1961) asks for as few packs as possible, in fractions,
out of all patterns that fit. The simplex method holds one pattern a length in its basis, the greedy ones
to begin with; its duals are prices of the lengths, and a knapsack over prices finds the patterns that are
worth more than the pack they cost: those come in (column generation). Prices are averaged with those of the
best bound so far (Wentges 1997), without which they swing. A place of one length may hold the next shorter
one: such exchange columns (Valerio de Carvalho 2005) make prices rise with length and save most of the steps.

The whole packs of the solution are kept and the rest is packed greedily, so that few packs are lost to
fractions. Steps are bounded: the cost depends on the number of lengths, not of pieces.

The same on every machine: floating-point numbers are only added, multiplied, divided and compared, element
by element, and sums run in a fixed order (no BLAS, no reduction that a library may split), which IEEE 754
leaves no choice in. Whatever they say, the plan is made of whole pieces and takes no more than there are.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from packer.packing.bin_slack import Pattern, slack_patterns
from packer.packing.values import Int64

Float64 = NDArray[np.float64]
Places = tuple[int, list[tuple[int, int]]]  # packs, and (length, places of it in each)
Column = tuple[tuple[int, float], ...]  # (row, how many more places of its length a unit of it gives)

_PRICE = 1 << 24  # of a pack, in the knapsack's integers
_WORK = 4 * 10**8  # numbers of the basis inverse that steps may write
_STEPS = 10  # a length: four or five are enough
_LOOKED_AT = 8  # columns that a step chooses from
_GAIN = 1e-6  # packs: a column that is worth less is left out
_PIVOT = 1e-6  # smaller numbers say nothing of which column leaves
_NOTHING = 1e-11  # what rounding leaves of a zero
_NEAR = 1.0001  # packs over the bound at which the search ends


def cutting_stock(counts: Int64, capacity: int, greedy: list[Pattern]) -> list[Pattern]:
    """Patterns that use up `counts` (capacity + 1,), as `greedy` does, but mostly of fewer packs."""
    sizes = np.flatnonzero(counts)
    shared = sizes[sizes <= capacity - sizes[0]]  # the others stand alone
    if not len(shared):
        return greedy
    programme = _Programme(shared, counts[shared], capacity, greedy)
    programme.run()
    found, left = _dealt(programme.whole_packs(), counts)
    return found + slack_patterns(left, capacity)


class _Programme:
    """The linear programme over some lengths, and a solution of it.

    sizes, demand: (m,) int64, lengths ascending and how many pieces there are of each. packs: (m,) float64,
    how often each column of the basis is taken. prices: (m,) float64, of a piece of each length, in packs.
    inverse: (m, m) float64 of the basis, a row for each of its columns.
    """

    def __init__(self, sizes: Int64, demand: Int64, capacity: int, start: list[Pattern]) -> None:
        self.sizes, self.demand, self.capacity = sizes, demand, capacity
        self.columns: list[Column] = []
        self.costs: list[float] = []  # of the columns in the basis: a pattern costs a pack
        self.packs = np.zeros(len(sizes))
        self.prices = np.zeros(len(sizes))
        self.inverse = np.zeros((len(sizes), len(sizes)))
        self.buffers = np.empty((2, *self.inverse.shape))
        self.steps_left = min(_STEPS * len(sizes), _WORK // len(sizes) ** 2)
        self._begin(start)

    def _begin(self, start: list[Pattern]) -> None:
        """The basis of patterns taken one after another, in fractions, until each uses up a length."""
        row_of = {size: row for row, size in enumerate(self.sizes.tolist())}
        left = self.demand.astype(np.float64).tolist()
        in_row: list[list[tuple[int, float]]] = [[] for _ in left]  # columns so far, and their places
        planned = [lengths for _, lengths in start if lengths[0][0] in row_of]
        planned += [((size, self.capacity // size),) for size in row_of]
        for lengths in planned:
            column = tuple((row_of[size], float(copies)) for size, copies in lengths)
            if not all(left[row] for row, _ in column):
                continue
            packs, first = min((left[row] / copies, row) for row, copies in column)
            for row, copies in column:
                left[row] -= packs * copies
            used_up = [first] + [row for row, _ in column if left[row] < _GAIN and row != first]
            for row in used_up:
                left[row] = 0.0
            self._add_first(used_up[0], column, 1, packs, in_row)
            for row in used_up[1:]:
                self._add_first(row, ((row, -1.0),), 0, 0.0, in_row)

    def _add_first(
        self, row: int, column: Column, cost: int, packs: float, in_row: list[list[tuple[int, float]]]
    ) -> None:
        """Columns so far had no more places for `row` to come: the basis is triangular, and so inverted."""
        number = len(self.columns)
        self.columns.append(column)
        self.costs.append(cost)
        self.packs[number] = packs
        inverse = self.inverse[number]
        inverse[row] = 1.0
        for earlier, places in in_row[row]:
            inverse -= places * self.inverse[earlier]
        inverse /= dict(column)[row]
        self.prices += cost * inverse
        for other, places in column:
            in_row[other].append((number, places))

    def run(self) -> None:
        """Improve the solution until it is near a bound or the steps are used up."""
        centre, best = self.prices.copy(), 0.0
        while True:
            for prices in ((centre + self.prices) / 2, self.prices.copy()):
                bound, columns = self._priced(prices)
                if bound > best:
                    best, centre = bound, prices
                pool = _Pool(columns, len(self.sizes))
                if pool.gains(self.prices).max() > _GAIN:
                    break
            else:
                return
            before = self.steps_left
            while self.steps_left and self._step(pool):
                self.steps_left -= 1
            total = math.fsum((self.packs * np.array(self.costs)).tolist())
            if self.steps_left in (0, before) or total <= best * _NEAR:
                return

    def _priced(self, prices: Float64) -> tuple[float, list[Column]]:
        """A bound on the packs (Farley 1990), and for each length the dearest pattern that holds it.

        Only patterns that are worth more than a pack.
        """
        rising = np.maximum.accumulate(np.clip(prices, 0.0, 1.0))
        # As many as fit of one length are a pattern too: no price need be higher than that makes it.
        worth = np.minimum(np.floor(rising * _PRICE), _PRICE // (self.capacity // self.sizes)).astype(
            np.int32
        )
        most = _knapsack(self.sizes, worth, self.capacity)
        bound = int(self.demand @ worth.astype(np.int64)) / max(int(most[-1]), _PRICE)
        dear = np.flatnonzero(worth + most[self.capacity - self.sizes] > _PRICE)
        columns = dict.fromkeys(self._patterns(dear, worth, most))
        # One length alone, where its price was held down.
        for row in np.flatnonzero(prices * (self.capacity // self.sizes) > 1 + _GAIN).tolist():
            columns[((row, float(self.capacity // self.sizes[row])),)] = None
        return bound, list(columns)

    def _patterns(self, rows: Int64, worth: NDArray[np.int32], most: NDArray[np.int32]) -> list[Column]:
        """Of each row the dearest pattern that holds it, read off the knapsack's table `most`."""
        copies: list[dict[int, float]] = [{row: 1.0} for row in rows.tolist()]
        # Behind the table stands what a negative room finds: no pattern.
        table = np.concatenate([most, np.full(self.capacity, -1 << 30, np.int32)])
        open_, rooms = np.arange(len(rows)), self.capacity - self.sizes[rows]
        while True:
            unread = most[rooms] > 0
            open_, rooms = open_[unread], rooms[unread]
            if not len(open_):
                return [tuple(sorted(each.items())) for each in copies]
            reached = table[rooms[:, None] - self.sizes] + worth == most[rooms][:, None]
            chosen = len(self.sizes) - 1 - reached[:, ::-1].argmax(axis=1)  # the longest that does
            for number, row in zip(open_.tolist(), chosen.tolist(), strict=True):
                copies[number][row] = copies[number].get(row, 0.0) + 1.0
            rooms = rooms - self.sizes[chosen]

    def _step(self, pool: _Pool) -> bool:
        """Bring in the column that saves most packs of those with the highest gain; False: none can."""
        gains = pool.gains(self.prices)
        gaining = np.flatnonzero(gains > _GAIN)
        if not len(gaining):
            return False
        looked_at = gaining[np.argsort(-gains[gaining], kind="stable")[:_LOOKED_AT]]
        leaving = pool.directions(looked_at, self.inverse)  # packs that a unit takes from each in the basis
        ratios = np.full(leaving.shape, np.inf)
        np.divide(self.packs[:, None], leaving, out=ratios, where=leaving > _PIVOT)
        amounts = ratios.min(axis=0)
        amounts[np.isinf(amounts)] = -1.0  # nothing would leave: rounding
        chosen = int((amounts * gains[looked_at]).argmax())
        if amounts[chosen] < 0:
            return False
        number = int(looked_at[chosen])
        row = self._exchange(float(gains[number]), leaving[:, chosen].copy(), ratios[:, chosen])
        self.columns[row], self.costs[row] = pool.known[number]
        return True

    def _exchange(self, gain: float, leaving: Float64, ratios: Float64) -> int:
        """Let a column into the basis for the one that is used up first; its row."""
        amount = float(ratios.min())
        first = np.flatnonzero(ratios <= amount + _GAIN)
        row = int(first[leaving[first].argmax()])
        amount = float(ratios[row])
        priced = self.inverse[row] / leaving[row]
        self.prices -= gain * priced
        self.packs -= amount * leaving
        np.maximum(self.packs, 0.0, out=self.packs)
        self.packs[row] = amount
        leaving[row] = 0.0
        touched = np.flatnonzero(np.abs(leaving) > _NOTHING)
        change, changed = self.buffers[0][: len(touched)], self.buffers[1][: len(touched)]
        np.multiply(leaving[touched][:, None], priced, out=change)
        np.take(self.inverse, touched, axis=0, out=changed, mode="clip")
        self.inverse[touched] = np.subtract(changed, change, out=changed)
        self.inverse[row] = priced
        return row

    def whole_packs(self) -> list[Places]:
        """The patterns of the solution, rounded down."""
        return [
            (int(packs + _GAIN), [(int(self.sizes[row]), int(places)) for row, places in column])
            for column, cost, packs in zip(self.columns, self.costs, self.packs.tolist(), strict=True)
            if cost and packs + _GAIN >= 1
        ]


class _Pool:
    """Columns that may come in: patterns, and of each length the exchange for the next shorter one.

    Those of most rows come first: rows[k] and places[k] are of the k-th row of as many as have one.
    """

    def __init__(self, patterns: list[Column], num_rows: int) -> None:
        exchanges: list[Column] = [((row, -1.0), (row - 1, 1.0)) for row in range(1, num_rows)]
        known = [(column, 1.0) for column in patterns] + [(column, 0.0) for column in exchanges]
        known.append((((0, -1.0),), 0.0))
        self.known = sorted(known, key=lambda each: -len(each[0]))
        self.costs = np.array([cost for _, cost in self.known])
        self.rows: list[Int64] = []
        self.places: list[Float64] = []
        for k in range(len(self.known[0][0])):
            entries = [column[k] for column, _ in self.known if len(column) > k]
            self.rows.append(np.array([row for row, _ in entries]))
            self.places.append(np.array([places for _, places in entries]))

    def gains(self, prices: Float64) -> Float64:
        """What a unit of each column saves, (n,), in packs."""
        worth = -self.costs
        for rows, places in zip(self.rows, self.places, strict=True):
            worth[: len(rows)] += prices[rows] * places
        return worth

    def directions(self, chosen: Int64, inverse: Float64) -> Float64:
        """What a unit of each chosen column takes from each column of the basis, (m, chosen)."""
        taken = np.zeros((len(inverse), len(chosen)))
        for rows, places in zip(self.rows, self.places, strict=True):
            here = np.flatnonzero(chosen < len(rows))
            if not len(here):
                break
            which = chosen[here]
            taken[:, here] += inverse[:, rows[which]] * places[which]
        return taken


def _knapsack(sizes: Int64, worth: NDArray[np.int32], capacity: int) -> NDArray[np.int32]:
    """The most that pieces of `sizes` are worth together in each room up to `capacity`, (capacity + 1,).

    Any number of each: sums of one size double (1, 2, 4 copies). O(capacity) for a doubling.
    """
    most = np.zeros(capacity + 1, np.int32)
    for size, value in zip(sizes.tolist(), worth.tolist(), strict=True):
        while size <= capacity and value:
            np.maximum(most[size:], most[:-size] + np.int32(value), out=most[size:])
            size, value = 2 * size, 2 * value
    return most


def _dealt(whole: list[Places], counts: Int64) -> tuple[list[Pattern], Int64]:
    """Pieces for the places of packs. Returns patterns, and the counts of the pieces that are left.

    A place goes to the longest piece that is left and fits, short places first, so that none takes what only
    a shorter place could not.
    """
    left = counts.copy()
    places = np.zeros(len(counts), np.int64)
    for repeats, lengths in whole:
        for size, copies in lengths:
            places[size] += repeats * copies
    pieces: dict[int, list[list[int]]] = {}  # of each length of place: [length of piece, how many are left]
    waiting: list[int] = []  # shorter lengths of which pieces are left
    for size in np.flatnonzero(places | counts).tolist():
        waiting.append(size)
        wanted, pieces[size] = int(places[size]), []
        while wanted and waiting:
            taken = min(wanted, int(left[waiting[-1]]))
            if taken:
                pieces[size].append([waiting[-1], taken])
                left[waiting[-1]] -= taken
                wanted -= taken
            if not left[waiting[-1]]:
                waiting.pop()
    return [pattern for packs in whole for pattern in _filled(*packs, pieces)], left


def _filled(
    repeats: int, lengths: list[tuple[int, int]], pieces: dict[int, list[list[int]]]
) -> list[Pattern]:
    """The packs of one pattern of places, with pieces taken from `pieces`."""
    found = []
    while repeats:
        held: dict[int, int] = {}
        same = repeats  # packs that can be filled alike
        for size, copies in lengths:
            queue = pieces[size]
            if queue and queue[0][1] >= copies:
                same = min(same, queue[0][1] // copies)
            elif queue:
                same = 1
        for size, copies in lengths:
            queue, wanted = pieces[size], same * copies
            while wanted and queue:
                taken = min(wanted, queue[0][1])
                held[queue[0][0]] = held.get(queue[0][0], 0) + taken // same
                queue[0][1] -= taken
                wanted -= taken
                if not queue[0][1]:
                    queue.pop(0)
        if held:
            found.append(Pattern(same, tuple(sorted(held.items(), reverse=True))))
        repeats -= same
    return found
