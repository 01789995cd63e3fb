"""A NaN or infinity of one example kept in it, around attention kernels that would let it through.

Kernels that work in tiles multiply values of a neighbouring segment by weights of zero, and zero times NaN
is NaN. So such a kernel gets zeros in the place of whatever is not finite, and the segments that held it
come out as NaN, forward and backward: whole segments, for where in it a NaN was is of no use to anyone.
Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def contained(
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """run(q, k, v), all (tokens, heads, dim), where nothing that is not finite leaves its segment.

    cu_seqlens: (num_segments + 1,) int32 on the same device, from 0 to tokens. Where all is finite, here
    and in the gradient that comes back, the result and the gradients are run's own to the bit.
    """
    taint = _Taint(cu_seqlens, q.shape[0])
    return _Out.apply(taint, run(*_In.apply(taint, q, k, v)))


class _Taint:
    """Which segments held something that is not finite so far."""

    def __init__(self, cu_seqlens: torch.Tensor, num_tokens: int) -> None:
        self.cu_seqlens = cu_seqlens.long()
        tokens = torch.arange(num_tokens, device=cu_seqlens.device)
        # Right of equal ends: a token behind empty segments (static shapes) is of the one that holds it.
        segment_of = torch.searchsorted(self.cu_seqlens[1:], tokens, right=True)
        self.segment_of = segment_of.clamp(max=cu_seqlens.shape[0] - 2)
        self.tokens: torch.Tensor | None = None  # (tokens,) bool: of a tainted segment

    def clean(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors with zeros for all that is not finite; their segments are noted."""
        faulty = torch.stack([~torch.isfinite(_largest(x)) for x in tensors]).any(0)
        count = torch.nn.functional.pad(faulty.long().cumsum(0), [1, 0])[self.cu_seqlens]
        tainted = (count.diff() > 0)[self.segment_of]
        self.tokens = tainted if self.tokens is None else self.tokens | tainted
        return tuple(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in tensors)

    def mark(self, x: torch.Tensor) -> torch.Tensor:
        assert self.tokens is not None
        return x.masked_fill(self.tokens[:, None, None], float("nan"))


def _largest(x: torch.Tensor) -> torch.Tensor:
    """(tokens, heads, dim) to (tokens,): the largest magnitude; NaN where there is one. In one pass."""
    return torch.linalg.vector_norm(x, ord=float("inf"), dim=(1, 2))


class _In(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, taint: _Taint, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.taint = taint
        return taint.clean(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(ctx.taint.mark(gradient) for gradient in gradients)


class _Out(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, taint: _Taint, out: torch.Tensor) -> torch.Tensor:
        ctx.taint = taint
        return taint.mark(out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        (clean,) = ctx.taint.clean(gradient)
        return None, clean
