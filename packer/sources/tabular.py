"""Parquet and Arrow files: row groups read in batches, or spooled to JSON Lines for random access.

Parquet is read by row group where that will do: in source order, row groups of at most 1 GiB. Else (a
shuffle, huge row groups, any Arrow file) the columns in use are spooled once.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from packer.sources.ids import list_values
from packer.sources.jsontypes import json_values
from packer.sources.parse import RowFault
from packer.sources.values import MARK, MARK_BYTES, MIB, SourceError

# A batch holds few rows: what a row takes once decoded is not known before (dictionaries).
_BATCH_ROWS = 256
_BATCH_BYTES = 8 * MIB
_NUMBERS_BATCH_ROWS = 1 << 13  # of which it is known: 4 or 8 bytes a number
# Passing over rows costs decoding them, perhaps a tenth of packing them.
_MAX_GROUP_BYTES = 1 << 30
_MAX_ROW_GROUPS = 1 << 12
_MAPPED_BYTES = 64 * MIB
_DATASET_KEY = b"padfree.dataset"  # of a shard's schema (packer.shard.layout)
_SCHEMA_BYTES = 4096  # that of a shard takes under half of it


@contextlib.contextmanager
def open_table(path: str, file: Any, reader: str) -> Iterator[Any]:
    """A ParquetFile or Arrow reader over an open file; what Arrow raises becomes a SourceError."""
    try:
        if reader == "parquet":
            # Pages are streamed: with pre_buffer a whole row group would be held.
            with pq.ParquetFile(file, pre_buffer=False, buffer_size=MIB) as parquet:
                _refuse_packs(path, parquet.schema_arrow)
                yield parquet
        else:
            table = _open_arrow(file)
            _refuse_packs(path, table.schema)
            yield table
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of the file's content
        raise SourceError(
            f"{path}: cannot be read as {reader}: {str(error).splitlines()[0] if str(error) else error!r}; "
            "write it again, or convert it to .jsonl"
        ) from error


def _open_arrow(file: Any) -> Any:
    magic = file.read(6)
    file.seek(0)
    return pa.ipc.open_file(file) if magic == b"ARROW1" else pa.ipc.open_stream(file)


def check_examples(path: str, file: Any) -> None:
    """Raise SourceError where an open Arrow file is a shard. Of others the beginning is read, no more."""
    file.seek(0)
    head = file.read(_SCHEMA_BYTES)
    file.seek(0)
    if _DATASET_KEY in head:
        with open_table(path, file, "arrow"):
            pass


def _refuse_packs(path: str, schema: pa.Schema) -> None:
    """Raise SourceError where the rows of a table are packs: each would be taken for one example."""
    dataset = (schema.metadata or {}).get(_DATASET_KEY)
    if dataset is not None and {"input_ids", "cu_seqlens"} <= set(schema.names):
        name = dataset.decode("utf-8", "replace")
        raise SourceError(
            f"{path}: a file of examples is required, found a shard of the packed dataset {name}: its rows "
            "are packs, whose masks and boundaries would be lost; to pack its segments anew give "
            f"dataset://{name} alone as the source, with the store (or service) that holds this dataset; or "
            "give the files that it was packed from"
        )


def columns_in_use(schema: pa.Schema, names: frozenset[str]) -> list[str]:
    """The columns that the fields in use could mean, in the file's order."""
    return [name for name in schema.names if name in names]


