"""Ready ids in flat arrays: many rows of a file or table at once, with no Python object a number.

`IdLines` and `table_ids` give what reading row after row would give, or None where they cannot tell; then
the rows are read one by one, and what is wrong with one is found there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from packer.sources.numbers import NumberParser
from packer.sources.watch import Watch

Flat = tuple[NDArray[Any], NDArray[np.int64]]  # whole numbers end to end, and how many each row has
_OPTIONAL = ("labels", "attention_mask")
Frame = tuple[bytes, ...]  # a line up to its first list's bracket, from there to the next list's, …, the rest


class IdRows(Sequence[Mapping[str, Any]]):
    """Rows whose fields all are lists of whole numbers: {"input_ids": (n,), "labels": (n,), …}, as views.

    `columns` holds each field of all rows, flat. A row is made only when it is asked for.
    """

    __slots__ = ("_places", "columns")

    def __init__(self, columns: dict[str, Flat]) -> None:
        self.columns = columns
        self._places = {
            name: np.concatenate([[0], np.cumsum(lengths)]) for name, (_, lengths) in columns.items()
        }

    def __len__(self) -> int:
        return min(len(lengths) for _, lengths in self.columns.values())

    @property
    def num_values(self) -> int:
        return sum(len(flat) for flat, _ in self.columns.values())

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]  # negative ones too; IndexError behind the end
        return {
            name: flat[self._places[name][at] : self._places[name][at + 1]]
            for name, (flat, _) in self.columns.items()
        }

    @classmethod
    def joined(cls, parts: Sequence[IdRows]) -> IdRows:
        """Rows after rows, all with the same fields."""
        if len(parts) == 1:
            return parts[0]
        columns = {}
        for name in parts[0].columns:
            flats, lengths = zip(*(part.columns[name] for part in parts), strict=True)
            columns[name] = np.concatenate(flats), np.concatenate(lengths)
        return cls(columns)


def _taken(fields: Mapping[str, str]) -> dict[str, str] | None:
    """Our names to plain names in the source, where the format is tokens; else None."""
    plain = not any("." in theirs or "+" in theirs for theirs in fields.values())
    ours = "input_ids" in fields and set(fields) <= {"input_ids", *_OPTIONAL}
    return dict(fields) if plain and ours else None


# ------------------------------------------------------------------ JSON


class IdLines:
    """Reads lines of JSON that hold ready ids, with the fields named as in `fields`."""

    def __init__(self, fields: Mapping[str, str], watch: Watch) -> None:
        self._taken = _taken(fields)
        self._watch = watch
        self._numbers = NumberParser()

    def parse(self, raws: Sequence[Any]) -> IdRows | None:
        """Lines as rows; None where one has anything but flat lists of whole numbers of up to 8 digits."""
        if self._taken is None or set(map(type, raws)) != {bytes}:  # none at all; too long to be kept
            return None
        bodies: list[bytes] = []  # what stands between brackets
        layouts: dict[Frame, tuple[str, ...] | None] = {}
        at = 0
        while at < len(raws):
            frame = _frame_of(raws[at])
            if frame not in layouts:
                layouts[frame] = _lists_of(frame, self._taken)
            begun, at = at, _add_bodies(raws, at, frame, bodies)
            if at == begun:
                return None
        (layout, *others) = set(layouts.values())
        if layout is None or others or not self._watch.passes_lists(layout):
            return None
        columns: dict[str, Flat] = {}
        for at, theirs in enumerate(layout):
            # Also of what is not taken: it may be no JSON.
            column = self._numbers.parse(bodies[at :: len(layout)])
            if column is None:
                return None
            columns |= {ours: column for ours, name in self._taken.items() if name == theirs}
        return IdRows(columns)


def _frame_of(raw: bytes) -> Frame:
    """The line without what its lists hold, cut there. A bracket that is no list's (in a word, or nested)
    makes the number of lists, or the text as JSON, come out wrong."""
    pieces, at = [], 0
    while (begin := raw.find(b"[", at)) >= 0:
        pieces.append(raw[at : begin + 1])
        at = raw.find(b"]", begin)
        if at < 0:
            return (raw,)
    return (*pieces, raw[at:])


def _add_bodies(raws: Sequence[bytes], start: int, frame: Frame, bodies: list[bytes]) -> int:
    """Add what the lists of lines from `start` on hold, up to the first that has another frame: its place."""
    first, *others = frame
    for place in range(start, len(raws)):
        raw, added = raws[place], len(bodies)
        at = len(first) if raw.startswith(first) else -1
        for piece in others:
            end = raw.find(b"]", at)
            if at < 0 or end < 0 or not raw.startswith(piece, end):
                at = -1
                break
            bodies.append(raw[at:end])
            at = end + len(piece)
        if at != len(raw):
            del bodies[added:]
            return place
    return len(raws)


def _lists_of(frame: Frame, taken: Mapping[str, str]) -> tuple[str, ...] | None:
    """The names of an object's lists, in order; None where the object is not as it should be.

    Each list gets its number to hold: a key that comes twice keeps its first place among the others but its
    last value, so that places say nothing. Where a list is lost so, there are too few.
    """
    *opened, rest = frame
    numbered = b"".join(b"%b%d" % (piece, number) for number, piece in enumerate(opened)) + rest
    try:
        found = orjson.loads(numbered)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict):
        return None
    lists = [name for name, value in found.items() if isinstance(value, list)]
    if len(lists) != len(opened) or taken["input_ids"] not in lists:
        return None
    optional = (taken[ours] for ours in _OPTIONAL if ours in taken)
    if any(name not in lists and found.get(name) is not None for name in optional):
        return None
    return tuple(sorted(lists, key=found.__getitem__))


# ------------------------------------------------------------------ tables


def table_ids(batch: pa.RecordBatch, fields: Mapping[str, str]) -> IdRows | None:
    """A table's rows; None where a column in use is no list of whole numbers, or holds nulls."""
    taken = _taken(fields)
    if taken is None or taken["input_ids"] not in batch.schema.names:
        return None
    columns = {}
    for ours, theirs in taken.items():
        if theirs in batch.schema.names:
            column = list_values(batch.column(theirs))
            if column is None:
                return None
            columns[ours] = column
    return IdRows(columns)


def list_values(column: pa.Array) -> Flat | None:
    """A column of lists of signed whole numbers as its values and lengths; None for any other."""
    of = column.type
    is_list = pa.types.is_list(of) or pa.types.is_large_list(of)
    if not (is_list and pa.types.is_signed_integer(of.value_type)) or column.null_count:
        return None
    # Not to_numpy, which imports pandas where that is there: half a second of every new process.
    width = np.int32 if pa.types.is_list(of) else np.int64
    offsets = _memory(column.buffers()[1], width, column.offset, len(column) + 1)
    values = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    if values.null_count:
        return None
    flat = _memory(values.buffers()[1], of.value_type.to_pandas_dtype(), values.offset, len(values))
    return flat, np.diff(offsets).astype(np.int64)


def _memory(buffer: pa.Buffer | None, dtype: type, start: int, size: int) -> NDArray[Any]:
    if size == 0 or buffer is None:
        return np.zeros(size, dtype)
    return np.frombuffer(buffer, dtype)[start : start + size]
