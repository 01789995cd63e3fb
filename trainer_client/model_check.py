"""Whether a model keeps the examples of a packed batch apart: measured on the model itself.

Attention per segment is not all that it takes. State space layers, linear attention and convolutions carry
what they saw over a boundary; some models make masks without looking at positions, ignore the positions that
they are given, or never ask for the attention that was registered. Nothing of that shows in a loss. So a
model is given a batch of a few short examples:

    gradient  of one example's logits by the embeddings of all others: zero to the bit, on any device and in
              any dtype, as long as nothing gets across; a mask or a boundary gives exact zeros
    values    each example's logits beside those of the example alone: positions that do not restart show here
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from packer.shard import Pack
from trainer_client.batch import PackedBatch, flatten
from trainer_client.needs import needs_torch

with needs_torch("trainer_client.attention.check"):
    import torch

_LENGTHS = (5, 3, 6, 4, 7, 2, 8)  # of the examples; the first and the last are long enough to carry something
# Largest distance to the example alone, over its size, that rounding may make: another order of additions.
_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3}
_ROUNDING_OF_HALVES = 0.1
_LOUDNESS = 0.02  # standard deviation, as weights are begun with

_ALONE = 'pack with strategy "padded" and train with packs_per_step=1: then a batch is one example'


class ExamplesMeet(ValueError):
    """A model lets the examples of a packed batch see each other, or gives them other positions."""


def check(model: torch.nn.Module, **options: Any) -> None:
    """Raise ExamplesMeet unless `model` trains each example of a packed batch as if it were alone.

    Call it once, on the device and in the dtype of the training (under autocast where that is used), before
    the model is wrapped for several ranks. It costs a few passes over 35 tokens, not compiled; weights,
    buffers, gradients, modes and random numbers are left as they were.
    options: what batch.for_transformers is given in the training, as seq_idx=True.
    """
    rng = np.random.default_rng(0)
    examples = [rng.choice(_tokens(model), length).astype(np.int32) for length in _LENGTHS]
    device = next(model.parameters()).device
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    # Compiled for these few tokens, a model would have used up the shapes it may be compiled for.
    eager = torch.compiler.set_stance("force_eager")
    with eager, torch.random.fork_rng(devices=list(devices)), _as_in_training(model), _nothing_silent(model):
        inputs = _inputs(examples, device, options)
        ends = np.cumsum(_LENGTHS).tolist()
        for own in (slice(ends[-2], ends[-1]), slice(0, ends[0])):
            seen = _seen(model, inputs, own)
            seen[own] = False
            if seen.any():
                raise ExamplesMeet(_meeting(model, inputs, own, int(seen.sum())))
        _compare_with_alone(model, examples, inputs, options)


def _tokens(model: torch.nn.Module) -> np.ndarray:
    """The ids to draw from: all but padding's, which some models leave out as they count positions."""
    if not hasattr(model, "get_input_embeddings"):
        raise ValueError(
            f"a model of transformers (or peft) is required, before it is wrapped for several ranks, found "
            f"{type(model).__name__}"
        )
    known = np.arange(model.get_input_embeddings().weight.shape[0])
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    return known if padding is None else known[known != padding]


