"""`plan`: from lengths to packs, for every strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.packing import in_order
from packer.packing.overlong import cut, fit_minibatches
from packer.packing.shuffle import shuffle
from packer.packing.values import Capacity, Int64, Layout, PackingError, Pieces
from packer.packing.window import window_best_fit

_CHOICES = {
    "strategy": ("best_fit", "sequential", "wrapped", "minibatch", "step", "padded"),
    "overlong": ("truncate", "split", "drop", "error"),
    "truncate_side": ("right", "left"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackPlan:
    """Where every segment goes. Padding is not in it: it follows from the multiples.

    example, start, length: (num_segments,) int64, in pack order; segment s is tokens [start, start + length)
    of its example, and none is empty. pack_offsets: (num_packs + 1,) int64; pack p holds the segments
    [pack_offsets[p], pack_offsets[p + 1]). pack_step: (num_packs,) int64, the number of each pack's
    optimiser step (example // step_size), under strategy "step" alone; a step without tokens has no pack.
    truncated, dropped, split: ids of the examples that lost some tokens, lost all, or have several
    segments; sorted. tokens_dropped: tokens of `truncated` and `dropped` that are in no segment.
    """

    example: Int64
    start: Int64
    length: Int64
    pack_offsets: Int64
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
    max_tokens: int,
    *,
    strategy: str = "best_fit",
    seed: int | None = None,
    minibatch_size: int | None = None,
    step_size: int | None = None,
    overlong: str = "truncate",
    truncate_side: str = "right",
    min_piece: int = 1,
    segment_multiple: int = 1,
    pack_multiple: int = 1,
) -> PackPlan:
    """Lay examples of `lengths` tokens, (n,) integers in stream order, into packs of at most `max_tokens`.

    The same arguments give the same plan on every machine. Examples without tokens are left out.
    `seed` shuffles the packs, and the segments in each, under best_fit, and inside each step under step;
    the other strategies are defined by the order of the stream and keep it. Sizes are counted with the
    padding that segment_multiple and pack_multiple ask for. Raises PackingError.
    """
    options = {"strategy": strategy, "overlong": overlong, "truncate_side": truncate_side}
    for name, value in options.items():
        if value not in _CHOICES[name]:
            raise PackingError(f"{name} must be one of {', '.join(_CHOICES[name])}, found {value!r}")
    _check_numbers(
        max_tokens=max_tokens,
        segment_multiple=segment_multiple,
        pack_multiple=pack_multiple,
        min_piece=min_piece,
        **({"minibatch_size": minibatch_size} if strategy == "minibatch" else {}),
        **({"step_size": step_size} if strategy == "step" else {}),
    )
    capacity = Capacity(max_tokens=max_tokens, segment_multiple=segment_multiple, pack_multiple=pack_multiple)
    if capacity.segment < 1:
        raise PackingError(
            f"max_tokens must be at least segment_multiple and pack_multiple, found {max_tokens} with "
            f"{segment_multiple} and {pack_multiple}; raise max_tokens"
        )
    lengths = _checked(lengths)
    if strategy == "wrapped" and overlong in ("truncate", "split"):
        # Nothing is too long for a stream that is cut anyway.
        example = np.flatnonzero(lengths)
        pieces, layout = in_order.wrapped(example, lengths[example], capacity)
        return _finished(lengths, pieces, layout, None)
    pieces = cut(lengths, capacity, overlong=overlong, truncate_side=truncate_side, min_piece=min_piece)
    if strategy == "wrapped":
        dropped = pieces.dropped
        pieces, layout = in_order.wrapped(pieces.example, pieces.length, capacity)
        return _finished(lengths, pieces, layout, None, dropped=dropped)
    sizes = capacity.padded(pieces.length)
    steps: Int64 | None = None
    if strategy == "sequential":
        layout = in_order.sequential(sizes, capacity.pack)
    elif strategy == "padded":
        layout = in_order.padded(sizes)
    elif strategy == "minibatch":
        assert minibatch_size is not None
        pieces = fit_minibatches(
            pieces, capacity, minibatch_size, overlong=overlong, truncate_side=truncate_side
        )
        layout = in_order.minibatch(pieces.example, minibatch_size)
    elif strategy == "step":
        assert step_size is not None
        layout, steps = _steps(sizes, pieces.example // step_size, capacity.pack)
        layout = shuffle(layout, seed, groups=steps)
    else:
        layout = shuffle(window_best_fit(sizes, capacity.pack), seed)
    return _finished(lengths, pieces, layout, steps)


def _steps(sizes: Int64, step: Int64, capacity: int) -> tuple[Layout, Int64]:
    """Best fit inside each step. Returns the layout and each pack's step, (num_packs,) int64."""
    orders, counts, steps = [], [np.zeros(1, np.int64)], []
    edges = np.append(np.flatnonzero(np.diff(step, prepend=-1)), len(step)).tolist()
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        layout = window_best_fit(sizes[a:b], capacity)
        orders.append(layout.order + a)
        counts.append(np.diff(layout.offsets))
        steps.append(np.full(len(layout.offsets) - 1, step[a]))
    empty = np.zeros(0, np.int64)
    order = np.concatenate([empty, *orders])
    return Layout(order, np.cumsum(np.concatenate(counts))), np.concatenate([empty, *steps])


def _finished(
    lengths: Int64, pieces: Pieces, layout: Layout, steps: Int64 | None, *, dropped: Int64 | None = None
) -> PackPlan:
    again = pieces.example[1:][pieces.example[1:] == pieces.example[:-1]]
    length = pieces.length[layout.order]
    return PackPlan(
        example=pieces.example[layout.order],
        start=pieces.start[layout.order],
        length=length,
        pack_offsets=layout.offsets,
        pack_step=steps,
        truncated=pieces.truncated,
        dropped=pieces.dropped if dropped is None else dropped,
        split=np.unique(again),
        tokens_dropped=int(lengths.sum() - length.sum()),
    )


def _checked(lengths: Sequence[int] | NDArray[Any]) -> Int64:
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


def _check_numbers(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise PackingError(f"{name} must be a whole number of 1 or more, found {value!r}; set it")
