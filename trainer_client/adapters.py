"""A batch in the words of those who take it: transformers, flash-attn, torch, Megatron.

All of these give torch tensors: on the batch's device where the stream was opened with `device`, else on
the CPU, or on the `device` asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from packer.shard import IGNORE_INDEX
from trainer_client import device as on_device
from trainer_client.batch import PackedBatch, padded_boundaries

if TYPE_CHECKING:
    import torch

    from trainer_client.static import StaticShape


def for_transformers(
    batch: PackedBatch, *, device: Any = None, seq_idx: bool = False, static: bool | StaticShape = False
) -> dict[str, Any]:
    """Keyword arguments of a transformers model's forward.

    input_ids, position_ids, labels (1, num_tokens) int64; cu_seq_lens_q/k (num_segments + 1,) int32;
    max_length_q/k int; use_cache False: without it SDPA and eager build a cache and let examples see
    each other. No attention mask, for the same reason. With `seq_idx` also seq_idx (1, num_tokens)
    int32, for linear attention and convolutions. Equal in values, shapes and dtypes to transformers'
    DataCollatorWithFlattening(return_flash_attn_kwargs=True) on the same examples.

    static: every batch in one shape, for torch.compile and CUDA graphs; True for the shape that the
    dataset's max_tokens gives, or a trainer_client.static.StaticShape.
    """
    arrays, longest = on_device.tensors(batch, device), batch.max_seqlen
    segments = batch.seq_idx if seq_idx else None
    if static:
        from trainer_client.static import fixed, shape_for

        shape = shape_for(batch, static)
        arrays, longest = fixed(arrays, batch, shape), shape.longest
        if segments is not None:
            pad = (0, shape.num_tokens - batch.num_tokens)
            segments = np.pad(segments, pad, constant_values=batch.num_segments)
    ids = arrays.input_ids.long()
    kwargs: dict[str, Any] = {
        "input_ids": ids[None],
        "position_ids": arrays.position_ids.long()[None],
        "labels": _labels(ids, arrays.loss_mask)[None],
        "cu_seq_lens_q": arrays.cu_seqlens,
        "cu_seq_lens_k": arrays.cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
        "use_cache": False,
    }
    if segments is not None:
        kwargs["seq_idx"] = on_device.to_device(segments, arrays.input_ids.device)[None]
    return kwargs


def for_flash_attn(batch: PackedBatch, *, device: Any = None) -> dict[str, Any]:
    """Keyword arguments of flash_attn_varlen_func beside q, k and v."""
    cu_seqlens = on_device.tensors(batch, device).cu_seqlens
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": batch.max_seqlen,
        "max_seqlen_k": batch.max_seqlen,
        "causal": True,
    }


def for_torch_varlen(batch: PackedBatch, *, device: Any = None) -> dict[str, Any]:
    """Keyword arguments of torch.nn.attention.varlen.varlen_attn beside query, key and value."""
    cu_seqlens = on_device.tensors(batch, device).cu_seqlens
    return {
        "cu_seq_q": cu_seqlens,
        "cu_seq_k": cu_seqlens,
        "max_q": batch.max_seqlen,
        "max_k": batch.max_seqlen,
        "window_size": (-1, 0),  # causal, in every torch that has it
    }


def for_megatron(batch: PackedBatch, *, device: Any = None) -> dict[str, Any]:
    """A batch as Megatron's models take it, and the fields of its PackedSeqParams.

    tokens, labels, position_ids (1, num_tokens) int64; loss_mask (1, num_tokens) float32. labels and
    loss_mask are shifted: at t they speak of token t + 1, which the first-token rule of the format
    keeps inside the segment. packed_seq_params: qkv_format "thd"; cu_seqlens_q/kv count real tokens,
    cu_seqlens_q/kv_padded say where segments lie (padding behind a segment belongs to it); max_seqlen
    with the padding.
    """
    arrays = on_device.tensors(batch, device)
    ids = arrays.input_ids.long()
    real, where = padded_boundaries(batch)
    longest = int((where[1:] - where[:-1]).max())
    cu_seqlens = on_device.to_device(real, ids.device)
    cu_padded = on_device.to_device(where, ids.device)
    return {
        "tokens": ids[None],
        "labels": on_device.shifted(ids)[None],
        "loss_mask": on_device.shifted(arrays.loss_mask).float()[None],
        "position_ids": arrays.position_ids.long()[None],
        "packed_seq_params": {
            "qkv_format": "thd",
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_kv": cu_seqlens,
            "cu_seqlens_q_padded": cu_padded,
            "cu_seqlens_kv_padded": cu_padded,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        },
    }


def _labels(ids: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    return ids.masked_fill(~loss_mask, IGNORE_INDEX)
