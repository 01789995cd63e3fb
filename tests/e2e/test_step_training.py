"""Strategy "step" trains as padding does: the same loss in each optimiser step, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packing_job import pack_document, spec_of, write_rows
from transformers import LlamaConfig, LlamaForCausalLM

from trainer_client import PackedBatch, PackedStream, attention

STEP_SIZE = 6
MAX_TOKENS = 40


def rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)
    lengths = rng.integers(2, MAX_TOKENS + 1, 4 * STEP_SIZE + 2)
    return [{"input_ids": rng.integers(0, 97, length).tolist()} for length in lengths]


def model() -> Any:
    torch.set_num_threads(1)  # more cost more than they save on so small a model
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation=attention.register(),
    )  # fmt: skip
    return LlamaForCausalLM(config)


def padded_losses(examples: list[dict[str, Any]]) -> tuple[list[float], Any]:
    """What a padding loader and a plain loop give, without any code of padfree in the data's way."""
    net = model()
    net.set_attn_implementation("eager")
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.5), []
    for first in range(0, len(examples), STEP_SIZE):
        part = [one["input_ids"] for one in examples[first : first + STEP_SIZE]]
        longest = max(map(len, part))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in part])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in part])
        labels = ids.masked_fill(mask == 0, -100)
        items = sum(len(row) - 1 for row in part)
        loss = net(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=items).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, net


@pytest.mark.parametrize(("world_size", "balance"), [(1, "none"), (2, "attention"), (5, "attention")])
def test_step_datasets_train_as_padding_does(tmp_path: Path, world_size: int, balance: Any) -> None:
    examples = rows()
    source = write_rows(tmp_path / "rows.jsonl", examples)
    packing = {"strategy": "step", "step_size": STEP_SIZE, "max_tokens": MAX_TOKENS}
    document = spec_of(source, None, source={"format": "tokens"}, packing=packing)
    dataset = pack_document(tmp_path / "store", document).job.dataset
    streams = [
        PackedStream(
            tmp_path / "store", dataset=dataset, rank=rank, world_size=world_size, balance=balance,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    net = model()
    optimizer, losses, loss = torch.optim.SGD(net.parameters(), lr=0.5), [], 0.0
    num_micro = 0
    for batches in zip(*streams, strict=True):
        for batch in batches:
            loss += add_gradient(net, batch)
        num_micro += 1
        assert len({batch.step_done for batch in batches}) == 1
        if batches[0].step_done:
            losses.append(loss)
            optimizer.step()
            optimizer.zero_grad()
            loss = 0.0
    wanted, padded = padded_losses(examples)
    assert len(wanted) == 5
    assert num_micro == len(streams[0]) >= 5
    assert losses == pytest.approx(wanted, abs=1e-5)
    for one, other in zip(net.parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def add_gradient(net: Any, batch: PackedBatch) -> float:
    """One rank's micro-batch: its share of the optimiser step's loss."""
    loss = net(**batch.for_transformers(), num_items_in_batch=batch.num_items_in_batch).loss
    loss.backward()
    assert not (batch.is_padding and loss.item())
    return loss.item()
