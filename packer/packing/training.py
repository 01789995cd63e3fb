"""Plans that leave out what trains nothing: a row may lose all that it trains to a cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.packing.planning import PackPlan, plan
from packer.packing.values import Int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """Which tokens of flat rows are trained, as runs: few numbers a row, where a mask has one a token.

    starts, stops: (num_runs,) int64, rising; run r is tokens [starts[r], stops[r]).
    """

    starts: Int64
    stops: Int64

    @classmethod
    def of(cls, mask: NDArray[np.bool_], first: int = 0) -> Trained:
        """Those of a mask, whose first token is number `first`."""
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)) + first
        return cls(starts=edges[::2], stops=edges[1::2])

    @classmethod
    def joined(cls, parts: Sequence[Trained]) -> Trained:
        """Those of parts that follow each other."""
        none = [np.zeros(0, np.int64)]
        return cls(
            starts=np.concatenate(none + [part.starts for part in parts]),
            stops=np.concatenate(none + [part.stops for part in parts]),
        )

    def any(self, starts: Int64, stops: Int64) -> NDArray[np.bool_]:
        """Whether a token is trained in each of the ranges [starts, stops): (k,) bool."""
        # The first run that ends behind the start is the first that may reach into the range.
        run = np.searchsorted(self.stops, starts, side="right")
        begins = np.append(self.starts, np.iinfo(np.int64).max)[run]
        return (np.maximum(begins, starts) < stops) & (run < len(self.stops))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedPlan:
    """A plan, and what was left out for it.

    lengths: (n,) int64, what was planned: 0 for what was left out. left_out: rows that lose to a cut all that
    they train; sorted. kept: rows of which that is true too, but which stay where they are, since under
    "wrapped" others would be cut in their place.
    """

    plan: PackPlan
    lengths: Int64
    left_out: Int64
    kept: Int64


def plan_trained(
    lengths: Int64,
    begins: Int64 | None,
    trained: Callable[[], Trained | None],
    max_tokens: int | Sequence[int],
    **options: Any,
) -> TrainedPlan:
    """`plan`, without the rows that a cut leaves with nothing to train. Raises PackingError.

    begins: (n,) int64, the number of each row's first token in `trained`, which is asked for only where
    something was cut; without them no row is left out. options: those of `plan`. A row that is left out keeps
    its place (length 0), since mini-batches and steps are counted by place.
    """
    none = np.zeros(0, np.int64)
    lengths, left_out = lengths.copy(), none
    while True:
        planned = plan(lengths, max_tokens, **options)
        was_cut = np.union1d(planned.truncated, planned.split)
        lost = none
        if len(was_cut) and begins is not None and (runs := trained()) is not None:
            lost = untrained(was_cut, planned.example, planned.start, planned.length, begins, runs)
        if not len(lost) or options.get("strategy") == "wrapped":
            return TrainedPlan(plan=planned, lengths=lengths, left_out=left_out, kept=lost)
        left_out = np.union1d(left_out, lost)
        lengths[lost] = 0


def untrained(
    was_cut: Int64, example: Int64, start: Int64, length: Int64, begins: Int64, trained: Trained
) -> Int64:
    """Of the rows `was_cut` those of which no segment trains anything, rising.

    example, start, length: the segments, as of a PackPlan. begins: as of `plan_trained`.
    """
    segments = np.flatnonzero(np.isin(example, was_cut))
    of, starts = example[segments], begins[example[segments]] + start[segments]
    # The first token of a segment is never trained.
    kept = trained.any(starts + 1, starts + length[segments])
    return np.setdiff1d(of, of[kept])
