"""From a partition to batches of rows, in stream order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, BinaryIO, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from packer.order import permute
from packer.sources import tabular
from packer.sources.lines import TooLong, read_lines
from packer.sources.parse import (
    LONG_NUMBER,
    FieldPicker,
    RowFault,
    parse_converted,
    parse_document,
    parse_object,
    roots,
)
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
from packer.store import Store, StoreError

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
    """Collects records until a batch is full. Records are added many at a time: this is the hot loop."""

    pick: FieldPicker
    prints_numbers: bool  # conversations: a template prints the numbers of tool calls
    max_row_bytes: int
    files: list[tuple[str, Unit]]
    layouts: list[Layout]
    rows: list[dict[str, Any]] = field(default_factory=list)
    places: list[NDArray[np.int64]] = field(default_factory=list)  # (3, k): example id, file, number
    errors: list[RowError] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def full(self) -> bool:
        return len(self.rows) + len(self.errors) >= BATCH_RECORDS or self.num_bytes >= BATCH_BYTES

    def add_lines(self, places: NDArray[np.int64], raws: Sequence[bytes | TooLong]) -> None:
        """Records as the bytes that lie in their files. `places`: (3, len(raws))."""
        pick, faults, prints_numbers = self.pick, [], self.prints_numbers
        rows: list[Any] = []
        for raw in raws:
            try:
                if prints_numbers and LONG_NUMBER.search(raw):  # type: ignore[arg-type]  # as below
                    raise ValueError
                record = orjson.loads(raw)  # type: ignore[arg-type]  # a TooLong is refused
                if type(record) is not dict:
                    raise TypeError
                rows.append(pick(record))
            except (ValueError, TypeError):  # looked at again below; None keeps its place
                faults.append(len(rows))
                rows.append(None)
        for at in faults:
            rows[at] = self._slowly(raws[at], self.layouts[places[1, at]])
        self.num_bytes += sum(map(len, raws))
        self._add(places, rows, faults)

    def add_documents(self, places: NDArray[np.int64], raws: Sequence[bytes | TooLong]) -> None:
        """Records that are whole text files."""
        rows = [self._slowly(raw, "document") for raw in raws]
        self.num_bytes += sum(map(len, raws))
        self._add(places, rows, range(len(rows)))

    def add_parsed(self, places: NDArray[np.int64], records: Sequence[dict[str, Any] | RowFault]) -> None:
        """Records of a table."""
        pick = self.pick
        rows = [record if isinstance(record, RowFault) else pick(record) for record in records]
        self._add(places, rows, range(len(rows)))

    def _slowly(self, raw: bytes | TooLong, layout: Layout) -> dict[str, Any] | RowFault:
        """A record that the short way did not read, or why it cannot be read."""
        try:
            if isinstance(raw, TooLong):
                limit = self.max_row_bytes
                return RowFault(
                    f"the record has {raw.num_bytes} bytes, more than the limit of {limit}: split it"
                )
            if layout == "document":
                # A text, whatever name the other files have for theirs.
                return parse_document(raw)
            return self.pick(parse_converted(raw) if layout == "converted" else parse_object(raw))
        except RowFault as fault:
            return fault

    def _add(
        self, places: NDArray[np.int64], rows: list[dict[str, Any] | RowFault], suspects: Sequence[int]
    ) -> None:
        bad = [at for at in suspects if isinstance(rows[at], RowFault)]
        for at in bad:
            example_id, which, number = places[:, at].tolist()
            file, unit = self.files[which]
            reason = str(rows[at])
            self.errors.append(
                RowError(example_id=example_id, file=file, line=number, reason=reason, unit=unit)
            )
        if bad:
            places = np.delete(places, bad, axis=1)
            rows = [row for row in rows if not isinstance(row, RowFault)]
        self.places.append(places)
        self.rows += cast(list[dict[str, Any]], rows)

    def take(self) -> Records:
        """What was collected, as a batch; begins anew."""
        ids, which, numbers = np.concatenate(self.places, axis=1)
        records = Records(
            example_ids=ids,
            rows=self.rows,
            locations=Locations(self.files, which, numbers),
            errors=self.errors,
        )
        self.rows, self.places, self.errors, self.num_bytes = [], [], [], 0
        return records


def read_partition(
    partition: Partition,
    *,
    store: Store,
    fields: Mapping[str, str],
    max_row_bytes: int = MAX_ROW_BYTES,
) -> Iterator[Records]:
    """The records of a partition in stream order, in batches of up to about 1000 records or 8 MiB.

    Every record of the partition is in one batch, as a row or as an error. Raises SourceError where an
    input changed since it was indexed, or is gone.
    """
    batcher = _Batcher(
        pick=FieldPicker(fields),
        prints_numbers="messages" in fields,
        max_row_bytes=max_row_bytes,
        files=[(span.file.input.path, span.file.unit) for span in partition.spans],
        layouts=[span.file.layout for span in partition.spans],
    )
    steps = (
        _read_in_order(partition, store, roots(fields), batcher)
        if partition.seed is None
        else _read_shuffled(partition, store, batcher)
    )
    for _ in steps:  # after each, a few records more are there
        if batcher.full:
            yield batcher.take()
    if batcher.places:
        yield batcher.take()


@contextlib.contextmanager
def _open(file: RecordFile, store: Store, *, random_access: bool) -> Iterator[BinaryIO]:
    """The bytes where the records lie; that an input stayed the same is checked before and after."""
    if file.spool is not None:
        try:
            # In stream order a partition is one stretch of it; shuffled, records from all over.
            spooled = store.open(file.spool) if random_access else store.open_part(file.spool)
        except FileNotFoundError as error:
            raise StoreError(
                error.errno, f"work file {file.spool} of {file.input.path} is gone; post the dataset again"
            ) from error
        with spooled:
            yield spooled
        return
    with open_input(file.input.path) as source:
        check_unchanged(source, file.input, file.mtime_ns)
        yield source
        check_unchanged(source, file.input, file.mtime_ns)


# ------------------------------------------------------------------ source order


def _read_in_order(
    partition: Partition, store: Store, names: frozenset[str], batcher: _Batcher
) -> Iterator[None]:
    for which, span in enumerate(partition.spans):
        with _open(span.file, store, random_access=False) as file:
            yield from _READERS[span.file.layout](span, which, file, names, batcher)


def _read_line_span(
    span: Span, which: int, file: BinaryIO, names: frozenset[str], batcher: _Batcher
) -> Iterator[None]:
    ordinal, offset, number = span.mark
    file.seek(offset)
    for lines in read_lines(file, max_bytes=batcher.max_row_bytes):
        # Blank lines are no records but count as lines.
        raws = [raw for raw in lines if raw and not raw.isspace()]
        numbers = number + np.arange(len(lines))
        if len(raws) < len(lines):
            numbers = numbers[[bool(raw) and not raw.isspace() for raw in lines]]
        number += len(lines)
        skip, stop = max(0, span.start - ordinal), span.stop - ordinal
        for low in range(skip, min(stop, len(raws)), BATCH_RECORDS):
            high = min(low + BATCH_RECORDS, stop, len(raws))
            places = _places_of(span, which, ordinal + low, numbers[low:high])
            batcher.add_lines(places, raws[low:high])
            yield
        ordinal += len(raws)
        if ordinal >= span.stop:
            return
    raise changed(span.file.input, f"record {span.stop} is not there any more")


def _places_of(span: Span, which: int, ordinal: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Example ids, file and numbers of a run of records, (3, k)."""
    ids = span.first + ordinal + np.arange(len(numbers))
    return np.stack([ids, np.full(len(numbers), which), numbers])


