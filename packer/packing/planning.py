"""`plan`: from lengths to packs, for every strategy."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.packing import in_order
from packer.packing.decreasing import fewest_packs
from packer.packing.histogram import histogram_best_fit
from packer.packing.overlong import cut, fit_minibatches
from packer.packing.shuffle import in_stream_order, shuffle
from packer.packing.values import (
    Capacity,
    Int64,
    Layout,
    PackingError,
    Pieces,
    capacities_of,
    require_count,
    smallest_that_holds,
)
from packer.packing.window import window_best_fit

_CHOICES = {
    "strategy": ("best_fit", "sequential", "wrapped", "minibatch", "step", "padded"),
    "scope": ("window", "global"),
    "balance": ("none", "attention"),
    "overlong": ("truncate", "split", "drop", "error"),
    "truncate_side": ("right", "left"),
}
# Why a strategy has packs of one capacity only: what it promises fixes what stands in a pack or a step.
ONE_CAPACITY = {
    "wrapped": "cuts one stream, so no example has a pack that it belongs to",
    "minibatch": "makes one pack of each mini-batch, whatever its examples",
    "step": "packs each optimiser step into as few packs as it needs",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackPlan:
    """Where every segment goes. Padding is not in it: it follows from the multiples.

    example, start, length: (num_segments,) int64, in pack order; segment s is tokens [start, start + length)
    of its example, and none is empty. pack_offsets: (num_packs + 1,) int64; pack p holds the segments
    [pack_offsets[p], pack_offsets[p + 1]). pack_capacity: (num_packs,) int64, the max_tokens that each pack
    was made for. pack_step: (num_packs,) int64, the number of each pack's optimiser step (example //
    step_size), under strategy "step" alone; a step without tokens has no pack.
    truncated, dropped, split: ids of the examples that lost some tokens, lost all, or have several
    segments; sorted. tokens_dropped: tokens of `truncated` and `dropped` that are in no segment.
    """

    example: Int64
    start: Int64
    length: Int64
    pack_offsets: Int64
    pack_capacity: Int64
    pack_step: Int64 | None
    truncated: Int64
    dropped: Int64
    split: Int64
    tokens_dropped: int

    @property
    def num_packs(self) -> int:
        return len(self.pack_offsets) - 1

    @property
    def num_segments(self) -> int:
        return len(self.example)

    @property
    def num_tokens(self) -> int:
        """Real tokens in all packs."""
        return int(self.length.sum())


def partition_multiple(packing: Any) -> int:
    """What the number of examples of every partition but the last must be a multiple of.

    `packing` has the fields of a PackingSpec. Mini-batches and steps are cut from the stream by
    position, so a partition that ended inside one would make two of it.
    """
    if packing.strategy == "minibatch":
        return int(packing.minibatch_size)
    if packing.strategy == "step":
        return int(packing.step_size)
    return 1


def plan(
    lengths: Sequence[int] | NDArray[Any],
    max_tokens: int | Sequence[int],
    *,
    strategy: str = "best_fit",
    seed: int | None = None,
    minibatch_size: int | None = None,
    step_size: int | None = None,
    scope: str = "window",
    balance: str = "none",
    overlong: str = "truncate",
    truncate_side: str = "right",
    min_piece: int = 1,
    segment_multiple: int = 1,
    pack_multiple: int = 1,
) -> PackPlan:
    """Lay examples of `lengths` tokens, (n,) integers in stream order, into packs of at most `max_tokens`.

    The same arguments give the same plan on every machine. Examples without tokens are left out. Sizes are
    counted with the padding that segment_multiple and pack_multiple ask for. Raises PackingError.

    max_tokens: several make packs of several capacities: each piece goes to the smallest that holds it, and
    overlong is judged by the largest. For best_fit, sequential (in order within each capacity) and padded.
    seed: shuffles the packs, and the segments in each, under best_fit, and inside each step under step; the
    other strategies are defined by the order of the stream and keep it. None keeps packs near stream order.
    scope: of best_fit; "window" looks at some thousand waiting examples and changes the order of the stream
    little, "global" looks at the histogram of all lengths and makes the fewest packs, of similar lengths.
    balance: of best_fit; "attention" puts packs of about equal sum of squared segment lengths side by side,
    so that ranks that train neighbours finish together.
    overlong, truncate_side, min_piece: see packer.packing.overlong.
    """
    _check_choices(
        strategy=strategy, scope=scope, balance=balance, overlong=overlong, truncate_side=truncate_side
    )
    require_count("min_piece", min_piece)
    array = checked_lengths(lengths)
    capacities = capacities_of(max_tokens, segment_multiple=segment_multiple, pack_multiple=pack_multiple)
    _check_capacities(strategy, capacities)
    capacity = capacities[-1]
    if strategy == "wrapped":
        return _wrapped(array, capacity, overlong)
    pieces = cut(array, capacity, overlong=overlong, truncate_side=truncate_side, min_piece=min_piece)
    if strategy == "minibatch":
        size = _required("minibatch_size", minibatch_size)
        pieces = fit_minibatches(pieces, capacity, size, overlong=overlong, truncate_side=truncate_side)
        return _finished(array, pieces, in_order.minibatch(pieces.example, size), capacities)
    sizes = capacity.padded(pieces.length)
    if strategy == "sequential":
        layout = _by_capacity(pieces, sizes, capacities, in_order.sequential)
        return _finished(array, pieces, layout, capacities)
    if strategy == "padded":
        return _finished(array, pieces, in_order.padded(sizes), capacities)
    if strategy == "step":
        of_piece = pieces.example // _required("step_size", step_size)
        layout, steps = _steps(sizes, of_piece, capacity.pack, seed)
        return _finished(array, pieces, layout, capacities, steps)
    return _finished(array, pieces, _best_fit(pieces, sizes, capacities, scope, balance, seed), capacities)


def _best_fit(
    pieces: Pieces,
    sizes: Int64,
    capacities: tuple[Capacity, ...],
    scope: str,
    balance: str,
    seed: int | None,
) -> Layout:
    if scope == "window":
        layout = _by_capacity(pieces, sizes, capacities, window_best_fit)
    else:
        engine = functools.partial(histogram_best_fit, seed=seed)
        layout = _by_capacity(pieces, sizes, capacities, engine)
        if seed is None:
            layout = in_stream_order(layout)
    costs = None
    if balance == "attention" and len(layout.order):
        costs = np.add.reduceat(pieces.length[layout.order] ** 2, layout.offsets[:-1])
    return shuffle(layout, seed, costs=costs)


def _by_capacity(
    pieces: Pieces, sizes: Int64, capacities: tuple[Capacity, ...], engine: Callable[[Int64, int], Layout]
) -> Layout:
    """Pack the pieces of each capacity by themselves; the packs of all come in stream order."""
    if len(capacities) == 1:
        return engine(sizes, capacities[0].pack)
    of_piece = smallest_that_holds(pieces.length, capacities)
    orders, counts = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
    for number, capacity in enumerate(capacities):
        here = np.flatnonzero(of_piece == number)
        if len(here):
            layout = engine(sizes[here], capacity.pack)
            orders.append(here[layout.order])
            counts.append(np.diff(layout.offsets))
    return in_stream_order(Layout(np.concatenate(orders), np.cumsum(np.concatenate(counts))))


def _steps(sizes: Int64, step: Int64, capacity: int, seed: int | None) -> tuple[Layout, Int64]:
    """Best fit inside each step. Returns the layout and each pack's step, (num_packs,) int64."""
    orders, counts, steps = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)], [np.zeros(0, np.int64)]
    edges = np.append(np.flatnonzero(np.diff(step, prepend=-1)), len(step)).tolist()
    for a, b in itertools.pairwise(edges):
        layout = fewest_packs(sizes[a:b], capacity)
        orders.append(layout.order + a)
        counts.append(np.diff(layout.offsets))
        steps.append(np.full(len(layout.offsets) - 1, step[a]))
    of_pack = np.concatenate(steps)
    layout = Layout(np.concatenate(orders), np.cumsum(np.concatenate(counts)))
    return shuffle(in_stream_order(layout, groups=of_pack), seed, groups=of_pack), of_pack


