"""examples/ddp.py on two ranks: the losses of padding, equal steps, and resuming on another world size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ddp
import pytest
import torch
import torch.distributed as dist
from training import (
    LEARNING_RATE,
    MINIBATCH,
    STEP_SIZE,
    STEPS,
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
    fsdp: bool,
    *,
    dataset: str,
    steps: int,
    resume: Path | None = None,
    save: Path | None = None,
    **options: Any,
) -> Run:
    """On one rank: losses, example ids of each batch that the loop took, the whole weights (rank 0)."""
    model = ddp.distributed(tiny(), fsdp=fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    stream = Recorded(store, dataset=dataset, epochs=None, **ranks, **options)
    if resume is not None:
        ddp.load(resume, model, optimizer, stream)
    losses = ddp.train(stream, model, optimizer, steps=steps)
    if save is not None:
        ddp.save(save, model, optimizer, stream)
    weights, _ = ddp.get_state_dict(model, optimizer, options=ddp.WHOLE)
    return losses, stream.taken, weights


def runs(store: Path, fsdp: bool, phases: list[dict[str, Any]]) -> list[Run]:
    dist.init_process_group("gloo")
    found = [run(store, fsdp, **phase) for phase in phases]
    dist.destroy_process_group()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_ranks_train_as_padding_does(tmp_path: Path, fsdp: bool) -> None:
    rows = rows_of(8 * MINIBATCH)
    wanted, weights = padded_losses(rows, rows_per_step=2 * MINIBATCH)
    assert STEP_SIZE == 2 * MINIBATCH
    phases = [
        {"dataset": pack_rows(tmp_path, rows), "steps": 4},
        {"dataset": pack_rows(tmp_path, rows, **STEPS), "steps": 4},
    ]
    first, second = on_ranks(2, runs, tmp_path, fsdp, phases)
    for one, two in zip(first, second, strict=True):
        assert one[0] == two[0] == pytest.approx(wanted, abs=1e-5)
        assert_same_weights(one[2], weights)
        # As many batches on each rank, each example once.
        assert len(one[1]) == len(two[1])
        seen = [example for example in joined(one[1] + two[1]) if example >= 0]
        assert sorted(seen) == list(range(len(rows)))
    assert [len(batch) for batch in first[0][1] + second[0][1]] == 8 * [MINIBATCH]
    # Micro-batches: more batches than optimiser steps, and a rank that had none left took part.
    assert len(first[1][1]) > 4
    assert [-1] in second[1][1]


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
    ranks = on_ranks(2, runs, tmp_path, fsdp, [{"dataset": dataset, **phase} for phase in phases])
    for whole, *parts in ranks:
        assert joined(part[0] for part in parts) == pytest.approx(whole[0], abs=1e-5)
        assert joined(part[1] for part in parts) == whole[1]
    # One rank that takes both packs of a step is the same training.
    elastic = {"dataset": dataset, "steps": 4, "resume": saved, "packs_per_step": 2}
    ((alone,),) = on_ranks(1, runs, tmp_path, fsdp, [elastic])
    assert alone[0] == pytest.approx(ranks[0][0][0][3:], abs=1e-5)
    both = [one + two for one, two in zip(ranks[0][0][1], ranks[1][0][1], strict=True)]
    assert alone[1] == both[3:]


@pytest.mark.slow
def test_the_script_under_torchrun(tmp_path: Path) -> None:
    """As the manual has it: run, and run again."""
    dataset = pack_rows(tmp_path, rows_of(4 * MINIBATCH))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [ddp.__file__, "--url", str(tmp_path), "--dataset", dataset, "--steps", "2"]
    script += ["--vocab-size", "97", "--checkpoint", str(tmp_path / "run.pt")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for epoch in (1, 2):
        done = subprocess.run(
            torchrun + script, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "2 steps, loss" in done.stdout
        assert torch.load(tmp_path / "run.pt")["stream"]["epoch"] == epoch
    script[script.index("97")] = "8"
    script[-2:] = []
    done = subprocess.run(
        torchrun + script, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode != 0
    assert "ValueError: --vocab-size: " in done.stderr
