"""attention.check on a GPU, in half precision: with every kernel, and with transformers' own attention."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from trainer_client import attention
from trainer_client.attention import ExamplesMeet
from trainer_client.attention_kernels import KERNELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
# Without dropout of attention, which not every build of a kernel does.
OF_BERT = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "head_dim")}
OF_BERT["attention_probs_dropout_prob"] = 0.0
OF_GPT2 = {"vocab_size": 512, "n_embd": 256, "n_layer": 4, "n_head": 4, "attn_pdrop": 0.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
DECODERS = {
    "llama": ("LlamaForCausalLM", SIZES),
    "mistral-window": ("MistralForCausalLM", {**SIZES, "sliding_window": 3}),
    "qwen3": ("Qwen3ForCausalLM", SIZES),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**SIZES, **EXPERTS}),
    "gpt2": ("GPT2LMHeadModel", OF_GPT2),
    "smollm3": ("SmolLM3ForCausalLM", {**SIZES, "pad_token_id": 0}),
    "gemma3": ("Gemma3ForCausalLM", {**SIZES, "sliding_window": 3}),
    "bert": ("BertForMaskedLM", OF_BERT),
}
SINKS = ("GptOssForCausalLM", {**SIZES, "num_local_experts": 4})
# A state, a convolution. With the kernels that they name, seq_idx=True keeps examples apart in them.
CARRYING = {
    "bamba": (
        "BambaForCausalLM",
        {
            **SIZES, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64,
            "mamba_chunk_size": 64,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", {**SIZES, "layer_types": ["conv", "full_attention"] * 2}),
}  # fmt: skip
IMPLEMENTATIONS = ["auto", *KERNELS, "flash_attention_2", "sdpa-of-transformers"]


def model_of(name: str, sizes: dict[str, Any], implementation: str, dtype: torch.dtype) -> Any:
    import transformers

    if implementation in KERNELS and KERNELS[implementation].function() is None:
        pytest.skip(f"{KERNELS[implementation].needs} is not installed")
    if implementation == "flash_attention_2" and KERNELS["flash2"].function() is None:
        pytest.skip("flash-attn is not installed")
    if implementation == "auto" or implementation in KERNELS:
        implementation = attention.register(
            implementation, name=f"padfree-{implementation.removeprefix('flash')}"
        )
    implementation = implementation.removesuffix("-of-transformers")
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    config = cls.config_class(**sizes)
    return cls._from_config(config, attn_implementation=implementation).to("cuda", dtype)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_examples_are_apart_in_half_precision(implementation: str, name: str) -> None:
    if name == "bert" and implementation == "flash_attention_2":
        pytest.skip("not a decoder: transformers' flash attention is not claimed for it")
    model = model_of(*DECODERS[name], implementation, torch.bfloat16)
    if name == "bert" and implementation == "sdpa-of-transformers":
        with pytest.raises(ExamplesMeet):
            attention.check(model)
    else:
        attention.check(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks_keep_examples_apart(dtype: torch.dtype) -> None:
    attention.check(model_of(*SINKS, "auto", dtype))


def test_a_model_with_sinks_is_as_each_example_alone() -> None:
    """bfloat16 packed, beside transformers' eager attention in float32, one example at a time."""
    packed, alone = model_of(*SINKS, "auto", torch.bfloat16), model_of(*SINKS, "eager", torch.float32)
    with torch.no_grad():
        for weight in alone.parameters():
            weight.normal_(0, 0.05)
    packed.load_state_dict(alone.state_dict())
    alone.load_state_dict({name: value.float() for name, value in packed.state_dict().items()})
    lengths = [5, 1, 200, 317]
    ids = torch.randint(0, 512, (1, sum(lengths)), device="cuda")
    positions = torch.cat([torch.arange(length, device="cuda") for length in lengths])[None]
    together = packed(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()
    start = 0
    for length in lengths:
        own = alone(input_ids=ids[:, start : start + length], use_cache=False).logits[0]
        distance = (together[start : start + length] - own).norm(dim=-1) / own.norm(dim=-1)
        assert float(distance.median()) < 0.05
        start += length


@pytest.mark.parametrize("name", CARRYING)
def test_what_carries_over_a_boundary_is_refused_or_told_apart(name: str) -> None:
    model = model_of(*CARRYING[name], "auto", torch.bfloat16)
    with pytest.raises(ExamplesMeet):
        attention.check(model)
    if importlib.util.find_spec("causal_conv1d") and importlib.util.find_spec("mamba_ssm"):
        attention.check(model, seq_idx=True)
    else:  # transformers refuses it, or (before 5.24) lets them meet without a word
        with pytest.raises(ValueError, match=r"can't keep packed sequences apart|see each other"):
            attention.check(model, seq_idx=True)


def test_the_run_goes_on_with_the_same_random_numbers() -> None:
    model = model_of(*DECODERS["llama"], "auto", torch.bfloat16)
    before = torch.cuda.get_rng_state()
    attention.check(model)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_under_autocast_as_a_trainer_runs_it() -> None:
    with torch.autocast("cuda", torch.bfloat16):
        attention.check(model_of(*DECODERS["llama"], "auto", torch.float32))


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_tf32_is_no_leak(precision: str) -> None:
    """24 layers: rounding to TF32 adds up to more than float32's own ever would."""
    sizes = {
        **SIZES,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "head_dim": 128,
    }
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        attention.check(
            model_of("LlamaForCausalLM", {**sizes, "num_attention_heads": 16}, "auto", torch.float32)
        )
    finally:
        torch.set_float32_matmul_precision(before)