def _wrapped(lengths: Int64, capacity: Capacity, overlong: str) -> PackPlan:
    """No example is too long for a stream that is cut anyway, unless it was asked to be left out."""
    if overlong in ("truncate", "split"):
        example = np.flatnonzero(lengths)
        pieces, layout = in_order.wrapped(example, lengths[example], capacity)
        return _finished(lengths, pieces, layout, (capacity,))
    kept = cut(lengths, capacity, overlong=overlong, truncate_side="right", min_piece=1)
    pieces, layout = in_order.wrapped(kept.example, kept.length, capacity)
    return _finished(lengths, dataclasses.replace(pieces, dropped=kept.dropped), layout, (capacity,))


def _finished(
    lengths: Int64,
    pieces: Pieces,
    layout: Layout,
    capacities: tuple[Capacity, ...],
    steps: Int64 | None = None,
) -> PackPlan:
    # From the narrowest type: looked up all over, lengths should stay in a core's cache.
    narrow = pieces.length.astype(np.min_scalar_type(capacities[-1].segment))
    length = narrow[layout.order].astype(np.int64)
    # Mostly a piece is an example, from its first token on: then there is nothing to look up.
    moved = pieces.start.any()
    again = np.zeros(0, np.int64)
    if moved:
        again = pieces.example[1:][pieces.example[1:] == pieces.example[:-1]]
    whole = len(pieces.example) == len(lengths) and not len(again)
    max_tokens = np.array([capacity.max_tokens for capacity in capacities], np.int64)
    return PackPlan(
        example=layout.order if whole else pieces.example[layout.order],
        start=pieces.start[layout.order] if moved else np.zeros(len(length), np.int64),
        length=length,
        pack_offsets=layout.offsets,
        pack_capacity=max_tokens[smallest_that_holds(length[layout.offsets[:-1]], capacities)],
        pack_step=steps,
        truncated=pieces.truncated,
        dropped=pieces.dropped,
        split=np.unique(again),
        tokens_dropped=int(lengths.sum() - length.sum()),
    )


