"""From a partition to batches of rows, in stream order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from packer.order import permute
from packer.sources import tabular
from packer.sources.lines import TooLong, read_lines
from packer.sources.parse import FieldPicker, RowFault, parse_converted, parse_document, parse_object, roots
from packer.sources.streams import changed, check_unchanged, open_input
from packer.sources.values import (
    MAX_ROW_BYTES,
    MIB,
    OFFSET,
    Layout,
    Locations,
    Partition,
    RecordFile,
    Records,
    RowError,
    Span,
    Unit,
)
from packer.store import LocalStore

Parser = Callable[[bytes], dict[str, Any]] | None

BATCH_RECORDS = 1000
BATCH_BYTES = 8 * MIB
# Of a shuffled partition this much is held at a time, so that its records can be read in file order.
_GATHER_BYTES = 64 * MIB
_GATHER_RECORDS = 1 << 15
# Records closer than this are read together: a gap costs less than a call.
_GAP_BYTES = 16 << 10
_RUN_BYTES = 4 * MIB


@dataclass(slots=True)
class _Batcher:
    """Collects parsed records until a batch is full."""

    pick: FieldPicker
    max_row_bytes: int
    files: list[tuple[str, Unit]]
    parse: list[Parser]  # of each file's records
    ids: list[int] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    which: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    errors: list[RowError] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def full(self) -> bool:
        return len(self.rows) + len(self.errors) >= BATCH_RECORDS or self.num_bytes >= BATCH_BYTES

    def add_raw(self, example_id: int, which: int, number: int, raw: bytes | TooLong) -> None:
        """One record as the bytes that lie in its file."""
        try:
            if isinstance(raw, TooLong):
                limit = self.max_row_bytes
                raise RowFault(
                    f"the record has {raw.num_bytes} bytes, more than the limit of {limit}: split it"
                )
            self.num_bytes += len(raw)
            parse = self.parse[which]
            if parse is None:
                self.add_row(example_id, which, number, parse_document(raw))
            else:
                self.add(example_id, which, number, parse(raw))
        except RowFault as fault:
            self.reject(example_id, which, number, fault)

    def add(self, example_id: int, which: int, number: int, record: dict[str, Any]) -> None:
        self.add_row(example_id, which, number, self.pick(record))

    def add_row(self, example_id: int, which: int, number: int, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.ids.append(example_id)
        self.which.append(which)
        self.numbers.append(number)

    def reject(self, example_id: int, which: int, number: int, fault: RowFault) -> None:
        file, unit = self.files[which]
        self.errors.append(
            RowError(example_id=example_id, file=file, line=number, reason=str(fault), unit=unit)
        )

    def take(self) -> Records:
        """What was collected, as a batch; begins anew."""
        records = Records(
            example_ids=np.array(self.ids, np.int64),
            rows=self.rows,
            locations=Locations(self.files, np.array(self.which, np.int64), np.array(self.numbers, np.int64)),
            errors=self.errors,
        )
        self.ids, self.rows, self.which, self.numbers, self.errors, self.num_bytes = [], [], [], [], [], 0
        return records

    def __bool__(self) -> bool:
        return bool(self.rows or self.errors)


def read_partition(
    partition: Partition,
    *,
    store: LocalStore,
    fields: Mapping[str, str],
    max_row_bytes: int = MAX_ROW_BYTES,
) -> Iterator[Records]:
    """The records of a partition in stream order, in batches of up to about 1000 records or 8 MiB.

    Every record of the partition is in one batch, as a row or as an error. Raises SourceError where an
    input changed since it was indexed, or is gone.
    """
    batcher = _Batcher(
        pick=FieldPicker(fields),
        max_row_bytes=max_row_bytes,
        files=[(span.file.input.path, span.file.unit) for span in partition.spans],
        parse=[_PARSERS[span.file.layout] for span in partition.spans],
    )
    steps = (
        _read_in_order(partition, store, roots(fields), batcher)
        if partition.seed is None
        else _read_shuffled(partition, store, batcher)
    )
    for _ in steps:  # they stop whenever the batch is full
        yield batcher.take()
    if batcher:
        yield batcher.take()


@contextlib.contextmanager
def _open(file: RecordFile, store: LocalStore) -> Iterator[BinaryIO]:
    """The bytes where the records lie; that an input stayed the same is checked before and after."""
    if file.spool is not None:
        with open(store.path(file.spool), "rb", buffering=0) as spooled:
            yield spooled
        return
    with open_input(file.input.path) as source:
        check_unchanged(source, file.input, file.mtime_ns)
        yield source
        check_unchanged(source, file.input, file.mtime_ns)


# ------------------------------------------------------------------ source order


def _read_in_order(
    partition: Partition, store: LocalStore, names: frozenset[str], batcher: _Batcher
) -> Iterator[None]:
    for which, span in enumerate(partition.spans):
        with _open(span.file, store) as file:
            yield from _READERS[span.file.layout](span, which, file, names, batcher)


def _read_line_span(
    span: Span, which: int, file: BinaryIO, names: frozenset[str], batcher: _Batcher
) -> Iterator[None]:
    ordinal, offset, number = span.mark
    file.seek(offset)
    for lines in read_lines(file, max_bytes=batcher.max_row_bytes):
        for raw in lines:
            number += 1
            if isinstance(raw, bytes) and (not raw or raw.isspace()):
                continue
            if ordinal >= span.start:
                batcher.add_raw(span.first + ordinal, which, number - 1, raw)
                if batcher.full:
                    yield
            ordinal += 1
            if ordinal == span.stop:
                return
    raise changed(span.file.input, f"record {span.stop} is not there any more")


def _read_row_span(
    span: Span, which: int, file: BinaryIO, names: frozenset[str], batcher: _Batcher
) -> Iterator[None]:
    ordinal, group, _ = span.mark
    with tabular.open_table(span.file.input.path, file, span.file.input.reader) as table:
        columns = tabular.columns_in_use(table.schema_arrow, names)
        for row in tabular.parquet_rows(table, columns, group):
            if ordinal >= span.start:
                place = span.first + ordinal, which, ordinal + 1
                if isinstance(row, RowFault):
                    batcher.reject(*place, row)
                else:
                    batcher.add(*place, row)
                if batcher.full:
                    yield
            ordinal += 1
            if ordinal == span.stop:
                return
    raise changed(span.file.input, f"row {span.stop} is not there any more")


def _read_document_span(
    span: Span, which: int, file: BinaryIO, names: frozenset[str], batcher: _Batcher
) -> Iterator[None]:
    batcher.add_raw(span.first, which, 1, _read_document(span.file, file, batcher.max_row_bytes))
    if batcher.full:
        yield


def _read_document(document: RecordFile, file: BinaryIO, max_row_bytes: int) -> bytes | TooLong:
    if document.num_bytes > max_row_bytes:
        return TooLong(num_bytes=document.num_bytes, head=b"")
    return file.read()


_READERS = {
    "lines": _read_line_span,
    "converted": _read_line_span,
    "rows": _read_row_span,
    "document": _read_document_span,
}
_PARSERS: dict[Layout, Parser] = {
    "lines": parse_object,
    "converted": parse_converted,
    "rows": None,  # rows come parsed
    "document": None,  # a text, under whatever name other files have theirs
}


# ------------------------------------------------------------------ shuffled


def _read_shuffled(partition: Partition, store: LocalStore, batcher: _Batcher) -> Iterator[None]:
    """Records by random access, part by part: read in file order, given in stream order."""
    assert partition.seed is not None
    firsts = np.array([span.first for span in partition.spans], np.int64)
    for low in range(partition.start, partition.stop, _GATHER_RECORDS):
        positions = np.arange(low, min(low + _GATHER_RECORDS, partition.stop), dtype=np.int64)
        ids = permute(positions, partition.num_records, partition.seed)
        which = np.searchsorted(firsts, ids, side="right") - 1
        places = _places(partition.spans, which, ids - firsts[which], store)
        for part in _parts(places["end"] - places["offset"]):
            raws = _gather(partition.spans, which[part], places[part], store, batcher.max_row_bytes)
            for at, raw in zip(range(part.start, part.stop), raws, strict=True):
                batcher.add_raw(int(ids[at]), int(which[at]), int(places["line"][at]), raw)
                if batcher.full:
                    yield


_PLACE = np.dtype([("offset", "<i8"), ("end", "<i8"), ("line", "<i8")])


def _places(
    spans: Sequence[Span], which: NDArray[np.int64], ordinals: NDArray[np.int64], store: LocalStore
) -> np.ndarray:
    """Where each record lies in its file. (k,) of _PLACE."""
    places = np.empty(len(which), _PLACE)
    for number in np.unique(which):
        mine = np.flatnonzero(which == number)
        file = spans[number].file
        if file.layout == "document":
            places[mine] = (0, file.num_bytes, 1)
            continue
        assert file.offsets is not None, "indexed without random_access"
        # Mapped anew for each part, so that pages which were touched do not add up.
        offsets = np.memmap(store.path(file.offsets), OFFSET, "r")
        rows = ordinals[mine]
        places["offset"][mine] = offsets["offset"][rows]
        places["end"][mine] = offsets["offset"][rows + 1]
        places["line"][mine] = offsets["line"][rows]
    return places


def _parts(sizes: NDArray[np.int64]) -> Iterator[slice]:
    """Runs of records that are at most _GATHER_BYTES together, or one record."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _GATHER_BYTES, side="right")))
        yield slice(start, stop)
        start = stop


