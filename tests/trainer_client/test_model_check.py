"""attention.check finds every model that lets examples of a packed batch meet, and no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packs import random_packs

from trainer_client import attention
from trainer_client.attention import ExamplesMeet
from trainer_client.batch import PackedBatch, flatten

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
OF_BERT = {name: SIZES[name] for name in SIZES if name != "num_key_value_heads"}
OF_BART = {
    "vocab_size": 97, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
}  # fmt: skip
APART = {
    "llama": ("LlamaForCausalLM", SIZES, "padfree"),
    "llama-sdpa": ("LlamaForCausalLM", SIZES, "sdpa"),
    "llama-eager": ("LlamaForCausalLM", SIZES, "eager"),
    "mistral-window": ("MistralForCausalLM", {**SIZES, "sliding_window": 3}, "padfree"),
    "gemma2": ("Gemma2ForCausalLM", {**SIZES, "head_dim": 8, "sliding_window": 3}, "padfree"),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "padfree",
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {
            **SIZES, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
        },
        "padfree",
    ),
    "smollm3": ("SmolLM3ForCausalLM", {**SIZES, "pad_token_id": 0}, "padfree"),
    "gpt2-learned-positions": (
        "GPT2LMHeadModel",
        {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4},
        "sdpa",
    ),
    "bert": ("BertForMaskedLM", OF_BERT, "padfree"),
    "opt": ("OPTForCausalLM", {**OF_BERT, "ffn_dim": 48, "word_embed_proj_dim": 32}, "padfree"),
}  # fmt: skip
# What lets them meet, as the error names it.
MEETING = {
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8,
            "state_size": 8, "n_groups": 1, "chunk_size": 8,
        },
        "eager",
        r"backbone\.layers\.0\.mixer \(Mamba2Mixer\)",
    ),
    "bamba": (
        "BambaForCausalLM",
        {
            **SIZES, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
        "padfree",
        r"model\.layers\.0\.mamba \(BambaMixer\)",
    ),
    "lfm2-convolution": (
        "Lfm2ForCausalLM",
        {**SIZES, "layer_types": ["full_attention", "conv"]},
        "padfree",
        r"model\.layers\.1\.conv \(Lfm2ShortConv\)",
    ),
    "a-mask-without-positions": (
        "AfmoeForCausalLM",
        {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "sdpa",
        r"model\.layers\.0\.self_attn \(AfmoeAttention\)",
    ),
    "bert-sdpa": ("BertForMaskedLM", OF_BERT, "sdpa", r"bert\.encoder\.layer\.0\.attention\.self "),
    "opt-sdpa": ("OPTForCausalLM", {**OF_BERT, "ffn_dim": 48}, "sdpa", r"decoder\.layers\.0\.self_attn"),
    "gpt-oss-eager": (
        "GptOssForCausalLM",
        {**SIZES, "head_dim": 8, "num_local_experts": 4},
        "eager",
        r"model\.layers\.0\.self_attn \(GptOssAttention\)",
    ),
    "bart-without-positions": ("BartForCausalLM", OF_BART, "padfree", "does not take the positions"),
}  # fmt: skip


def model_of(name: str, sizes: dict[str, Any], implementation: str) -> Any:
    attention.register()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls._from_config(cls.config_class(**sizes), attn_implementation=implementation)


def batch_of(seed: int = 0) -> PackedBatch:
    packs = random_packs(3, max_tokens=40, vocab_size=97, seed=seed)
    return flatten(packs, padding=[False] * 3, epoch=0, step=0, num_items=1, step_done=True)


@torch.no_grad()
def distance_to_alone(model: Any, batch: PackedBatch) -> float:
    """Independent of check: the largest distance of a logit to that of the example by itself."""
    kwargs = batch.for_transformers()
    del kwargs["labels"]
    packed, most = model.eval()(**kwargs).logits, 0.0
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids = torch.tensor(batch.input_ids[None, start:end].astype(np.int64))
        alone = model(input_ids=ids, use_cache=False).logits
        most = max(most, float((packed[:, start:end] - alone).abs().max() / alone.abs().max()))
    return most


@pytest.mark.parametrize("name", APART)
def test_f08_a_model_that_keeps_examples_apart_passes(name: str) -> None:
    model = model_of(*APART[name])
    attention.check(model)
    assert distance_to_alone(model, batch_of()) < 1e-5


@pytest.mark.parametrize("name", MEETING)
def test_f08_a_model_in_which_examples_meet_is_refused_by_the_layer(name: str) -> None:
    *given, layer = MEETING[name]
    model = model_of(*given)
    assert distance_to_alone(model, batch_of()) > 1e-4
    with pytest.raises(ExamplesMeet, match=layer) as refused:
        attention.check(model)
    assert 'pack with strategy "padded"' in str(refused.value)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "bamba", "bart-without-positions"])
def test_half_precision_is_judged_alike(name: str) -> None:
    given = (APART.get(name) or MEETING[name])[:3]
    model = model_of(*given).to(torch.bfloat16)
    if name in APART:
        attention.check(model)
    else:
        with pytest.raises(ExamplesMeet):
            attention.check(model)


def test_a_leak_of_any_size_is_found() -> None:
    """Far below what rounding does to a logit."""
    model = model_of(*APART["llama"])
    project = model.model.layers[1].mlp.down_proj
    project.register_forward_hook(lambda module, args, out: out + 1e-12 * out.roll(2, dims=1))
    with pytest.raises(ExamplesMeet, match="depends on 2 of others"):
        attention.check(model)


def hooks_of(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_a_model_is_left_as_it_was() -> None:
    model = model_of("LlamaForCausalLM", {**SIZES, "attention_dropout": 0.5}, "padfree").train()
    model.activation_checkpointing_enable()
    model.model.norm.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    distance_to_alone(model, batch_of())  # transformers adds hooks of its own as it first runs
    model.train()
    model.model.norm.eval()
    hooks, before = hooks_of(model), torch.get_rng_state()
    attention.check(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert model.is_activation_checkpointing
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert hooks_of(model) == hooks


def test_what_a_batch_is_given_in_the_training_is_what_is_checked() -> None:
    """transformers refuses seq_idx itself where the kernels that honour it are missing."""
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        attention.check(model_of(*MEETING["bamba"][:3]), seq_idx=True)
    attention.check(model_of(*APART["llama"]), static=True)


def test_a_model_with_one_output_a_row_is_told() -> None:
    model = model_of("LlamaForSequenceClassification", {**SIZES, "pad_token_id": 0}, "padfree")
    with pytest.raises(
        ValueError, match=r"an output for every token is required.*Classification.*shape \(1, 2\) for 35"
    ):
        attention.check(model)


def test_a_wrapped_model_is_told() -> None:
    with pytest.raises(ValueError, match="before it is wrapped for several ranks, found DataParallel"):
        attention.check(torch.nn.DataParallel(model_of(*APART["llama"])))
