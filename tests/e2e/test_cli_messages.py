"""What the command line says when it is used wrongly: names what was given, and what to type instead."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from packing_job import write_rows
from packs import build_dataset, numbered_packs
from serving import running

from packer.runners import InlineRunner
from packer.spec import parse_spec
from padfree.cli import main
from padfree.cli.flags import FLAGS, with_flags
from padfree.cli.spec_options import add_spec_options

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


def test_verify_names_no_option_that_it_does_not_have(tmp_path: Path, capsys: Any) -> None:
    said = told(capsys, "verify", tmp_path / "none", status=2)
    assert "name one with `padfree verify STORE`" in said
    assert "--store" not in said


def test_a_field_the_wrong_way_round_is_shown_as_it_is_typed(tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"question": "a", "answer": "b"}\n')
    said = told(capsys, "pack", source, "--tokenizer", TOKENIZER, "--field", "question=prompt", status=2)
    assert "--field prompt=question" in said


def test_a_format_whose_fields_are_not_there_shows_its_own(tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"question": "a", "answer": "b"}\n')
    options = ["--tokenizer", TOKENIZER, "--format", "messages"]
    said = told(capsys, "pack", source, *options, "--store", tmp_path / "store", status=1)
    assert 'source.fields (--field), for example {"messages": ' in said


def test_a_port_that_is_taken_leaves_no_store_behind(tmp_path: Path, capsys: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ["--port", taken.getsockname()[1], "--store", tmp_path / "store"]
        assert "cannot listen on" in told(capsys, "serve", *options, status=2)
    assert not (tmp_path / "store").exists()


def test_a_preview_says_why_rows_cannot_be_used_and_names_the_option(tmp_path: Path, capsys: Any) -> None:
    options = ["pack", rows_with_bad_ones(tmp_path), "--tokenizer", TOKENIZER, "--preview", "1"]
    assert main([str(one) for one in options]) == 0
    shown = capsys.readouterr().out
    assert "warning: 2 of the first 8 rows" in shown
    assert "source.on_bad_row (--on-bad-row)" in shown
    assert re.search(r"line 6 \(.+\); ", shown)


def test_a_token_comes_without_its_end_of_line_and_is_not_shown(tmp_path: Path, capsys: Any) -> None:
    with running(tmp_path, tokens=("a-secret",)) as server:
        assert main(["datasets", "--url", server.url, "--token", "a-secret\n"]) == 0
        with pytest.raises(SystemExit) as exit:
            main(["datasets", "--url", server.url, "--token", "a-secret\nX-Other: 1"])
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert "--token" in said
    assert "a-secret" not in said


@pytest.mark.parametrize(
    ("options", "words"), [(["--workers", 1], "no Ray starts here"), (["--ray", "h:1"], "at h:1 (--ray)")]
)
def test_a_ray_that_cannot_be_had_is_told(
    tmp_path: Path, capsys: Any, monkeypatch: Any, options: list[Any], words: str
) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("the head has no room")

    monkeypatch.setattr("ray.init", fail)
    source = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1, 2]}])
    said = told(capsys, "pack", source, "--store", tmp_path / "store", *options, status=1)
    assert words in said
    assert "the head has no room" in said
    assert "--workers 0" in said


def test_forgotten_ranks_are_warned_of(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    build_dataset(tmp_path, numbered_packs(8), packs_per_shard=2, name="caps")
    assert main(["stream", "caps", "--store", str(tmp_path), "--rank", "2", "--world-size", "4"]) == 0
    assert "WORLD_SIZE=4" not in caplog.text
    assert main(["stream", "caps", "--store", str(tmp_path)]) == 0
    assert "RANK=2, WORLD_SIZE=4" in caplog.text


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


@pytest.mark.parametrize(
    ("field", "column"), [("messages=conv", "'conv' (for messages)"), ("prompt=questions", "'questions'")]
)
def test_a_column_that_is_not_there_is_named(tmp_path: Path, capsys: Any, field: str, column: str) -> None:
    source = tmp_path / "rows.jsonl"
    row = {"question": "a", "answer": "b", "conversation": [{"role": "user", "content": "a"}]}
    source.write_text(json.dumps(row) + "\n")
    said = told(capsys, "pack", source, "--tokenizer", TOKENIZER, "--field", field, status=1)
    assert column in said
    assert "found 'question', 'answer', 'conversation'" in said
    assert "source.fields (--field)" in said


def test_a_number_that_is_none_says_what_is_required(capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        main(["pack", "rows.jsonl", "--max-tokens", "1k"])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "--max-tokens: a whole number is required" in said
    assert "found '1k'" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-tokens", 0], "packing.max_tokens (--max-tokens):"),
        (["--on-bad-row", "drop"], "source.on_bad_row (--on-bad-row):"),
        (["--loss", "none"], "loss (--loss):"),
        ([], 'or set source.on_bad_row (--on-bad-row) to "skip"'),
    ],
)
@pytest.mark.parametrize("where", ["here", "service"])
def test_errors_name_the_option_beside_the_field(
    tmp_path: Path, capsys: Any, options: list[Any], says: str, where: str
) -> None:
    source = rows_with_bad_ones(tmp_path)
    command = ["pack", source, "--tokenizer", TOKENIZER, *options]
    status = 2 if options else 1
    if where == "here":
        said = told(capsys, *command, "--store", tmp_path / "store", status=status)
    else:
        with running(tmp_path / "store", runner=InlineRunner(), data_roots=(tmp_path, TOKENIZER)) as server:
            said = told(capsys, *command, "--url", server.url, status=status)
    assert says in said


def test_every_field_that_has_an_option_is_known_by_it() -> None:
    document = dataclasses.asdict(parse_spec({"source": {"paths": ["a"]}, "tokenizer": {"path": "b"}}))
    fields = {
        f"{name}.{inner}" if inner else name
        for name, value in document.items()
        for inner in (value if isinstance(value, dict) else [""])
    }
    assert fields - {"tokenizer.revision"} == set(FLAGS)
    parser = argparse.ArgumentParser()
    add_spec_options(parser)
    options = set(re.findall(r"--[a-z-]+", parser.format_help())) - {"--help"}
    assert options == set(FLAGS.values()) - {"SOURCE"}


def test_an_option_is_not_told_twice() -> None:
    text = "raise packing.max_tokens (--max-tokens), see source.on_bad_row and packing.overlong, --overlong"
    assert with_flags(text) == text.replace("on_bad_row", "on_bad_row (--on-bad-row)")


@pytest.mark.parametrize("text", ["/data/source.paths/x", "packing.max_tokens_2", "the loss: 3", "loss of a"])
def test_what_is_no_field_is_left_as_it_is(text: str) -> None:
    assert with_flags(text) == text


def test_a_package_that_is_missing_is_told_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> int:
        raise ModuleNotFoundError("No module", name="uvicorn")

    monkeypatch.setattr("padfree.cli.serve.run", run)
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == (
        "padfree serve: needs the package uvicorn: in padfree's checkout, pip install '.[service]'\n"
    )