def _read_row_span(
    span: Span, which: int, file: BinaryIO, names: frozenset[str], batcher: _Batcher
) -> Iterator[None]:
    begin, group, _ = span.mark
    ordinal = span.start
    with tabular.open_table(span.file.input.path, file, span.file.input.reader) as table:
        columns = tabular.columns_in_use(table.schema_arrow, names)
        for rows in tabular.parquet_batches(table, columns, group, span.start - begin):
            rows = rows[: span.stop - ordinal]
            numbers = ordinal + 1 + np.arange(len(rows))
            batcher.add_parsed(_places_of(span, which, ordinal, numbers), rows)
            ordinal += len(rows)
            yield
            if ordinal >= span.stop:
                return
    raise changed(span.file.input, f"row {span.stop} is not there any more")


def _read_document_span(
    span: Span, which: int, file: BinaryIO, names: frozenset[str], batcher: _Batcher
) -> Iterator[None]:
    raw = _read_document(span.file, file, batcher.max_row_bytes)
    batcher.add_documents(_places_of(span, which, 0, np.ones(1, np.int64)), [raw])
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


# ------------------------------------------------------------------ shuffled


def _read_shuffled(partition: Partition, store: Store, batcher: _Batcher) -> Iterator[None]:
    """Records by random access, part by part: read in file order, given in stream order."""
    assert partition.seed is not None
    firsts = np.array([span.first for span in partition.spans], np.int64)
    documents = np.array([span.file.layout == "document" for span in partition.spans])
    for low in range(partition.start, partition.stop, _GATHER_RECORDS):
        positions = np.arange(low, min(low + _GATHER_RECORDS, partition.stop), dtype=np.int64)
        ids = permute(positions, partition.num_records, partition.seed)
        which = np.searchsorted(firsts, ids, side="right") - 1
        found = _places(partition.spans, which, ids - firsts[which], store)
        places = np.stack([ids, which, found["line"]])
        for part in _parts(found["end"] - found["offset"]):
            raws = _gather(partition.spans, which[part], found[part], store, batcher.max_row_bytes)
            for run in _alike(documents[which[part]]):
                add = batcher.add_documents if documents[which[part][run.start]] else batcher.add_lines
                add(places[:, part][:, run], raws[run])
                yield


