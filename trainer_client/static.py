"""Batches of one shape: for torch.compile and CUDA graphs, which want to see no other.

Tokens are padded to a fixed number: what is added is one segment of its own, at the end, that trains
nothing. Its positions are all 0: a model may know fewer positions than there is padding, or scale them by the
largest (longrope). Boundaries are padded to a fixed number with the end of the batch, which makes segments of
no tokens: every varlen kernel passes over them. The longest segment is given as a constant, an upper bound,
which is all that kernels use it for.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer_client.batch import PackedBatch
from trainer_client.needs import needs_torch

with needs_torch("trainer_client.static"):
    from torch.nn import functional

from trainer_client.device import Tensors

_TOKENS_A_SEGMENT = 64  # segments of no tokens are not quite free: not one for every token there may be


class ShapeExceeded(ValueError):
    """A batch is larger than the static shape asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticShape:
    """num_tokens: of every batch. num_segments: with the padding's own. max_seqlen: an upper bound on
    segments, padding included; None: num_tokens."""

    num_tokens: int
    num_segments: int
    max_seqlen: int | None = None

    @property
    def longest(self) -> int:
        return self.num_tokens if self.max_seqlen is None else self.max_seqlen


def shape_for(batch: PackedBatch, static: bool | StaticShape) -> StaticShape:
    """The shape asked for, checked against the batch; True: the dataset's own.

    That is max_tokens of all the batch's packs, and a segment for each 64 tokens: one shape, or of packs of
    several capacities one for each (course.Course.room_of). A batch of more segments gets the next power of
    two, which is another shape, but few batches are. Raises ShapeExceeded.
    """
    if not isinstance(static, StaticShape):
        if batch.max_tokens is None:
            raise ValueError(
                "static=True: this batch does not know its dataset's max_tokens; give a StaticShape"
            )
        if batch.num_tokens > batch.max_tokens:
            raise ShapeExceeded(
                f"step {batch.step} of epoch {batch.epoch} has {batch.num_tokens} tokens, the dataset's "
                f"max_tokens allow {batch.max_tokens}: padding segments to a multiple made it longer; give a "
                "StaticShape with more, or pack with packing.segment_multiple"
            )
        most = max(batch.max_tokens // _TOKENS_A_SEGMENT, 16)
        while most < batch.num_segments + 1:
            most *= 2
        return StaticShape(num_tokens=batch.max_tokens, num_segments=most)
    pad = static.num_tokens - batch.num_tokens
    found = (batch.num_tokens, batch.num_segments + (pad > 0), max(batch.max_seqlen, pad))
    allowed = (static.num_tokens, static.num_segments, static.longest)
    for what, has, most in zip(("tokens", "segments", "tokens in a segment"), found, allowed, strict=True):
        if has > most:
            raise ShapeExceeded(
                f"step {batch.step} of epoch {batch.epoch} has {has} {what} with its padding, the static "
                f"shape allows {most}; give a larger StaticShape"
            )
    return static


def fixed(arrays: Tensors, batch: PackedBatch, shape: StaticShape) -> Tensors:
    """The arrays of a batch in the shape, where they are."""
    pad = shape.num_tokens - batch.num_tokens
    ends = arrays.cu_seqlens.new_full((shape.num_segments + 1,), shape.num_tokens)
    ends[: batch.num_segments + 1] = arrays.cu_seqlens
    return Tensors(
        input_ids=functional.pad(arrays.input_ids, (0, pad)),
        position_ids=functional.pad(arrays.position_ids, (0, pad)),
        cu_seqlens=ends,
        loss_mask=functional.pad(arrays.loss_mask, (0, pad)),
    )
