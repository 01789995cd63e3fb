"""Attention with sinks and in chunks equals each example alone; what can not be done so is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from packs import pack_of
from tiny import SIZES
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
)

from trainer_client import attention
from trainer_client.attention import AttentionRefused
from trainer_client.batch import PackedBatch, flatten

OF_EXPERTS = {
    **SIZES, "num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
}  # fmt: skip
LENGTHS = [7, 1, 12, 5, 9]


def batch_of() -> PackedBatch:
    rng = np.random.default_rng(0)
    pack = pack_of([rng.integers(0, 97, length).tolist() for length in LENGTHS], range(len(LENGTHS)))
    return flatten([pack], padding=[False], epoch=0, step=0, num_items=pack.num_trained, step_done=True)


def gpt_oss(implementation: str) -> Any:
    """Every other layer with a window of 5."""
    config = GptOssConfig(**OF_EXPERTS, sliding_window=5, attn_implementation=implementation)
    return wide(GptOssForCausalLM, config)


def llama4(implementation: str, **options: Any) -> Any:
    """Three layers of four in chunks of 5."""
    config = Llama4TextConfig(
        **OF_EXPERTS,
        intermediate_size_mlp=48,
        attention_chunk_size=5,
        attn_implementation=implementation,
        **options,
    )
    assert set(config.layer_types) == {"chunked_attention", "full_attention"}
    return wide(Llama4ForCausalLM, config)


def wide(cls: Any, config: Any) -> Any:
    """A model of which every weight shows in the result."""
    attention.register()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = cls(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("model_of", [gpt_oss, llama4])
def test_f08_packed_equals_each_example_alone_forward_and_backward(model_of: Any) -> None:
    batch, packed, alone = batch_of(), model_of("padfree"), model_of("eager")
    num_items, total = batch.num_items_in_batch, 0.0
    out = packed(**batch.for_transformers(), num_items_in_batch=num_items)
    out.loss.backward()
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids, labels = (
            torch.tensor(values[None, start:end].astype(np.int64))
            for values in (batch.input_ids, batch.labels)
        )
        one = alone(input_ids=ids, labels=labels, use_cache=False, num_items_in_batch=num_items)
        torch.testing.assert_close(out.logits[:, start:end], one.logits, atol=1e-4, rtol=1e-4)
        one.loss.backward()
        total += one.loss.item()
    assert out.loss.item() == pytest.approx(total, rel=1e-5)
    for (name, one), two in zip(packed.named_parameters(), alone.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        if one.grad is not None:
            assert float((one.grad - two.grad).norm()) <= 1e-4 * float(two.grad.norm()) + 1e-7, name
    attention.check(model_of("padfree"))


def test_no_sink_is_taken_by_a_kernel_without_sinks() -> None:
    sinks = torch.zeros(4)
    tensors = [torch.randn(1, 4, 8, 8) for _ in range(3)]
    for name in ("flash2", "flash3", "flash4", "torch"):
        lacks = attention.KERNELS[name].lacks
        call = attention.Call(
            q=torch.empty(8, 4, 8, dtype=torch.bfloat16, device="meta"), k=tensors[1], v=tensors[2],
            bounds=attention.Boundaries(torch.tensor([0, 8])), scale=None, causal=True, window=None,
            softcap=None, dropout=0.0, sinks=sinks,
        )  # fmt: skip
        assert attention.KERNELS[name].sinks is False
        assert lacks(call) is not None
    with pytest.raises(AttentionRefused, match="sinks with softcap"):
        attention.attend(torch.nn.Module(), *tensors, s_aux=sinks, softcap=2.0)


def test_llama4_scales_by_the_place_in_the_row_which_is_refused_where_it_shows() -> None:
    batch = batch_of()
    with torch.no_grad():
        llama4("padfree", floor_scale=batch.num_tokens + 1)(**batch.for_transformers())
        with pytest.raises(AttentionRefused, match="floor_scale = 34 tokens are required, found 34"):
            llama4("padfree", floor_scale=batch.num_tokens)(**batch.for_transformers())
        alone = torch.arange(40)[None]
        llama4("padfree", floor_scale=8)(
            input_ids=alone, use_cache=False
        )  # one example: its places are the row's


def test_a_model_that_makes_attention_itself_is_refused() -> None:
    config = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, attn_implementation="padfree")
    model = wide(BloomForCausalLM, config)
    with pytest.raises(AttentionRefused, match=r'BloomConfig make attention themselves.*strategy "padded"'):
        model(**batch_of().for_transformers())


def test_a_mask_of_the_models_own_is_refused() -> None:
    sizes = {name: OF_EXPERTS[name] for name in OF_EXPERTS if "experts" not in name}
    config = Gemma3TextConfig(**sizes, use_bidirectional_attention=True, attn_implementation="padfree")
    with pytest.raises(AttentionRefused, match=r"mask of its own|sliding_window without causal"):
        wide(Gemma3ForCausalLM, config)(**batch_of().for_transformers())