def parquet_marks(parquet: pq.ParquetFile, columns: list[str]) -> tuple[np.ndarray, int]:
    """Marks at row groups and, evenly, within large ones; and the text's bytes in all."""
    marks = []
    ordinal = num_bytes = 0
    for group in range(parquet.num_row_groups):
        num_rows = parquet.metadata.row_group(group).num_rows
        size = _column_bytes(parquet, group, columns)
        parts = max(1, min(num_rows, size // MARK_BYTES))
        for part in range(parts if num_rows else 0):
            row = num_rows * part // parts
            marks.append((ordinal + row, num_bytes + size * part // parts, ordinal, group, ordinal + 1))
        ordinal += num_rows
        num_bytes += size
    return np.array(marks, MARK), num_bytes


def row_groups(parquet: pq.ParquetFile) -> tuple[int, ...] | None:
    """The first row of each row group; None where they are too many to be carried along."""
    sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
    starts = [0, *itertools.accumulate(sizes)][:-1]
    return tuple(starts) if len(starts) <= _MAX_ROW_GROUPS else None


_ID_BYTES = 4


def _column_bytes(parquet: pq.ParquetFile, group: int, columns: list[str]) -> int:
    about = parquet.metadata.row_group(group)
    wanted = set(columns)
    chunks = (about.column(i) for i in range(about.num_columns))
    # Ids that come from a dictionary take less in the file than in memory.
    return sum(
        max(c.total_uncompressed_size, _ID_BYTES * c.num_values * c.physical_type.startswith("INT"))
        for c in chunks
        if wanted & {c.path_in_schema, c.path_in_schema.split(".")[0]}
    )


def readable_by_group(parquet: pq.ParquetFile, columns: list[str]) -> bool:
    """Whether the rows before a partition, which are decoded and passed over, are few enough."""
    groups = range(parquet.num_row_groups)
    return all(_column_bytes(parquet, group, columns) <= _MAX_GROUP_BYTES for group in groups)


Rows = list[dict[str, Any] | RowFault]


def parquet_batches(
    parquet: pq.ParquetFile,
    columns: list[str],
    rows: Callable[[pa.RecordBatch], Rows],
) -> Iterator[Rows]:
    """All rows, these columns alone, as `rows` makes them of a batch."""
    return map(rows, record_batches(parquet, columns))


def record_batches(parquet: pq.ParquetFile, columns: list[str], group: int = 0) -> Iterator[pa.RecordBatch]:
    """Rows from row group `group` on, as they are in the file; rows too where nothing wanted is there."""
    numbers = all(_is_numbers(parquet.schema_arrow.field(name).type) for name in columns)
    for number in range(group, parquet.num_row_groups):
        num_rows = parquet.metadata.row_group(number).num_rows
        a_row = _column_bytes(parquet, number, columns) // max(1, num_rows) + 1
        most = _NUMBERS_BATCH_ROWS if numbers else _BATCH_ROWS
        batch_rows = max(1, min(most, _BATCH_BYTES // a_row))
        yield from parquet.iter_batches(batch_rows, row_groups=[number], columns=columns, use_threads=False)


def arrow_batches(
    reader: Any,
    columns: list[str],
    forget: Callable[[], None],
    rows: Callable[[pa.RecordBatch], Rows],
) -> Iterator[Rows]:
    """The rows of an Arrow file or stream, these columns alone, as `rows` makes them of a batch.

    `forget` is called after each _MAPPED_BYTES or so, to let go of memory that a mapped file holds.
    """
    is_file = isinstance(reader, pa.ipc.RecordBatchFileReader)
    batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
    held = 0
    for whole in batches:
        batch = whole.select(columns)
        a_row = whole.nbytes // max(1, whole.num_rows) + 1
        step = max(1, min(_BATCH_ROWS, _BATCH_BYTES // a_row))
        for start in range(0, whole.num_rows, step):
            yield rows(batch.slice(start, step))
            held += step * a_row
            if held > _MAPPED_BYTES:
                held = 0
                forget()


def rows_of(batch: pa.RecordBatch) -> Rows:
    """A batch as Python rows; a RowFault stands for one unreadable.

    Values such as bytes, times and decimals are made what JSON can hold. A list of whole numbers is an array,
    not a Python object a number.
    """
    if not batch.num_columns:
        return [{} for _ in range(batch.num_rows)]
    try:
        values = [_values(column) for column in batch.columns]
    except UnicodeDecodeError as error:  # text that is not UTF-8: find the rows that hold it
        if batch.num_rows == 1:
            return [RowFault(f"not UTF-8 ({error.reason} at byte {error.start + 1} of a text)")]
        return [row for i in range(batch.num_rows) for row in rows_of(batch.slice(i, 1))]
    names = batch.schema.names
    rows = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
    plain = all(_is_plain(of) for of in batch.schema.types)
    return cast(Rows, rows) if plain else [_through_json(row) for row in rows]


def rows_to_look_at(batch: pa.RecordBatch) -> Rows:
    """As `rows_of`, but a value that cannot be read (an image, a sound) is null: its column may be none in
    use. A row of such values alone is a RowFault."""
    rows = rows_of(batch)
    if not any(isinstance(row, RowFault) for row in rows):
        return rows
    names = batch.schema.names
    columns = [rows_of(batch.select([name])) for name in names]
    for at, parts in enumerate(zip(*columns, strict=True)):
        found = [part for part in parts if isinstance(part, dict)]
        if isinstance(rows[at], RowFault) and found:
            rows[at] = functools.reduce(operator.or_, found, dict.fromkeys(names))
    return rows


def _values(column: pa.Array) -> list[Any]:
    found = list_values(column)
    if found is None:
        return json_values(column)
    flat, lengths = found
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(column) else []


def _through_json(row: dict[str, Any]) -> dict[str, Any] | RowFault:
    try:
        return orjson.loads(dump(row))
    except RowFault as fault:
        return fault


def dump(row: dict[str, Any]) -> bytes:
    """A row as one line of JSON. Raises RowFault where it cannot be said in JSON."""
    try:
        return orjson.dumps(
            row, default=_as_text, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
        )
    except TypeError as error:
        raise RowFault(str(error.__cause__ or error)) from None


def _as_text(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("bytes that are not UTF-8 text") from None
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    return str(value)


def _is_numbers(of: pa.DataType) -> bool:
    is_list = pa.types.is_list(of) or pa.types.is_large_list(of)
    return is_list and pa.types.is_integer(of.value_type)


def _is_plain(of: pa.DataType) -> bool:
    if pa.types.is_dictionary(of):
        return _is_plain(of.value_type)
    if pa.types.is_struct(of):
        return all(_is_plain(of.field(i).type) for i in range(of.num_fields))
    if pa.types.is_list(of) or pa.types.is_large_list(of) or pa.types.is_fixed_size_list(of):
        return _is_plain(of.value_type)
    return (
        pa.types.is_string(of)
        or pa.types.is_large_string(of)
        or pa.types.is_integer(of)
        or pa.types.is_floating(of)
        or pa.types.is_boolean(of)
        or pa.types.is_null(of)
    )
