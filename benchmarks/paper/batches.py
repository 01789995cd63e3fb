"""Micro-batches of every variant, as keyword arguments of a transformers model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from packer.shard import IGNORE_INDEX
from paper.settings import ACCUMULATE
from trainer_client import PackedBatch, PackedStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro:
    """One forward and backward pass."""

    kwargs: dict[str, Any]
    num_real: int  # tokens of examples
    num_computed: int  # with padding
    num_items: int  # trained tokens that the loss is divided by
    step_done: bool  # the optimiser takes a step behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One example's tokens, (n,) int32, and the first-token rule applied to its labels."""

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]


def examples_of(batch: PackedBatch) -> list[Example]:
    """The examples of a packed batch, in its order."""
    labels = batch.labels
    edges = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
    return [Example(ids=batch.input_ids[a:b], labels=labels[a:b]) for a, b in edges]


# ------------------------------------------------------------------ padded


def padded(examples: Sequence[Example], *, device: Any, step_done: bool) -> Micro:
    """Examples as rows, padded at the right to the longest of them."""
    lengths = np.array([len(example.ids) for example in examples])
    shape = (len(examples), int(lengths.max()))
    ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
    for row, example in enumerate(examples):
        ids[row, : lengths[row]], labels[row, : lengths[row]] = example.ids, example.labels
    mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
    arrays = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    return Micro(
        kwargs={name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        | {"use_cache": False},
        num_real=int(lengths.sum()),
        num_computed=ids.size,
        num_items=int((labels != IGNORE_INDEX).sum()),
        step_done=step_done,
    )


def padded_like(batches: Iterable[PackedBatch], *, device: Any) -> list[Micro]:
    """The same examples as each mini-batch of the stream, padded."""
    return [
        padded(examples_of(batch), device=device, step_done=(number + 1) % ACCUMULATE == 0)
        for number, batch in enumerate(batches)
    ]


def sorted_sample(examples: Sequence[Example], size: int, num: int, *, device: Any) -> list[Micro]:
    """`num` of the mini-batches of neighbours in length, evenly spaced from the shortest to the longest
    and then mixed, since their sizes differ."""
    by_length = sorted(examples, key=lambda example: len(example.ids))
    groups = [by_length[at : at + size] for at in range(0, len(by_length) - size + 1, size)]
    chosen = ((np.arange(num) + 0.5) * len(groups) / num).astype(int)
    np.random.default_rng(0).shuffle(chosen)
    return [
        padded(groups[which], device=device, step_done=(number + 1) % ACCUMULATE == 0)
        for number, which in enumerate(chosen)
    ]


def padding_share(lengths: NDArray[np.int64], size: int) -> float:
    """Share of padding among all tokens computed, if each `size` lengths in order make a batch."""
    starts = np.arange(0, len(lengths), size)
    rows = np.diff(np.append(starts, len(lengths)))
    return 1 - float(lengths.sum() / (np.maximum.reduceat(lengths, starts) * rows).sum())


# ------------------------------------------------------------------ packed


def packed(stream: PackedStream, *, accumulate: int = 1) -> Iterator[Micro]:
    """Micro-batches as the stream gives them, on its device."""
    for number, batch in enumerate(stream):
        yield Micro(
            kwargs=batch.for_transformers(),
            num_real=batch.num_tokens,
            num_computed=batch.num_tokens,
            num_items=batch.num_items_in_batch,
            step_done=batch.step_done and (number + 1) % accumulate == 0,
        )


def without_boundaries(stream: PackedStream, row_tokens: int) -> Iterator[Micro]:
    """Rows of `row_tokens` laid full without regard to examples: a token sees all before it."""
    for batch in stream:
        if batch.num_tokens % row_tokens:
            continue  # the short pack at the end of a partition
        kwargs = batch.for_transformers()
        yield Micro(
            kwargs={name: kwargs[name].reshape(-1, row_tokens) for name in ("input_ids", "labels")}
            | {"use_cache": False},
            num_real=batch.num_tokens,
            num_computed=batch.num_tokens,
            num_items=batch.num_items_in_batch,
            step_done=batch.step_done,
        )


def one_row(batch: PackedBatch, *, boundaries: bool) -> dict[str, Any]:
    """A mini-batch as one row, with its boundaries or as if it were one example."""
    kwargs = batch.for_transformers()
    if boundaries:
        return kwargs
    return {"input_ids": kwargs["input_ids"], "labels": kwargs["labels"], "use_cache": False}
