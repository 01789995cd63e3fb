"""The values that pass between the steps of reading, and the one error of this package."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from packer.spec import InputFile

MIB = 1 << 20

# A record longer than this is rejected with its size: parsing needs several times as much memory.
MAX_ROW_BYTES = 256 * MIB
# What one compressed file may unpack to. Generous: it stops files that were made to fill the disk.
MAX_UNPACKED_BYTES = 256 << 30
# A partition may begin at about every such many bytes of text without reading what comes before.
MARK_BYTES = MIB

# Which place in a file a number means: a line of text, a row of a table, a value of a JSON file, or of a
# packed dataset an example.
Unit = Literal["line", "row", "record", "example"]
# "lines": one JSON value a line. "converted": the same, but a line that begins with "!" tells why its record
# could not be converted. "rows": a table with row groups. "document": one text, one record. "segments": the
# packs of a dataset.
Layout = Literal["lines", "converted", "rows", "document", "segments"]

# Where a file may be cut: `ordinal` of the record within its file, and how much text (`num_bytes`) comes
# before it. To read it a reader begins at record `begin` (itself, or the first of its row group), which lies
# at `offset` (bytes, or the number of the row group) in line `line`.
MARK = np.dtype(
    [("ordinal", "<i8"), ("num_bytes", "<i8"), ("begin", "<i8"), ("offset", "<i8"), ("line", "<i8")]
)
# One a record, and one more for the end: what random access needs.
OFFSET = np.dtype([("offset", "<i8"), ("line", "<i8")])


class SourceError(ValueError):
    """An input cannot be read. Permanent: the message names the file and says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a record stands. `number` counts from 1 in `unit`s; that of an "example" is its id.

    group: of a row of Parquet the row group and the row there, both counted from 1.
    """

    file: str
    number: int
    unit: Unit = "line"
    group: tuple[int, int] | None = None

    def __str__(self) -> str:
        within = f" (row group {self.group[0]}, row {self.group[1]})" if self.group else ""
        return f"{self.file}, {self.unit} {self.number}{within}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """A record that could not be read. It takes an example id all the same."""

    example_id: int
    file: str
    line: int | None  # counted from 1; `unit` says of what
    reason: str
    unit: Unit = "line"
    group: tuple[int, int] | None = None  # as of a Location

    @classmethod
    def of(cls, at: Location, example_id: int, reason: str) -> RowError:
        """The error of the record at a location."""
        return cls(
            example_id=example_id, file=at.file, line=at.number, unit=at.unit, group=at.group, reason=reason
        )

    @property
    def location(self) -> str:
        if self.line is None:
            return self.file
        return str(Location(file=self.file, number=self.line, unit=self.unit, group=self.group))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A file as its records are located in it. row_groups: as of a RecordFile."""

    file: str
    unit: Unit
    row_groups: tuple[int, ...] | None = None

    def at(self, number: int) -> Location:
        """The location of record `number`."""
        group = None
        if self.row_groups:
            which = bisect.bisect_right(self.row_groups, number - 1)
            group = (which, number - self.row_groups[which - 1])
        return Location(file=self.file, number=number, unit=self.unit, group=group)


class Locations(Sequence[Location]):
    """Locations of a batch of records, made only when one is asked for."""

    __slots__ = ("_files", "_numbers", "_which")

    def __init__(self, files: Sequence[Place], which: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        self._files, self._which, self._numbers = files, which, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Location: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Location]: ...
    def __getitem__(self, index: int | slice) -> Location | Sequence[Location]:
        if isinstance(index, slice):
            return Locations(self._files, self._which[index], self._numbers[index])
        return self._files[int(self._which[index])].at(int(self._numbers[index]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """A batch of records in stream order.

    example_ids: (k,) int64, 0-based ordinals in the source. rows: k objects under padfree's names
    (text | prompt, completion | messages, tools | input_ids, labels); a field that a record has not
    is left out; ready ids may be an IdRows (packer.sources.ids). errors: records of this part of the
    stream that could not be read.
    """

    example_ids: NDArray[np.int64]
    rows: Sequence[Mapping[str, Any]]
    locations: Locations
    errors: list[RowError]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFile:
    """Where the records of one input lie, and in what form."""

    input: InputFile
    layout: Layout
    unit: Unit
    num_records: int
    num_bytes: int  # of text: what partitions are measured by
    mtime_ns: int  # of the input when it was indexed
    spool: str | None = None  # store key of the records, where they are not read from the input itself
    offsets: str | None = None  # store key of an array of OFFSET; of segments, of SEGMENT
    row_groups: tuple[int, ...] | None = None  # of Parquet: the first row (from 0) of each row group
    num_examples: int | None = None  # of segments: what the dataset's example ids are below


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileIndex:
    """What one pass over an input found: its records and where reading can begin."""

    file: RecordFile
    marks: np.ndarray  # of MARK; the first is the first record


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of one file's records, [start, stop) within the file; `mark` is where to begin reading.

    `first` is the example id of the file's first record.
    """

    file: RecordFile
    first: int
    start: int
    stop: int
    mark: tuple[int, int, int] = (0, 0, 1)  # begin, offset, line of a MARK


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stream positions [start, stop), of `num_records` in all.

    Without a seed they are records in source order and `spans` are these records. With one, position
    p is record permute(p), and `spans` are all files.
    """

    index: int
    start: int
    stop: int
    num_records: int
    seed: int | None
    spans: tuple[Span, ...]
