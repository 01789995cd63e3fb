"""attention.check finds every model that lets examples of a packed batch meet, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packs import random_packs
from tiny import SIZES

from trainer_client import attention
from trainer_client.attention import ExamplesMeet
from trainer_client.batch import PackedBatch, flatten

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


# ------------------------------------------------------------------ hidden leaks; what is left as it was


class _AllSeen(torch.nn.Module):
    """Attention over the whole batch, through a projection that is still zero."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(size, size)
        torch.nn.init.zeros_(self.out.weight)
        torch.nn.init.zeros_(self.out.bias)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        scores = hidden_states @ hidden_states.transpose(1, 2)
        return self.out(torch.softmax(scores, -1) @ hidden_states), None


def test_a_leak_behind_what_is_still_zero_is_found() -> None:
    model = model_of(*APART["llama"])
    for layer in model.model.layers:
        layer.self_attn = _AllSeen(SIZES["hidden_size"])
    with pytest.raises(ExamplesMeet, match="depends on 27 of others"):
        attention.check(model)
    assert not any(layer.self_attn.out.weight.any() for layer in model.model.layers)
    torch.nn.init.zeros_((model := model_of(*APART["llama"])).lm_head.weight)
    attention.check(model)  # one that says nothing yet
    assert not model.lm_head.weight.any()


def test_frozen_weights_of_a_dtype_without_arithmetic_are_left_alone() -> None:
    model = model_of(*APART["llama"])
    packed = torch.zeros(32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    model.model.norm.register_parameter("quantised", torch.nn.Parameter(packed, requires_grad=False))
    attention.check(model)


def test_ids_looked_up_over_a_boundary_are_found() -> None:
    """No gradient tells of them, and only each example's first token differs."""
    model = model_of(*APART["llama"])
    pairs = torch.nn.Embedding(97, 97, _weight=torch.randn(97, 97))

    def add(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        before = kwargs["input_ids"].roll(1, dims=1)
        before[:, 0] = 0
        out["logits"] = out.logits + pairs(before)
        return out

    model.register_forward_hook(add, with_kwargs=True)
    with pytest.raises(ExamplesMeet, match="other outputs than each alone"):
        attention.check(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("positions", [True, False])
def test_words_that_a_model_never_says_hide_nothing(dtype: torch.dtype, positions: bool) -> None:
    model = model_of(
        *(APART["gpt2-learned-positions"] if positions else MEETING["bart-without-positions"][:3])
    )

    def never(module: Any, args: Any, out: Any) -> Any:
        out["logits"] = out.logits.index_fill(-1, torch.tensor([5, 6]), torch.finfo(out.logits.dtype).min)
        return out

    model.to(dtype).register_forward_hook(never)
    if positions:
        attention.check(model)
    else:
        with pytest.raises(ExamplesMeet, match="does not take the positions"):
            attention.check(model)


class _Counting(torch.nn.Module):
    """What training mode counts in, and the call of train() that takes merged weights apart."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.merged = inner, False
        self.register_buffer("num_calls", torch.zeros(()))

    def train(self, mode: bool = True) -> _Counting:
        self.merged = not mode
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training
        return self.inner(x)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("meets", [True, False])
def test_buffers_and_merged_weights_are_left_as_they_were(is_training: bool, meets: bool) -> None:
    model = model_of(*(MEETING["bert-sdpa"][:3] if meets else APART["bert"]))
    layer = model.bert.encoder.layer[0]
    counting = layer.intermediate = _Counting(layer.intermediate)
    model.train(is_training)
    if meets:
        with pytest.raises(ExamplesMeet):
            attention.check(model)
    else:
        attention.check(model)
    assert (counting.training, counting.merged, float(counting.num_calls)) == (
        is_training,
        not is_training,
        0,
    )


def test_a_compiled_model_is_checked_and_compiles_nothing() -> None:
    graphs: list[Any] = []

    def compiled(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    attention.check(torch.compile(model_of(*APART["llama"]), backend=compiled))
    with pytest.raises(ExamplesMeet):
        attention.check(torch.compile(model_of(*MEETING["opt-sdpa"][:3]), backend=compiled))
    assert not graphs


def test_what_cannot_be_told_is_said() -> None:
    model = model_of(*APART["llama"])
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    with pytest.raises(
        ValueError, match="found NaN among those of LlamaForCausalLM: its weights are damaged"
    ):
        attention.check(model)
    model = model_of(*APART["llama"])
    model.model.embed_tokens, model.get_input_embeddings = (
        torch.nn.Embedding(97, 32),
        lambda kept=model.model.embed_tokens: kept,
    )
    with pytest.raises(ValueError, match=r"calls its get_input_embeddings\(\) is required"):
        attention.check(model)


@pytest.fixture
def float32_precision() -> Iterator[None]:
    """As torch's own backends have it before, and after."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("float32_precision")
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_float32_that_is_rounded_on_the_way_is_not_held_to_more(precision: str) -> None:
    model = model_of(*APART["llama"])
    # Another rounding for another number of tokens; most examples have an even one, the batch has not.
    model.lm_head.register_forward_hook(lambda module, args, out: out * (1 + 0.01 * (out.shape[1] % 2)))
    torch.set_float32_matmul_precision(precision)
    if precision == "highest":
        with pytest.raises(ExamplesMeet, match=r"differ by 0\.01 of their size, rounding may by 0\.001"):
            attention.check(model)
    else:
        attention.check(model)
