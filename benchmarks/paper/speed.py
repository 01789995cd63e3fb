"""Useful tokens a second of every variant, and the stream against the same packs lying on the GPU."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from paper.batches import (
    Example,
    Micro,
    examples_of,
    packed,
    padded_like,
    padding_share,
    sorted_sample,
    without_boundaries,
)
from paper.settings import ACCUMULATE, Shape, Source, Variant
from paper.training import Trainer, measure
from trainer_client import PackedStream

Record = Callable[[dict[str, Any]], None]


@dataclass(slots=True, kw_only=True)
class Data:
    """One source as the service has it: dataset views by packing, and all examples' tokens."""

    source: Source
    url: str
    views: dict[str, dict[str, Any]]
    examples: list[Example]

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        return np.array([len(example.ids) for example in self.examples], np.int64)

    @contextlib.contextmanager
    def stream(self, packing: str, *, device: Any = None, packs_per_step: int = 1) -> Iterator[PackedStream]:
        # Only CUDA needs a copy that runs beside the training.
        on = device if device is not None and torch.device(device).type == "cuda" else None
        view = self.views[packing]
        with PackedStream(
            self.url, dataset=view["id"], device=on, packs_per_step=packs_per_step, epochs=None
        ) as stream:
            yield stream


def read(source: Source, url: str, views: dict[str, dict[str, Any]]) -> Data:
    """All examples, in the order in which padding takes them: that of the mini-batches."""
    data = Data(source=source, url=url, views=views, examples=[])
    with data.stream("minibatch") as stream:
        num = views["minibatch"]["report"]["num_packs"]
        for batch in itertools.islice(stream, num):
            data.examples.extend(examples_of(batch))
    if max(len(example.ids) for example in data.examples) > source.max_example:
        raise RuntimeError(f"{source.name} has examples of more than {source.max_example} tokens")
    return data


def steps_an_epoch(variant: Variant, data: Data) -> int:
    """Optimiser steps an epoch takes."""
    if not variant.packed or variant.name in ("minibatch", "step"):
        return math.ceil(len(data.examples) / (data.source.batch * ACCUMULATE))
    num_packs = data.views[variant.name]["report"]["num_packs"]
    return num_packs // rows_a_step(data.source) if variant.name == "unaware" else num_packs


def rows_a_step(source: Source) -> int:
    """Rows of packing without boundaries that hold as many tokens as a full pack."""
    return source.pack_tokens // source.max_example


# ------------------------------------------------------------------ cells


def measure_cell(
    trainer: Trainer, shape: Shape, data: Data, variant: Variant, *, attention: str
) -> dict[str, Any]:
    """One model, one source, one variant. `attention` takes the place of the variant's own."""
    began = time.perf_counter()
    trainer.use(attention)
    cell = {
        "part": "speed",
        "model": shape.name,
        "source": data.source.name,
        "variant": variant.name,
        "attention": attention,
        "batch": data.source.batch,
        "parameters": trainer.num_parameters,
        "steps_an_epoch": steps_an_epoch(variant, data),
        "num_examples": len(data.examples),
    }
    try:
        timing = _timed(trainer, shape, data, variant)
    except torch.OutOfMemoryError as error:
        cell["error"] = f"out of memory: {str(error).splitlines()[0]}"
    else:
        cell |= asdict(timing)
        cell["real_per_s"] = timing.real_per_s
        cell["padding_share"] = 1 - timing.num_real / timing.num_computed
        cell["epoch_padding_share"] = _epoch_share(variant, data)
    trainer.forget()
    cell["whole_s"] = time.perf_counter() - began
    return cell


def _timed(trainer: Trainer, shape: Shape, data: Data, variant: Variant) -> Any:
    device = trainer.device
    if not variant.packed:
        return _padded(trainer, shape, data, variant)
    by_batch = variant.name == "minibatch"
    packs_per_step = rows_a_step(data.source) if variant.name == "unaware" else 1
    with data.stream(variant.name, device=device, packs_per_step=packs_per_step) as stream:
        micros = (
            packed(stream, accumulate=ACCUMULATE if by_batch else 1)
            if variant.boundaries
            else without_boundaries(stream, data.source.max_example)
        )
        with contextlib.closing(micros):
            num = shape.batches if by_batch else shape.packs
            return measure(trainer, micros, warmup=shape.warmup, num=num, stats=stream.stats)


def _padded(trainer: Trainer, shape: Shape, data: Data, variant: Variant) -> Any:
    num = shape.warmup + shape.batches
    if variant.name == "sorted_flash":
        micros = sorted_sample(data.examples, data.source.batch, num, device=trainer.device)
    else:
        # The very mini-batches that `minibatch` takes from the stream.
        with data.stream("minibatch") as stream:
            micros = padded_like(itertools.islice(stream, num), device=trainer.device)
    return measure(trainer, micros, warmup=shape.warmup, num=shape.batches)


def _epoch_share(variant: Variant, data: Data) -> float:
    if variant.packed:
        return 0.0
    lengths = np.sort(data.lengths) if variant.name == "sorted_flash" else data.lengths
    return padding_share(lengths, data.source.batch)


# ------------------------------------------------------------------ stream against resident packs


def measure_stream(
    trainer: Trainer, shape: Shape, data: Data, packing: str, *, num: int, rounds: int, attention: str
) -> dict[str, Any]:
    """The same packs from the stream and lying on the GPU, turn by turn; medians of `rounds`."""
    trainer.use(attention)
    accumulate = ACCUMULATE if packing == "minibatch" else 1
    with data.stream(packing, device=trainer.device) as stream:
        resident: list[Micro] = list(itertools.islice(packed(stream, accumulate=accumulate), num))
    lying, streamed, stalls = [], [], []
    for _ in range(rounds):
        lying.append(measure(trainer, resident + resident, warmup=len(resident), num=num).real_per_s)
        with data.stream(packing, device=trainer.device) as stream:
            micros = itertools.chain(resident, packed(stream, accumulate=accumulate))
            timing = measure(trainer, micros, warmup=len(resident), num=num, stats=stream.stats)
        streamed.append(timing.real_per_s)
        stalls.append(timing.stall_share)
    trainer.forget()
    return {
        "part": "stream",
        "model": shape.name,
        "source": data.source.name,
        "packing": packing,
        "attention": attention,
        "num": num,
        "resident_per_s": lying,
        "streamed_per_s": streamed,
        "share": float(np.median(streamed) / np.median(lying)),
        "stall_share": max(stalls),
    }
