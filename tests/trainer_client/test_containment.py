"""A kernel that multiplies other segments' values by zero, as tiles do, must not let a NaN through."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from trainer_client.attention_kernels import KERNELS, Boundaries, Call

LENGTHS = [3, 7, 1, 5]
CU_SEQLENS = torch.tensor([0, 3, 10, 11, 16], dtype=torch.int32)


def leaky(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
) -> torch.Tensor:
    """All tokens against all, other segments at weight zero: right for finite numbers only."""
    tokens = torch.arange(q.shape[0])
    segment = torch.searchsorted(cu_seqlens_q[1:].long(), tokens, right=True)
    seen = (segment[:, None] == segment) & (tokens[:, None] >= tokens)
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return torch.einsum("hts,shd->thd", weights, v)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(sum(LENGTHS), 2, 8, generator=generator) for _ in range(4)]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    options: dict[str, Any] = {"scale": None, "causal": True, "window": None, "softcap": None, "dropout": 0.0}
    return KERNELS["flash4"].run(Call(q=q, k=k, v=v, bounds=Boundaries(cu_seqlens), **options), leaky)


def forward_and_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: torch.Tensor, cu_seqlens: torch.Tensor
) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*inputs, cu_seqlens)
    out.backward(weights)
    return [out.detach(), *(x.grad for x in inputs)]


def test_the_kernel_of_this_test_leaks() -> None:
    q, k, v, _ = tensors()
    v[4] = float("nan")
    bounds = {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_k": CU_SEQLENS}
    assert leaky(q, k, v, **bounds, softmax_scale=None, causal=True)[12].isnan().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["q", "k", "v", "gradient"])
def test_what_is_not_finite_stays_in_its_segment(where: str, value: float) -> None:
    q, k, v, weights = tensors()
    clean = forward_and_backward(q, k, v, weights, CU_SEQLENS)
    poisoned = dict(zip(["q", "k", "v", "gradient"], (q, k, v, weights), strict=True))[where]
    poisoned[4, 1, 2] = value
    found = forward_and_backward(q, k, v, weights, CU_SEQLENS)
    keep = torch.ones(16, dtype=torch.bool)
    keep[3:10] = False
    for before, after in zip(clean, found, strict=True):
        assert torch.equal(before[keep], after[keep])
    marked = found[1:] if where == "gradient" else found
    assert all(x[3:10].isnan().flatten(1).any(1).all() for x in marked)  # each token of it


def test_finite_numbers_move_no_bit() -> None:
    q, k, v, weights = tensors()
    found = forward_and_backward(q, k, v, weights, CU_SEQLENS)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    bounds = {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_k": CU_SEQLENS}
    out = leaky(*inputs, **bounds, softmax_scale=None, causal=True)
    out.backward(weights)
    for wanted, one in zip([out, *(x.grad for x in inputs)], found, strict=True):
        assert torch.equal(wanted, one)


def test_empty_segments_of_a_static_shape_hide_no_segment() -> None:
    q, k, v, weights = tensors()
    padded = torch.tensor([0, 3, 10, 11, 11, 11, 16, 16, 16], dtype=torch.int32)
    v[12] = float("nan")
    out = forward_and_backward(q, k, v, weights, padded)[0]
    tainted = [bool(out[start:end].isnan().any()) for start, end in pairwise(CU_SEQLENS.tolist())]
    assert tainted == [False, False, False, True]
