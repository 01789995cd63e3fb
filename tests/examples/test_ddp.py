"""examples/ddp.py on two ranks: the losses of padding, equal steps, and resuming on another world size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ddp
import pytest
import torch
import torch.distributed as dist
from training import (
    LEARNING_RATE,
    MINIBATCH,
    Recorded,
    assert_same_weights,
    joined,
    on_ranks,
    pack_rows,
    padded_losses,
    rows_of,
    tiny,
)

Run = tuple[list[float], list[list[int]], dict[str, torch.Tensor]]


def run(
    store: Path,
    dataset: str,
    fsdp: bool,
    *,
    steps: int,
    resume: Path | None = None,
    save: Path | None = None,
    **options: Any,
) -> Run:
    """On one rank: losses, example ids of each batch that the loop took, weights of the whole model."""
    model = ddp.distributed(tiny(), fsdp=fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    stream = Recorded(store, dataset=dataset, **ranks, **options)
    if resume is not None:
        ddp.load(resume, model, optimizer, stream)
    losses = ddp.train(stream, model, optimizer, steps=steps)
    if save is not None:
        ddp.save(save, model, optimizer, stream)
    weights, _ = ddp.get_state_dict(model, optimizer, options=ddp.WHOLE)
    return losses, stream.taken, weights


def runs(store: Path, dataset: str, fsdp: bool, phases: list[dict[str, Any]]) -> list[Run]:
    dist.init_process_group("gloo")
    found = [run(store, dataset, fsdp, **phase) for phase in phases]
    dist.destroy_process_group()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_ranks_train_as_padding_does(tmp_path: Path, fsdp: bool) -> None:
    rows = rows_of(8 * MINIBATCH)
    dataset = pack_rows(tmp_path, rows)
    wanted, weights = padded_losses(rows, rows_per_step=2 * MINIBATCH)
    (first,), (second,) = on_ranks(2, runs, tmp_path, dataset, fsdp, [{"steps": 4}])
    assert first[0] == second[0] == pytest.approx(wanted, abs=1e-5)
    assert_same_weights(first[2], weights)
    # Each rank took its own mini-batches, and as many.
    assert [len(batch) for batch in first[1] + second[1]] == 8 * [MINIBATCH]
    assert sorted(joined(first[1] + second[1])) == list(range(len(rows)))


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_a_checkpoint_goes_on_as_if_nothing_had_happened_also_on_one_rank(tmp_path: Path, fsdp: bool) -> None:
    dataset = pack_rows(tmp_path, rows_of(9 * MINIBATCH))  # 4 steps of 2 packs an epoch, and one left over
    saved, again = tmp_path / "saved.pt", tmp_path / "again.pt"
    phases: list[dict[str, Any]] = [
        {"steps": 7},
        {"steps": 3, "save": saved},
        {"steps": 2, "resume": saved, "save": again},  # over the end of the epoch
        {"steps": 2, "resume": again},
    ]
    ranks = on_ranks(2, runs, tmp_path, dataset, fsdp, phases)
    for whole, *parts in ranks:
        assert joined(part[0] for part in parts) == pytest.approx(whole[0], abs=1e-5)
        assert joined(part[1] for part in parts) == whole[1]
    # One rank that takes both packs of a step is the same training.
    elastic = {"steps": 4, "resume": saved, "packs_per_step": 2}
    ((alone,),) = on_ranks(1, runs, tmp_path, dataset, fsdp, [elastic])
    assert alone[0] == pytest.approx(ranks[0][0][0][3:], abs=1e-5)
    both = [one + two for one, two in zip(ranks[0][0][1], ranks[1][0][1], strict=True)]
    assert alone[1] == both[3:]
