"""Attention segment by segment: exact by construction, on any device and in any dtype.

The kernel that does everything; the others are measured against it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from trainer_client.attention_kernels import Call


@torch.compiler.disable  # a graph for each set of boundaries is of no use
def per_segment(call: Call, function: Any) -> torch.Tensor:
    """Each segment alone: exact by construction. Memory O(longest segment squared) at worst."""
    host = call.bounds.host
    parts = []
    for start, end in pairwise(host):
        if start == end:  # of a static shape
            continue
        # (tokens, heads, dim) to (1, heads, tokens, dim)
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (call.q, call.k, call.v))
        if call.softcap is not None:
            out = _explicit(q, k, v, call)
        elif call.sinks is not None:
            out = _with_sinks(q, k, v, call.sinks, call, function)
        else:
            windowed = call.window is not None and end - start > call.window
            out = function(
                q,
                k,
                v,
                attn_mask=_band(end - start, call.window, q.device) if windowed else None,
                dropout_p=call.dropout,
                is_causal=call.causal and not windowed,
                scale=call.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _band(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where token i sees token j: j <= i, and within the window. (length, length) bool."""
    ahead = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)


def _explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Attention written out, for what SDPA does not take (softcap)."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scale = call.scale if call.scale is not None else q.shape[-1] ** -0.5
    scores = q @ k.transpose(-1, -2) * scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if call.causal:
        scores = scores.masked_fill(~_band(q.shape[2], call.window, q.device), float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return functional.dropout(weights, call.dropout, training=call.dropout > 0) @ v


def _with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, call: Call, function: Any
) -> torch.Tensor:
    """Attention with sinks (GPT-OSS): a key more, which every token sees, with a score but no value.

    A dimension more, in which every query is 1, carries the score; eight, for kernels want multiples.
    """
    heads, length, dim = q.shape[1:]
    groups = heads // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scale = call.scale if call.scale is not None else dim**-0.5
    q, k = functional.pad(q, (0, 8)), functional.pad(k, (0, 8, 1, 0))
    one = functional.one_hot(q.new_tensor(dim, dtype=torch.int64), dim + 8).to(q.dtype)
    q = q + one
    k = k + functional.pad((sinks / scale).to(k.dtype)[None, :, None, None] * one, (0, 0, 0, length))
    v = functional.pad(v, (0, 0, 1, 0))
    seen = _band(length, call.window, q.device)
    seen = functional.pad(seen if call.causal else torch.ones_like(seen), (1, 0), value=True)
    return function(q, k, v, attn_mask=seen, dropout_p=call.dropout, scale=scale)
