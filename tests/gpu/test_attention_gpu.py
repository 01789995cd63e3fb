"""Attention kernels on a GPU: packed equals alone, and nothing crosses a boundary."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from packer.shard import Pack
from trainer_client import attention
from trainer_client.attention_kernels import KERNELS, AttentionRefused
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
    "long": [4096, 1, 4095],
}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


def batch_of(lengths: list[int], seed: int = 0) -> PackedBatch:
    rng = np.random.default_rng(seed)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    loss_mask = np.ones(cu_seqlens[-1], np.bool_)
    loss_mask[cu_seqlens[:-1]] = False
    pack = Pack(
        input_ids=rng.integers(0, 97, cu_seqlens[-1], dtype=np.int32),
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
        example_ids=np.arange(len(lengths), dtype=np.int64),
    )
    return flatten([pack], padding=[False], epoch=0, step=0, num_items=1, step_done=True)


def qkv(num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """4 heads of queries on 2 of keys and values, 64 wide."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(1, heads, num_tokens, 64, generator=generator).to("cuda", dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]


def attend(batch: PackedBatch, tensors: list[torch.Tensor], backend: str, **options: Any) -> torch.Tensor:
    kwargs = batch.for_transformers(device="cuda")
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    boundaries = {name: kwargs[name] for name in names}
    return attention.attend(torch.nn.Module(), *tensors, backend=backend, **boundaries, **options)


def reference(batch: PackedBatch, tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
    """In float64, each segment by itself."""
    return attend(batch, [x.detach().double().requires_grad_() for x in tensors], "sdpa", **options)


def installed(backend: str) -> str:
    if KERNELS[backend].function() is None:
        pytest.skip(f"{KERNELS[backend].needs} is not installed")
    return backend


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("window", [None, 16])
def test_packed_equals_alone(backend: str, dtype: torch.dtype, case: str, window: int | None) -> None:
    batch = batch_of(CASES[case])
    tensors = qkv(batch.num_tokens, dtype)
    options = {"sliding_window": window}
    if dtype == torch.float32 and KERNELS[installed(backend)].cuda_half_only:
        with pytest.raises(AttentionRefused, match="float16 or bfloat16"):
            attend(batch, tensors, backend, **options)
        return
    out = attend(batch, tensors, installed(backend), **options)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    wanted = attend(batch, doubles, "sdpa", **options)
    torch.testing.assert_close(out.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    weights = torch.randn_like(wanted)
    out.backward(weights.to(dtype))
    wanted.backward(weights)
    for one, two in zip(tensors, doubles, strict=True):
        torch.testing.assert_close(
            one.grad.double(), two.grad, atol=4 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype]
        )


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (100, 100), (64, 128), (256, 256)])
def test_heads_of_any_size(backend: str, dim: int, value_dim: int) -> None:
    """MLA's values are narrower than its keys; kernels want one size, and a multiple of 8."""
    if backend == "flash4" and max(dim, value_dim) > 128:
        pytest.skip("a beta, asked for by name alone")
    batch = batch_of(CASES["many"])
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(1, heads, batch.num_tokens, size, generator=generator).to("cuda", torch.bfloat16)
        for heads, size in ((4, dim), (2, dim), (2, value_dim))
    ]
    tensors = [x.requires_grad_() for x in tensors]
    installed(backend)
    out = None
    with contextlib.suppress(AttentionRefused):
        out = attend(batch, tensors, backend)
    if out is None:  # a build for smaller heads is found out, instead of giving garbage
        assert max(dim, value_dim) > 128
        return
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    wanted = attend(batch, doubles, "sdpa")
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=2e-2)
    weights = torch.randn_like(wanted)
    out.backward(weights.to(torch.bfloat16))
    wanted.backward(weights)
    for one, two in zip(tensors, doubles, strict=True):
        torch.testing.assert_close(one.grad.double(), two.grad, atol=8e-2, rtol=8e-2)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("poison", ["other", "nan"])
def test_a_changed_segment_moves_no_bit_of_another(backend: str, poison: str) -> None:
    batch = batch_of(CASES["many"])
    tensors = qkv(batch.num_tokens, torch.bfloat16)
    before = attend(batch, tensors, installed(backend))
    bounds = list(itertools.pairwise(batch.cu_seqlens.tolist()))
    start, end = bounds[len(bounds) // 2]
    with torch.no_grad():
        for x in tensors:
            x[:, :, start:end] = float("nan") if poison == "nan" else x[:, :, start:end].flip(2) * 2
    after = attend(batch, tensors, backend)
    assert torch.equal(before[:, :start], after[:, :start])
    assert torch.equal(before[:, end:], after[:, end:])
    assert not torch.equal(before[:, start:end], after[:, start:end])


@pytest.mark.parametrize("backend", KERNELS)
def test_softcap_and_dropout_are_done_or_refused(backend: str) -> None:
    """A build may lack what its package has; then it is refused by name, never done wrong."""
    batch = batch_of([5, 80, 33])
    tensors = qkv(batch.num_tokens, torch.bfloat16)
    installed(backend)
    wanted = reference(batch, tensors, softcap=2.0)
    assert not torch.allclose(wanted, reference(batch, tensors), atol=0.1)
    try:
        out = attend(batch, tensors, backend, softcap=2.0)
    except AttentionRefused as error:
        assert backend != "sdpa"
        assert "softcap" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=2e-2)
    try:
        out = attend(batch, tensors, backend, dropout=0.5)
    except AttentionRefused as error:
        assert backend != "sdpa"
        assert "dropout" in str(error)  # noqa: PT017
    else:
        assert not torch.equal(out, attend(batch, tensors, backend))
    # Left to choose, what is asked for is done.
    chosen = attend(batch, tensors, "auto", softcap=2.0)
    torch.testing.assert_close(chosen.double(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("implementation", ["padfree", "flash_attention_2", "sdpa"])
def test_a_model_packed_equals_the_model_alone(implementation: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    if implementation == "flash_attention_2":
        installed("flash2")
    attention.register()
    config = {
        "vocab_size": 97, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation=implementation))
    model = model.to("cuda", torch.bfloat16)
    torch.manual_seed(0)
    alone = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager")).to("cuda")
    alone.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    batch = batch_of(CASES["many"])
    with torch.no_grad():
        packed = model(**batch.for_transformers(device="cuda")).logits.float()
        for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            ids = torch.tensor(batch.input_ids[None, start:end].astype(np.int64), device="cuda")
            one = alone(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(packed[:, start:end], one, atol=3e-2, rtol=3e-2)


def test_the_choice_in_half_precision_is_a_varlen_kernel(caplog: pytest.LogCaptureFixture) -> None:
    from trainer_client import attention_kernels

    attention_kernels._logged.clear()
    batch = batch_of([5, 80])
    with caplog.at_level("INFO", logger="trainer_client"):
        attend(batch, qkv(85, torch.bfloat16), "auto")
        attend(batch, qkv(85, torch.float32), "auto")
    chosen = [record.args[0] for record in caplog.records]
    best = next(name for name in KERNELS if KERNELS[name].function() is not None)
    assert chosen == [best, "sdpa"]
    assert best != "sdpa"


def test_boundaries_given_cost_no_wait_for_the_device() -> None:
    batch = batch_of(CASES["many"])
    tensors = qkv(batch.num_tokens, torch.bfloat16)
    kwargs = batch.for_transformers(device="cuda")
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    boundaries = {name: kwargs[name] for name in names}
    attention.attend(torch.nn.Module(), *tensors, **boundaries)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention.attend(torch.nn.Module(), *tensors, **boundaries)
    finally:
        torch.cuda.set_sync_debug_mode("default")
