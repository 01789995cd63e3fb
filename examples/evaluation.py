"""Evaluate on a packed dataset: the loss of every single example, each counted once, on any number of ranks.

    python examples/evaluation.py --url http://localhost:8000 --dataset ID
    torchrun --nproc-per-node 8 examples/evaluation.py …

Packs mix examples as it suits them, but a batch knows whose tokens are whose (`example_ids`): the losses
are those of each example alone, and examples that were cut come together again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from packer.shard import PADDING_ID
from trainer_client import PackedBatch, PackedStream


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleLoss:
    """Of one example: the sum of its trained tokens' losses, and their number."""

    total: float
    num_tokens: int

    @property
    def mean(self) -> float:
        return self.total / self.num_tokens

    def __add__(self, other: ExampleLoss) -> ExampleLoss:
        return ExampleLoss(total=self.total + other.total, num_tokens=self.num_tokens + other.num_tokens)


def open_stream(
    source: str, dataset: str, *, rank: int = 0, world_size: int = 1, **options: Any
) -> PackedStream:
    """Every pack once over all ranks, in the order of packing, each time it is iterated, and as many batches
    on each rank: the last step is filled up with packs that count for nothing."""
    given: dict[str, Any] = {"epochs": 1, "shuffle_seed": None, "tail": "pad", **options}
    return PackedStream(source, dataset=dataset, rank=rank, world_size=world_size, **given)


@torch.no_grad()
def segment_losses(model: torch.nn.Module, batch: PackedBatch) -> list[tuple[int, ExampleLoss]]:
    """(example id, its loss) of each segment of a batch with trained tokens."""
    inputs = batch.for_transformers(device=next(model.parameters()).device)
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    # The token at t is predicted at t - 1; the first of a segment is never trained.
    losses = functional.cross_entropy(logits[0, :-1].float(), labels[0, 1:], reduction="none")
    trained = (labels[0, 1:] != -100).to(losses.dtype)
    segment = torch.from_numpy(batch.seq_idx).to(losses.device)[1:].long()
    totals = losses.new_zeros(batch.num_segments, dtype=torch.float64)
    counts = torch.zeros_like(totals)
    totals.index_add_(0, segment, losses.double())
    counts.index_add_(0, segment, trained.double())
    return [
        (example, ExampleLoss(total=total, num_tokens=int(count)))
        for example, total, count in zip(
            batch.example_ids.tolist(), totals.tolist(), counts.tolist(), strict=True
        )
        if count and example != PADDING_ID
    ]


def evaluate(model: torch.nn.Module, stream: Iterable[PackedBatch]) -> dict[int, ExampleLoss]:
    """The loss of every example that has trained tokens, by its index in the source; on every rank."""
    was_training = model.training
    model.eval()
    found: dict[int, ExampleLoss] = {}
    for batch in stream:
        _add(found, segment_losses(model, batch))
    model.train(was_training)
    if dist.is_initialized():
        of_ranks: list[dict[int, ExampleLoss]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_ranks, found)
        found = {}
        for one in of_ranks:
            _add(found, one.items())
    return dict(sorted(found.items()))


def _add(found: dict[int, ExampleLoss], losses: Iterable[tuple[int, ExampleLoss]]) -> None:
    for example, loss in losses:
        found[example] = found[example] + loss if example in found else loss


def main() -> None:
    from train_tiny import tiny_model  # here, so that this file may be copied without that one

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://localhost:8000", help="a service, or a store folder")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--vocab-size", type=int, default=8192)
    args = parser.parse_args()
    rank, world_size = 0, 1
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
    stream = open_stream(args.url, args.dataset, rank=rank, world_size=world_size)
    losses = evaluate(tiny_model(args.vocab_size), stream)
    if rank == 0:
        tokens = sum(loss.num_tokens for loss in losses.values())
        mean = sum(loss.total for loss in losses.values()) / tokens
        print(f"{len(losses)} examples, {tokens} tokens, loss {mean:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
