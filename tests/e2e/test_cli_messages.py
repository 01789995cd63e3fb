"""What the command line says when it is used wrongly: names what was given, and what to type instead."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from packs import build_dataset, numbered_packs
from serving import running

from padfree.cli import main

TOKENIZER = Path(__file__).parents[2] / "examples" / "tokenizer"


def told(capsys: pytest.CaptureFixture[str], *args: Any, status: int) -> str:
    """What the command line says on standard error."""
    assert main([str(one) for one in args]) == status
    return capsys.readouterr().err


@pytest.mark.parametrize("dataset", ["caps", "0" * 32])
def test_a_refused_connection_is_told_at_once(capsys: Any, dataset: str) -> None:
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))  # bound, but nobody listens: refused
        url = f"http://127.0.0.1:{kept.getsockname()[1]}"
        said = told(capsys, "stream", dataset, "--url", url, status=1)
    assert f"no padfree service answers at {url}" in said
    assert "refused" in said


def test_a_url_needs_its_scheme(capsys: Any) -> None:
    said = told(capsys, "stream", "caps", "--url", "localhost:8000", status=2)
    assert "http://localhost:8000" in said
    assert "'localhost:8000'" in said


@pytest.mark.parametrize("verb", ["stream", "inspect"])
def test_an_unknown_dataset_is_named(tmp_path: Path, capsys: Any, verb: str) -> None:
    build_dataset(tmp_path, numbered_packs(3), packs_per_shard=2, name="caps")
    with running(tmp_path) as server:
        said = told(capsys, verb, "cpas", "--url", server.url, status=1)
        assert "'cpas'" in said
        assert f"padfree datasets --url {server.url}" in said
        assert main(["stream", "caps", "--url", server.url]) == 0


def rows_with_bad_ones(folder: Path) -> Path:
    source = folder / "rows.jsonl"
    lines = ['{"text": "some words"}'] * 5 + ['{"text": 7}', "{no JSON", '{"text": "more"}']
    source.write_text("\n".join(lines) + "\n")
    return source


def test_an_estimate_tells_of_rows_that_cannot_be_used(tmp_path: Path, capsys: Any) -> None:
    source = rows_with_bad_ones(tmp_path)
    options = ["estimate", source, "--tokenizer", TOKENIZER, "--max-tokens", 64]
    said = told(capsys, *options, status=1)
    assert "2 rows could not be used, the first is" in said
    assert "rows.jsonl, line 6" in said
    assert "--on-bad-row skip" in said
    assert main([str(one) for one in [*options, "--on-bad-row", "skip", "--json"]]) == 0
    shown = capsys.readouterr()
    assert "2 rows could not be used" in shown.err
    found = json.loads(shown.out.splitlines()[-1])
    assert (found["num_examples"], found["rows_rejected"]) == (6, 2)
    assert [row["line"] for row in found["rejected"]] == [6, 7]


def test_estimate_and_report_say_the_same_of_the_same_rows(tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": "word " * (number % 50)}) + "\n" for number in range(120)))
    options = [source, "--tokenizer", TOKENIZER, "--max-tokens", "16,40,64"]

    def shown(verb: str, *more: Any) -> str:
        assert main([str(one) for one in [verb, *options, *more]]) == 0
        return capsys.readouterr().out

    packed = shown("pack", "--store", tmp_path / "store")
    estimated = shown("estimate")
    (count,) = re.findall(r"the tokens alone need ([\d,]+)", packed)
    assert re.findall(r"the tokens alone need ([\d,]+) packs", estimated) == [count]
    (whole,) = re.findall(r"with whole examples no packer needs fewer than ([\d,]+)", estimated)
    assert int(whole) > int(count)
    for capacity in (16, 40, 64):  # a line each, which add up
        assert re.search(rf"of max_tokens {capacity}: \d+ packs, [\d,]+ tokens, fill 0\.\d+", packed)
    table, _, below = estimated.rpartition("\n\n")
    assert re.search(r"^wrapped( +-){6}$", table, re.MULTILINE)
    assert re.search("^wrapped: .+", below, re.MULTILINE)
