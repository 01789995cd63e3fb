"""Previews show what packing will do, and warn of what it will be sorry for."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import toy
from packing_job import pack_document, spec_of, write_rows, write_tokenizer

from packer.preview import Preview, preview
from packer.resolve import resolve
from packer.sources import identity
from packer.spec import parse_spec
from packer.store import LocalStore
from packer.tokenization import Bundle

WORDS = [chr(ord("a") + i) for i in range(26)]


def write_as(path: Path, texts: list[str]) -> Path:
    """Texts as a file of the kind that its name says."""
    rows = [{"text": text} for text in texts]
    table = pa.table({"text": texts})
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=200)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, 200)
    else:
        path.write_bytes(
            {
                ".jsonl": lines,
                ".gz": gzip.compress(lines),
                ".json": json.dumps(rows).encode(),
                ".csv": "\n".join(["text", *texts]).encode(),
            }[path.suffix]
        )
    return path


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
    assert any("1 of the first 3 rows (33%) cannot be used" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("rows", "more", "bundle", "warning"),
    [
        (
            [{"text": "a b c d e f g"}],
            {"packing": {"max_tokens": 4}},
            None,
            "1 of the first 1 rows (100%) are longer",
        ),
        ([{"input_ids": [20, 21], "labels": [20, -100]}], {}, None, "train no token"),
        (
            [{"text": "a b"}, {"text": "a b"}],
            {},
            None,
            "rows (50%) have the tokens of an earlier",
        ),
        ([{"text": "a"}], {}, toy.bundle(eos=False), "will not learn to stop"),
        ([{"text": "a"}, {"text": ""}], {}, None, "1 of the first 2 rows (50%) have no tokens"),
        (
            [{"text": "a"}] * 300 + [{"text": 1}],
            {},
            None,
            "301 rows (under 1%) cannot be used",
        ),
        (
            [toy.chat(("user", "a"), ("assistant", "b"))],
            {},
            toy.bundle(chat_template=toy.T1_UNMARKED_PROMPT),
            "no {% generation %} markers",
        ),
        ([{"input_ids": [1, 1, 20, 2]}], {}, None, "begin with two BOS"),
        (
            [{"input_ids": [20] * 9}] * 3,
            {"packing": {"strategy": "minibatch", "minibatch_size": 2, "max_tokens": 16}},
            None,
            "1 of the first 2 mini-batches of 2 rows (in source order) take more than a pack holds "
            "(16 tokens), the largest 18",
        ),
        ([toy.chat(("user", "a"), ("assistant", "b"))], {}, toy.bundle(chat_template=toy.T2), "outside its"),
    ],
)
def test_warnings(
    tmp_path: Path, rows: list[Any], more: dict[str, Any], bundle: Bundle | None, warning: str
) -> None:
    found, _ = previewed(tmp_path, rows, bundle=bundle, **more)
    assert any(warning in text for text in found.warnings), found.warnings


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.parquet", "a.arrow"])
def test_no_more_is_read_than_the_first_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(identity, "content_digests", None)  # which reads all
    texts = [f"{WORDS[number % 26]} w{100 + number % 300} b" for number in range(1500)]
    path = write_as(tmp_path / name, texts)
    document = spec_of([str(path), str(path)], write_tokenizer(tmp_path / "tokenizer"))
    store = LocalStore(tmp_path / "preview")
    found = preview(resolve(parse_spec(document), store=store, identify=False), store, 3)
    assert found.num_rows == 1000
    assert [one.example for one in found.examples] == [0, 1, 2]
    assert ["".join(token.text for token in one.tokens) for one in found.examples] == [
        f"{text.replace(' ', '')}<eos>" for text in texts[:3]
    ]
    used = sum(file.stat().st_size for file in (tmp_path / "preview" / "work").rglob("*") if file.is_file())
    assert used < 100_000


def test_a_damaged_end_is_not_seen(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    line = json.dumps({"text": "a b " * 3000}).encode() + b"\n"
    data = gzip.compress(line * 1000)
    path.write_bytes(data[:-5000])  # 12 MB unpacked, of which the end is missing
    store = LocalStore(tmp_path / "preview")
    document = spec_of(path, write_tokenizer(tmp_path / "tokenizer"), packing={"max_tokens": 8192})
    job = resolve(parse_spec(document), store=store, identify=False)
    found = preview(job, store, 2, sample_rows=50)
    assert (len(found.examples), found.num_rows) == (2, 50)


def test_examples_of_the_second_file_have_their_ids(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.jsonl", [{"text": "a"}, {"text": 1}])
    second = write_rows(tmp_path / "b.jsonl", [{"text": "b"}, {"text": 2}, {"text": "c"}])
    document = spec_of(
        [str(first), str(second)], write_tokenizer(tmp_path / "tokenizer"), source={"on_bad_row": "skip"}
    )
    store = LocalStore(tmp_path / "preview")
    found = preview(resolve(parse_spec(document), store=store), store, 5)
    packed = pack_document(tmp_path / "store", document)
    assert [one.example for one in found.examples] == [0, 1, 2, 3, 4]
    assert {one.example for one in found.examples if not one.error} == set(packed.segments)
    assert [one.place.rpartition("/")[2] for one in found.examples][1:4] == [
        "a.jsonl, line 2", "b.jsonl, line 1", "b.jsonl, line 2"
    ]  # fmt: skip


def test_of_a_long_example_the_rest_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packer.preview.SHOWN_TOKENS", 3)
    found, _ = previewed(tmp_path, [{"prompt": "a b", "completion": "c d e"}])
    (one,) = found.examples
    assert (one.num_tokens, one.num_trained, len(one.tokens)) == (6, 4, 3)


def test_no_warning_where_all_is_well(tmp_path: Path) -> None:
    found, _ = previewed(tmp_path, [{"text": "a b"}, {"text": "c"}])
    assert found.warnings == []


def test_warnings_name_the_first_places(tmp_path: Path) -> None:
    good, bad = {"prompt": "a", "completion": "b c"}, {"prompt": "a", "completion": 7}
    untrained = {"input_ids": [4, 5, 6], "labels": [-100] * 3}
    found, _ = previewed(tmp_path, [good, bad, good, *4 * [bad]], 1)
    (said,) = [text for text in found.warnings if "cannot be used" in text]
    assert said.startswith("5 of the first 7 rows")
    assert [int(line) for line in re.findall(r"line (\d+)", said)] == [2, 4, 5]  # a few, not all
    assert re.search(r"line 2 \(.*text is required.*\); ", said)  # and why the first
    found, _ = previewed(tmp_path, [{"input_ids": [4, 5, 6], "labels": [4, 5, 6]}, untrained])
    (said,) = [text for text in found.warnings if "train no token" in text]
    assert re.findall(r"line (\d+)", said) == ["2"]


def test_the_command(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b c"}])
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    command = [sys.executable, "-m", "padfree", "pack", str(source), "--tokenizer", str(tokenizer)]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=120)

    shown = run("--preview", "2")
    assert shown.returncode == 0
    assert "a|[b]|[c]|[<eos>]" in shown.stdout
    assert "in [brackets] is trained" in shown.stdout.splitlines()[0]
    found = json.loads(run("--preview", "2", "--json").stdout.splitlines()[-1])
    assert [token["trained"] for token in found["examples"][0]["tokens"]] == [False, True, True, True]
    assert not list(tmp_path.glob("padfree-store*"))
    assert run("--preview", "0").returncode == 2
    assert "no padfree service answers" in run("--preview", "1", "--url", "http://localhost:1").stderr
