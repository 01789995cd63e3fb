"""Partitions that begin within a row group of Parquet: read in turn each row is decoded once."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packer.sources import SourceError, cut, index_input, resolve_inputs, rowgroups, tabular
from packer.sources.values import Span
from packer.sources.watch import Watch
from packer.store import LocalStore

NUM_ROWS = 3000
NAMES = frozenset({"input_ids"})
NOTHING = Watch({"input_ids": "input_ids"})


def spans_of(tmp_path: Path, num_spans: int = 7, row_group_size: int = 2000) -> list[Span]:
    """Spans of a file of ids (row i holds i), most of which begin within a row group."""
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"input_ids": [[i] for i in range(NUM_ROWS)]}), path, row_group_size=row_group_size
    )
    (one,), _ = resolve_inputs((str(path),), roots=None)
    index = index_input(
        one,
        store=LocalStore(tmp_path / "s"),
        work_key="w",
        random_access=False,
        fields={"input_ids": "input_ids"},
    )
    (partition,) = cut([index], shuffle_seed=None)
    (whole,) = partition.spans
    bounds = [NUM_ROWS * i // num_spans for i in range(num_spans + 1)]
    marks = index.marks
    found = []
    for start, stop in itertools.pairwise(bounds):
        mark = marks[marks["ordinal"] <= start][-1]
        place = (int(mark["begin"]), int(mark["offset"]), int(mark["line"]))
        found.append(dataclasses.replace(whole, start=start, stop=stop, mark=place))
    return found


def rows_in(span: Span) -> list[int]:
    found = []
    with open(span.file.input.path, "rb") as opened:
        for ordinal, batch in rowgroups.read_rows(span, opened, NAMES, NOTHING):
            assert ordinal == span.start + len(found)
            found += [row["input_ids"][0] for row in batch.to_pylist()]
    return found


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each batch that was decoded."""
    counts: list[int] = []
    original = tabular.record_batches

    def counting(*given: object) -> object:
        for batch in original(*given):  # type: ignore[arg-type]
            counts.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(tabular, "record_batches", counting)
    monkeypatch.setattr(tabular, "_NUMBERS_BATCH_ROWS", 64)
    monkeypatch.setattr(rowgroups, "_kept", rowgroups._Kept())
    return counts


def test_each_row_is_decoded_once_by_who_reads_in_turn(tmp_path: Path, decoded: list[int]) -> None:
    spans = spans_of(tmp_path)
    assert [rows_in(span) for span in spans] == [list(range(span.start, span.stop)) for span in spans]
    assert sum(decoded) == NUM_ROWS
    assert rowgroups._kept.reader is None  # nothing comes behind the last


@pytest.mark.parametrize("order", [[6, 5, 4, 3, 2, 1, 0], [0, 2, 4, 6], [1, 3, 5, 0], [2, 2, 2]])
def test_in_any_order_each_span_has_its_rows(tmp_path: Path, decoded: list[int], order: list[int]) -> None:
    spans = spans_of(tmp_path)
    for number in order:
        assert rows_in(spans[number]) == list(range(spans[number].start, spans[number].stop))


def test_what_stays_is_of_the_same_file_and_columns(tmp_path: Path, decoded: list[int]) -> None:
    first, second, *_ = spans_of(tmp_path)
    rows_in(first)
    later = dataclasses.replace(second, file=dataclasses.replace(second.file, mtime_ns=7))
    assert rows_in(later) == list(range(second.start, second.stop))
    assert sum(decoded) > second.stop + 64


def test_a_reader_that_is_left_early_does_not_stay(tmp_path: Path, decoded: list[int]) -> None:
    first, second, *_ = spans_of(tmp_path)
    num_open = len(os.listdir("/proc/self/fd"))
    with open(first.file.input.path, "rb") as opened:
        rows = rowgroups.read_rows(first, opened, NAMES, NOTHING)
        next(rows)
        rows.close()  # type: ignore[attr-defined]
    assert rowgroups._kept.reader is None
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert rows_in(second) == list(range(second.start, second.stop))


def test_rows_that_are_not_there_any_more(tmp_path: Path, decoded: list[int]) -> None:
    *_, last = spans_of(tmp_path)
    with pytest.raises(SourceError, match="row 4000 is not there any more"):
        rows_in(dataclasses.replace(last, stop=4000))
