"""One shape on a GPU: kernels take padded boundaries, torch.compile sees one graph, CUDA graphs replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packs import random_packs

from trainer_client import attention
from trainer_client.attention_kernels import KERNELS
from trainer_client.batch import PackedBatch, flatten
from trainer_client.static import StaticShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = StaticShape(num_tokens=2048, num_segments=64)


def batch_of(seed: int) -> PackedBatch:
    packs = random_packs(5, max_tokens=400, vocab_size=97, seed=seed)
    return flatten(packs, padding=[False] * 5, epoch=0, step=0, num_items=1, step_done=True)


def model_of(backend: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    if KERNELS[backend].function() is None:
        pytest.skip(f"{KERNELS[backend].needs} is not installed")
    config = {
        "vocab_size": 97, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    }  # fmt: skip
    name = attention.register(backend, name=f"padfree-{backend.removeprefix('flash')}")
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**config, attn_implementation=name)).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("backend", KERNELS)
def test_a_static_shape_changes_no_logit(backend: str) -> None:
    model, batch = model_of(backend), batch_of(0)
    with torch.no_grad():
        plain = model(**batch.for_transformers(device="cuda")).logits
        static = model(**batch.for_transformers(device="cuda", static=SHAPE)).logits
    assert static.shape[1] == 2048
    torch.testing.assert_close(static[:, : batch.num_tokens], plain, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", KERNELS)
def test_a_static_shape_changes_no_gradient(backend: str) -> None:
    batch, gradients = batch_of(0), []
    for static in (False, SHAPE):
        model = model_of(backend)
        model(**batch.for_transformers(device="cuda", static=static)).loss.backward()
        gradients.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    one, two = gradients
    assert float((one - two).norm() / one.norm()) < 1e-2


@pytest.mark.parametrize("backend", [name for name in KERNELS if name != "sdpa"])
@pytest.mark.parametrize("static", [False, SHAPE], ids=["as-it-is", "static"])
def test_compiling_ends_after_one_graph_or_two(backend: str, static: bool | StaticShape) -> None:
    """Training, ten batches: one graph for a static shape, a second with free sizes without it."""
    model = model_of(backend)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model)
    graphs = []
    for seed in range(10):
        kwargs = batch_of(seed).for_transformers(device="cuda", static=static)
        loss = compiled(**kwargs).loss
        loss.backward()
        torch.testing.assert_close(loss, model(**kwargs).loss, atol=2e-2, rtol=2e-2)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] if static else graphs[1] == graphs[-1], graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", [name for name in KERNELS if name != "sdpa"])
def test_a_cuda_graph_of_one_batch_replays_with_others(backend: str) -> None:
    model = model_of(backend)
    names = ("input_ids", "position_ids", "cu_seq_lens_q")

    def given(seed: int) -> dict[str, Any]:
        kwargs = batch_of(seed).for_transformers(device="cuda", static=SHAPE)
        del kwargs["labels"]
        return kwargs

    kept = given(0)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(**kept)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(**kept).logits
        for seed in (1, 2):
            other = given(seed)
            for name in names:
                kept[name].copy_(other[name])
            graph.replay()
            assert torch.equal(logits, model(**other).logits)