def _alike(kinds: NDArray[np.bool_]) -> Iterator[slice]:
    """Runs of at most BATCH_RECORDS of one kind."""
    borders = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
    for low, high in pairwise([0, *borders.tolist(), len(kinds)]):
        for start in range(low, high, BATCH_RECORDS):
            yield slice(start, min(start + BATCH_RECORDS, high))


_PLACE = np.dtype([("offset", "<i8"), ("end", "<i8"), ("line", "<i8")])


def _places(
    spans: Sequence[Span], which: NDArray[np.int64], ordinals: NDArray[np.int64], store: Store
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
        offsets = np.frombuffer(store.map(file.offsets), OFFSET)
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
    spans: Sequence[Span], which: NDArray[np.int64], places: np.ndarray, store: Store, max_row_bytes: int
) -> list[bytes | TooLong]:
    """The records at `places`, read in the order of files and offsets, given in the order asked for."""
    raws: list[bytes | TooLong] = [b""] * len(places)
    order = np.lexsort((places["offset"], which))
    borders = np.flatnonzero(np.diff(which[order])) + 1
    for mine in np.split(order, borders):
        record_file = spans[which[mine[0]]].file
        with _open(record_file, store, random_access=True) as file:
            if record_file.layout == "document":
                raws[mine[0]] = _read_document(record_file, file, max_row_bytes)
                continue
            offsets, ends = places["offset"][mine].tolist(), places["end"][mine].tolist()
            wanted = mine.tolist()
            for low, high in _runs(offsets, ends, min(_RUN_BYTES, max_row_bytes)):
                begin, end = offsets[low], ends[high - 1]
                if high - low == 1 and end - begin > max_row_bytes:
                    raws[wanted[low]] = _read_long(file, begin, max_row_bytes)
                    continue
                data = os.pread(file.fileno(), end - begin, begin)
                if len(data) < end - begin:
                    raise changed(record_file.input, f"byte {begin + len(data)} is its end now")
                for i in range(low, high):
                    raws[wanted[i]] = data[offsets[i] - begin : ends[i] - begin]
    return raws


def _runs(offsets: list[int], ends: list[int], max_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs [low, high) of neighbours that are worth one read; one record alone may be over `max_bytes`."""
    low = 0
    for i in range(1, len(offsets)):
        if offsets[i] - ends[i - 1] > _GAP_BYTES or ends[i] - offsets[low] > max_bytes:
            yield low, i
            low = i
    yield low, len(offsets)


def _read_long(file: BinaryIO, begin: int, max_bytes: int) -> bytes | TooLong:
    """A record that may be over the limit: blank lines behind it count as its bytes in the index."""
    file.seek(begin)
    for lines in read_lines(file, max_bytes=max_bytes):
        return lines[0]
    return b""
