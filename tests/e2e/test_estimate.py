"""`padfree estimate` beside `padfree pack`: the same rows left out, the same packs and tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packing_job import write_rows, write_tokenizer

from padfree.cli import main

LONG = [
    ["--overlong", "truncate"],
    ["--overlong", "truncate", "--truncate-side", "left"],
    ["--overlong", "split"],
    ["--overlong", "split", "--min-piece", "5"],
    ["--overlong", "drop"],
    ["--strategy", "sequential"],
    ["--strategy", "wrapped"],
    ["--strategy", "minibatch", "--minibatch-size", "4", "--max-tokens", "40"],
    ["--strategy", "step", "--step-size", "8", "--minibatch-size", "8"],
    ["--scope", "global", "--shuffle-seed", "none"],
]


def prompts(count: int) -> list[dict[str, str]]:
    """Prompts of up to 40 words, with completions of up to 10."""
    numbers = np.random.default_rng(5)
    sizes = numbers.integers(1, 40, (count, 2)).tolist()
    return [{"prompt": " ".join("a" * a), "completion": " ".join("b" * (b // 4 + 1))} for a, b in sizes]


def ready(count: int) -> list[dict[str, list[int]]]:
    """Ready ids that train a token or two somewhere, or none."""
    numbers = np.random.default_rng(6)
    rows = []
    for length in numbers.integers(1, 60, count).tolist():
        labels = [-100] * length
        for at in numbers.integers(0, length, 2).tolist():
            labels[at] = 5
        rows.append({"input_ids": [5] * length, "labels": labels})
    return rows


def said(capsys: pytest.CaptureFixture[str], verb: str, *args: Any) -> Any:
    """What a verb answers with --json."""
    capsys.readouterr()
    assert main([verb, *map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def compare(capsys: pytest.CaptureFixture[str], store: Path, options: list[Any], packed_by: str) -> None:
    found = said(capsys, "estimate", *options, "--store", store)
    row = next(row for row in found["rows"] if row["name"] == packed_by)
    report = said(capsys, "pack", *options, "--store", store)["report"]
    assert row["tokens_dropped"] == report["tokens_dropped"]
    assert found["num_tokens"] == report["tokens_in"]
    assert found["rows_in"] == report["rows_in"]
    for name in ("num_packs", "tokens_packed", "rows_untrained"):
        assert row[name] == report[name], name
    assert row["fill"] == pytest.approx(report["fill"])
    if "truncate" in options and "left" not in options:
        assert report["rows_untrained_by_cut"] > 0
    if packed_by == "best_fit":
        left = report["rows_packed"] + report["rows_overlong"]
        assert (found["num_examples"], found["volume_packs"]) == (left, report["lower_bound_packs"])


def strategy_of(options: list[str]) -> str:
    return options[1] if options[0] == "--strategy" else "best_fit"


@pytest.mark.parametrize("options", LONG, ids=" ".join)
def test_rows_that_train_nothing_are_left_out_of_an_estimate_as_of_packing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", prompts(300))
    folder = write_tokenizer(tmp_path / "tokenizer")
    # Behind each other the later of two options counts.
    line = [source, "--tokenizer", folder, "--max-tokens", 24, *options]
    compare(capsys, tmp_path / "store", line, strategy_of(options))
    if options == LONG[0]:
        assert main(["estimate", *map(str, line)]) == 0
        assert "rows more have nothing to train, or nothing after a cut" in capsys.readouterr().out


@pytest.mark.parametrize("options", LONG, ids=" ".join)
def test_of_ready_ids_and_of_a_dataset_an_estimate_is_what_packing_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    source, store = write_rows(tmp_path / "rows.jsonl", ready(300)), tmp_path / "store"
    compare(capsys, store, [source, "--max-tokens", 24, *options], strategy_of(options))
    first = said(capsys, "pack", source, "--max-tokens", 50, "--overlong", "split", "--store", store)
    again = [f"dataset://{first['id']}", "--max-tokens", 24, *options]
    compare(capsys, store, again, strategy_of(options))


def test_partitions_are_estimated_each_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from packer.sources import partitions

    monkeypatch.setattr(
        partitions.cut, "__kwdefaults__", {**partitions.cut.__kwdefaults__, "first_bytes": 4096}
    )
    source = write_rows(tmp_path / "rows.jsonl", ready(300))
    compare(
        capsys, tmp_path / "store", [source, "--max-tokens", 24, "--strategy", "sequential"], "sequential"
    )
