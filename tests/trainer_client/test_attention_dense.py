"""The exact kernel beside attention written out with a dense mask: boundaries, windows, chunks, sinks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainer_client import attention


def positions_of(rng: np.random.Generator, rows: int, length: int) -> torch.Tensor:
    """Rows of positions that begin anew with a chance of 0.3, (rows, length) int64."""
    begins = rng.random((rows, length)) < 0.3
    begins[:, 0] = True
    places = np.arange(length)
    return torch.tensor(places - np.maximum.accumulate(np.where(begins, places, 0), axis=1))


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, case: dict[str, Any]
) -> torch.Tensor:
    """softmax(q k) v over all tokens of a row, with a mask of which token sees which."""
    place = torch.arange(q.shape[2])
    starts = place - positions  # of each token's segment, which tells segments apart
    seen = starts[:, :, None] == starts[:, None, :]
    ahead = place[:, None] - place
    if case["causal"]:
        seen = seen & (ahead >= 0)
    if case["window"]:
        seen = seen & (ahead < case["window"])
    if case["chunk"]:
        number = positions // case["chunk"]
        seen = seen & (number[:, :, None] == number[:, None, :])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (case["scale"] or q.shape[-1] ** -0.5)
    if case["softcap"]:
        scores = torch.tanh(scores / case["softcap"]) * case["softcap"]
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if case["sinks"] is not None:
        more = case["sinks"][None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, more], dim=-1)
    return (torch.softmax(scores, -1)[..., : q.shape[2]] @ v).transpose(1, 2)


@pytest.mark.parametrize("seed", range(60))
def test_forward_and_backward(seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    rows, length, heads = int(rng.integers(1, 3)), int(rng.integers(1, 25)), int(rng.choice([2, 4]))
    dim, kv_heads = int(rng.choice([4, 5, 8])), int(rng.choice([1, 2]))
    window, softcap = rng.choice([None, 1, 2, 5]), rng.choice([None, None, 2.0])
    given = {"dtype": torch.float64, "requires_grad": True}
    case = {
        "window": window,
        "softcap": softcap,
        "causal": window is not None or rng.random() < 0.7,
        "scale": rng.choice([None, 0.3]),
        "chunk": rng.choice([None, None, 3]),
        "sinks": torch.randn(heads, **given) if softcap is None and rng.random() < 0.5 else None,
    }
    q = torch.randn(rows, heads, length, dim, **given)
    k = torch.randn(rows, kv_heads, length, dim, **given)
    v = torch.randn(rows, kv_heads, length, int(rng.choice([dim, 3, 8])), **given)
    positions = positions_of(rng, rows, length)
    layer: Any = torch.nn.Module()
    if case["chunk"]:
        kinds = {"layer_types": ["chunked_attention"], "attention_chunk_size": case["chunk"]}
        layer.config, layer.layer_idx = SimpleNamespace(**kinds), 0
    found = attention.attend(
        layer, q, k, v, position_ids=positions, scaling=case["scale"], sliding_window=window,
        softcap=softcap, s_aux=case["sinks"], is_causal=case["causal"],
    )  # fmt: skip
    wanted = dense(q, k, v, positions, case)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    weights, leaves = torch.randn_like(wanted), [q, k, v, *([] if case["sinks"] is None else [case["sinks"]])]
    gradients = (torch.autograd.grad(out, leaves, weights) for out in (found, wanted))
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
