"""examples/accelerate_loop.py: the stream's own batches, padding's losses, save_state and load_state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate_loop
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from packs import build_dataset, numbered_packs
from torch.utils.data import DataLoader
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

from trainer_client import PackedBatch, PackedDataset

Run = tuple[list[float], list[list[int]], dict[str, torch.Tensor]]


def run(
    store: Path,
    *,
    dataset: str,
    steps: int,
    resume: Path | None = None,
    save: Path | None = None,
    accumulate: int = 1,
    **options: Any,
) -> Run:
    """On this rank: losses, example ids of the batches that reached the model, weights."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    accelerator = Accelerator(cpu=True)
    model = tiny()
    taken: list[list[int]] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    stream = accelerate_loop.open_stream(accelerator, store, dataset, **options)
    if resume is not None:
        accelerator.load_state(resume)
    with noted(taken):
        losses = accelerate_loop.train(
            accelerator, stream, model, optimizer, steps=steps, accumulate=accumulate
        )
    if save is not None:
        accelerator.save_state(save)
    stream.close()
    return losses, taken, accelerator.unwrap_model(model).state_dict()


class noted:  # noqa: N801
    """Notes the batches that the loop turns into a model's arguments."""

    def __init__(self, taken: list[list[int]]) -> None:
        self.taken = taken
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        given: Callable[..., Any] = PackedBatch.for_transformers

        def noting(batch: PackedBatch, **options: Any) -> dict[str, Any]:
            self.taken.append(batch.example_ids.tolist())
            return given(batch, **options)

        self.patch.setattr(PackedBatch, "for_transformers", noting)

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def runs(store: Path, phases: list[dict[str, Any]]) -> list[Run]:
    found = [run(store, **phase) for phase in phases]
    PartialState().destroy_process_group()
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_trains_as_padding_does(tmp_path: Path, accumulate: int) -> None:
    rows = rows_of(4 * MINIBATCH)
    dataset = pack_rows(tmp_path, rows)
    losses, taken, weights = run(tmp_path, dataset=dataset, steps=4 // accumulate, accumulate=accumulate)
    wanted, wanted_weights = padded_losses(rows, rows_per_step=accumulate * MINIBATCH)
    assert losses == pytest.approx(wanted, abs=1e-5)
    assert_same_weights(weights, wanted_weights)
    assert joined(taken) == list(range(len(rows)))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_dataset_trains_as_padding_does(tmp_path: Path, accumulate: int) -> None:
    rows = rows_of(4 * STEP_SIZE)
    dataset = pack_rows(tmp_path, rows, **STEPS)
    losses, taken, weights = run(tmp_path, dataset=dataset, steps=4 // accumulate, accumulate=accumulate)
    wanted, wanted_weights = padded_losses(rows, rows_per_step=accumulate * STEP_SIZE)
    assert len(taken) > 4
    assert losses == pytest.approx(wanted, abs=1e-5)
    assert_same_weights(weights, wanted_weights)


def test_a_saved_state_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    dataset = pack_rows(tmp_path, rows_of(4 * MINIBATCH))
    whole = run(tmp_path, dataset=dataset, steps=7)
    one, two = tmp_path / "one", tmp_path / "two"
    before = run(tmp_path, dataset=dataset, steps=3, save=one)
    middle = run(tmp_path, dataset=dataset, steps=2, resume=one, save=two)  # over the end of the epoch
    after = run(tmp_path, dataset=dataset, steps=2, resume=two)
    assert before[0] + middle[0] + after[0] == pytest.approx(whole[0], abs=1e-6)
    assert before[1] + middle[1] + after[1] == whole[1]


@pytest.mark.slow
def test_two_ranks_and_back_to_one(tmp_path: Path) -> None:
    rows = rows_of(8 * MINIBATCH)
    dataset, of_steps = pack_rows(tmp_path, rows), pack_rows(tmp_path, rows, **STEPS)
    saved = tmp_path / "saved"
    phases: list[dict[str, Any]] = [
        {"dataset": dataset, "steps": 4},
        {"dataset": dataset, "steps": 2, "save": saved},
        {"dataset": dataset, "steps": 2, "resume": saved},
        {"dataset": of_steps, "steps": 4},
    ]
    ranks = on_ranks(2, runs, tmp_path, phases)
    wanted, weights = padded_losses(rows, rows_per_step=2 * MINIBATCH)
    for whole, *parts, _ in ranks:
        assert whole[0] == pytest.approx(wanted, abs=1e-5)
        assert_same_weights(whole[2], weights)
        assert joined(part[0] for part in parts) == pytest.approx(wanted, abs=1e-5)
        assert joined(part[1] for part in parts) == whole[1]
    assert sorted(joined(ranks[0][0][1] + ranks[1][0][1])) == list(range(len(rows)))
    for *_, step_wise in ranks:
        assert step_wise[0] == pytest.approx(wanted, abs=1e-5)
        assert_same_weights(step_wise[2], weights)
    alone = run(tmp_path, dataset=dataset, steps=2, resume=saved, packs_per_step=2)
    assert alone[0] == pytest.approx(wanted[2:], abs=1e-5)
    assert joined(alone[1]) == list(range(4 * MINIBATCH, 8 * MINIBATCH))


# ------------------------------------------------------------------ what `prepare` would do


def prepared(store: Path, dataset: str) -> tuple[list[str], list[list[int]]]:
    """What a rank is told of loaders that went through `prepare`, and the packs that it gets from one that
    is made with PackedDataset.loader(), before and after its states were saved and loaded."""
    packed = PackedDataset(store, dataset=dataset, **ranks_of(Accelerator(cpu=True)), transform=ids_of)
    told = []
    for options in ({}, {"dispatch_batches": False}):
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
        for num_workers in (0, 1):
            loader = accelerator.prepare(DataLoader(packed, batch_size=1, num_workers=num_workers))
            try:
                list(loader)
            except RuntimeError as error:
                told.append(str(error))
            loader.end()
    loader = packed.loader()
    assert accelerator.prepare(loader) is loader
    found = [list(loader)]
    accelerator.save_state(store / "saved" / str(accelerator.process_index))
    accelerator.load_state(store / "saved" / str(accelerator.process_index))
    found.append(list(loader))
    PartialState().destroy_process_group()
    return told, found


def ids_of(batch: PackedBatch) -> list[int]:
    return batch.example_ids.tolist()


def ranks_of(accelerator: Accelerator) -> dict[str, int]:
    return {"rank": accelerator.process_index, "world_size": accelerator.num_processes}


@pytest.mark.slow
def test_a_second_split_by_accelerate_is_refused_on_every_rank(tmp_path: Path) -> None:
    """It would read rank 0's part alone and deal it out to both ranks; and the way that goes through."""
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=4)
    ranks = on_ranks(2, prepared, tmp_path, dataset)
    for rank, (told, found) in enumerate(ranks):
        assert len(told) == 4
        for text in told:
            assert f"rank {rank} of 2" in text
            assert "PackedDataset.loader()" in text
        assert found[0] == [[rank], [2 + rank]]
    assert sorted(joined(ranks[0][1][1] + ranks[1][1][1])) == [0, 1, 2, 3]