def _inputs(examples: list[np.ndarray], device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the model, for the examples as one batch."""
    inputs = _batch(examples).for_transformers(device=device, **options)
    del inputs["labels"]
    return inputs


def _batch(examples: list[np.ndarray]) -> PackedBatch:
    lengths = [len(example) for example in examples]
    pack = Pack(
        input_ids=np.concatenate(examples),
        loss_mask=np.zeros(sum(lengths), np.bool_),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        example_ids=np.arange(len(lengths)),
    )
    return flatten(
        [pack], padding=[False], epoch=0, step=0, num_items=1, step_done=True, max_tokens=sum(_LENGTHS)
    )


@contextlib.contextmanager
def _as_in_training(model: torch.nn.Module) -> Iterator[None]:
    """Training mode, in which some layers take other kernels; without checkpointing, whose older form does
    not give the gradient of an activation."""
    modes = {module: module.training for module in model.modules()}
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}  # training mode counts in some
    checkpointed = [module for module in modes if getattr(module, "gradient_checkpointing", False)]
    for module in checkpointed:
        module.gradient_checkpointing = False
    model.train()
    try:
        yield
    finally:
        model.train(modes[model])  # not the flags alone: layers that merge weights for eval() take them apart
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)
        for module, mode in modes.items():  # of those within it too
            module.training = mode
        for module in checkpointed:
            module.gradient_checkpointing = True
        with torch.no_grad():
            for buffer, before in buffers.items():
                buffer.copy_(before)


@contextlib.contextmanager
def _nothing_silent(model: torch.nn.Module) -> Iterator[None]:
    """Other values for what is trained and all zero, as projections and gates are that begin so: nothing
    comes through them yet, but will. What is frozen stays as it is, and may be of a kind that takes none."""
    # The first value tells of most that they are not, and a large model has many others.
    trained = (one for one in model.parameters() if one.requires_grad)
    silent = [one for one in trained if not one.reshape(-1)[:1].any() and not one.any()]
    try:
        with torch.no_grad():
            for one in silent:
                one.copy_(torch.randn(one.shape, device=one.device) * _LOUDNESS)
        yield
    finally:
        with torch.no_grad():
            for one in silent:
                one.zero_()


def _logits(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """(num_tokens, size of the vocabulary), or hidden states of a model without a head. Raises ValueError."""
    out = model(**inputs)
    found = out.logits if getattr(out, "logits", None) is not None else out[0]
    if found.dim() != 3 or found.shape[1] < inputs["input_ids"].shape[1]:
        raise ValueError(
            f"a model with an output for every token is required, found {type(model).__name__} with outputs "
            f"of shape {tuple(found.shape)} for {inputs['input_ids'].shape[1]} tokens"
        )
    if found.isnan().any():
        raise ValueError(
            "a model whose outputs are numbers is required, found NaN among those of "
            f"{type(model).__name__}: its weights are damaged, or were never set"
        )
    return found[0]


# ------------------------------------------------------------------ who sees whom


def _seen(model: torch.nn.Module, inputs: dict[str, Any], own: slice) -> torch.Tensor:
    """Which tokens' embeddings the logits of the tokens `own` depend on, (num_tokens,) bool."""
    leaves: list[torch.Tensor] = []

    def embedded(module: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        leaves.append(out.detach().requires_grad_())
        return leaves[-1].clone()  # some models write into it

    handle = model.get_input_embeddings().register_forward_hook(embedded)
    try:
        with torch.enable_grad():
            logits = _logits(model, inputs)[own]
            if not leaves:
                raise ValueError(
                    "a model that calls its get_input_embeddings() is required, found "
                    f"{type(model).__name__}, which does not: who sees whom cannot be told of it"
                )
            weights = torch.randn(logits.shape, device=logits.device)
            gradients = torch.autograd.grad((logits.float() * weights).sum(), leaves, allow_unused=True)
    finally:
        handle.remove()
    num_tokens = inputs["input_ids"].shape[1]
    seen = torch.zeros(num_tokens, dtype=torch.bool, device=logits.device)
    for gradient in gradients:
        if gradient is not None:
            seen |= (gradient != 0).reshape(num_tokens, -1).any(-1)
    return seen


def _meeting(model: torch.nn.Module, inputs: dict[str, Any], own: slice, num_seen: int) -> str:
    name = _first_to_tell(model, inputs, own)
    where = f", first in {name}" if name else ""
    return (
        f"{_called(model)} lets the examples of a packed batch see each other{where}: one of "
        f"{own.stop - own.start} tokens depends on {num_seen} of others, where 0 are required. If that "
        "is attention, give the model attn_implementation=trainer_client.attention.register(); if it is a "
        "convolution, linear attention or a state space, use for_transformers(seq_idx=True), install the "
        f"kernels that transformers asks for then, and check with seq_idx=True too; else {_ALONE}"
    )


def _called(model: torch.nn.Module) -> str:
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return f"{type(model).__name__} with attn_implementation={implementation!r}"


def _first_to_tell(model: torch.nn.Module, inputs: dict[str, Any], own: slice) -> str | None:
    """The innermost module that makes the tokens `own` depend on others: where only others change, what it
    is given for `own` stays, what it gives does not."""
    changed = dict(inputs, input_ids=inputs["input_ids"].flip(1))
    changed["input_ids"][:, own] = inputs["input_ids"][:, own]
    before, after = (_passed(model, given, own) for given in (inputs, changed))
    for name, (given, gave) in before.items():
        if name in after and not _differ(given, after[name][0]) and _differ(gave, after[name][1]):
            return f"{name} ({type(model.get_submodule(name)).__name__})"
    return None


def _differ(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape != two.shape or bool((one - two).norm() > 1e-3 * one.norm())


@torch.no_grad()
def _passed(
    model: torch.nn.Module, inputs: dict[str, Any], own: slice
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What each module was given for the tokens `own` and what it gave, in the order in which they ended."""
    num_tokens = inputs["input_ids"].shape[1]
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def of_own(values: Any) -> torch.Tensor | None:
        """The first tensor with a row for each token."""
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                rows = value[0] if value.dim() == 3 and value.shape[0] == 1 else value
                if rows.dim() == 2 and rows.shape[0] == num_tokens:
                    return rows[own].float()
        return None

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        given = of_own([*args, *kwargs.values()])
        gave = of_own(out if isinstance(out, tuple) else [out])
        if name and given is not None and gave is not None:
            found.setdefault(name, (given, gave))

    handles = [
        module.register_forward_hook(
            lambda _, args, kwargs, out, name=name: note(name, args, kwargs, out), with_kwargs=True
        )
        for name, module in model.named_modules()
    ]
    try:
        model.eval()  # dropout would make a difference too
        model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


# ------------------------------------------------------------------ alone


@torch.no_grad()
def _compare_with_alone(
    model: torch.nn.Module, examples: list[np.ndarray], inputs: dict[str, Any], options: dict[str, Any]
) -> None:
    model.eval()  # dropout would make the difference
    packed = _said(_logits(model, inputs))[: sum(_LENGTHS)]  # not what a static shape adds
    device = inputs["input_ids"].device
    each = [_said(_logits(model, _inputs([one], device, options)))[: len(one)] for one in examples]
    alone = torch.cat(each)
    distances = (packed - alone).norm(dim=-1) / alone.norm(dim=-1)
    # The one in the middle: where a router's scores are nearly equal, rounding may send a token elsewhere.
    # Of the first tokens and the second too, for ids looked up over a boundary change no others.
    places = torch.cat([torch.arange(length) for length in _LENGTHS]).to(device)
    groups = [distances, distances[places == 0], distances[places == 1]]
    distance = max(float(group.median()) for group in groups)
    allowed = _rounding(model)
    if not distance <= allowed:
        raise ExamplesMeet(
            f"{_called(model)} gives the examples of a packed batch other outputs than each alone, though "
            f"none sees another (the median token's differ by {distance:.2g} of their size, rounding may by "
            f"{allowed:g}): it does not take the positions that it is given, which restart in every example. "
            f"Use another model, or {_ALONE}"
        )


def _said(logits: torch.Tensor) -> torch.Tensor:
    """In float32; zero for words that a model never says, which would be larger than all others."""
    return logits.masked_fill(logits.abs() >= torch.finfo(logits.dtype).max, 0).float()


def _rounding(model: torch.nn.Module) -> float:
    """What rounding may do to an output, over its size."""
    device = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device):
        return _ROUNDING.get(torch.get_autocast_dtype(device), _ROUNDING_OF_HALVES)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    matmul = torch.backends.cuda.matmul if device == "cuda" else torch.backends.mkldnn.matmul
    if dtype == torch.float32 and matmul.fp32_precision in ("tf32", "bf16"):
        return _ROUNDING_OF_HALVES  # on an H200 a Llama of 24 layers was 0.002 from itself with TF32
    return _ROUNDING.get(dtype, _ROUNDING_OF_HALVES)