def _check_capacities(strategy: str, capacities: tuple[Capacity, ...]) -> None:
    """PackingError where the strategy has packs of one capacity and several are asked for."""
    if len(capacities) > 1 and strategy in ONE_CAPACITY:
        numbers = [capacity.max_tokens for capacity in capacities]
        raise PackingError(
            f'max_tokens must be one number under strategy "{strategy}", which {ONE_CAPACITY[strategy]}, '
            f'found {numbers}; set {numbers[-1]}, or use "best_fit", "sequential" or "padded"'
        )


def checked_lengths(lengths: Sequence[int] | NDArray[Any]) -> Int64:
    """`lengths` as an int64 array; PackingError where it is none of whole numbers of 0 or more."""
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise PackingError(
            f"lengths must be a one-dimensional array of whole numbers, found shape {array.shape} of "
            f"{array.dtype}; give one number of tokens an example"
        )
    array = array.astype(np.int64, copy=False)
    if array.size and array.min() < 0:
        first = int(np.flatnonzero(array < 0)[0])
        raise PackingError(f"lengths must be 0 or more, found {array[first]} for example {first}")
    return array


def _check_choices(**chosen: str) -> None:
    for name, choice in chosen.items():
        if choice not in _CHOICES[name]:
            raise PackingError(f"{name} must be one of {', '.join(_CHOICES[name])}, found {choice!r}")
    if chosen["strategy"] != "best_fit":
        for name, plain in (("scope", "window"), ("balance", "none")):
            if chosen[name] != plain:
                raise PackingError(
                    f'{name}="{chosen[name]}" goes with strategy "best_fit", found strategy '
                    f'"{chosen["strategy"]}"; leave {name} out'
                )


def _required(name: str, value: int | None) -> int:
    require_count(name, value)
    return int(value or 0)
