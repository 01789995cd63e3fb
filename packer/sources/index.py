"""The one pass over an input that makes it seekable: a runner task a file."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from packer.sources import hubstream, tabular
from packer.sources.convert import LineSpool, open_raw, table_lines
from packer.sources.csvlines import csv_lines
from packer.sources.identity import check_identity
from packer.sources.jsonvalues import is_json_lines, value_lines
from packer.sources.lines import LineIndexer
from packer.sources.packed import READER
from packer.sources.parse import roots
from packer.sources.remote import is_remote
from packer.sources.saved import INDEX_VERSION, load_index, save_index
from packer.sources.segments import index_packed
from packer.sources.streams import (
    BLOCK_BYTES,
    Spool,
    Stream,
    blocks,
    changed,
    open_input,
    open_stream,
    spool,
    spool_key,
)
from packer.sources.values import MARK, MAX_ROW_BYTES, MAX_UNPACKED_BYTES, MIB, FileIndex, RecordFile, Unit
from packer.sources.watch import Watch
from packer.spec import InputFile, What
from packer.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """One call of `index_input`, with what was found out about it."""

    input: InputFile
    store: Store
    work_key: str
    random_access: bool
    names: frozenset[str]  # that columns in use may have
    watch: Watch
    max_unpacked_bytes: int
    max_row_bytes: int
    mtime_ns: int
    max_records: int | None

    def enough(self, num_records: int) -> bool:
        """Whether what was found will do: a record that another follows is whole."""
        return self.max_records is not None and num_records > self.max_records

    def first(self, num_records: int) -> int:
        """How many of the records found are asked for."""
        return num_records if self.max_records is None else min(num_records, self.max_records)

    def key(self, *what: str) -> str:
        return spool_key(self.work_key, self.input, *what)

    @property
    def use(self) -> list[str]:
        """What says which columns are read of a table, for a key."""
        return [*sorted(self.names), *sorted(f"watch {what}" for what in self.watch.what)]

    def columns_of(self, schema: pa.Schema) -> list[str]:
        """The columns of a table to be spooled, and those that are looked at besides."""
        return [*tabular.columns_in_use(schema, self.names), *self.watch.columns(schema)]

    def file(self, **values: Any) -> RecordFile:
        return RecordFile(input=self.input, mtime_ns=self.mtime_ns, **values)

    @property
    def in_place(self) -> bool:
        """Whether workers can read the input itself."""
        return self.input.compression is None and not is_remote(self.input.path)

    def stream(self) -> contextlib.AbstractContextManager[Stream]:
        return open_stream(self.input, max_unpacked_bytes=self.max_unpacked_bytes)

    def spool(self, key: str | None) -> contextlib.AbstractContextManager[Spool | None]:
        return contextlib.nullcontext() if key is None else spool(self.store, key)


def index_input(
    input: InputFile,
    *,
    store: Store,
    work_key: str,
    random_access: bool,
    fields: Mapping[str, str],
    watch: Collection[What] = (),
    max_unpacked_bytes: int = MAX_UNPACKED_BYTES,
    max_row_bytes: int = MAX_ROW_BYTES,
    max_records: int | None = None,
) -> FileIndex:
    """Count an input's records and find where reading can begin; spool what is not seekable.

    Spools and offsets lie under `work_key`, named by content and use; a repeated call writes the same.
    `random_access` is what a shuffle needs: the place of every record. `fields` (our names: names in
    the source) says which columns of a table are in use, `watch` what no record may hold besides: of a table
    that is spooled it is looked for here. Memory is bounded whatever the file's size.
    The index is kept there too, and a later call takes it from there, whoever made it (packer.sources.saved).
    `max_records`: an index of the first records alone, and no more of the input is read than they take (of
    compressed tables all, since they must be unpacked).
    Raises SourceError for a file that is not what it should be, StoreError where the store is full.
    """
    if input.reader == READER:
        return index_packed(input, store=store, work_key=work_key)
    task = _Task(
        input=input,
        store=store,
        work_key=work_key,
        random_access=random_access,
        names=roots(fields),
        watch=Watch(fields, watch),
        max_unpacked_bytes=max_unpacked_bytes,
        max_row_bytes=max_row_bytes,
        mtime_ns=_check_identity(input),
        max_records=max_records,
    )
    limits = (str(max_unpacked_bytes), str(max_row_bytes), str(max_records))
    key = f"{task.key('index', INDEX_VERSION, str(random_access), *limits, *task.use)}.index"
    saved = load_index(store, key, input, task.mtime_ns)
    if saved is not None:
        return saved
    index = _INDEXERS[input.reader](task)
    if _check_identity(input) != task.mtime_ns:
        raise changed(input, "while it was indexed")
    save_index(store, key, index)
    return index


def _check_identity(input: InputFile) -> int:
    """`check_identity`, of whatever kind the input is."""
    if input.reader != hubstream.READER:
        return check_identity(input)
    hubstream.check_stream(input)
    return 0


def _index_lines(task: _Task) -> FileIndex:
    key = task.key()
    offsets_key = f"{key}.offsets" if task.random_access else None
    unpacked_key = None if task.in_place else f"{key}.jsonl"
    with (
        task.stream() as stream,
        task.spool(offsets_key) as offsets,
        task.spool(unpacked_key) as unpacked,
    ):
        indexer = LineIndexer(offsets)
        for block in blocks(stream, MIB if task.in_place else BLOCK_BYTES):
            indexer.feed(block)
            if unpacked is not None:
                unpacked.write(block)
            if task.enough(indexer.num_records):
                break
        marks = indexer.finish()
    num_records = task.first(indexer.num_records)
    file = task.file(
        layout="lines",
        unit="line",
        num_records=num_records,
        num_bytes=indexer.num_bytes,
        spool=unpacked_key,
        offsets=offsets_key,
    )
    return FileIndex(file=file, marks=marks[marks["ordinal"] < max(1, num_records)])


def _index_converted(task: _Task, lines: Iterable[bytes], unit: Unit, *what: str) -> FileIndex:
    """Spool `lines`, whatever they were made from."""
    key = task.key(*what)
    offsets_key = f"{key}.offsets" if task.random_access else None
    with task.spool(offsets_key) as offsets, spool(task.store, f"{key}.jsonl") as file:
        lines_out = LineSpool(file, offsets)
        num_records = 0
        for line in lines:
            num_records += bool(line)  # CSV's blank lines keep line numbers
            if task.enough(num_records):
                break
            lines_out.write(line)
        marks = lines_out.finish()
    record_file = task.file(
        layout="converted",
        unit=unit,
        num_records=lines_out.num_records,
        num_bytes=lines_out.num_bytes,
        spool=f"{key}.jsonl",
        offsets=offsets_key,
    )
    return FileIndex(file=record_file, marks=marks)


def _index_table(task: _Task) -> FileIndex:
    input = task.input
    if task.max_records is not None and input.compression is None and is_remote(input.path):
        opened = _open_remote_table(task)
    else:
        opened = _open_table(task)
    with opened as (table, forget):
        if input.reader == "parquet":
            columns, groups = (
                tabular.columns_in_use(table.schema_arrow, task.names),
                tabular.row_groups(table),
            )
            marks, num_bytes = tabular.parquet_marks(table, columns)
            by_groups = tabular.readable_by_group(table, columns) and task.in_place
            if by_groups and not task.random_access:
                num_records = table.metadata.num_rows
                file = task.file(
                    layout="rows", unit="row", num_records=num_records, num_bytes=num_bytes, row_groups=groups
                )
                return FileIndex(file=file, marks=marks)
            batches = tabular.parquet_batches(table, task.columns_of(table.schema_arrow), tabular.rows_of)
        else:
            columns, groups = task.columns_of(table.schema), None
            batches = tabular.arrow_batches(table, columns, forget, tabular.rows_of)
        index = _index_converted(task, table_lines(batches, task.watch), "row", *task.use)
        return dataclasses.replace(index, file=dataclasses.replace(index.file, row_groups=groups))


def _index_json(task: _Task) -> FileIndex:
    with task.stream() as stream:
        if is_json_lines(stream):
            return _index_lines(task)
    with task.stream() as stream:
        lines = value_lines(stream, task.input.path, max_bytes=task.max_row_bytes)
        return _index_converted(task, lines, "record")


def _index_csv(task: _Task) -> FileIndex:
    with task.stream() as stream:
        lines = csv_lines(
            stream, task.input.path, names=task.names, watch=task.watch, max_bytes=task.max_row_bytes
        )
        return _index_converted(task, lines, "line", *task.use)


def _index_stream(task: _Task) -> FileIndex:
    rows = hubstream.stream_rows(task.input, task.columns_of)
    return _index_converted(task, table_lines(rows, task.watch), "record", *task.use)


def _index_document(task: _Task) -> FileIndex:
    key, num_bytes = None, task.input.num_bytes
    if not task.in_place:
        key, num_bytes = f"{task.key()}.txt", 0
        with task.stream() as stream, spool(task.store, key) as unpacked:
            for block in blocks(stream):
                unpacked.write(block)
                num_bytes += len(block)
    file = task.file(layout="document", unit="line", num_records=1, num_bytes=num_bytes, spool=key)
    return FileIndex(file=file, marks=np.array([(0, 0, 0, 0, 1)], MARK))


@contextlib.contextmanager
def _open_remote_table(task: _Task) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A table of an object store without a copy: for its first rows alone, since each read is a request."""
    with (
        open_input(task.input.path) as file,
        tabular.open_table(task.input.path, file, task.input.reader) as table,
    ):
        yield table, lambda: None


@contextlib.contextmanager
def _open_table(task: _Task) -> Iterator[tuple[Any, Callable[[], None]]]:
    raw_key = f"{task.key()}-{os.getpid()}.{task.input.reader}"
    with (
        open_raw(task.input, task.store, None if task.in_place else raw_key, task.max_unpacked_bytes) as (
            raw,
            forget,
        ),
        tabular.open_table(task.input.path, raw, task.input.reader) as table,
    ):
        yield table, forget


_INDEXERS = {
    "jsonl": _index_lines,
    "json": _index_json,
    "csv": _index_csv,
    "txt": _index_document,
    "parquet": _index_table,
    "arrow": _index_table,
    hubstream.READER: _index_stream,
}
