"""padfree batches for torchtitan: a data loader with its interface.

torchtitan finds the segments by positions that begin anew at 0, for its flex and varlen attention, and
divides the summed loss by the trained tokens of all ranks and micro-batches, which is what packed batches
need. Set training.local_batch_size to 1: a batch is one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainer_client import PackedBatch, PackedStream

IGNORE_INDEX = -100


class PackedDataLoader:
    """Iterates ({"input", "positions"}, labels), each (1, T) int64; labels are shifted.

    rank, world_size: of data parallelism (`dp_rank`, `dp_world_size` of torchtitan's build function). Its
    state is the stream's, and loads on another dp_world_size.
    """

    def __init__(self, source: str, dataset: str, *, rank: int, world_size: int, **options: Any) -> None:
        self.stream = PackedStream(
            source, dataset=dataset, rank=rank, world_size=world_size, epochs=None, **options
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        return map(titan_batch, self.stream)

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self.stream.load_state_dict(state)


def titan_batch(batch: PackedBatch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The inputs and the shifted labels, -100 where nothing is trained."""
    given = batch.for_megatron()
    labels = given["labels"].masked_fill(given["loss_mask"] == 0, IGNORE_INDEX)
    return {"input": given["tokens"], "positions": given["position_ids"]}, labels
