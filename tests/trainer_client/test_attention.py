"""Packed attention equals each example alone, and no segment sees another."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packing_job import STRATEGIES, pack_document, packing_of, spec_of, write_rows
from packs import random_packs
from tiny import SIZES
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trainer_client import PackedStream, attention, attention_kernels
from trainer_client.attention_kernels import KERNELS, AttentionRefused, Boundaries, Call
from trainer_client.batch import PackedBatch, flatten

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
    "gemma2-window-softcap": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"sliding_window": 5, "head_dim": 8, "attn_logit_softcapping": 20.0},
    ),
}


def model_of(name: str, implementation: str) -> torch.nn.Module:
    attention.register()
    cls, config, extra = MODELS[name]
    torch.manual_seed(7)
    model = cls(config(**SIZES, **extra, attn_implementation=implementation)).float()
    return model.train()


def batch_of(*, num_packs: int = 3, seed: int = 0) -> PackedBatch:
    packs = random_packs(num_packs, max_tokens=40, vocab_size=97, seed=seed)
    return flatten(
        packs,
        padding=[False] * num_packs,
        epoch=0,
        step=0,
        num_items=sum(pack.num_trained for pack in packs),
        step_done=True,
    )


def segments(batch: PackedBatch) -> list[slice]:
    return [slice(int(a), int(b)) for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("implementation", ["padfree", "sdpa", "eager"])
def test_f08_packed_equals_each_example_alone_forward_and_backward(name: str, implementation: str) -> None:
    if name.startswith("gemma2") and implementation == "sdpa":
        pytest.skip("transformers' sdpa refuses softcap")
    batch, model = batch_of(), model_of(name, implementation)
    # The reference: the model's own eager attention, one example at a time, without any packing.
    alone = model_of(name, "eager")
    num_items = batch.num_items_in_batch

    out = model(**batch.for_transformers(), num_items_in_batch=num_items)
    out.loss.backward()
    total = 0.0
    for where in segments(batch):
        ids = torch.tensor(batch.input_ids[where][None].astype(np.int64))
        labels = torch.tensor(batch.labels[where][None].astype(np.int64))
        one = alone(input_ids=ids, labels=labels, use_cache=False, num_items_in_batch=num_items)
        torch.testing.assert_close(out.logits[:, where], one.logits, atol=1e-5, rtol=0)
        one.loss.backward()
        total += one.loss.item()
    assert out.loss.item() == pytest.approx(total, abs=1e-5)
    for packed, separate in zip(gradients(model), gradients(alone), strict=True):
        torch.testing.assert_close(packed, separate, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_f08_changing_one_segment_changes_no_logit_of_another(name: str) -> None:
    batch, model = batch_of(), model_of(name, "padfree").eval()
    kwargs = batch.for_transformers()
    changed = segments(batch)[2]
    other = dict(kwargs, input_ids=kwargs["input_ids"].clone())
    other["input_ids"][:, changed] = (other["input_ids"][:, changed] + 1) % 97
    with torch.no_grad():
        before, after = model(**kwargs).logits, model(**other).logits
    assert not torch.equal(before[:, changed], after[:, changed])
    before[:, changed] = after[:, changed] = 0
    assert torch.equal(before, after)


def test_f08_the_case_as_given() -> None:
    model = model_of("llama", "padfree").eval()

    def run(ids: list[int], positions: list[int], boundaries: list[int]) -> torch.Tensor:
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
        longest = int(cu_seqlens.diff().max())
        with torch.no_grad():
            return model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.tensor([positions]),
                cu_seq_lens_q=cu_seqlens,
                cu_seq_lens_k=cu_seqlens,
                max_length_q=longest,
                max_length_k=longest,
                use_cache=False,
            ).logits

    first = run([10, 11, 12, 20, 21], [0, 1, 2, 0, 1], [0, 3, 5])
    again = run([13, 14, 15, 20, 21], [0, 1, 2, 0, 1], [0, 3, 5])
    alone = run([20, 21], [0, 1], [0, 2])
    torch.testing.assert_close(first[:, 3:], again[:, 3:], atol=1e-5, rtol=0)
    torch.testing.assert_close(first[:, 3:], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_f08_a_segment_cannot_see_its_neighbour_under_any_strategy(tmp_path: Path, strategy: str) -> None:
    model, logits = model_of("llama", "padfree").eval(), []
    for first in ([10, 11, 12], [13, 14, 15]):
        rows = [{"input_ids": first}, {"input_ids": [20, 21]}]
        source = write_rows(tmp_path / f"{first[0]}.jsonl", rows)
        packing = packing_of(strategy, 5, group=2)
        packed = pack_document(tmp_path / "store", spec_of(source, None, packing=packing))
        num_packs = len(packed.packs)
        (batch,) = PackedStream(tmp_path / "store", dataset=packed.job.dataset, packs_per_step=num_packs)
        at = batch.example_ids.tolist().index(1)
        with torch.no_grad():
            out = model(**batch.for_transformers(), num_items_in_batch=batch.num_items_in_batch)
            alone = [
                model(input_ids=ids, labels=ids, use_cache=False, num_items_in_batch=3)
                for ids in (torch.tensor([row["input_ids"]]) for row in rows)
            ]
        logits.append(out.logits[:, segments(batch)[at]])
        torch.testing.assert_close(logits[-1], alone[1].logits, atol=1e-5, rtol=0)
        assert batch.num_items_in_batch == 3
        assert out.loss.item() == pytest.approx(sum(one.loss.item() for one in alone), abs=1e-5)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dropped", [(), ("use_cache",), ("max_length_q", "max_length_k")])
def test_boundaries_hold_with_a_cache_and_without_lengths(dropped: tuple[str, ...]) -> None:
    batch, model = batch_of(), model_of("llama", "padfree").eval()
    kwargs = batch.for_transformers()
    with torch.no_grad():
        whole = model(**kwargs).logits
        less = model(**{name: value for name, value in kwargs.items() if name not in dropped}).logits
    assert torch.equal(whole, less)


def test_boundaries_from_position_ids_alone_also_in_several_rows() -> None:
    model = model_of("llama", "padfree").eval()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions).logits
        for row, start, end in [(0, 0, 3), (0, 3, 7), (1, 0, 5), (1, 5, 7)]:
            alone = model(input_ids=ids[row : row + 1, start:end]).logits
            torch.testing.assert_close(packed[row : row + 1, start:end], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("with_boundaries", [False, True])
@torch.inference_mode()
def test_buffers_of_inference_mode_may_be_written_to_again(with_boundaries: bool) -> None:
    """They have no version: what was found for a batch in them is not kept for the next."""
    model = model_of("llama", "padfree").eval()
    ids, positions, cu_seqlens = torch.arange(8)[None], torch.zeros(1, 8).long(), torch.zeros(3).int()
    given = {"cu_seq_lens_q": cu_seqlens} if with_boundaries else {}
    packed = {}
    for first in (3, 5, 1):
        positions.copy_(torch.tensor([[*range(first), *range(8 - first)]]))
        cu_seqlens.copy_(torch.tensor([0, first, 8]))
        packed[first] = model(input_ids=ids, position_ids=positions, use_cache=False, **given).logits
    for first, logits in packed.items():
        for own in (slice(0, first), slice(first, 8)):
            alone = model(input_ids=ids[:, own], use_cache=False).logits
            torch.testing.assert_close(logits[:, own], alone, atol=1e-5, rtol=0)


def test_boundaries_of_one_batch_are_not_kept_for_the_next() -> None:
    model = model_of("llama", "padfree").eval()
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    kwargs = {"input_ids": torch.arange(8)[None], "use_cache": False}
    with torch.no_grad():
        one = model(
            **kwargs, cu_seq_lens_q=cu_seqlens, position_ids=torch.tensor([[*range(3), *range(5)]])
        ).logits
        cu_seqlens[1] = 5  # in place: the same tensor with other values
        two = model(
            **kwargs, cu_seq_lens_q=cu_seqlens, position_ids=torch.tensor([[*range(5), *range(3)]])
        ).logits
        alone = model(input_ids=torch.arange(5)[None]).logits
    torch.testing.assert_close(two[:, :5], alone, atol=1e-5, rtol=0)
    assert not torch.allclose(one[:, 3:5], two[:, 3:5], atol=1e-3)


def test_what_is_not_done_is_refused_by_name() -> None:
    batch, model = batch_of(), model_of("llama", "padfree")
    kwargs = batch.for_transformers()
    zeros = torch.ones(1, batch.num_tokens, dtype=torch.int64)
    zeros[0, 0] = 0
    with pytest.raises(AttentionRefused, match="attention_mask with zeros"):
        model(**kwargs, attention_mask=zeros)
    four_d = torch.zeros(1, 1, batch.num_tokens, batch.num_tokens)
    with pytest.raises(AttentionRefused, match="attention mask of shape"):
        model(**kwargs, attention_mask=four_d)
    cut = kwargs["cu_seq_lens_q"][:-1]
    with pytest.raises(AttentionRefused, match="must span the whole batch"):
        model(**{**kwargs, "cu_seq_lens_q": cut, "cu_seq_lens_k": cut})
    past = model(input_ids=kwargs["input_ids"][:, :4], use_cache=True).past_key_values
    with pytest.raises(AttentionRefused, match="KV cache"):
        model(input_ids=kwargs["input_ids"][:, 4:5], cache=past)
    tensors = [torch.zeros(1, 2, 3, 8)] * 3
    for name in ("position_bias", "output_attentions"):
        with pytest.raises(AttentionRefused, match=name):
            attention.attend(torch.nn.Module(), *tensors, **{name: torch.ones(2)[0]})


def test_an_attention_mask_of_ones_changes_nothing() -> None:
    batch, model = batch_of(), model_of("llama", "padfree").eval()
    kwargs = batch.for_transformers()
    with torch.no_grad():
        bare = model(**kwargs).logits
        masked = model(**kwargs, attention_mask=torch.ones(1, batch.num_tokens, dtype=torch.int64)).logits
    assert torch.equal(bare, masked)


def test_a_forced_backend_is_taken_or_refused() -> None:
    with pytest.raises(ValueError, match="one of auto, flash3, flash2, torch, flash4, sdpa"):
        attention.register(backend="fast")
    with pytest.raises(ImportError, match="flash_attn_interface"):
        attention.register(backend="flash3")
    with pytest.raises(ValueError, match='without "flash" is required'):
        attention.register(name="my-flash")  # transformers would look for a kernel of that name
    batch = batch_of()
    attention.register(backend="torch", name="padfree-torch")
    with pytest.raises(AttentionRefused, match="torch: it needs CUDA"):
        model_of("llama", "padfree-torch")(**batch.for_transformers())
    attention.register(backend="sdpa", name="padfree-sdpa")
    forced, chosen = model_of("llama", "padfree-sdpa"), model_of("llama", "padfree")
    assert torch.equal(forced(**batch.for_transformers()).logits, chosen(**batch.for_transformers()).logits)


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    attention_kernels._logged.clear()
    batch, model = batch_of(), model_of("llama", "padfree")
    with caplog.at_level(logging.INFO, logger="trainer_client"):
        model(**batch.for_transformers())
        model(**batch.for_transformers())
    assert [record.message for record in caplog.records] == [
        "padfree attention runs on sdpa (cpu, torch.float32)"
    ]


@pytest.mark.parametrize("missing", ["softcap", "window_size", "dropout_p"])
def test_a_build_that_leaves_a_feature_out_is_not_trusted_with_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn built without softcap takes the argument and gives wrong numbers."""
    calls = []

    def fake_flash(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, dropout_p=0.0,
    ):  # fmt: skip
        given = {"softcap": softcap, "window_size": window_size, "dropout_p": dropout_p}
        given[missing] = {"softcap": 0.0, "window_size": (-1, -1), "dropout_p": 0.0}[missing]
        calls.append(given)
        call = Call(
            q=q, k=k, v=v, bounds=Boundaries(cu_seqlens_q), scale=softmax_scale, causal=causal,
            window=None if given["window_size"][0] < 0 else given["window_size"][0] + 1,
            softcap=given["softcap"] or None, dropout=given["dropout_p"],
        )  # fmt: skip
        return attention_kernels.per_segment(call, torch.nn.functional.scaled_dot_product_attention)

    monkeypatch.setitem(KERNELS, "flash2", replace(KERNELS["flash2"], cuda_half_only=False))
    monkeypatch.setitem(attention_kernels._functions, "flash2", fake_flash)
    monkeypatch.setattr(attention_kernels, "_ignored", {})
    tensors = [torch.randn(1, 4, 40, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    options = {"position_ids": torch.tensor([[*range(15), *range(25)]])}
    plain = attention.attend(torch.nn.Module(), *tensors, backend="flash2", **options)
    torch.testing.assert_close(
        plain, attention.attend(torch.nn.Module(), *tensors, backend="sdpa", **options)
    )
    features = {
        "softcap": {"softcap": 2.0},
        "window_size": {"sliding_window": 4},
        "dropout_p": {"dropout": 0.5},
    }
    for name, option in features.items():
        if name == missing:
            with pytest.raises(AttentionRefused, match=f"does not do {missing.split('_')[0]}"):
                attention.attend(torch.nn.Module(), *tensors, backend="flash2", **options, **option)
        else:
            attention.attend(torch.nn.Module(), *tensors, backend="flash2", **options, **option)
    # Left to choose, another kernel does it.
    option = features[missing]
    torch.manual_seed(0)
    chosen = attention.attend(torch.nn.Module(), *tensors, **options, **option)
    torch.manual_seed(0)
    exact = attention.attend(torch.nn.Module(), *tensors, backend="sdpa", **options, **option)
    torch.testing.assert_close(chosen, exact)


def test_a_build_for_small_heads_is_not_trusted_with_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn built for heads of up to 128 takes larger ones and gives garbage."""

    def fake_flash(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal
    ):  # fmt: skip
        call = Call(
            q=q, k=k, v=v, bounds=Boundaries(cu_seqlens_q), scale=softmax_scale, causal=causal, window=None,
            softcap=None, dropout=0.0,
        )  # fmt: skip
        out = attention_kernels.per_segment(call, torch.nn.functional.scaled_dot_product_attention)
        return out if q.shape[-1] <= 128 else torch.zeros_like(out)

    monkeypatch.setitem(KERNELS, "flash2", replace(KERNELS["flash2"], cuda_half_only=False))
    monkeypatch.setitem(attention_kernels._functions, "flash2", fake_flash)
    monkeypatch.setattr(attention_kernels, "_ignored", {})
    options = {"position_ids": torch.tensor([[*range(15), *range(25)]])}
    for dim, value_dim in [(128, 128), (192, 128), (96, 256)]:
        q, k, v = (torch.randn(1, 4, 40, size) for size in (dim, dim, value_dim))
        exact = attention.attend(torch.nn.Module(), q, k, v, backend="sdpa", **options)
        chosen = attention.attend(torch.nn.Module(), q, k, v, **options)
        torch.testing.assert_close(chosen, exact)
        if max(dim, value_dim) > 128:
            with pytest.raises(AttentionRefused, match=f"does not do heads of {max(dim, value_dim)}"):
                attention.attend(torch.nn.Module(), q, k, v, backend="flash2", **options)


@pytest.mark.parametrize("name", ["flash2", "torch"])
@pytest.mark.parametrize(("dim", "value_dim"), [(24, 16), (16, 24), (20, 20), (13, 5)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_kernels_get_heads_of_one_size_that_is_a_multiple_of_8(
    name: str, dim: int, value_dim: int, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *boundaries: Any, scale: float | None = None,
        softmax_scale: float | None = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        max_seqlen_q: int = 0, max_seqlen_k: int = 0, causal: bool = True, window_size: Any = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        assert q.shape[-1] % 8 == 0
        call = Call(
            q=q, k=k, v=v, bounds=Boundaries(boundaries[0] if boundaries else cu_seqlens_q),
            scale=scale or softmax_scale, causal=True, window=None, softcap=None, dropout=0.0,
        )  # fmt: skip
        return attention_kernels.per_segment(call, torch.nn.functional.scaled_dot_product_attention)

    monkeypatch.setitem(KERNELS, name, replace(KERNELS[name], cuda_half_only=False))
    monkeypatch.setitem(attention_kernels._functions, name, kernel)
    tensors = [torch.randn(1, 2, 12, size) for size in (dim, dim, value_dim)]
    options: dict[str, Any] = {"position_ids": torch.tensor([[*range(5), *range(7)]]), "scaling": scale}
    found, wanted = (
        attention.attend(torch.nn.Module(), *tensors, backend=backend, **options)
        for backend in (name, "sdpa")
    )
    assert found.shape == (1, 12, 2, value_dim)
    torch.testing.assert_close(found, wanted)


def test_dropout_reaches_the_kernel() -> None:
    batch = batch_of()
    attention.register()
    torch.manual_seed(1)
    config = LlamaConfig(**SIZES, attention_dropout=0.5, attn_implementation="padfree")
    model = LlamaForCausalLM(config).train()
    kwargs = batch.for_transformers()
    with torch.no_grad():
        assert not torch.equal(model(**kwargs).logits, model(**kwargs).logits)
        model.eval()
        assert torch.equal(model(**kwargs).logits, model(**kwargs).logits)


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    batch, plain, again = batch_of(), model_of("llama", "padfree"), model_of("llama", "padfree")
    again.activation_checkpointing_enable()
    plain(**batch.for_transformers()).loss.backward()
    again(**batch.for_transformers()).loss.backward()
    for one, two in zip(gradients(plain), gradients(again), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0)


def test_a_beta_is_taken_where_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def kernel_of(name: str) -> Callable[..., torch.Tensor]:
        def run(call: Call, function: Any) -> torch.Tensor:
            taken.append(name)
            return KERNELS["sdpa"].run(call, torch.nn.functional.scaled_dot_product_attention)

        return run

    for name in ("torch", "flash4"):
        monkeypatch.setitem(KERNELS, name, replace(KERNELS[name], cuda_half_only=False, run=kernel_of(name)))
        monkeypatch.setitem(attention_kernels._functions, name, object())
    for name in ("flash3", "flash2"):
        monkeypatch.setitem(attention_kernels._functions, name, None)
    monkeypatch.setattr(attention_kernels, "_logged", set())
    q = torch.randn(1, 2, 8, 4)
    positions = torch.arange(8)[None]
    attention.attend(torch.nn.Module(), q, q, q, position_ids=positions)
    assert taken == ["torch"]
    attention.attend(torch.nn.Module(), q, q, q, position_ids=positions, backend="flash4")
    assert taken == ["torch", "flash4"]
