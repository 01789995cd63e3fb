"""What packing would bring, before a token is written: from lengths, and what of them is trained."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.packing.histogram import lower_bound_of, patterns
from packer.packing.overlong import cut
from packer.packing.planning import checked_lengths
from packer.packing.training import Trained, TrainedPlan, plan_trained, untrained
from packer.packing.values import (
    Capacity,
    Int64,
    PackingError,
    Pieces,
    capacities_of,
    smallest_that_holds,
)

STRATEGIES = ("best_fit", "sequential", "wrapped", "minibatch", "step", "padded")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEstimate:
    """One row of an estimate.

    name: a strategy, "best_fit (global)", or "padding": a loader that pads each mini-batch to its longest
    example. num_packs: packs, of padding mini-batches. num_steps: optimiser steps of an epoch.
    tokens_computed: tokens that a model is run on, padding counted. fill: real tokens over the max_tokens of
    all packs; of padding, over tokens_computed. rows_untrained: rows that a cut leaves with nothing to train
    (left out; under "wrapped" they stay). problem: why the strategy cannot be had; then all are 0.
    """

    name: str
    num_packs: int = 0
    num_steps: int = 0
    tokens_packed: int = 0
    tokens_dropped: int = 0
    tokens_computed: int = 0
    fill: float = 0.0
    rows_untrained: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What each strategy makes of the same lengths.

    num_examples: with tokens, but for those that a cut leaves with nothing to train. num_tokens: of all.
    volume_packs: packs that the tokens alone need, as `lower_bound_packs` of a dataset's report.
    lower_bound_packs: no packer of whole examples can go below (the L2 bound): volume_packs or more.
    """

    num_examples: int
    num_tokens: int
    volume_packs: int
    lower_bound_packs: int
    rows: tuple[StrategyEstimate, ...]


def lower_bound(
    lengths: Sequence[int] | NDArray[Any],
    max_tokens: int | Sequence[int],
    *,
    segment_multiple: int = 1,
    pack_multiple: int = 1,
) -> int:
    """Packs that no packer can go below if no example is split: the L2 bound (see histogram).

    Examples that are too long for a pack count as truncated to one. Of several capacities it is the sum,
    each example in the smallest that holds it.
    """
    capacities = capacities_of(max_tokens, segment_multiple=segment_multiple, pack_multiple=pack_multiple)
    array = checked_lengths(lengths)
    pieces = cut(array, capacities[-1], overlong="truncate", truncate_side="right", min_piece=1)
    return sum(lower_bound_of(counts, c.pack) for c, counts in _histograms(pieces, capacities))


