"""What holds for every source: no record lost, none twice, the same order however it is cut."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reading import Read, read_source

from packer.sources import FileIndex, RecordFile, SourceError, cut
from packer.sources.lines import BOM, LineIndexer, TooLong, read_lines
from packer.sources.values import MARK, OFFSET
from packer.spec import InputFile

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
RECORDS = st.lists(st.fixed_dictionaries({"text": TEXTS, "other": VALUES}), min_size=1, max_size=40)
SIZES = st.tuples(st.integers(1, 300), st.integers(1, 600))


def write(folder: Path, form: str, records: list[dict[str, Any]], ascii_only: bool, group_rows: int) -> Path:
    path = folder / f"data.{form}"
    lines = "".join(json.dumps(record, ensure_ascii=ascii_only) + "\n" for record in records).encode()
    if form == "jsonl":
        path.write_bytes(lines)
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif form == "jsonl.zst":
        path.write_bytes(zstandard.compress(lines))
    elif form == "json":
        path.write_text(json.dumps(records, ensure_ascii=ascii_only, indent=1), encoding="utf-8", newline="")
    else:
        table = pa.table({"text": [record["text"] for record in records]})
        pq.write_table(table, path, row_group_size=group_rows)
    return path


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst", "json", "parquet"])
@settings(max_examples=40)
@given(
    records=RECORDS,
    sizes=SIZES,
    ascii_only=st.booleans(),
    rows=st.integers(1, 10),
    seed=st.integers(0, 2**32),
)
def test_records_come_back_in_order_and_shuffled_as_one_permutation(
    form: str, records: list[dict[str, Any]], sizes: tuple[int, int], ascii_only: bool, rows: int, seed: int
) -> None:
    fields = {"text": "text"}
    wanted = [{"text": record["text"]} for record in records]
    small = {"first_bytes": sizes[0], "max_bytes": sizes[1]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write(folder, form, records, ascii_only, rows)
        out = read_source(path, folder / "store", fields=fields, cutting=small)
        assert out.rows == wanted
        assert out.ids == list(range(len(records)))
        shuffled = read_source(path, folder / "store", fields=fields, cutting=small, seed=seed)
        again = read_source(path, folder / "store", fields=fields, seed=seed)
        assert shuffled.ids == again.ids
        assert sorted(shuffled.ids) == out.ids
        assert shuffled.rows == again.rows == [wanted[i] for i in shuffled.ids]


@settings(max_examples=100)
@given(records=st.lists(VALUES, min_size=1, max_size=20))
def test_any_json_value_is_a_record_or_a_named_error(records: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = {"messages": "x"}
        (folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [first, *records]))
        (folder / "b.json").write_text(json.dumps([first, *records]))
        for path in (folder / "a.jsonl", folder / "b.json"):
            out = read_source(path, folder / "store")
            good = [i for i, record in enumerate(records, 1) if isinstance(record, dict)]
            assert out.ids == [0, *good]
            assert [e.example_id for e in out.errors] == [
                i for i in range(1, len(records) + 1) if i not in good
            ]
            assert [e.line for e in out.errors] == [e.example_id + 1 for e in out.errors]


PARTS = [
    b'{"text":',
    b'"a"',
    b"}",
    b"[",
    b"]",
    b",",
    b"\n",
    b"\r",
    b'"',
    b"text",
    b"\\",
    b"\xff",
    b" ",
    b"1",
    b"!",
    BOM,
    b"\0",
]
STARTS = {"jsonl": b'{"text":"a"}\n', "json": b'[{"text":"a"}', "csv": b"text,b\na,b\n", "txt": b""}


@settings(max_examples=400)
@given(
    data=st.lists(st.sampled_from(PARTS), max_size=25).map(b"".join) | st.binary(max_size=200),
    seed=st.none() | st.integers(0, 9),
    form=st.sampled_from(list(STARTS)),
    start=st.booleans(),
)
@example(data=b"\r\x00", seed=None, form="csv", start=False)
@example(data=b"\r", seed=None, form="csv", start=False)
def test_any_bytes_are_read_or_refused_clearly(data: bytes, seed: int | None, form: str, start: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / f"a.{form}").write_bytes(STARTS[form] * start + data)
        refused, out = "", Read()
        try:
            out = read_source(folder / f"a.{form}", folder / "store", seed=seed)
        except SourceError as error:
            refused = str(error)
        ids = out.ids + [error.example_id for error in out.errors]
        assert sorted(ids) == list(range(len(ids)))
        assert not refused or f"a.{form}" in refused
        assert not refused or not list(folder.rglob("store/**/*.jsonl"))


# ------------------------------------------------------------------ lines

PIECES = st.lists(
    st.sampled_from([b"{", b"x", b" ", b"\t", b"\r", b"\n", b"\n\n", BOM, b"\xe2\x80\xa8"]), max_size=60
)


def reference(data: bytes) -> list[tuple[int, int, bytes]]:
    """(offset, line, content) of each record, the slow way."""
    out, at = [], 0
    for number, line in enumerate(data.split(b"\n"), 1):
        start = at
        at += len(line) + 1
        if number == 1 and line.startswith(BOM):
            start, line = start + 3, line[3:]
        if line.strip():
            out.append((start, number, line))
    return out


@settings(max_examples=300)
@given(pieces=PIECES, cuts=st.lists(st.integers(3, 20), max_size=40))
@example(pieces=[BOM], cuts=[])
@example(pieces=[b" ", b" ", b" ", b"x"], cuts=[3])
def test_records_are_found_however_the_blocks_fall(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"".join(pieces)
    offsets = io.BytesIO()
    indexer = LineIndexer(offsets)
    stream = io.BytesIO(data)
    for size in [*cuts, len(data) + 1]:
        if block := stream.read(size):
            indexer.feed(block)
    marks = indexer.finish()
    wanted = reference(data)
    found = np.frombuffer(offsets.getvalue(), OFFSET)
    assert found[:-1].tolist() == [(offset, line) for offset, line, _ in wanted]
    assert found[-1]["offset"] == len(data)
    assert indexer.num_records == len(wanted)
    first = [(0, wanted[0][0], 0, wanted[0][0], wanted[0][1])] if wanted else []
    assert marks.tolist() == first


@settings(max_examples=300)
@given(pieces=PIECES, block=st.integers(1, 50), limit=st.integers(1, 30))
def test_lines_are_whole_or_told_to_be_too_long(pieces: list[bytes], block: int, limit: int) -> None:
    data = b"".join(pieces)
    lines = [
        line for lines in read_lines(io.BytesIO(data), max_bytes=limit, block_bytes=block) for line in lines
    ]
    wanted = data.split(b"\n")
    if not wanted[-1]:
        wanted.pop()
    assert len(lines) == len(wanted)
    for line, content in zip(lines, wanted, strict=True):
        if len(content) > limit:
            assert isinstance(line, TooLong)
            assert line.num_bytes == len(content)
            assert content.startswith(line.head)
        else:
            assert line == content


# ------------------------------------------------------------------ cut


def index_of(records: list[int]) -> FileIndex:
    """The index of a file with a mark at every record; `records` are their sizes."""
    starts = np.concatenate([[0], np.cumsum(records)]).astype(np.int64)
    marks = np.empty(len(records), MARK)
    marks["ordinal"] = marks["begin"] = np.arange(len(records))
    marks["offset"] = starts[:-1]
    marks["line"], marks["num_bytes"] = np.arange(len(records)) + 1, starts[:-1]
    input = InputFile(path="a.jsonl", num_bytes=int(starts[-1]), digest="d", reader="jsonl")
    file = RecordFile(
        input=input,
        layout="lines",
        unit="line",
        num_records=len(records),
        num_bytes=int(starts[-1]),
        mtime_ns=0,
    )
    return FileIndex(file=file, marks=marks)


@settings(max_examples=300)
@given(
    sources=st.lists(st.lists(st.integers(1, 1000), max_size=50), max_size=6),
    first=st.integers(1, 3000),
    largest=st.integers(1, 9000),
    multiple=st.integers(1, 9),
    seed=st.none() | st.integers(0, 99),
)
def test_partitions_cover_all_positions_once(
    sources: list[list[int]], first: int, largest: int, multiple: int, seed: int | None
) -> None:
    indexes = [index_of(sizes) for sizes in sources]
    total = sum(map(len, sources))
    partitions = cut(indexes, shuffle_seed=seed, multiple=multiple, first_bytes=first, max_bytes=largest)
    bounds = [partition.start for partition in partitions] + [total]
    assert [p.stop for p in partitions] == bounds[1:]
    assert bounds[0] == 0
    assert all(low < high for low, high in itertools.pairwise(bounds))
    assert all(bound % multiple == 0 for bound in bounds[:-1])
    assert [p.index for p in partitions] == list(range(len(partitions)))
    if seed is None:
        for partition in partitions:
            ids = [span.first + i for span in partition.spans for i in range(span.start, span.stop)]
            assert ids == list(range(partition.start, partition.stop))
            assert all(span.mark[0] <= span.start for span in partition.spans)


@pytest.mark.parametrize(
    ("total", "sizes"),
    [
        (400, [1, 2, 4, 8, 16, *[25] * 13, 44]),  # a sixteenth at most, so that workers share it
        (2000, [1, 2, 4, 8, 16, 32, *[64] * 29, 81]),  # and never more than 64 MiB
    ],
)
def test_the_first_partitions_are_small_and_grow(total: int, sizes: list[int]) -> None:
    mib = 1 << 20
    for seed in (None, 1):
        partitions = cut([index_of([mib] * total)], shuffle_seed=seed)
        assert [p.stop - p.start for p in partitions] == sizes
    assert cut([index_of([])], shuffle_seed=None) == []
