"""Rows of Parquet files in source order. Where a partition ends the reader stays, for the one that goes on.

A row group is decoded from its beginning. Partitions that begin within one would pass over all that comes
before: a worker that packs them in turn need not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator
from typing import BinaryIO

import pyarrow as pa

from packer.sources import tabular
from packer.sources.streams import changed
from packer.sources.values import RecordFile, Span
from packer.sources.watch import Watch


class _Reader:
    """Rows of a file from a row group on. `row`: which one is the next."""

    def __init__(
        self, file: RecordFile, names: frozenset[str], watch: Watch, opened: BinaryIO, row: int, group: int
    ) -> None:
        self.of = (file.input, file.mtime_ns, names, watch.what)
        self.row = row
        self._batches = _batches(file, names, watch, opened, group)
        self._rest: pa.RecordBatch | None = None  # of a batch that was not given whole

    def take(self, start: int, stop: int) -> pa.RecordBatch | None:
        """The next batch of rows, from `start` (not before `row`) to `stop`; None where the file ended."""
        while True:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                return None
            begin, end = self.row, self.row + batch.num_rows
            self.row = min(end, stop)
            self._rest = batch.slice(self.row - begin) if self.row < end else None
            if start < self.row:
                return batch.slice(max(0, start - begin), self.row - max(start, begin))

    def close(self) -> None:
        self._batches.close()


def _batches(
    file: RecordFile, names: frozenset[str], watch: Watch, opened: BinaryIO, group: int
) -> Generator[pa.RecordBatch, None, None]:
    with (
        os.fdopen(os.dup(opened.fileno()), "rb") as mine,  # `opened` is closed with its span
        tabular.open_table(file.input.path, mine, file.input.reader) as table,
    ):
        schema = table.schema_arrow
        columns = [*tabular.columns_in_use(schema, names), *watch.columns(schema)]
        yield from tabular.record_batches(table, columns, group)


class _Kept(threading.local):
    reader: _Reader | None = None


_kept = _Kept()


def read_rows(
    span: Span, opened: BinaryIO, names: frozenset[str], watch: Watch
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The span's rows in batches, each with the ordinal of its first; columns alone that `names` mean, or
    that are watched.

    Raises SourceError, also where the file has fewer rows.
    """
    begin, group, _ = span.mark
    reader, _kept.reader = _kept.reader, None
    key = (span.file.input, span.file.mtime_ns, names, watch.what)
    if reader is not None and not (reader.of == key and begin <= reader.row <= span.start):
        reader.close()
        reader = None
    if reader is None:
        reader = _Reader(span.file, names, watch, opened, begin, group)
    ordinal = span.start
    try:
        while ordinal < span.stop:
            batch = reader.take(ordinal, span.stop)
            if batch is None:
                raise changed(span.file.input, f"row {span.stop} is not there any more")
            yield ordinal, batch
            ordinal += batch.num_rows
        if span.stop < span.file.num_records:
            _kept.reader, reader = reader, None
    finally:
        if reader is not None:
            reader.close()