def estimate(
    lengths: Sequence[int] | NDArray[Any],
    max_tokens: int | Sequence[int],
    *,
    minibatch_size: int = 8,
    packs_per_step: int = 1,
    overlong: str = "truncate",
    truncate_side: str = "right",
    min_piece: int = 1,
    scope: str = "window",
    segment_multiple: int = 1,
    pack_multiple: int = 1,
    begins: NDArray[np.int64] | None = None,
    trained: Trained | None = None,
    bounds: Callable[[int], Sequence[int]] | None = None,
) -> Estimate:
    """Packs, steps and fill of every strategy, beside a loader that pads.

    packs_per_step: packs, or mini-batches, that all ranks together take in one step. Strategy step is
    estimated with the examples of that many mini-batches a step. begins, trained: what is trained, as of
    `plan_trained`; without them no example is left out. bounds: where partitions begin and the last ends, of
    a multiple of as many examples; each is packed by itself. Raises PackingError.
    """
    array = checked_lengths(lengths)
    capacities = capacities_of(max_tokens, segment_multiple=segment_multiple, pack_multiple=pack_multiple)
    options: dict[str, Any] = {
        "minibatch_size": minibatch_size,
        "step_size": minibatch_size * packs_per_step,
        "overlong": overlong,
        "truncate_side": truncate_side,
        "min_piece": min_piece,
        "scope": scope,
        "segment_multiple": segment_multiple,
        "pack_multiple": pack_multiple,
    }
    total = int(array.sum())
    bounds = bounds or (lambda multiple: (0, len(array)))
    examples = _Examples(lengths=array, begins=begins, trained=trained, bounds=bounds)
    pieces, rows_untrained = examples.pieces(
        capacities[-1], overlong=overlong, truncate_side=truncate_side, min_piece=min_piece
    )
    histograms = _histograms(pieces, capacities)
    rows = [_padding(total, pieces.length, minibatch_size, packs_per_step, rows_untrained)]
    rows += [_strategy(name, examples, capacities, packs_per_step, options) for name in STRATEGIES]
    packs = [sum(pattern.repeats for pattern in patterns(counts, c.pack)) for c, counts in histograms]
    num_packs = sum(packs)
    tokens = int(pieces.length.sum())
    overall = StrategyEstimate(
        name="best_fit (global)",
        num_packs=num_packs,
        num_steps=-(-num_packs // packs_per_step),
        tokens_packed=tokens,
        tokens_dropped=total - tokens,
        rows_untrained=rows_untrained,
        tokens_computed=rows[1].tokens_computed,  # as of best_fit, but for rounding up to pack_multiple
        fill=_share(tokens, sum(n * c.max_tokens for n, (c, _) in zip(packs, histograms, strict=True))),
    )
    return Estimate(
        num_examples=int(np.count_nonzero(array)) - rows_untrained,
        num_tokens=total,
        volume_packs=_volume(pieces, capacities),
        lower_bound_packs=sum(lower_bound_of(counts, c.pack) for c, counts in histograms),
        rows=(*rows, overall),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Examples:
    """What every strategy is asked about; the fields are arguments of `estimate`."""

    lengths: Int64
    begins: Int64 | None
    trained: Trained | None
    bounds: Callable[[int], Sequence[int]]

    def pieces(self, capacity: Capacity, **how: Any) -> tuple[Pieces, int]:
        """The pieces of all, and the number of examples that have none since a cut takes all they train."""
        pieces = cut(self.lengths, capacity, **how)
        was_cut = np.flatnonzero(self.lengths > capacity.segment)
        if self.begins is None or self.trained is None or not len(was_cut):
            return pieces, 0
        lost = untrained(was_cut, pieces.example, pieces.start, pieces.length, self.begins, self.trained)
        lengths = self.lengths.copy()
        lengths[lost] = 0
        return cut(lengths, capacity, **how), len(lost)

    def plans(self, capacities: tuple[Capacity, ...], **options: Any) -> Iterator[TrainedPlan]:
        """The plan of each partition."""
        multiple = {"minibatch": options["minibatch_size"], "step": options["step_size"]}
        for start, stop in itertools.pairwise(self.bounds(multiple.get(options["strategy"], 1))):
            here = slice(start, stop)
            begins = None if self.begins is None else self.begins[here]
            max_tokens = [c.max_tokens for c in capacities]
            yield plan_trained(self.lengths[here], begins, lambda: self.trained, max_tokens, **options)


def _strategy(
    name: str,
    examples: _Examples,
    capacities: tuple[Capacity, ...],
    packs_per_step: int,
    options: dict[str, Any],
) -> StrategyEstimate:
    capacity = capacities[-1]
    num_packs = num_steps = tokens_packed = computed = room = rows_untrained = 0
    try:
        for found in examples.plans(capacities, strategy=name, **options):
            planned = found.plan
            sizes = capacity.padded(planned.length)
            packs = np.add.reduceat(sizes, planned.pack_offsets[:-1]) if planned.num_packs else sizes
            num_packs += planned.num_packs
            num_steps += 0 if planned.pack_step is None else len(np.unique(planned.pack_step))
            tokens_packed += planned.num_tokens
            computed += int((-(-packs // capacity.pack_multiple) * capacity.pack_multiple).sum())
            room += int(planned.pack_capacity.sum())
            rows_untrained += len(found.left_out) + len(found.kept)
    except PackingError as error:
        return StrategyEstimate(name=name, problem=str(error))
    return StrategyEstimate(
        name=name,
        num_packs=num_packs,
        num_steps=num_steps if name == "step" else -(-num_packs // packs_per_step),
        tokens_packed=tokens_packed,
        tokens_dropped=int(examples.lengths.sum()) - tokens_packed,
        tokens_computed=computed,
        fill=_share(tokens_packed, room),
        rows_untrained=rows_untrained,
    )


def _padding(
    num_tokens: int, kept: Int64, minibatch_size: int, packs_per_step: int, rows_untrained: int
) -> StrategyEstimate:
    starts = np.arange(0, len(kept), minibatch_size)
    longest = np.maximum.reduceat(kept, starts) if len(kept) else kept
    computed = int((longest * np.diff(np.append(starts, len(kept)))).sum())
    return StrategyEstimate(
        name="padding",
        num_packs=len(starts),
        num_steps=-(-len(starts) // packs_per_step),
        tokens_packed=int(kept.sum()),
        tokens_dropped=num_tokens - int(kept.sum()),
        tokens_computed=computed,
        fill=_share(int(kept.sum()), computed),
        rows_untrained=rows_untrained,
    )


def _volume(pieces: Pieces, capacities: tuple[Capacity, ...]) -> int:
    """Packs that the real tokens fill, each example's in the smallest capacity that holds it."""
    of_piece = smallest_that_holds(pieces.length, capacities)
    tokens = np.bincount(of_piece, weights=pieces.length, minlength=len(capacities))
    return sum(-(-int(count) // c.max_tokens) for count, c in zip(tokens, capacities, strict=True))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _histograms(pieces: Pieces, capacities: tuple[Capacity, ...]) -> list[tuple[Capacity, Int64]]:
    """Each capacity with how many of its pieces have each size, padding counted: (capacity.pack + 1,)."""
    of_piece = smallest_that_holds(pieces.length, capacities)
    return [
        (c, np.bincount(c.padded(pieces.length[of_piece == number]), minlength=c.pack + 1))
        for number, c in enumerate(capacities)
    ]
