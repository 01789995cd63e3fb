"""Batches of one shape: the same numbers, one graph."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from packs import build_dataset, changed, random_packs
from torch._dynamo.testing import CompileCounter
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from packer.spec import PackingSpec
from trainer_client import PackedStream, attention, attention_kernels
from trainer_client.batch import PackedBatch, flatten
from trainer_client.static import ShapeExceeded, StaticShape

SHAPE = StaticShape(num_tokens=256, num_segments=32)


def batch_of(seed: int, max_tokens: int | None = None) -> PackedBatch:
    packs = random_packs(3, max_tokens=64, vocab_size=97, seed=seed)
    return flatten(
        packs,
        padding=[False] * 3,
        epoch=0,
        step=7,
        num_items=1,
        step_done=True,
        max_tokens=max_tokens,
    )


def model_of(implementation: str) -> LlamaForCausalLM:
    config = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    attention.register()
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**config, attn_implementation=implementation))


def test_every_batch_has_the_shape_and_the_padding_is_a_segment_that_trains_nothing() -> None:
    for seed in range(5):
        batch = batch_of(seed)
        plain, kwargs = (batch.for_transformers(seq_idx=True, static=static) for static in (False, SHAPE))
        n, pad = batch.num_tokens, 256 - batch.num_tokens
        for name in ("input_ids", "position_ids", "labels", "seq_idx"):
            assert kwargs[name].shape == (1, 256)
            assert kwargs[name].dtype == plain[name].dtype
            assert torch.equal(kwargs[name][:, :n], plain[name])
        assert (kwargs["labels"][:, n:] == -100).all()
        assert kwargs["position_ids"][0, n:].tolist() == [0] * pad
        assert (kwargs["seq_idx"][:, n:] == batch.num_segments).all()
        ends = kwargs["cu_seq_lens_q"]
        assert ends.tolist() == [*batch.cu_seqlens.tolist(), *[256] * (32 - batch.num_segments)]
        assert ends.dtype == torch.int32
        assert kwargs["max_length_q"] == kwargs["max_length_k"] == 256


@pytest.mark.parametrize("implementation", ["padfree", "sdpa", "eager"])
@pytest.mark.parametrize("kind", ["longrope", "learned"])
def test_padding_takes_no_position_that_the_examples_do_not(kind: str, implementation: str) -> None:
    """longrope takes other factors where one position is beyond; of learned ones there are so many."""
    attention.register()
    torch.manual_seed(0)
    batch = batch_of(1)
    assert batch.max_seqlen <= 64 < 256 - batch.num_tokens
    model: Any
    if kind == "learned":
        sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        model = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation=implementation))
    else:
        rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        rope |= {"rope_theta": 1e4, "original_max_position_embeddings": 64}
        config = Phi3Config(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, original_max_position_embeddings=64,
            rope_parameters=rope, pad_token_id=0, attn_implementation=implementation,
        )  # fmt: skip
        model = Phi3ForCausalLM(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0, 0.3)
    with torch.no_grad():
        plain, padded = (
            model.eval()(**batch.for_transformers(static=static)).logits for static in (False, SHAPE)
        )
    torch.testing.assert_close(padded[:, : batch.num_tokens], plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["padfree", "sdpa", "eager"])
def test_loss_and_gradient_are_those_of_the_batch_as_it_is(implementation: str) -> None:
    batch, gradients, losses = batch_of(1), [], []
    for static in (False, SHAPE):
        model = model_of(implementation)
        loss = model(**batch.for_transformers(static=static)).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    batch = batch_of(0)
    n, segments = batch.num_tokens, batch.num_segments
    for shape, what in (
        (StaticShape(num_tokens=n - 1, num_segments=99), rf"step 7 .* {n} tokens .* allows {n - 1}"),
        (StaticShape(num_tokens=n + 1, num_segments=segments), rf"{segments + 1} segments .* {segments}"),
        (StaticShape(num_tokens=n + 9, num_segments=99, max_seqlen=5), "tokens in a segment .* allows 5"),
    ):
        with pytest.raises(ShapeExceeded, match=what):
            batch.for_transformers(static=shape)
    full = StaticShape(num_tokens=n, num_segments=segments, max_seqlen=batch.max_seqlen)
    assert batch.for_transformers(static=full)["cu_seq_lens_q"].tolist() == batch.cu_seqlens.tolist()
    with pytest.raises(ValueError, match="give a StaticShape"):
        batch.for_transformers(static=True)


def test_true_is_the_shape_of_the_dataset(tmp_path: Path) -> None:
    dataset = build_dataset(
        tmp_path, random_packs(12, max_tokens=64), packs_per_shard=5, packing=PackingSpec(max_tokens=64)
    )
    batches = list(PackedStream(tmp_path, dataset=dataset, packs_per_step=3))
    assert {batch.max_tokens for batch in batches} == {192}
    shapes = {
        (kwargs["input_ids"].shape, kwargs["cu_seq_lens_q"].shape, kwargs["max_length_q"])
        for kwargs in (batch.for_transformers(static=True) for batch in batches)
    }
    assert shapes == {((1, 192), (17,), 192)}


def test_more_segments_than_usual_take_the_next_power_of_two() -> None:
    batch = batch_of(0, max_tokens=192)
    one_token_each = dataclasses.replace(
        batch,
        pack=changed(
            batch.pack,
            cu_seqlens=torch.arange(batch.num_tokens + 1, dtype=torch.int32).numpy(),
            example_ids=torch.arange(batch.num_tokens).numpy(),
        ),
    )
    most = 16
    while most < batch.num_tokens + 1:
        most *= 2
    assert len(one_token_each.for_transformers(static=True)["cu_seq_lens_q"]) == most + 1


def test_compiled_once_with_a_static_shape_and_twice_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a varlen kernel in the place of flash-attn's: no break in the graph, no storm of graphs."""
    _stand_in_for_flash(monkeypatch)
    for static, graphs in ((SHAPE, 1), (False, 2)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, counter = model_of("padfree"), CompileCounter()
        compiled = torch.compile(model, backend=counter)
        with torch.no_grad():
            for seed in range(8):
                kwargs = batch_of(seed).for_transformers(static=static)
                torch.testing.assert_close(
                    compiled(**kwargs).logits, model(**kwargs).logits, atol=1e-6, rtol=0
                )
        assert counter.frame_count == graphs
        assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


@torch.library.custom_op("padfree_tests::varlen", mutates_args=())
def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    at = torch.arange(len(q))
    segment = torch.searchsorted(cu_seqlens, at, right=True)
    mask = (segment[:, None] == segment) & (at[:, None] >= at)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1).contiguous()


@_varlen.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


def _stand_in_for_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        assert cu_seqlens_q is cu_seqlens_k
        assert causal
        return _varlen(q, k, v, cu_seqlens_q)

    kernel = dataclasses.replace(attention_kernels.KERNELS["flash2"], cuda_half_only=False)
    monkeypatch.setitem(attention_kernels.KERNELS, "flash2", kernel)
    monkeypatch.setitem(attention_kernels._functions, "flash2", flash)
