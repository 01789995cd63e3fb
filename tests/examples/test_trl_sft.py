"""examples/trl_sft.py: SFTTrainer on a stream trains as SFTTrainer does on the same rows, padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from datasets import Dataset
from packing_job import write_tokenizer
from training import (
    LEARNING_RATE,
    MINIBATCH,
    assert_same_weights,
    on_ranks,
    pack_rows,
    padded_losses,
    rows_of,
    tiny,
)
from transformers import AutoTokenizer
from trl import SFTTrainer
from trl_sft import PackedSFTTrainer, config

from trainer_client import PackedStream


class Observed(PackedSFTTrainer):
    """Notes the inputs that reach the model."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], **kwargs: Any) -> Any:
        self.received = [*getattr(self, "received", []), dict(inputs)]
        return super().compute_loss(model, inputs, **kwargs)


def options(store: Path) -> dict[str, Any]:
    return {
        "output_dir": str(store / "output"),
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }


def train(
    store: Path, dataset: str, max_steps: int
) -> tuple[list[dict[str, float]], list[dict[str, Any]], Any]:
    """On this rank: what was logged at each step, the inputs of the model, its weights."""
    trainer = Observed(
        model=tiny(),
        processing_class=AutoTokenizer.from_pretrained(store / "tokenizer"),
        args=config(**options(store), max_steps=max_steps, save_steps=2),
        stream={"source": store, "dataset": dataset},
    )
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return history, trainer.received, trainer.model.state_dict()


def test_trains_as_sft_trainer_does_with_padding(tmp_path: Path) -> None:
    rows = rows_of(4 * MINIBATCH)
    dataset = pack_rows(tmp_path, rows)
    write_tokenizer(tmp_path / "tokenizer", toy.bundle())
    history, received, weights = train(tmp_path, dataset, 4)
    losses, wanted_weights = padded_losses(rows, rows_per_step=MINIBATCH)
    assert [entry["loss"] for entry in history] == pytest.approx(losses, abs=1e-5)
    assert_same_weights(weights, wanted_weights)
    for inputs, batch in zip(received, PackedStream(tmp_path, dataset=dataset), strict=True):
        alone = batch.for_transformers()
        assert inputs.keys() == alone.keys()
        assert torch.equal(inputs["labels"], alone["labels"])
        assert torch.equal(inputs["position_ids"], alone["position_ids"])

    # SFTTrainer itself, on the rows: also what it logs beside the loss is the same.
    model = tiny()
    model.set_attn_implementation("sdpa")
    padded = SFTTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(tmp_path / "tokenizer"),
        args=config(
            **options(tmp_path),
            num_train_epochs=1,
            per_device_train_batch_size=MINIBATCH,
            train_sampling_strategy="sequential",
        ),
        train_dataset=Dataset.from_list(rows),
    )
    padded.train()
    theirs = [entry for entry in padded.state.log_history if "loss" in entry]
    for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
        assert [entry[name] for entry in history] == pytest.approx(
            [entry[name] for entry in theirs], abs=1e-5
        ), name


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    rows = rows_of(8 * MINIBATCH)
    dataset = pack_rows(tmp_path, rows)
    write_tokenizer(tmp_path / "tokenizer", toy.bundle())
    ranks = on_ranks(2, train, tmp_path, dataset, 4)
    wanted, weights = padded_losses(rows, rows_per_step=2 * MINIBATCH)
    assert [entry["loss"] for entry in ranks[0][0]] == pytest.approx(wanted, abs=1e-5)
    for rank, (_, received, found) in enumerate(ranks):
        assert_same_weights(found, weights)
        stream = PackedStream(tmp_path, dataset=dataset, rank=rank, world_size=2)
        assert [inputs["input_ids"][0].tolist() for inputs in received] == [
            batch.input_ids.tolist() for batch in stream
        ]
