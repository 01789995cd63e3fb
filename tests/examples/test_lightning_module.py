"""examples/lightning_module.py: the batches of a training step, padding's losses, Lightning's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning_module
import pytest
import pytorch_lightning as lightning
import torch
import torch.distributed as dist
from packs import commit_partition, finish_dataset, numbered_packs, start_dataset
from training import (
    LEARNING_RATE,
    MINIBATCH,
    STEP_SIZE,
    STEPS,
    assert_same_weights,
    joined,
    on_ranks,
    pack_rows,
    padded_losses,
    rows_of,
    tiny,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Run = tuple[list[float], list[list[int]], dict[str, torch.Tensor]]


class Noting(lightning.Callback):
    """Notes losses and the example ids of each batch that was trained."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.taken: list[list[int]] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: dict[str, torch.Tensor], batch: Any, index: int
    ) -> None:
        self.losses.append(outputs["loss"].item())
        self.taken.append(batch.example_ids.tolist())


def run(
    store: Path,
    *,
    dataset: str,
    steps: int,
    resume: Path | None = None,
    save: Path | None = None,
    **options: Any,
) -> Run:
    """On this rank."""
    noting, model = Noting(), tiny()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        strategy="ddp" if dist.is_initialized() else "auto",
        max_steps=steps,
        max_epochs=-1,
        callbacks=[noting],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = lightning_module.PackedData(source=store, dataset=dataset, **options)
    trainer.fit(lightning_module.Module(model, LEARNING_RATE), data, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return noting.losses, noting.taken, model.state_dict()


def test_trains_as_padding_does(tmp_path: Path) -> None:
    rows = rows_of(4 * MINIBATCH)
    dataset = pack_rows(tmp_path, rows)
    losses, taken, weights = run(tmp_path, dataset=dataset, steps=4)
    wanted, wanted_weights = padded_losses(rows, rows_per_step=MINIBATCH)
    assert losses == pytest.approx(wanted, abs=1e-5)
    assert_same_weights(weights, wanted_weights)
    assert joined(taken) == list(range(len(rows)))


def test_a_step_dataset_trains_as_padding_does(tmp_path: Path) -> None:
    rows = rows_of(4 * STEP_SIZE)
    dataset = pack_rows(tmp_path, rows, **STEPS)
    losses, taken, weights = run(tmp_path, dataset=dataset, steps=4)
    wanted, wanted_weights = padded_losses(rows, rows_per_step=STEP_SIZE)
    assert len(taken) > 4  # micro-batches
    assert sum(losses) == pytest.approx(sum(wanted), abs=1e-5)
    assert_same_weights(weights, wanted_weights)


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    dataset = pack_rows(tmp_path, rows_of(4 * MINIBATCH))
    whole = run(tmp_path, dataset=dataset, steps=11)
    saved = [tmp_path / f"{number}.ckpt" for number in range(3)]
    parts = [
        run(tmp_path, dataset=dataset, steps=3, save=saved[0]),
        run(tmp_path, dataset=dataset, steps=5, resume=saved[0], save=saved[1]),  # over the end of the epoch
        run(tmp_path, dataset=dataset, steps=8, resume=saved[1], save=saved[2]),  # to the end of one
        run(tmp_path, dataset=dataset, steps=11, resume=saved[2]),
    ]
    assert joined(part[1] for part in parts) == whole[1]
    assert joined(part[0] for part in parts) == pytest.approx(whole[0], abs=1e-6)


def test_f32_while_packing_runs_the_batch_taken_ahead_is_not_lost(tmp_path: Path) -> None:
    """Without a length Lightning takes one batch ahead of the training."""
    packs = numbered_packs(6)
    dataset = start_dataset(tmp_path, identity="growing")
    commit_partition(tmp_path, dataset, 0, packs[:4], packs_per_shard=2)
    saved = tmp_path / "saved.ckpt"
    before = run(tmp_path, dataset=dataset, steps=2, save=saved)
    commit_partition(tmp_path, dataset, 1, packs[4:], packs_per_shard=2)
    finish_dataset(tmp_path, dataset, 2, packs)
    after = run(tmp_path, dataset=dataset, steps=6, resume=saved)
    assert before[1] + after[1] == [[number] for number in range(6)]


# ------------------------------------------------------------------ two ranks


def runs(store: Path, phases: list[dict[str, Any]]) -> list[Run]:
    dist.init_process_group("gloo")
    found = [run(store, **phase) for phase in phases]
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_two_ranks_and_back_to_one(tmp_path: Path) -> None:
    rows = rows_of(8 * MINIBATCH)
    dataset, of_steps = pack_rows(tmp_path, rows), pack_rows(tmp_path, rows, **STEPS)
    saved = tmp_path / "saved.ckpt"
    phases: list[dict[str, Any]] = [
        {"dataset": dataset, "steps": 4},
        {"dataset": dataset, "steps": 2, "save": saved},
        {"dataset": dataset, "steps": 4, "resume": saved},
        {"dataset": of_steps, "steps": 4},
    ]
    ranks = on_ranks(2, runs, tmp_path, phases)
    wanted, weights = padded_losses(rows, rows_per_step=2 * MINIBATCH)
    for whole, *parts, _ in ranks:
        assert_same_weights(whole[2], weights)
        assert joined(part[1] for part in parts) == whole[1]
    of_both = [one + two for one, two in zip(ranks[0][0][0], ranks[1][0][0], strict=True)]
    assert of_both == pytest.approx(wanted, abs=1e-5)
    assert sorted(joined(ranks[0][0][1] + ranks[1][0][1])) == list(range(len(rows)))
    for *_, step_wise in ranks:
        assert len(step_wise[0]) > 4
        assert_same_weights(step_wise[2], weights)
    total = sum(joined(rank[-1][0] for rank in ranks))
    assert total == pytest.approx(sum(wanted), abs=1e-5)
    alone = run(tmp_path, dataset=dataset, steps=4, resume=saved, packs_per_step=2)
    assert alone[0] == pytest.approx(wanted[2:], abs=1e-5)
    assert joined(alone[1]) == list(range(4 * MINIBATCH, 8 * MINIBATCH))
