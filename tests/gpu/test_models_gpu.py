"""Models on a GPU, forward and backward: packed equals alone, with every kernel there is."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from packs import pack_of

from trainer_client import attention
from trainer_client.attention_kernels import KERNELS
from trainer_client.batch import PackedBatch, flatten

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = {
    "many": [*range(1, 40), 200, 317, 64],
    "one-token-each": [1] * 50,
    "one-segment": [777],
    "a-thousand": [1 + i % 23 for i in range(1000)],
    "long": [4096, 1, 2000],
}
SIZES = {
    "vocab_size": 97, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 8192,
}  # fmt: skip
IMPLEMENTATIONS = [*KERNELS, "flash_attention_2"]


def batch_of(case: str, seed: int = 0) -> PackedBatch:
    rng = np.random.default_rng(seed)
    lengths = CASES[case]
    pack = pack_of([rng.integers(0, 97, length).tolist() for length in lengths], range(len(lengths)))
    return flatten(
        [pack], padding=[False], epoch=0, step=0, num_items=max(1, pack.num_trained), step_done=True
    )


def model_of(kind: str, implementation: str, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    if implementation in KERNELS:
        backend = implementation
        if KERNELS[backend].function() is None:
            pytest.skip(f"{KERNELS[backend].needs} is not installed")
        implementation = attention.register(backend, name=f"padfree-{backend.removeprefix('flash')}")
    elif implementation == "flash_attention_2" and KERNELS["flash2"].function() is None:
        pytest.skip("flash-attn is not installed")
    torch.manual_seed(0)
    if kind == "mistral-window":
        config = MistralConfig(**SIZES, sliding_window=50, attn_implementation=implementation)
        return MistralForCausalLM(config).to("cuda", dtype)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=implementation)).to("cuda", dtype)


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


_alone: dict[tuple[str, str], tuple[float, torch.Tensor]] = {}


def alone(kind: str, case: str) -> tuple[float, torch.Tensor]:
    """Loss and gradient in float32 of each example by itself, through transformers' own attention."""
    if (kind, case) not in _alone:
        batch, model = batch_of(case), model_of(kind, "eager", torch.float32)
        # Weights as the half precision models have them.
        model.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
        total = 0.0
        for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            ids, labels = (
                torch.tensor(values[None, start:end].astype(np.int64), device="cuda")
                for values in (batch.input_ids, batch.labels)
            )
            loss = model(
                input_ids=ids, labels=labels, use_cache=False, num_items_in_batch=batch.num_items_in_batch
            ).loss
            loss.backward()
            total += loss.item()
        _alone[kind, case] = total, gradient(model)
    return _alone[kind, case]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["llama", "mistral-window"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_loss_and_gradient_packed_are_those_of_each_example_alone(
    implementation: str, kind: str, case: str
) -> None:
    batch = batch_of(case)
    model = model_of(kind, implementation, torch.bfloat16)
    kwargs = batch.for_transformers(device="cuda")
    loss = model(**kwargs, num_items_in_batch=batch.num_items_in_batch).loss
    loss.backward()
    if case == "one-token-each":  # nothing is trained
        assert loss.item() == 0
        return
    wanted_loss, wanted = alone(kind, case)
    assert loss.item() == pytest.approx(wanted_loss, rel=2e-3)
    assert distance(gradient(model), wanted) < 3e-2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_in_one_example_reaches_no_gradient_of_another(implementation: str) -> None:
    batch = batch_of("many")
    model = model_of("llama", implementation, torch.bfloat16)
    kwargs = batch.for_transformers(device="cuda")
    ids = kwargs.pop("input_ids")
    bounds = list(itertools.pairwise(batch.cu_seqlens.tolist()))
    start, end = bounds[len(bounds) // 2]
    kwargs["labels"] = kwargs["labels"].clone()
    kwargs["labels"][:, start:end] = -100  # the poisoned example trains nothing itself
    found = []
    for poisoned in (False, True):
        embedded = model.get_input_embeddings()(ids).detach()
        if poisoned:
            embedded[:, start:end] = float("nan")
        embedded.requires_grad_()
        model(inputs_embeds=embedded, **kwargs).loss.backward()
        found.append(embedded.grad.clone())
    clean, poisoned = found
    keep = torch.ones(batch.num_tokens, dtype=torch.bool)
    keep[start:end] = False
    assert torch.isfinite(poisoned[:, keep]).all()
    assert distance(poisoned[:, keep].double(), clean[:, keep].double()) < 1e-3


def test_packed_and_padded_give_the_same_loss_and_gradient() -> None:
    """The paper's claim for one step: mini-batch packing is padding without the padding."""
    batch = batch_of("many")
    packed, padded = (model_of("llama", name, torch.bfloat16) for name in ("flash2", "flash_attention_2"))
    one = packed(**batch.for_transformers(device="cuda"), num_items_in_batch=batch.num_items_in_batch).loss
    one.backward()
    bounds = list(itertools.pairwise(batch.cu_seqlens.tolist()))
    shape = (len(bounds), batch.max_seqlen)
    ids, labels, mask = np.zeros(shape, np.int64), np.full(shape, -100), np.zeros(shape, np.int64)
    for row, (start, end) in enumerate(bounds):
        ids[row, : end - start], mask[row, : end - start] = batch.input_ids[start:end], 1
        labels[row, : end - start] = batch.labels[start:end]
    tensors = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    two = padded(
        **{name: torch.tensor(value, device="cuda") for name, value in tensors.items()},
        use_cache=False,
        num_items_in_batch=batch.num_items_in_batch,
    ).loss
    two.backward()
    assert one.item() == pytest.approx(two.item(), rel=1e-3)
    assert distance(gradient(packed), gradient(padded)) < 2e-2
