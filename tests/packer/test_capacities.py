"""Several capacities in one job, from the spec to the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packing_job import Packed, pack_document, spec_of, write_rows
from packs import build_dataset, pack_of

from packer.report import report
from packer.spec import PackingSpec
from packer.store import LocalStore
from packer.verify import verify_store
from padfree.cli import main
from padfree.cli.flags import with_flags
from trainer_client import PackedStream

CAPACITIES = [64, 128, 512]


def rows_of(num_rows: int, longest: int = 600) -> list[dict[str, Any]]:
    """Ready ids, most of them short; row i begins with i."""
    lengths = np.random.default_rng(1).lognormal(3.5, 1.0, num_rows).astype(int).clip(2, longest)
    return [{"input_ids": [i, *range(1, int(length))]} for i, length in enumerate(lengths)]


@pytest.fixture(scope="module", params=["window", "global", "sequential", "padded"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    folder = tmp_path_factory.mktemp("capacities")
    source = write_rows(folder / "rows.jsonl", rows_of(2000))
    scope = {"scope": request.param} if request.param in ("window", "global") else {}
    strategy = "best_fit" if scope else request.param
    packing = {"max_tokens": CAPACITIES, "strategy": strategy, "pack_multiple": 8, **scope}
    return pack_document(folder / "store", spec_of(source, None, packing=packing, shuffle_seed=0))


def test_the_report_counts_each_capacity_and_adds_up(packed: Packed) -> None:
    found = packed.report
    assert [one["max_tokens"] for one in found["capacities"]] == CAPACITIES
    of_pack = np.array(CAPACITIES)[np.searchsorted(CAPACITIES, [one.num_tokens for one in packed.packs])]
    for one in found["capacities"]:
        assert one["num_packs"] == np.count_nonzero(of_pack == one["max_tokens"]) > 0
        assert one["fill"] == one["num_tokens"] / (one["num_packs"] * one["max_tokens"])
    real = found["tokens_packed"] - found["tokens_padding"]
    assert sum(one["num_packs"] for one in found["capacities"]) == found["num_packs"]
    assert sum(one["num_tokens"] for one in found["capacities"]) == real
    assert found["fill"] == real / of_pack.sum()
    bounds = [-(-one["num_tokens"] // one["max_tokens"]) for one in found["capacities"]]
    assert found["lower_bound_packs"] == sum(bounds)
    assert found["rows_packed"] == 2000
    assert found["rows_truncated"] == sum(len(row["input_ids"]) > 512 for row in rows_of(2000)) > 0


def test_a_commit_of_an_earlier_release_counts_as_of_the_one_capacity() -> None:
    old = {"num_packs": 3, "tokens_packed": 20, "tokens_padding": 2, "tokens_in": 18}
    found = report([old], capacities=(8,))
    assert found["fill"] == 18 / 24
    assert found["capacities"] == [{"max_tokens": 8, "num_packs": 3, "num_tokens": 18, "fill": 18 / 24}]


def test_verify_finds_a_segment_in_too_large_a_pack(tmp_path: Path) -> None:
    fine = [pack_of([range(40), range(24)], [0, 1]), pack_of([range(65)], [2])]
    wrong = pack_of([range(200), range(64)], [3, 4])
    for packs, faults in ((fine, 0), ([*fine, wrong], 1)):
        packing = PackingSpec(max_tokens=(64, 512))
        dataset = build_dataset(tmp_path, packs, packs_per_shard=9, packing=packing)
        assert len(found := verify_store(LocalStore(tmp_path), dataset=dataset).faults) == faults
    assert "one of 512 tokens and holds a segment of 64, which belongs into one of 64" in found[0]


def test_static_batches_have_a_shape_for_each_capacity(packed: Packed) -> None:
    stream = PackedStream(_store(packed), dataset=packed.job.dataset)
    shapes = set()
    for batch in stream:
        inputs = batch.for_transformers(static=True)
        shapes.add(tuple(inputs["input_ids"].shape))
        assert batch.max_tokens == next(c for c in CAPACITIES if batch.num_tokens <= c)
    assert shapes == {(1, number) for number in CAPACITIES}


def test_batches_of_several_packs_have_few_shapes(packed: Packed) -> None:
    found = set()
    for batch in PackedStream(_store(packed), dataset=packed.job.dataset, packs_per_step=4):
        assert batch.max_tokens is not None
        assert batch.num_tokens <= batch.max_tokens
        found.add(batch.max_tokens)
    multiples = {number * times for number in CAPACITIES for times in range(1, 5)}
    assert found <= multiples
    assert len(found) > 2


def _store(packed: Packed) -> Path:
    return Path(packed.job.inputs[0].path).parent / "store"


def test_the_command_takes_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "rows.jsonl", rows_of(200))
    options = [str(source), "--max-tokens", "512,64", "--json"]
    assert main(["estimate", *options]) == 0
    estimated = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert estimated["warnings"] == []
    assert main(["pack", *options, "--workers", "0", "--store", str(tmp_path / "store")]) == 0
    view = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert view["spec"]["packing"]["max_tokens"] == [64, 512]
    rows = {row["name"]: row for row in estimated["rows"]}
    assert rows["sequential"]["problem"] is None
    assert "must be one number" in rows["minibatch"]["problem"]
    assert rows["best_fit (global)"]["num_packs"] <= view["report"]["num_packs"]
    assert main(["pack", *options, "--strategy", "wrapped", "--store", str(tmp_path / "store")]) == 2
    assert 'one number is required under strategy "wrapped"' in capsys.readouterr().err
    assert main(["inspect", view["id"], "--store", str(tmp_path / "store")]) == 0
    assert "fill" in capsys.readouterr().out


def test_an_estimate_warns_of_minibatches_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"input_ids": list(range(3, 3 + length))} for length in (9, 9, 2, 3)]
    source = str(write_rows(tmp_path / "rows.jsonl", rows))
    options = ["estimate", source, "--strategy", "minibatch", "--minibatch-size", "2", "--json"]
    options += ["--shuffle-seed", "none"]  # the estimate looks at rows in the order of the stream
    assert main([*options, "--max-tokens", "12"]) == 0
    said = capsys.readouterr()
    (warning,) = json.loads(said.out)["warnings"]
    assert "1 of 2 mini-batches of 2 rows" in warning
    assert "Raise packing.max_tokens to 18 or more" in warning
    assert with_flags(warning) in said.err
    assert main([*options, "--max-tokens", "18"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
