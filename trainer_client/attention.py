"""attn_implementation="padfree" for transformers: attention that never crosses a segment's boundary.

    from trainer_client import attention
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register())
    loss = model(**batch.for_transformers()).loss

Boundaries come from cu_seq_lens_q/k, as a batch gives them, else from position_ids: a segment begins
wherever the position does not follow on the one before (and at the start of each row). They hold
whether or not the model builds a cache. Kernels, best first; the first that is installed and can do what
the model asks for is taken, and named once in the log of this module:

    name     needs                                        window  softcap  dropout  sinks
    flash3   flash_attn_interface (FlashAttention 3)      yes     yes      no       no
    flash2   flash_attn                                   yes     yes      yes      no
    torch    torch.nn.attention.varlen                    yes     no       no       no
    flash4   flash_attn.cute (FlashAttention 4)           yes     yes      no       no
    sdpa     nothing: a loop of exact causal attention    yes     yes      yes      yes
             per segment, on any device and dtype

flash4 was the fastest on an H200, yet comes late: it is a beta. Ask for it by name: register("flash4"). Alone
it would let a NaN of one example reach its neighbours; trainer_client/containment.py keeps it where it is.

All but sdpa need CUDA and half precision. What no kernel can do (an attention mask with zeros or of the
model's own, position biases, returned attention weights, a KV cache with a past) is refused by name, and so
are models that would not use this attention at all. Builds may leave features out: window, softcap and
dropout are tried once on a few tokens before a kernel is trusted with them.

Not every model keeps examples apart by this alone, or at all: check(model) finds out.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from trainer_client.needs import needs_torch

with needs_torch("trainer_client.attention"):
    import torch

from trainer_client.attention_kernels import KERNELS, AttentionRefused, Boundaries, Call, choose, prepare
from trainer_client.model_check import ExamplesMeet, check

__all__ = ["AttentionRefused", "ExamplesMeet", "attend", "check", "register"]

NAME = "padfree"
_REFUSED = ("position_bias", "head_mask")


# ------------------------------------------------------------------ register


def register(backend: str = "auto", *, name: str = NAME) -> str:
    """Make `attn_implementation=name` known to transformers; returns `name`.

    backend: "auto", or one of flash3, flash2, torch, flash4, sdpa, to take that one and no other (an
    error where it is not installed or cannot do what the model asks for). May be called again.
    name: without "flash", by which transformers knows its own implementations.
    """
    if "flash" in name:
        raise ValueError(
            f'name: one without "flash" is required, found {name!r}; transformers takes such a name for one '
            "of its own implementations and looks for a kernel of that name"
        )
    if backend != "auto" and backend not in KERNELS:
        raise ValueError(f"backend: one of auto, {', '.join(KERNELS)} is required, found {backend!r}")
    if backend != "auto" and KERNELS[backend].function() is None:
        raise ImportError(f"backend {backend!r} is not installed: {KERNELS[backend].needs} is missing")
    for kernel in KERNELS:
        prepare(kernel)
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, _forward_with(backend))
    AttentionMaskInterface.register(name, _no_mask)
    return name


def _forward_with(backend: str) -> Callable[..., tuple[torch.Tensor, None]]:
    def padfree_attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        return attend(module, query, key, value, attention_mask, backend=backend, **kwargs), None

    return padfree_attention


def _no_mask(
    *_: Any,
    attention_mask: torch.Tensor | None = None,
    config: object = None,
    use_vmap: bool = False,
    **__: Any,
) -> None:
    """transformers' mask interface: boundaries need no mask, and padding in rows is refused."""
    if use_vmap:  # how transformers says that a function of the model's own goes into its mask
        raise AttentionRefused(
            "the model asks for a mask of its own, beside causal ones and windows, which attention per "
            "segment does not make; use attn_implementation='sdpa' or 'eager', if "
            "trainer_client.attention.check(model) then finds that its examples do not meet"
        )
    kind: Any = type(config)
    if not torch.compiler.is_compiling() and not _asks_for_attention(kind):
        raise AttentionRefused(
            f"models of {kind.__name__} make attention themselves and would not use this one; use "
            'another model, or pack with strategy "padded" and train with packs_per_step=1 and '
            "attn_implementation='eager'"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise AttentionRefused(
            "attention_mask with zeros (padding) was given; packed batches have none: drop attention_mask, "
            "or use another attn_implementation for padded batches"
        )


@functools.cache
def _asks_for_attention(config: type) -> bool:
    """Whether models of such a config take attention from transformers' interface; True where unknown."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    model = MODEL_MAPPING.get(config, None)
    flags = ("_supports_attention_backend", "_supports_sdpa", "_supports_flash_attn")
    return model is None or any(getattr(model, flag, True) for flag in flags)


# ------------------------------------------------------------------ attend


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    backend: str = "auto",
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention within segments, as transformers calls it.

    query (batch, heads, length, dim), key and value (batch, kv_heads, length, dim) to (batch, length,
    heads, dim of value). Raises AttentionRefused.
    """
    _refuse(query, key, attention_mask, kwargs)
    batch, heads, length, _ = query.shape
    bounds = _boundaries(batch, length, query.device, kwargs)
    bounds = _chunked(module, bounds, batch * length)
    q, k, v = (x.transpose(1, 2).reshape(batch * length, x.shape[1], x.shape[3]) for x in (query, key, value))
    q, k, v = _autocast(q, k, v)
    call = Call(
        q=q,
        k=k,
        v=v,
        bounds=bounds,
        scale=scaling,
        causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        window=sliding_window
        if sliding_window is not None and sliding_window < bounds.reach(length * batch)
        else None,
        softcap=softcap or None,
        dropout=dropout,
        sinks=s_aux,
    )
    if call.window is not None and not call.causal:
        raise AttentionRefused("sliding_window without causal attention")
    out = choose(call, backend)(call)
    return out.reshape(batch, length, heads, value.shape[-1])


def _refuse(
    query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> None:
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise AttentionRefused(
                f"{name} is not supported; use attn_implementation='eager' for this model, if "
                "trainer_client.attention.check(model) then finds that its examples do not meet"
            )
    if kwargs.get("output_attentions"):
        raise AttentionRefused("output_attentions: no kernel gives weights; use attn_implementation='eager'")
    if attention_mask is not None:
        raise AttentionRefused(
            f"an attention mask of shape {tuple(attention_mask.shape)} was given; boundaries come from "
            "cu_seq_lens_q/k or position_ids alone: drop attention_mask"
        )
    if query.shape[2] != key.shape[2]:
        raise AttentionRefused(
            f"{query.shape[2]} queries for {key.shape[2]} keys, a KV cache with a past: padfree attention "
            "is for training; generate with model.set_attn_implementation('sdpa')"
        )


def _chunked(module: torch.nn.Module, bounds: Boundaries, num_tokens: int) -> Boundaries:
    """Of a layer of Llama 4, whose tokens see each other in chunks: its mask says so, and no argument.

    Its other layers scale by the place in the row, where it should be the place in the example.
    """
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if config is None or "chunked_attention" not in kinds:
        return bounds
    if kinds[module.layer_idx] == "chunked_attention":
        return bounds.cut(config.attention_chunk_size)
    tuned = getattr(module, "attn_temperature_tuning", False)
    if tuned and num_tokens >= config.floor_scale and bounds.num_segments > 1:
        raise AttentionRefused(
            "attn_temperature_tuning counts positions over the whole batch, not in each example: less than "
            f"floor_scale = {config.floor_scale} tokens are required, found {num_tokens}; pack with a "
            "smaller max_tokens, or train with fewer packs_per_step"
        )
    return bounds


_last = threading.local()  # boundaries of the latest forward pass: every layer asks for the same


def _boundaries(batch: int, length: int, device: torch.device, kwargs: dict[str, Any]) -> Boundaries:
    given = kwargs.get("cu_seq_lens_q")
    source = given if given is not None else kwargs.get("position_ids")
    if source is None:
        return Boundaries(_row_starts(batch, length, device), length)
    # A graph keeps what all layers share by itself; tensors of inference mode do not tell whether they were
    # written to since.
    if torch.compiler.is_compiling() or source.is_inference():
        return _made_boundaries(batch, length, given, source, kwargs)
    kept = getattr(_last, "kept", None)
    key = (source._version, batch, length)
    if kept is not None and kept[0]() is source and kept[1] == key:
        return kept[2]
    bounds = _made_boundaries(batch, length, given, source, kwargs)
    _last.kept = (weakref.ref(source), key, bounds)
    return bounds


def _made_boundaries(
    batch: int, length: int, given: torch.Tensor | None, source: torch.Tensor, kwargs: dict[str, Any]
) -> Boundaries:
    if given is not None:
        return _given_boundaries(given, kwargs, batch * length)
    return Boundaries(_from_positions(source, batch, length))


def _given_boundaries(cu_seqlens: torch.Tensor, kwargs: dict[str, Any], num_tokens: int) -> Boundaries:
    keys = kwargs.get("cu_seq_lens_k")
    if keys is not None and keys is not cu_seqlens and keys.shape != cu_seqlens.shape:
        raise AttentionRefused("cu_seq_lens_q and cu_seq_lens_k differ: cross attention is not supported")
    longest = kwargs.get("max_length_q")
    bounds = Boundaries(cu_seqlens, int(longest) if longest is not None else None)
    on_host = cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and bounds.host[-1] != num_tokens:
        raise AttentionRefused(
            f"cu_seq_lens_q ends at {bounds.host[-1]}, but there are {num_tokens} tokens: "
            "it must span the whole batch"
        )
    return bounds


def _row_starts(batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


def _from_positions(position_ids: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """cu_seqlens of rows of positions, (batch or 1, length): a segment begins where a step is not 1."""
    positions = position_ids.expand(batch, length)
    begins = torch.ones(batch, length, dtype=torch.bool, device=positions.device)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    starts = begins.flatten().nonzero().flatten().to(torch.int32)
    return torch.cat([starts, starts.new_tensor([batch * length])])


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In float32 under autocast (norms that cast up): back to autocast's dtype, which kernels need."""
    kind = tensors[0].device.type
    if tensors[0].dtype == torch.float32 and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return tuple(x.to(dtype) for x in tensors)
    if len({x.dtype for x in tensors}) > 1:
        return tuple(x.to(tensors[2].dtype) for x in tensors)
    return tensors
