"""A training loop with Hugging Face Accelerate on a padfree stream.

    accelerate launch examples/accelerate_loop.py --url http://localhost:8000 --dataset ID --steps 100 \\
        --checkpoint run

The model and the optimiser go through `prepare`; the stream does not: it is this rank's part already,
and on the device. Run it again with the same --checkpoint and it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from trainer_client import PackedBatch, PackedStream, attention


def open_stream(accelerator: Accelerator, source: str | Path, dataset: str, **options: Any) -> PackedStream:
    """This rank's stream, without end, as part of what save_state and load_state keep."""
    stream = PackedStream(
        source,
        dataset=dataset,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        epochs=None,
        device=accelerator.device if accelerator.device.type == "cuda" else None,
        **options,
    )
    accelerator.register_for_checkpointing(stream)
    return stream


def next_update(batches: Iterator[PackedBatch], accumulate: int) -> list[PackedBatch]:
    """The micro-batches of one optimiser step: `accumulate` steps of the stream."""
    update: list[PackedBatch] = []
    for _ in range(accumulate):
        update.append(next(batches))
        while not update[-1].step_done:  # of a `step` dataset
            update.append(next(batches))
    return update


def train(
    accelerator: Accelerator,
    stream: PackedStream,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    accumulate: int = 1,
) -> list[float]:
    """Take `steps` optimiser steps; returns each step's loss over all ranks."""
    losses = []
    model.train()
    batches = iter(stream)
    for _ in range(steps):
        update = next_update(batches, accumulate)
        # Known before the first backward, so that tokens weigh the same in whichever micro-batch they are.
        num_items = sum(batch.num_items_in_batch for batch in update if batch.step_done)
        loss = torch.zeros((), device=accelerator.device)
        for number, batch in enumerate(update, start=1):
            last = number == len(update)
            # Not `accumulate()`, which counts batches and takes the mean of their means.
            with contextlib.nullcontext() if last else accelerator.no_sync(model):
                out = model(**batch.for_transformers(), num_items_in_batch=num_items)
                accelerator.backward(out.loss * accelerator.num_processes)  # gradients are averaged
            loss += out.loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss, "sum").item())
    return losses


def main() -> None:
    from train_tiny import tiny_model  # here, so that this file may be copied without that one

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://localhost:8000", help="a service, or a store folder")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()
    accelerator = Accelerator()
    model = tiny_model(args.vocab_size).to(accelerator.device)
    with accelerator.autocast():
        attention.check(model)  # before it is wrapped: examples do not see each other in it
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    with open_stream(accelerator, args.url, args.dataset) as stream:
        if args.checkpoint and args.checkpoint.exists():
            accelerator.load_state(args.checkpoint)
        losses = train(accelerator, stream, model, optimizer, steps=args.steps, accumulate=args.accumulate)
        if args.checkpoint:
            accelerator.save_state(args.checkpoint)
    accelerator.print(f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
