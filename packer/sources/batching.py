"""Records to batches of rows: collected as they come, many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from packer.sources import tabular
from packer.sources.ids import IdLines, IdRows, table_ids
from packer.sources.lines import TooLong
from packer.sources.parse import (
    LONG_NUMBER,
    FieldPicker,
    RowFault,
    parse_converted,
    parse_document,
    parse_object,
)
from packer.sources.values import MIB, Layout, Locations, Place, Records, RowError
from packer.sources.watch import Watch

BATCH_RECORDS = 1000
BATCH_BYTES = 8 * MIB
_ID_BATCH_BYTES = MIB  # a block or two: batches of ids are not joined without need
# Lines of ready ids that are not written as expected are read twice; a few times, then no more.
_ID_TRIES = 4


@dataclass(slots=True, kw_only=True)
class Batcher:
    """Collects records until a batch is full. Records are added many at a time: this is the hot loop.

    A batch has rows of one kind: dicts, or an IdRows.
    """

    fields: Mapping[str, str]
    watch: Watch
    max_row_bytes: int
    files: list[Place]
    layouts: list[Layout]
    _pick: FieldPicker = field(init=False)
    _prints_numbers: bool = field(init=False)  # conversations: a template prints the numbers of tool calls
    _id_lines: IdLines = field(init=False)
    _id_tries: int = field(init=False, default=_ID_TRIES)
    _rows: list[dict[str, Any]] = field(init=False, default_factory=list)
    _ids: list[IdRows] = field(init=False, default_factory=list)
    _places: list[NDArray[np.int64]] = field(init=False, default_factory=list)  # (3, k): id, file, number
    _errors: list[RowError] = field(init=False, default_factory=list)
    _num_bytes: int = field(init=False, default=0)
    _done: list[Records] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._pick = FieldPicker(self.fields, self.watch.check)
        self._id_lines = IdLines(self.fields, self.watch)
        self._prints_numbers = "messages" in self.fields

    # -------------------------------------------------------------- in

    def add_lines(self, places: NDArray[np.int64], raws: Sequence[bytes | TooLong]) -> None:
        """Records as the bytes that lie in their files. `places`: (3, len(raws))."""
        if self._id_tries:
            ids = self._id_lines.parse(raws)
            if ids is not None:
                self._add_ids(places, ids, sum(map(len, raws)))
                return
            self._id_tries -= 1
        pick, faults, prints_numbers = self._pick, [], self._prints_numbers
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
        self._add(places, rows, faults, sum(map(len, raws)))

    def add_documents(self, places: NDArray[np.int64], raws: Sequence[bytes | TooLong]) -> None:
        """Records that are whole text files."""
        rows = [self._slowly(raw, "document") for raw in raws]
        self._add(places, rows, range(len(rows)), sum(map(len, raws)))

    def add_table(self, places: NDArray[np.int64], batch: pa.RecordBatch) -> None:
        """Records of a table."""
        ids = table_ids(batch, self.fields) if self.watch.passes(batch) else None
        if ids is not None:
            self._add_ids(places, ids, batch.nbytes)
            return
        rows = [self._picked(row) for row in tabular.rows_of(batch)]
        self._add(places, rows, range(len(rows)), 0)

    def _picked(self, row: dict[str, Any] | RowFault) -> dict[str, Any] | RowFault:
        """The fields of a table's row, or why it cannot be read."""
        try:
            return row if isinstance(row, RowFault) else self._pick(row)
        except RowFault as fault:
            return fault

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
            return self._pick(parse_converted(raw) if layout == "converted" else parse_object(raw))
        except RowFault as fault:
            return fault

    def _add(
        self,
        places: NDArray[np.int64],
        rows: list[dict[str, Any] | RowFault],
        suspects: Sequence[int],
        num_bytes: int,
    ) -> None:
        if self._ids:
            self._finish()
        bad = [at for at in suspects if isinstance(rows[at], RowFault)]
        for at in bad:
            example_id, which, number = places[:, at].tolist()
            self._errors.append(RowError.of(self.files[which].at(number), example_id, str(rows[at])))
        if bad:
            places = np.delete(places, bad, axis=1)
            rows = [row for row in rows if not isinstance(row, RowFault)]
        self._places.append(places)
        self._rows += cast(list[dict[str, Any]], rows)
        self._num_bytes += num_bytes
        if len(self._rows) + len(self._errors) >= BATCH_RECORDS or self._num_bytes >= BATCH_BYTES:
            self._finish()

    def _add_ids(self, places: NDArray[np.int64], ids: IdRows, num_bytes: int) -> None:
        if self._rows or self._errors or (self._ids and self._ids[-1].columns.keys() != ids.columns.keys()):
            self._finish()
        self._ids.append(ids)
        self._places.append(places)
        self._num_bytes += num_bytes
        if self._num_bytes >= _ID_BATCH_BYTES:
            self._finish()

    # -------------------------------------------------------------- out

    def _finish(self) -> None:
        ids, which, numbers = np.concatenate(self._places, axis=1)
        self._done.append(
            Records(
                example_ids=ids,
                rows=IdRows.joined(self._ids) if self._ids else self._rows,
                locations=Locations(self.files, which, numbers),
                errors=self._errors,
            )
        )
        self._rows, self._ids, self._places, self._errors, self._num_bytes = [], [], [], [], 0

    def take_full(self) -> Iterator[Records]:
        """The batches that are full; they are gone from here."""
        done, self._done = self._done, []
        yield from done

    def take_rest(self) -> Iterator[Records]:
        """All that is left, at the end."""
        if self._places:
            self._finish()
        yield from self.take_full()
