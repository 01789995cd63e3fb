"""What the tests of examples share: a dataset of mini-batches, the same training with padding, and ranks.

The reference (`padded_losses`) knows the rows alone: no packs, no stream, transformers' own attention.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packing_job import pack_document, spec_of, write_rows
from serving import free_port
from torch.multiprocessing import start_processes
from transformers import LlamaForCausalLM

from trainer_client import PackedBatch, PackedStream

VOCAB_SIZE = 97
MINIBATCH = 3
LEARNING_RATE = 3e-3

Row = dict[str, list[int]]


def rows_of(num_rows: int, *, seed: int = 0) -> list[Row]:
    """Ready token ids of 2 to 24 tokens, of which about two thirds are trained."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        ids = rng.integers(0, VOCAB_SIZE, int(rng.integers(2, 25)))
        trained = rng.random(len(ids)) < 0.7
        trained[-1] = True  # a row without a trained token would be left out
        rows.append({"input_ids": ids.tolist(), "labels": np.where(trained, ids, -100).tolist()})
    return rows


def pack_rows(folder: Path, rows: Sequence[Row], **packing: Any) -> str:
    """Pack the rows into the store at `folder`, by default in mini-batches of 3; returns the dataset."""
    packing = {"strategy": "minibatch", "minibatch_size": MINIBATCH, "max_tokens": 256, **packing}
    source = write_rows(folder / "rows.jsonl", rows)
    return pack_document(
        folder, spec_of(source, None, source={"format": "tokens"}, packing=packing)
    ).job.dataset


STEP_SIZE = 6
STEPS = {"strategy": "step", "step_size": STEP_SIZE, "minibatch_size": None, "max_tokens": 30}


def tiny() -> LlamaForCausalLM:
    """The examples' model, smaller still and always with the same weights."""
    torch.set_num_threads(1)
    from train_tiny import tiny_model

    return tiny_model(VOCAB_SIZE)


def padded_losses(rows: Sequence[Row], *, rows_per_step: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train one epoch on the rows with padding and AdamW: each step's loss, and the weights at the end."""
    model = tiny()
    model.set_attn_implementation("sdpa")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for first in range(0, len(rows), rows_per_step):
        batch = padded(rows[first : first + rows_per_step])
        loss = model(**batch, use_cache=False).loss  # the mean over the step's trained tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def padded(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """The rows as one padded batch."""
    longest = max(len(row["input_ids"]) for row in rows)
    shape = (len(rows), longest)
    ids = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, -100)
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[index, :length] = torch.tensor(row["input_ids"])
        labels[index, :length] = torch.tensor(row["labels"])
        mask[index, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def assert_same_weights(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """AdamW makes much of tiny differences between gradients, hence wider than the losses."""
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, atol=1e-4, rtol=0)


class Recorded(PackedStream):
    """A stream that notes the example ids of every batch that the loop takes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.taken: list[list[int]] = []

    def __iter__(self) -> Iterator[PackedBatch]:
        for batch in super().__iter__():
            self.taken.append(batch.example_ids.tolist())
            yield batch


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    """Lists end to end."""
    return list(chain.from_iterable(parts))


# ------------------------------------------------------------------ ranks


def on_ranks(world_size: int, target: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `target(*args)` in as many processes, in an environment as torchrun makes it; their results.

    A fork server has torch loaded: each process is there at once, and none of this process's threads
    are in it. A rank that fails, or does not end, ends them all.
    """
    multiprocessing.set_forkserver_preload(["torch", "transformers", "accelerate", "training"])
    port = free_port()
    with tempfile.TemporaryDirectory() as results:
        context = start_processes(
            _on_rank,
            (world_size, port, results, target, args),
            nprocs=world_size,
            join=False,
            start_method="forkserver",
        )
        deadline = time.monotonic() + 200
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"ranks did not end: {target.__name__}{args}")
        finally:
            for process in context.processes:
                process.kill()
        return [torch.load(Path(results, str(rank)), weights_only=False) for rank in range(world_size)]


def _on_rank(
    rank: int, world_size: int, port: int, results: str, target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    torch.save(target(*args), Path(results, str(rank)))
