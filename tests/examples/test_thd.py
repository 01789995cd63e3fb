"""examples/megatron_thd.py and torchtitan_loader.py: "thd" batches train as transformers' do.

Neither framework is installed for the tests: a stand-in takes what their models take.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megatron_thd
import pytest
import torch
from torch.nn import functional
from torchtitan_loader import PackedDataLoader
from training import LEARNING_RATE, MINIBATCH, STEP_SIZE, STEPS, pack_rows, padded_losses, rows_of, tiny

from trainer_client import PackedStream


class Stand(torch.nn.Module):
    """Called as Megatron's GPTModel is: gives the loss of each token, (1, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny()

    def forward(
        self, tokens: Any, position_ids: Any, attention_mask: Any, *, labels: Any, packed_seq_params: Any
    ) -> torch.Tensor:
        assert attention_mask is None
        assert packed_seq_params.qkv_format == "thd"
        logits = self.model(
            input_ids=tokens,
            position_ids=position_ids,
            cu_seq_lens_q=packed_seq_params.cu_seqlens_q_padded,
            cu_seq_lens_k=packed_seq_params.cu_seqlens_kv_padded,
            max_length_q=packed_seq_params.max_seqlen_q,
            max_length_k=packed_seq_params.max_seqlen_kv,
            use_cache=False,
        ).logits
        return functional.cross_entropy(logits[0], labels[0], reduction="none")[None]


@pytest.mark.parametrize("of_steps", [False, True])
def test_megatrons_forward_step_trains_as_padding_does(tmp_path: Path, of_steps: bool) -> None:
    """Over two data parallel ranks in turn: sums, divided by the step's tokens, as Megatron divides them."""
    rows = rows_of(4 * STEP_SIZE)
    dataset = pack_rows(tmp_path, rows, **(STEPS if of_steps else {}))
    given = list(PackedStream(tmp_path, dataset=dataset, world_size=2))
    ranks = [
        iter(megatron_thd.open_stream(str(tmp_path), dataset, rank=rank, world_size=2)) for rank in range(2)
    ]
    stand = Stand()
    optimizer = torch.optim.AdamW(stand.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    total = torch.zeros(())
    num_tokens = 0
    for batch in given:
        for batches in ranks:
            output, reduce = megatron_thd.forward_step(batches, stand)
            part, count, logged = reduce(output)
            assert logged["lm loss"].tolist() == pytest.approx([part.item(), count.item()])
            total, num_tokens = total + part, num_tokens + int(count)
        if batch.step_done:
            assert num_tokens == batch.num_items_in_batch  # no all-reduce is needed to know it
            (total / num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item() / num_tokens)
            total, num_tokens = torch.zeros(()), 0
    wanted, _ = padded_losses(rows, rows_per_step=2 * MINIBATCH)
    assert losses == pytest.approx(wanted, abs=1e-5)


def test_torchtitans_batches_train_as_padding_does_and_go_on(tmp_path: Path) -> None:
    rows = rows_of(4 * MINIBATCH)
    dataset = pack_rows(tmp_path, rows)
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    loader = PackedDataLoader(str(tmp_path), dataset, rank=0, world_size=1)
    batches, state = iter(loader), {}
    for batch in PackedStream(tmp_path, dataset=dataset):
        if len(losses) == 2:  # as a checkpoint has it
            loader.stream.close()
            loader = PackedDataLoader(str(tmp_path), dataset, rank=0, world_size=1)
            loader.load_state_dict(json.loads(json.dumps(state)))
            batches = iter(loader)
        inputs, labels = next(batches)
        state = loader.state_dict()
        # torchtitan's boundaries: where positions are 0.
        starts = (inputs["positions"][0] == 0).nonzero().flatten().tolist()
        assert [*starts, inputs["input"].shape[1]] == batch.cu_seqlens.tolist()
        logits = model(input_ids=inputs["input"], position_ids=inputs["positions"], use_cache=False).logits
        assert (labels != -100).sum() == batch.num_items_in_batch
        loss = functional.cross_entropy(logits[0], labels[0], reduction="sum") / batch.num_items_in_batch
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    wanted, _ = padded_losses(rows, rows_per_step=MINIBATCH)
    assert losses == pytest.approx(wanted, abs=1e-5)
