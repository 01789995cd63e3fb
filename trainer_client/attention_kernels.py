"""The kernels behind trainer_client.attention: what each can do, how each is called, which one is taken."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch.nn import functional

from trainer_client.containment import contained
from trainer_client.per_segment import per_segment

log = logging.getLogger(__name__)


class AttentionRefused(ValueError):
    """The model asks for something that attention per segment does not do here."""


class Boundaries:
    """cu_seqlens (num_segments + 1,) int32 on the device, and what kernels need beside it."""

    def __init__(self, cu_seqlens: torch.Tensor, max_seqlen: int | None = None) -> None:
        self.cu_seqlens = cu_seqlens.to(torch.int32)
        self._max_seqlen = max_seqlen
        self._host: list[int] | None = None
        self._segment_of: torch.Tensor | None = None
        self._cut: dict[int, Boundaries] = {}

    @property
    def host(self) -> list[int]:
        """On the host; one wait for the device, once a forward pass."""
        if self._host is None:
            self._host = self.cu_seqlens.tolist()
        return self._host

    @property
    def max_seqlen(self) -> int:
        if self._max_seqlen is None:
            host = self.host
            self._max_seqlen = max(end - start for start, end in pairwise(host))
        return self._max_seqlen

    def segment_of(self, num_tokens: int) -> torch.Tensor:
        """(num_tokens,) int64: each token's segment; the last one's for tokens beyond the end."""
        if self._segment_of is None:
            tokens = torch.arange(num_tokens, device=self.cu_seqlens.device, dtype=torch.int32)
            # Right of equal ends: a token behind empty segments (static shapes) is of the one that holds it.
            found = torch.searchsorted(self.cu_seqlens[1:], tokens, right=True)
            self._segment_of = found.clamp(max=self.num_segments - 1)
        return self._segment_of

    def cut(self, size: int) -> Boundaries:
        """Those of segments that are cut every `size` tokens, each from its own start."""
        if size not in self._cut:
            pieces = [list(range(start, end, size)) for start, end in pairwise(self.host)]
            ends = torch.tensor([*chain.from_iterable(pieces), self.host[-1]], dtype=torch.int32)
            self._cut[size] = Boundaries(ends.to(self.cu_seqlens.device), min(size, self.max_seqlen))
        return self._cut[size]

    @property
    def num_segments(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    def reach(self, num_tokens: int) -> int:
        """The longest segment where that is known without a wait, else `num_tokens`."""
        return num_tokens if self._max_seqlen is None else self._max_seqlen


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One attention layer's work. q (tokens, heads, dim), k and v (tokens, kv_heads, dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bounds: Boundaries
    scale: float | None
    causal: bool
    window: int | None  # tokens that a token sees, itself included
    softcap: float | None
    dropout: float
    sinks: torch.Tensor | None = None  # (heads,): each head's score of a key that has no value


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One backend: where its function is found, what it can do, how it is called."""

    needs: str
    module: str
    attribute: str
    run: Callable[[Call, Any], torch.Tensor]
    softcap: bool = True
    dropout: bool = True
    sinks: bool = False
    cuda_half_only: bool = True
    max_dim: int = 256

    def function(self) -> Any:
        """The function itself, or None where it is not installed. The package alone proves nothing:
        flash_attn is also a namespace package of FlashAttention 4."""
        try:
            return getattr(importlib.import_module(self.module), self.attribute, None)
        except ImportError:
            return None

    def lacks(self, call: Call) -> str | None:
        """What of the call this kernel cannot do, or None."""
        if self.cuda_half_only and call.q.device.type != "cuda":
            return f"it needs CUDA, tensors are on {call.q.device.type}"
        if self.cuda_half_only and call.q.dtype not in (torch.float16, torch.bfloat16):
            return f"it needs float16 or bfloat16, found {call.q.dtype}"
        if (dim := max(call.q.shape[-1], call.v.shape[-1])) > self.max_dim:
            return f"it takes heads of up to {self.max_dim}, found {dim}"
        if call.softcap is not None and not self.softcap:
            return "it has no softcap"
        if call.dropout and not self.dropout:
            return "it has no dropout"
        if call.sinks is not None and not self.sinks:
            return "it has no sinks"
        if call.sinks is not None and call.softcap is not None:
            return "it has no sinks with softcap"
        return None


