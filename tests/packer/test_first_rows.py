"""First rows that are bad are told by file and line, like any others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from packing_job import Packed, pack_document, spec_of, write_rows, write_tokenizer

from packer.coordinator import PackingFailed
from packer.sources import SourceError

Rows = Sequence[dict[str, Any]]

TEXT = {"text": "a b c"}
PAIR = {"prompt": "a b", "completion": "c d"}
CHAT = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]}
READY = {"input_ids": [1, 2, 3]}


def pack(tmp_path: Path, rows: Rows, **source: Any) -> Packed:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    return pack_document(tmp_path / "store", spec_of(file, tokenizer, source=source))


CASES: list[tuple[str, Rows, dict[str, Any], str]] = [
    ("text", [{"text": 5}, {"text": None}], TEXT, "field text: a text is required, found a number (5)"),
    ("text", [{"text": ["a"]}, {"text": {}}], TEXT, "field text: a text is required, found a list"),
    (
        "prompt_completion",
        [{"prompt": 1.5, "completion": 5}, {"prompt": None, "completion": None}],
        PAIR,
        "field prompt: a text is required, found a number (1.5)",
    ),
    (
        "messages",
        [{"messages": 5}, {"messages": None}],
        CHAT,
        "field messages: a list of messages is required, found a number (5)",
    ),
    (
        "messages",
        [{"messages": {"role": "user"}}, {"messages": [5]}],
        CHAT,
        "field messages: a list of messages is required, found an object",
    ),
    (
        "tokens",
        [{"input_ids": 5}, {"input_ids": None}],
        READY,
        "field input_ids: a list of whole numbers is required, found a number (5)",
    ),
    (
        "tokens",
        [{"input_ids": "a b"}, {"input_ids": None}],
        READY,
        "field input_ids: a list of whole numbers is required, found a text",
    ),
]


@pytest.mark.parametrize(("format", "bad", "good", "reason"), CASES)
@pytest.mark.parametrize("asked", [True, False])
def test_first_rows_of_a_wrong_type_are_rejected_each_by_itself(
    tmp_path: Path, format: str, bad: Rows, good: dict[str, Any], reason: str, asked: bool
) -> None:
    rows, named = [*bad, good], {"format": format} if asked else {}
    found = pack(tmp_path, rows, on_bad_row="skip", **named)
    assert (found.report["rows_in"], found.report["rows_rejected"], found.report["rows_packed"]) == (3, 2, 1)
    told = [(Path(row["file"]).name, row["line"]) for row in found.report["rejected"]]
    assert told == [("rows.jsonl", 1), ("rows.jsonl", 2)]
    assert found.report["rejected"][0]["reason"] == reason
    with pytest.raises(PackingFailed) as raised:
        pack(tmp_path, rows, **named)
    assert f"rows.jsonl, line 1: {reason}. Correct the row" in str(raised.value)


@pytest.mark.parametrize(("format", "bad", "good", "reason"), CASES)
def test_so_are_rows_that_are_all_bad(
    tmp_path: Path, format: str, bad: Rows, good: dict[str, Any], reason: str
) -> None:
    found = pack(tmp_path, bad, on_bad_row="skip", format=format)
    assert (found.report["rows_rejected"], found.report["rows_packed"]) == (2, 0)
    assert found.report["rejected"][0]["reason"] == reason


def test_what_no_format_fits_is_told_with_its_type(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"found 'text' \(a number\), 'body'; name yours"):
        pack(tmp_path, [{"text": 5, "body": "x"}])


@pytest.mark.parametrize(
    ("format", "told"),
    [
        ("messages", r"required is the field messages; found 'body'"),
        ("text", r"required is the field text; found 'body'"),
        ("tokens", r"required is the field input_ids \(tokens\); found 'body'"),
        ("prompt_completion", r"required are the fields prompt and completion \(prompt_completion\); found"),
        (
            "auto",
            r"are the fields messages; or input_ids \(tokens\); or prompt and .*; or text; found",
        ),
    ],
)
def test_names_are_not_said_twice(tmp_path: Path, format: str, told: str) -> None:
    with pytest.raises(SourceError, match=told):
        pack(tmp_path, [{"body": "x"}], format=format)


def test_one_empty_file_is_one_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no record in the input file; give"):
        pack(tmp_path, [])


def test_a_reason_that_asks_needs_no_full_stop(tmp_path: Path) -> None:
    with pytest.raises(PackingFailed, match=r"another tokenizer\? Correct the row"):
        pack(tmp_path, [{"input_ids": [1, 1 << 20]}])
