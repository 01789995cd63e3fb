"""A NaN or infinity of one example kept in it, around attention kernels that would let it through.

Kernels that work in tiles multiply values of a neighbouring segment by weights of zero, and zero times NaN
is NaN. So such a kernel gets zeros in the place of whatever is not finite, and each token of a segment that
held it comes out with a NaN in its first element, forward and backward, which the next layer spreads over
the rest: where in the segment it was is of no use to anyone. Nothing here waits for the device, and memory is
passed over as seldom as can be: on one H200 a NaN for all elements cost three times as much.
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
    segment_of: torch.Tensor,
    num_segments: int,
) -> torch.Tensor:
    """run(q, k, v), all (tokens, heads, dim), where nothing that is not finite leaves its segment.

    segment_of: (tokens,) int64 on the same device, each token's segment. Where all is finite, here and in
    the gradient that comes back, the result and the gradients are run's own to the bit.
    """
    taint = _Taint(segment_of, num_segments)
    return _Out.apply(taint, run(*_In.apply(taint, q, k, v)))


class _Taint:
    """Which tokens belong to a segment that held something that is not finite so far."""

    def __init__(self, segment_of: torch.Tensor, num_segments: int) -> None:
        self._segment_of = segment_of
        self._num_segments = num_segments
        self._tokens: torch.Tensor | None = None  # (tokens,) bool

    def clean(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors with zeros for all that is not finite; their segments are noted."""
        # Zero times the largest magnitude of a token is 0, or NaN: sums over segments keep that.
        faults = sum(torch.linalg.vector_norm(x, ord=float("inf"), dim=(1, 2)) * 0 for x in tensors)
        assert isinstance(faults, torch.Tensor)
        segments = faults.new_zeros(self._num_segments).index_add_(0, self._segment_of, faults)
        found = segments.isnan()[self._segment_of]
        self._tokens = found if self._tokens is None else self._tokens | found
        return tuple(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in tensors)

    def mark(self, x: torch.Tensor) -> torch.Tensor:
        """x itself, changed."""
        assert self._tokens is not None
        x[:, 0, 0].masked_fill_(self._tokens, float("nan"))
        return x


class _In(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, taint: _Taint, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.taint = taint
        return taint.clean(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In place: nobody but the kernel took the cleaned tensors, so nobody else has these gradients.
        return None, *(ctx.taint.mark(gradient) for gradient in gradients)


class _Out(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, taint: _Taint, out: torch.Tensor) -> torch.Tensor:
        ctx.taint = taint
        return taint.mark(out.clone())  # the kernel keeps its own for the way back

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        (clean,) = ctx.taint.clean(gradient)
        return None, clean
