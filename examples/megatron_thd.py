"""padfree batches for Megatron's training loop: packed sequences in "thd" form.

Megatron is not needed to read this file; the functions are what its pretrain() asks for (as in its
pretrain_gpt.py), to be used with

    --calculate-per-token-loss      the loss function gives a sum and a number of tokens, and Megatron divides
                                    by the tokens of the whole step over all data parallel ranks
    --micro-batch-size 1            a batch is one row
    --variable-seq-lengths          rows differ in length (with pipeline parallelism)
    --dataloader-type external      the stream is the iterator, dealt out by data parallel rank already

Under context parallelism open the stream with `segment_multiple=parallel_multiple(context_parallel=…, …)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from trainer_client import PackedBatch, PackedStream

try:
    from megatron.core.packed_seq_params import PackedSeqParams
except ImportError:
    from types import SimpleNamespace as PackedSeqParams


def open_stream(source: str, dataset: str, *, rank: int, world_size: int, **options: Any) -> PackedStream:
    """The train iterator of a data parallel rank, of which parallel_state knows number and count.

    Ranks of one tensor, context or pipeline parallel group open the same one and get the same batches.
    """
    return PackedStream(source, dataset=dataset, rank=rank, world_size=world_size, epochs=None, **options)


def get_batch(batches: Iterator[PackedBatch], device: Any = None) -> dict[str, Any]:
    """tokens, labels, loss_mask, position_ids (1, T), and packed_seq_params; labels are shifted."""
    fields = next(batches).for_megatron(device=device)
    fields["packed_seq_params"] = PackedSeqParams(**fields["packed_seq_params"])
    return fields


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the trained tokens' losses, their number, and both for the log. losses: (1, T) float."""
    mask = loss_mask.flatten()
    total = torch.sum(losses.flatten().float() * mask)
    num_tokens = mask.sum().to(torch.int32)
    return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.to(total.dtype)])}


def forward_step(
    batches: Iterator[PackedBatch], model: torch.nn.Module
) -> tuple[torch.Tensor, partial[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]]:
    """What pretrain() calls for each micro-batch: the losses of all tokens, and how they become one."""
    batch = get_batch(batches, next(model.parameters()).device)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,  # no attention mask: boundaries are in packed_seq_params
        labels=batch["labels"],
        packed_seq_params=batch["packed_seq_params"],
    )
    return losses, partial(loss_func, batch["loss_mask"])
