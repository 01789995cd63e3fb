"""From a partition to batches of rows, in stream order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from packer.order import permute
from packer.sources.batching import BATCH_RECORDS, Batcher
from packer.sources.lines import TooLong, read_lines
from packer.sources.parse import roots
from packer.sources.rowgroups import read_rows
from packer.sources.streams import BLOCK_BYTES, changed, check_unchanged, open_input
from packer.sources.values import (
    MAX_ROW_BYTES,
    MIB,
    OFFSET,
    Partition,
    Place,
    RecordFile,
    Records,
    Span,
)
from packer.sources.watch import Watch
from packer.spec import What
from packer.store import Store, StoreError

# Of a shuffled partition this much is held at a time, so that its records can be read in file order.
_GATHER_BYTES = 64 * MIB
_GATHER_RECORDS = 1 << 15
# Records closer than this are read together: a gap costs less than a call.
_GAP_BYTES = 16 << 10
_RUN_BYTES = 4 * MIB


def read_partition(
    partition: Partition,
    *,
    store: Store,
    fields: Mapping[str, str],
    watch: Collection[What] = (),
    max_row_bytes: int = MAX_ROW_BYTES,
) -> Iterator[Records]:
    """The records of a partition in stream order, in batches of up to about 1000 records or 8 MiB.

    Every record of the partition is in one batch, as a row or as an error. fields, watch: as the inputs were
    indexed with. Raises SourceError where an input changed since it was indexed, or is gone.
    """
    batcher = Batcher(
        fields=fields,
        watch=Watch(fields, watch),
        max_row_bytes=max_row_bytes,
        files=[
            Place(file=span.file.input.path, unit=span.file.unit, row_groups=span.file.row_groups)
            for span in partition.spans
        ],
        layouts=[span.file.layout for span in partition.spans],
    )
    steps = (
        _read_in_order(partition, store, roots(fields), batcher)
        if partition.seed is None
        else _read_shuffled(partition, store, batcher)
    )
    for _ in steps:  # after each, a few records more are there
        yield from batcher.take_full()
    yield from batcher.take_rest()


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
    partition: Partition, store: Store, names: frozenset[str], batcher: Batcher
) -> Iterator[None]:
    for which, span in enumerate(partition.spans):
        with _open(span.file, store, random_access=False) as file:
            yield from _READERS[span.file.layout](span, which, file, names, batcher)


def _read_line_span(
    span: Span, which: int, file: BinaryIO, names: frozenset[str], batcher: Batcher
) -> Iterator[None]:
    ordinal, offset, number = span.mark
    file.seek(offset)
    # Of an object store each block may be a request; of a file smaller ones stay in the core's cache.
    block_bytes = MIB if span.file.spool is None else BLOCK_BYTES
    for lines in read_lines(file, max_bytes=batcher.max_row_bytes, block_bytes=block_bytes):
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
    span: Span, which: int, file: BinaryIO, names: frozenset[str], batcher: Batcher
) -> Iterator[None]:
    for ordinal, batch in read_rows(span, file, names, batcher.watch):
        numbers = ordinal + 1 + np.arange(batch.num_rows)
        batcher.add_table(_places_of(span, which, ordinal, numbers), batch)
        yield


def _read_document_span(
    span: Span, which: int, file: BinaryIO, names: frozenset[str], batcher: Batcher
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


def _read_shuffled(partition: Partition, store: Store, batcher: Batcher) -> Iterator[None]:
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
