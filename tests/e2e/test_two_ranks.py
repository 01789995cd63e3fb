"""Two ranks fed by one service train as one rank does with the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packs import build_dataset, random_packs
from serving import running
from two_ranks import run

_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["none", "attention"])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _TWO_GPUS])])
def test_two_ranks_take_equal_steps_and_learn_what_one_does(tmp_path: Path, kind: str, balance: str) -> None:
    options: dict[str, Any] = {"kind": kind, "stream": {"balance": balance}}
    dataset = build_dataset(tmp_path / "store", random_packs(41), packs_per_shard=7)
    with running(tmp_path / "store") as server:
        [alone] = run(tmp_path / "one", 1, server.url, dataset, 4, options)
        both = run(tmp_path / "two", 2, server.url, dataset, 2, options)
    assert len(alone["losses"]) == 10  # the 41st pack fills no step
    assert both[0]["losses"] == both[1]["losses"]
    assert both[0]["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    for rank in both:
        torch.testing.assert_close(rank["weights"], alone["weights"], atol=1e-4, rtol=1e-4)
    for step, whole in enumerate(alone["examples"]):
        one, two = (rank["examples"][step] for rank in both)
        assert one
        assert two
        assert sorted(one + two) == sorted(whole)
