"""Previews show what packing will do, and warn of what it will be sorry for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import toy
from packing_job import pack_document, spec_of, write_rows, write_tokenizer

from packer.bundle import Bundle
from packer.preview import Preview, preview
from packer.resolve import resolve
from packer.spec import parse_spec
from packer.store import LocalStore


def previewed(
    tmp_path: Path, rows: list[Any], count: int = 3, bundle: Bundle | None = None, **more: Any
) -> tuple[Preview, dict[str, Any]]:
    source = write_rows(tmp_path / "rows.jsonl", rows)
    document = spec_of(source, write_tokenizer(tmp_path / "tokenizer", bundle), **more)
    store = LocalStore(tmp_path / "preview")
    return preview(resolve(parse_spec(document), store=store), store, count), document


def test_the_examples_are_the_packed_ones(tmp_path: Path) -> None:
    rows = [toy.chat(("user", "a b"), ("assistant", "c d")), toy.chat(("user", "e"), ("assistant", "f"))] * 3
    found, document = previewed(tmp_path, rows, packing={"max_tokens": 16})
    packed = pack_document(tmp_path / "store", document)
    assert [example.example for example in found.examples] == [0, 1, 2]
    assert found.num_rows == 6
    for example in found.examples:
        ((ids, trained),) = packed.segments[example.example]
        assert [token.id for token in example.tokens] == ids
        assert [token.trained for token in example.tokens] == trained
    assert [token.text for token in found.examples[0].tokens][:3] == ["<bos>", "<usr>", "a"]
    assert found.examples[1].place.endswith("rows.jsonl, line 2")


def test_a_bad_row_stands_in_its_place(tmp_path: Path) -> None:
    rows = [{"text": "a b"}, {"text": 3}, {"text": "c"}]
    found, _ = previewed(tmp_path, rows)
    assert [example.error is None for example in found.examples] == [True, False, True]
    assert "a text is required" in (found.examples[1].error or "")
    assert any("1 of the first 3 rows cannot be used" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("rows", "more", "bundle", "warning"),
    [
        (
            [{"text": "a b c d e f g"}],
            {"packing": {"max_tokens": 4}},
            None,
            "1 of the first 1 rows are longer",
        ),
        ([{"input_ids": [20, 21], "labels": [20, -100]}], {}, None, "train no token"),
        ([{"text": "a b"}, {"text": "a b"}], {}, None, "1 of the first 2 rows have the tokens of an earlier"),
        ([{"text": "a"}], {}, toy.bundle(eos=False), "will not learn to stop"),
        ([{"input_ids": [1, 1, 20, 2]}], {}, None, "begin with two BOS"),
        ([toy.chat(("user", "a"), ("assistant", "b"))], {}, toy.bundle(chat_template=toy.T2), "outside its"),
    ],
)
def test_warnings(
    tmp_path: Path, rows: list[Any], more: dict[str, Any], bundle: Bundle | None, warning: str
) -> None:
    found, _ = previewed(tmp_path, rows, bundle=bundle, **more)
    assert any(warning in text for text in found.warnings), found.warnings


def test_no_warning_where_all_is_well(tmp_path: Path) -> None:
    found, _ = previewed(tmp_path, [{"text": "a b"}, {"text": "c"}])
    assert found.warnings == []


def test_the_command(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b c"}])
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    command = [sys.executable, "-m", "padfree", "pack", str(source), "--tokenizer", str(tokenizer)]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=120)

    shown = run("--preview", "2")
    assert shown.returncode == 0
    assert "a|[b]|[c]|[<eos>]" in shown.stdout
    found = json.loads(run("--preview", "2", "--json").stdout.splitlines()[-1])
    assert [token["trained"] for token in found["examples"][0]["tokens"]] == [False, True, True, True]
    assert not list(tmp_path.glob("padfree-store*"))
    assert run("--preview", "0").returncode == 2
    assert run("--preview", "1", "--url", "http://localhost:1").returncode == 2
