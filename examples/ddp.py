"""Train on several ranks with plain PyTorch: DistributedDataParallel, or FSDP with --fsdp.

    torchrun --nproc-per-node 8 examples/ddp.py --url http://localhost:8000 --dataset ID --steps 100 \\
        --checkpoint run.pt

Run it again with the same --checkpoint and it goes on where it stopped, on any number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainer_client import PackedStream, attention


def distributed(model: torch.nn.Module, *, fsdp: bool) -> torch.nn.Module:
    """The model on this rank. Both ways average gradients over the ranks."""
    if not fsdp:
        return DistributedDataParallel(model)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@contextlib.contextmanager
def gradients_meet(model: torch.nn.Module, at_this_batch: bool) -> Iterator[None]:
    """Micro-batches before the last of a step only add up; the last one brings the ranks together."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(at_this_batch)
        yield
    elif at_this_batch:
        yield
    else:
        with model.no_sync():
            yield


def train(
    stream: PackedStream, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, steps: int
) -> list[float]:
    """Take `steps` optimiser steps; returns each step's loss over all ranks (on every rank)."""
    losses: list[float] = []
    loss = torch.zeros((), device=next(model.parameters()).device)
    model.train()
    for batch in stream:
        with gradients_meet(model, batch.step_done):
            out = model(**batch.for_transformers(), num_items_in_batch=batch.num_items_in_batch)
            # num_items_in_batch counts the tokens of all ranks, so the losses of the ranks add up
            # to the step's. Gradients are averaged: times the number of ranks makes it a sum.
            (out.loss * dist.get_world_size()).backward()
        loss += out.loss.detach()
        if not batch.step_done:  # of a `step` dataset; elsewhere each batch is a step
            continue
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item())
        loss.zero_()
        if len(losses) == steps:
            break
    return losses


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, stream: PackedStream) -> None:
    """Write a checkpoint from rank 0. The stream's state is the same on every rank."""
    weights, moments = get_state_dict(model, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
        # Beside it and then in its place: a run that dies here leaves the old one whole, and the old one
        # may still be mapped.
        new = path.with_name(f"{path.name}.new")
        torch.save({"model": weights, "optimizer": moments, "stream": stream.state_dict()}, new)
        new.replace(path)
    dist.barrier()


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, stream: PackedStream) -> None:
    """Go on from a checkpoint, on any number of ranks: each takes its part of the file."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
    stream.load_state_dict(state["stream"])


def main() -> None:
    from train_tiny import tiny_model  # here, so that this file may be copied without that one

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://localhost:8000", help="a service, or a store folder")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--packs-per-step", type=int, default=1, help="on each rank")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    model = tiny_model(args.vocab_size).to(device)
    attention.check(model)  # before it is wrapped: examples do not see each other in it
    model = distributed(model, fsdp=args.fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with PackedStream(
        args.url,
        dataset=args.dataset,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        packs_per_step=args.packs_per_step,
        epochs=None,  # --steps says how long
        device=device if cuda else None,
    ) as stream:
        if args.checkpoint and args.checkpoint.exists():
            load(args.checkpoint, model, optimizer, stream)
        losses = train(stream, model, optimizer, steps=args.steps)
        if args.checkpoint:
            save(args.checkpoint, model, optimizer, stream)
    if dist.get_rank() == 0:
        print(f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
