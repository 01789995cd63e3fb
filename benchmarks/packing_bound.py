"""How far the histogram engine is from the best that any packer can do, where the L2 bound is not tight.

    SCIPY/bin/python benchmarks/packing_bound.py --data DATA --rows docs:2048,docs:8192
    SCIPY/bin/python benchmarks/packing_bound.py --data DATA --least 1.0001    all rows of files over it

The bound is that of the cutting-stock linear programme (Gilmore and Gomory 1961): as few packs as possible,
in fractions, out of all patterns of lengths that fit into one. Patterns are found as they are needed (column
generation): HiGHS solves the programme over those known, its duals price the lengths, and an unbounded
integer knapsack finds the dearest patterns. The bound does not rest on floating point: prices are rounded
down to integers, and packs are at least their sum over all pieces by the dearest pattern's price (Farley
1990). Where L2 is as high, it is L2.

Lengths are those of benchmarks/packing.py. "Best found" packs by the programme's own solution, rounded down,
and by the engine what that leaves: so few packs there can be. "LP" is above the programme's value where the
search ended before (L2 reached, or --limit-s); the bound holds either way. SCIPY is an environment with scipy
and numpy. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csc_array

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import packing  # noqa: E402

from packer.packing import lower_bound, plan  # noqa: E402
from packer.packing.histogram import lower_bound_of, patterns  # noqa: E402

Array = np.ndarray[Any, Any]
Column = tuple[tuple[int, int], ...]  # (index of a length, copies of it), ascending
_PRICE = 10**9  # of a pack, in integers
_SLACK = 1e-6  # packs: what HiGHS may be off by


def dearest(sizes: Array, prices: Array, capacity: int) -> tuple[int, list[Column]]:
    """The price of the dearest pattern, and for each length the dearest pattern that holds it.

    sizes: distinct lengths, ascending. prices: of one piece of each, int64. O(capacity * sizes).
    """
    best = np.zeros(capacity + 1, np.int64)
    last = np.full(capacity + 1, -1)  # index of the length put in last; -1: nothing fits
    used = np.zeros(capacity + 1, np.int64)  # room that the pattern really takes
    num_fitting = np.searchsorted(sizes, np.arange(capacity + 1), side="right")
    for room in range(1, capacity + 1):
        best[room], last[room], used[room] = best[room - 1], last[room - 1], used[room - 1]
        fitting = num_fitting[room]
        if fitting:
            worth = best[room - sizes[:fitting]] + prices[:fitting]
            chosen = int(worth.argmax())
            if worth[chosen] > best[room]:
                best[room], last[room], used[room] = worth[chosen], chosen, room
    columns = []
    for index in np.flatnonzero(prices + best[capacity - sizes] > _PRICE):
        copies = {int(index): 1}
        room = int(used[capacity - sizes[index]])
        while last[room] >= 0:
            chosen = int(last[room])
            copies[chosen] = copies.get(chosen, 0) + 1
            room = int(used[room - sizes[chosen]])
        columns.append(tuple(sorted(copies.items())))
    return int(best[capacity]), columns


def solve(columns: list[Column], demand: Array) -> tuple[Array, float, Array]:
    """The programme over `columns`: packs of each (float64), packs in all, price of each length in packs."""
    index = np.array([i for column in columns for i, _ in column])
    copies = np.array([-c for column in columns for _, c in column], float)
    starts = np.cumsum([0] + [len(column) for column in columns])
    matrix = csc_array((copies, index, starts), shape=(len(demand), len(columns)))
    found = linprog(np.ones(len(columns)), A_ub=matrix, b_ub=-demand.astype(float), method="highs")
    if not found.success:
        raise RuntimeError(f"HiGHS: {found.message}")
    return found.x, float(found.fun), -found.ineqlin.marginals


def bound(lengths: Array, capacity: int, limit_s: float) -> tuple[int, float, int]:
    """(packs that no packer can go below, value of the programme, packs by its solution)."""
    counts = np.bincount(lengths, minlength=capacity + 1)
    sizes = np.flatnonzero(counts)
    demand, at = counts[sizes], {int(size): i for i, size in enumerate(sizes)}
    known = {tuple(sorted((at[s], c) for s, c in p.lengths)): 0 for p in patterns(counts, capacity)}
    least, ends = lower_bound_of(counts, capacity), time.monotonic() + limit_s
    while True:
        packs, optimum, prices = solve(list(known), demand)
        whole = np.floor(np.maximum(prices, 0) * _PRICE).astype(np.int64)
        most, columns = dearest(sizes, whole, capacity)
        least = max(least, -(-int(demand @ whole) // max(most, _PRICE)))
        new = [column for column in columns if column not in known]
        if least >= math.ceil(optimum - _SLACK) or not new or time.monotonic() > ends:
            return least, optimum, _rounded(list(known), packs, sizes, demand, capacity)
        known.update(dict.fromkeys(new, 0))


def _rounded(columns: list[Column], packs: Array, sizes: Array, demand: Array, capacity: int) -> int:
    left, num_packs = demand.copy(), 0
    for column, amount in zip(columns, np.floor(packs + _SLACK).astype(int).tolist(), strict=True):
        repeats = min([amount, *(int(left[i]) // c for i, c in column)])
        for i, c in column:
            left[i] -= repeats * c
        num_packs += repeats
    counts = np.zeros(capacity + 1, np.int64)
    counts[sizes] = left
    return num_packs + sum(pattern.repeats for pattern in patterns(counts, capacity))


def row(name: str, lengths: Array, capacity: int, arguments: argparse.Namespace) -> str:
    """A row of the table; empty where the engine is near enough to the L2 bound."""
    ours, l2 = plan(lengths, capacity, scope="global", seed=0).num_packs, lower_bound(lengths, capacity)
    if not arguments.rows and ours <= arguments.least * l2:
        return ""
    least, value, rounded = bound(lengths, capacity, arguments.limit_s)
    peer = packing._first_fit_decreasing(lengths, capacity)
    numbers = (len(np.unique(lengths)), l2, round(value, 2), least, min(ours, rounded), ours, peer)
    cells = [f"{number:,}" for number in numbers] + [f"{packs / least:.5f}" for packs in (ours, peer)]
    return f"| {name} | {capacity:,} | " + " | ".join(cells) + " |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of *.jsonl or *.jsonl.gz files")
    parser.add_argument("--rows", default="", help="file:max_tokens, with commas; else all rows over --least")
    parser.add_argument("--least", type=float, default=1.0001, help="packs over the L2 bound")
    parser.add_argument("--limit-s", type=float, default=600, help="seconds a row")
    arguments = parser.parse_args()
    titles = ("L2", "LP", "bound", "best found", "padfree global", "first-fit decreasing", "padfree over it")
    print("| lengths | max_tokens | sizes | " + " | ".join(titles) + " | first-fit decreasing over it |")
    print("|---" * 11 + "|", flush=True)
    for path in sorted(arguments.data.glob("*.jsonl*")):
        name = path.name.split(".")[0]
        for capacity in packing.CAPACITIES:
            if not arguments.rows or f"{name}:{capacity}" in arguments.rows.split(","):
                lengths = packing.split(packing.from_file(path, 100_000), capacity)
                print(row(name, lengths, capacity, arguments), end="", flush=True)


if __name__ == "__main__":
    main()