def choose(call: Call, backend: str) -> Callable[[Call], torch.Tensor]:
    names = list(KERNELS) if backend == "auto" else [backend]
    why = []
    for name in names:
        kernel = KERNELS[name]
        function = find(name)
        lacks = kernel.lacks(call)
        if lacks is None and function is None:
            lacks = f"{kernel.needs} is not installed"
        if lacks is None:
            lacks = _ignores(name, function, call)
        if lacks is None:
            _log_once(name, call)
            return lambda call: kernel.run(call, function)
        why.append(f"{name}: {lacks}")
    raise AttentionRefused(f"no attention kernel can do this: {'; '.join(why)}")


_functions: dict[str, Any] = {}
_parameters: dict[Any, frozenset[str]] = {}  # by function: torch.compile cannot look into signatures
_logged: set[tuple[str, str, torch.dtype]] = set()


def find(name: str) -> Any:
    """The kernel's function, looked for once; None where it is not installed."""
    if name not in _functions:
        _functions[name] = KERNELS[name].function()
    return _functions[name]


def prepare(name: str) -> None:
    """Import the kernel and read its signature, neither of which compiled code can do."""
    if (function := find(name)) is not None and name != "sdpa":
        _accepted(function)


def _accepted(function: Any) -> frozenset[str]:
    """The names of the parameters that a kernel's function takes."""
    if function not in _parameters:
        _parameters[function] = frozenset(inspect.signature(function).parameters)
    return _parameters[function]


_ignored: dict[tuple[str, str, torch.device], bool] = {}


def _ignores(name: str, function: Any, call: Call) -> str | None:
    """What of the call the installed build leaves out without a word, or None.

    flash-attn can be built without softcap, without dropout and for fewer sizes of heads; builds were seen
    that take the argument, or such heads, and give wrong numbers. So each is tried once, on a few tokens.
    """
    if name == "sdpa":
        return None
    dim = max(call.q.shape[-1], call.v.shape[-1])
    tried: dict[str, dict[str, Any]] = {f"heads of {dim}": {}} if dim > _DIM_OF_ALL_BUILDS else {}
    tried |= {feature: {feature: value} for feature, value in _TRIED_WITH.items() if getattr(call, feature)}
    for what, values in tried.items():
        key = (name, what, call.q.device)
        if key not in _ignored:
            _ignored[key] = not _honours(KERNELS[name], function, call, 64 if values else dim, values)
        if _ignored[key]:
            return f"the installed build does not do {what}"
    return None


_DIM_OF_ALL_BUILDS = 128
# Scores are wide, so that a cap of 2 and a window of 4 change the result a lot.
_TRIED_WITH: dict[str, Any] = {"window": 4, "softcap": 2.0, "dropout": 0.5}


def _probe(call: Call, dim: int) -> Call:
    """Two short segments with heads of `dim`, on the device and in the dtype of the call."""
    generator = torch.Generator().manual_seed(0)
    device, num_tokens = call.q.device, 48
    q, k, v = (torch.randn(num_tokens, 2, dim, generator=generator) for _ in range(3))
    cu_seqlens = torch.tensor([0, 16, num_tokens], dtype=torch.int32, device=device)
    return Call(
        q=(4 * q).to(device, call.q.dtype),
        k=(4 * k).to(device, call.q.dtype),
        v=(4 * v).to(device, call.q.dtype),
        bounds=Boundaries(cu_seqlens, num_tokens - 16),
        scale=None,
        causal=True,
        window=None,
        softcap=None,
        dropout=0.0,
    )


@torch.compiler.disable
def _honours(kernel: Kernel, function: Any, like: Call, dim: int, values: dict[str, Any]) -> bool:
    """Whether its numbers with heads of `dim` and these values are those of attention written out."""
    plain, device = _probe(like, dim), like.q.device
    call = replace(plain, **values)
    try:
        devices = [device] if device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):  # the run's randomness stays as it is
            found = kernel.run(call, function)
            if call.dropout:  # random: it must only do something
                return not torch.equal(found, kernel.run(plain, function))
            exact = replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float())
            wanted = per_segment(exact, functional.scaled_dot_product_attention)
    except (RuntimeError, TypeError, AttentionRefused):
        return False
    return torch.allclose(found.float(), wanted, atol=0.1, rtol=0.05)


def _log_once(name: str, call: Call) -> None:
    if torch.compiler.is_compiling():
        return
    key = (name, call.q.device.type, call.q.dtype)
    if key not in _logged:
        _logged.add(key)
        log.info("padfree attention runs on %s (%s, %s)", name, call.q.device.type, call.q.dtype)