def _gather(
    spans: Sequence[Span], which: NDArray[np.int64], places: np.ndarray, store: LocalStore, max_row_bytes: int
) -> list[bytes | TooLong]:
    """The lines at `places`, read in the order of files and offsets, given in the order asked for."""
    raws: list[bytes | TooLong] = [b""] * len(places)
    order = np.lexsort((places["offset"], which))
    for number in np.unique(which):
        mine = order[which[order] == number]
        record_file = spans[number].file
        with _open(record_file, store) as file:
            if record_file.layout == "document":
                raws[mine[0]] = _read_document(record_file, file, max_row_bytes)
                continue
            for run in _runs(places["offset"][mine], places["end"][mine], min(_RUN_BYTES, max_row_bytes)):
                wanted = mine[run]
                begin, end = int(places["offset"][wanted[0]]), int(places["end"][wanted[-1]])
                if len(wanted) == 1 and end - begin > max_row_bytes:
                    raws[wanted[0]] = _read_long(file, begin, max_row_bytes)
                    continue
                data = os.pread(file.fileno(), end - begin, begin)
                if len(data) < end - begin:
                    raise changed(record_file.input, f"byte {begin + len(data)} is its end now")
                for at in wanted:
                    raws[at] = data[places["offset"][at] - begin : places["end"][at] - begin]
    return raws


def _runs(offsets: NDArray[np.int64], ends: NDArray[np.int64], max_bytes: int) -> Iterator[slice]:
    """Runs of neighbours that are worth one read; one record alone may be larger than `max_bytes`."""
    start = 0
    for i in range(1, len(offsets) + 1):
        if i == len(offsets) or offsets[i] - ends[i - 1] > _GAP_BYTES or ends[i] - offsets[start] > max_bytes:
            yield slice(start, i)
            start = i


def _read_long(file: BinaryIO, begin: int, max_bytes: int) -> bytes | TooLong:
    """A record that may be over the limit: blank lines behind it count as its bytes in the index."""
    file.seek(begin)
    for lines in read_lines(file, max_bytes=max_bytes):
        return lines[0]
    return b""
