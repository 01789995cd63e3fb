"""An index is made once, and used again only while all that it says is so."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packing_job import spec_of, write_rows, write_tokenizer

from packer import sources
from packer.coordinator import pack
from packer.manifest import Manifest
from packer.resolve import resolve
from packer.runners import InlineRunner
from packer.sources import FileIndex, SourceError, index_input, resolve_inputs
from packer.sources import index as indexing
from packer.spec import InputFile, parse_spec
from packer.store import LocalStore

ROWS = [{"text": f"word {i}"} for i in range(500)]
FORMS = ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.parquet", "a.txt.gz"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The readers of the inputs that were really indexed."""
    seen: list[str] = []

    def counted(reader: str, indexer: Any) -> Any:
        def call(task: Any) -> FileIndex:
            seen.append(reader)
            return indexer(task)

        return call

    for reader, indexer in list(indexing._INDEXERS.items()):
        monkeypatch.setitem(indexing._INDEXERS, reader, counted(reader, indexer))
    return seen


def source(tmp_path: Path, name: str) -> InputFile:
    path = tmp_path / name
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if "parquet" in name:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif "csv" in name:
        path.write_text("text\n" + "".join(f"{row['text']}\n" for row in ROWS))
    elif name.endswith("gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(json.dumps(ROWS) if name == "a.json" else lines)
    (input,), _ = resolve_inputs([str(path)], roots=None)
    return input


def index(input: InputFile, store: LocalStore, **other: Any) -> FileIndex:
    options = {"work_key": "work/0", "random_access": True, "fields": {"text": "text"}, **other}
    return index_input(input, store=store, **options)


def same(one: FileIndex, other: FileIndex) -> bool:
    return one.file == other.file and np.array_equal(one.marks, other.marks)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_second_call_takes_the_index_of_the_first(
    tmp_path: Path, calls: list[str], name: str, shuffled: bool
) -> None:
    store, input = LocalStore(tmp_path / "store"), source(tmp_path, name)
    first = index(input, store, random_access=shuffled)
    assert same(first, index(input, store, random_access=shuffled))
    assert len(calls) == 1


def test_another_use_or_place_or_content_is_another_index(tmp_path: Path, calls: list[str]) -> None:
    store, input = LocalStore(tmp_path / "store"), source(tmp_path, "a.csv")
    index(input, store)
    for other in (
        {"random_access": False},
        {"fields": {"text": "text", "labels": "id"}},
        {"work_key": "work/1"},
        {"max_row_bytes": 100_000},
    ):
        index(input, store, **other)
    assert len(calls) == 5
    (tmp_path / "a.csv").write_text("text\nx\n")
    with pytest.raises(SourceError, match="changed"):
        index(input, store)
    (input,), _ = resolve_inputs([str(tmp_path / "a.csv")], roots=None)
    assert index(input, store).file.num_records == 1


def test_a_touched_input_keeps_its_index_under_its_new_time(tmp_path: Path, calls: list[str]) -> None:
    store, input = LocalStore(tmp_path / "store"), source(tmp_path, "a.jsonl")
    index(input, store)
    os.utime(input.path, ns=(1, 12345))
    assert index(input, store).file.mtime_ns == 12345
    assert len(calls) == 1


@pytest.mark.parametrize("what", ["jsonl", "offsets", "index"])
@pytest.mark.parametrize("damage", ["gone", "short", "other"])
def test_what_is_not_whole_is_made_anew(tmp_path: Path, calls: list[str], what: str, damage: str) -> None:
    store, input = LocalStore(tmp_path / "store"), source(tmp_path, "a.jsonl.gz")
    first = index(input, store)
    (path,) = (tmp_path / "store").rglob(f"*.{what}")
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "short":
        path.write_bytes(whole[:-1])
    else:
        path.write_bytes(whole.replace(b"500", b"400") + b"\n")
    assert same(first, index(input, store))
    assert path.read_bytes() == whole
    assert len(calls) == 2


def test_a_job_that_goes_on_indexes_nothing_again(tmp_path: Path, calls: list[str]) -> None:
    paths = [str(write_rows(tmp_path / f"{i}.jsonl", ROWS)) for i in range(3)]
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    store = LocalStore(tmp_path / "store")
    document = spec_of(paths, tokenizer, packing={"max_tokens": 64}, shuffle_seed=1)
    job = resolve(parse_spec(document), store=store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "cut", Mock(side_effect=KeyboardInterrupt))  # as if killed when all is indexed
        with pytest.raises(KeyboardInterrupt):
            pack(job, store, InlineRunner())
    assert len(calls) == 3
    report = pack(job, store, InlineRunner())
    assert len(calls) == 3
    assert report["rows_packed"] == 1500
    again = LocalStore(tmp_path / "again")
    pack(resolve(parse_spec(document), store=again), again, InlineRunner())
    digests = []
    for one in (store, again):
        manifest = Manifest(one, job.dataset)
        manifest.refresh()
        digests.append([shard.sha256 for shard in manifest.shards])
    assert digests[0] == digests[1]
    assert not list((tmp_path / "store").rglob("*.index"))  # gone with the work folder