def _window(call: Call, none: int | None = -1) -> tuple[int | None, int | None]:
    """(left, right) as the varlen kernels count them: without the token itself."""
    if call.window is None:
        return (none, none)
    return (call.window - 1, 0)


def _scale(call: Call) -> float:
    return call.q.shape[-1] ** -0.5 if call.scale is None else call.scale


def _flash(call: Call, function: Any) -> torch.Tensor:
    """flash_attn_varlen_func of FlashAttention 2, 3 and 4."""
    accepted = _accepted(function)
    wanted: dict[str, Any] = {
        "cu_seqlens_q": call.bounds.cu_seqlens,
        "cu_seqlens_k": call.bounds.cu_seqlens,
        "softmax_scale": _scale(call),
        "causal": call.causal,
    }
    # Newest betas of FlashAttention 4 find the longest segment themselves.
    for name in ("max_seqlen_q", "max_seqlen_k"):
        if name in accepted:
            wanted[name] = call.bounds.max_seqlen
    if call.window is not None:
        wanted["window_size"] = _window(call)
    if call.softcap is not None:
        wanted["softcap"] = call.softcap
    if call.dropout:
        wanted["dropout_p"] = call.dropout
    if missing := set(wanted) - set(accepted):
        raise AttentionRefused(
            f"the installed {function.__module__} does not take {', '.join(sorted(missing))}"
        )
    out = function(*_of_one_size(call), **wanted)
    out = out[0] if isinstance(out, tuple) else out
    return out[..., : call.v.shape[-1]]


def _of_one_size(call: Call) -> tuple[torch.Tensor, ...]:
    """q, k and v with heads of one size, a multiple of 8, as kernels want them: widened with zeros, which
    change no score. What comes out is to be cut to the size of v."""
    widest = -(-max(call.q.shape[-1], call.v.shape[-1]) // 8) * 8
    return tuple(
        functional.pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x
        for x in (call.q, call.k, call.v)
    )


@torch.compiler.disable  # its interface compiles kernels itself; traced, graphs were seen to grow without end
def _flash4(call: Call, function: Any) -> torch.Tensor:
    # Seen with 4.0.0b36 on an H200: a NaN in one segment reached the next.
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _flash(replace(call, q=q, k=k, v=v), function)

    bounds = call.bounds
    segment_of = bounds.segment_of(call.q.shape[0])
    return contained(run, call.q, call.k, call.v, segment_of, bounds.num_segments)


def _torch_varlen(call: Call, function: Any) -> torch.Tensor:
    q, k, v = _of_one_size(call)
    extra: dict[str, Any] = {}
    if (groups := q.shape[1] // k.shape[1]) > 1:
        if "enable_gqa" in _accepted(function):
            extra["enable_gqa"] = True
        else:  # torch 2.11
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    left = -1 if call.window is None else call.window - 1
    out = function(
        q,
        k,
        v,
        call.bounds.cu_seqlens,
        call.bounds.cu_seqlens,
        call.bounds.max_seqlen,
        call.bounds.max_seqlen,
        scale=_scale(call),
        window_size=(left, 0 if call.causal else -1),
        **extra,
    )
    return out[..., : call.v.shape[-1]]


KERNELS = {
    "flash3": Kernel(
        needs="flash_attn_interface (FlashAttention 3)",
        module="flash_attn_interface",
        attribute="flash_attn_varlen_func",
        run=_flash,
        dropout=False,
    ),
    "flash2": Kernel(
        needs="flash_attn (FlashAttention 2)",
        module="flash_attn",
        attribute="flash_attn_varlen_func",
        run=_flash,
    ),
    "torch": Kernel(
        needs="torch.nn.attention.varlen",
        module="torch.nn.attention.varlen",
        attribute="varlen_attn",
        run=_torch_varlen,
        softcap=False,
        dropout=False,
    ),
    "flash4": Kernel(
        needs="flash_attn.cute (FlashAttention 4)",
        module="flash_attn.cute",
        attribute="flash_attn_varlen_func",
        run=_flash4,
        dropout=False,
    ),
    "sdpa": Kernel(
        needs="torch",
        module="torch.nn.functional",
        attribute="scaled_dot_product_attention",
        run=per_segment,
        sinks=True,
        cuda_half_only=False,
        max_dim=1 << 30,
    ),
}
