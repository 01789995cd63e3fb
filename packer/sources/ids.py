"""Ready ids in flat arrays: many rows of a file or table at once, with no Python object a number.

`parse_ids` and `table_ids` give what reading row after row would give, or None where they cannot tell; then
the rows are read one by one, and what is wrong with one is found there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

Flat = tuple[NDArray[Any], NDArray[np.int64]]  # whole numbers end to end, and how many each row has


class IdRows(Sequence[Mapping[str, Any]]):
    """Rows whose fields all are lists of whole numbers: {"input_ids": (n,), "labels": (n,)}, as views.

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
    return dict(fields) if plain and set(fields) in ({"input_ids"}, {"input_ids", "labels"}) else None


# ------------------------------------------------------------------ JSON


def parse_ids(raws: Sequence[Any], fields: Mapping[str, str]) -> IdRows | None:
    """Lines of JSON as rows; None where one has anything but flat lists of numbers of up to 7 digits."""
    taken = _taken(fields)
    if taken is None or not raws:
        return None
    bodies: list[bytes] = []  # what stands between brackets
    layouts: dict[bytes, tuple[str, ...] | None] = {}
    for raw in raws:
        if type(raw) is not bytes:  # too long to be kept
            return None
        rests, at = [], 0
        while (begin := raw.find(b"[", at)) >= 0:
            end = raw.find(b"]", begin)
            if end < 0:
                return None
            bodies.append(raw[begin + 1 : end])
            rests.append(raw[at:begin])
            at = end + 1
        rests.append(raw[at:])
        # The line with its lists emptied. A bracket that is no list's (in a word, or nested) makes the
        # number of lists, or the text as JSON, come out wrong.
        frame = b"[]".join(rests)
        if frame not in layouts:
            layouts[frame] = _lists_of(frame, len(rests) - 1, taken)
    (layout, *others) = set(layouts.values())
    if layout is None or others:
        return None
    columns: dict[str, Flat] = {}
    for at, theirs in enumerate(layout):
        column = _numbers(bodies[at :: len(layout)])  # also what is not taken: it may be no JSON
        if column is None:
            return None
        columns |= {ours: column for ours, name in taken.items() if name == theirs}
    return IdRows(columns)


def _lists_of(frame: bytes, num_lists: int, taken: Mapping[str, str]) -> tuple[str, ...] | None:
    """The names of an object's lists, all emptied, in order; None where the object is not as it should be."""
    try:
        found = orjson.loads(frame)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict):
        return None
    lists = tuple(name for name, value in found.items() if value == [])
    if len(lists) != num_lists or taken["input_ids"] not in lists:
        return None
    labels = taken.get("labels")
    if labels is not None and labels not in lists and found.get(labels) is not None:
        return None
    return lists


_WORD = np.uint64
_ZEROS = _WORD(0x3030303030303030)
_ABOVE_NINE = _WORD(0x7676767676767676)  # lifts a byte of 10 or more to its top bit
_TOP_BITS = _WORD(0x8080808080808080)
_BYTE = _WORD(0xFF)
_SPACE, _MINUS, _ZERO, _COMMA = map(ord, " -0,")
_MAX_WIDTH = 8
# The least number of so many digits that has no zero in front.
_LEAST = np.array([0, 0, *(10**n for n in range(1, _MAX_WIDTH))], _WORD)
_SEGMENT_BYTES = 128 << 10  # of text at a time: arrays between the steps stay in the core's cache


def _numbers(bodies: Sequence[bytes]) -> Flat | None:
    """Each body ("1, 2, 3") as its numbers, int32; None where one is not written so.

    All have commas with one space behind, or all without, and up to 8 bytes from comma to comma.
    """
    filled = [body for body in bodies if body]
    lengths = np.zeros(len(bodies), np.int64)
    if not filled:
        return np.zeros(0, np.int32), lengths
    spaced = next((b", " in body for body in filled if b"," in body), False)
    # A comma behind each body, and room to read a whole word at the last number.
    text = (
        b", ".join([b"", *filled, bytes(_MAX_WIDTH)]) if spaced else b",".join([*filled, bytes(_MAX_WIDTH)])
    )
    start, size = int(spaced), len(text) - _MAX_WIDTH - int(spaced)
    data = np.frombuffer(text, np.uint8)
    signed = b"-" in text
    values, commas = [], []
    while start < size:
        stop = text.find(b",", min(start + _SEGMENT_BYTES, size - 1)) + 1
        ends = np.flatnonzero(data[start:stop] == _COMMA)
        begins = np.empty_like(ends)
        begins[0] = 0
        np.add(ends[:-1], 1, out=begins[1:])
        widths = ends - begins
        if widths.max() > _MAX_WIDTH or widths.min() < 1 + spaced:
            return None
        words = np.ndarray(stop - start, "<u8", data, offset=start, strides=(1,))[begins]
        found = _parse(words, widths, spaced, signed)
        if found is None:
            return None
        values.append(found)
        ends += start
        commas.append(ends)
        start = stop
    borders = np.cumsum([len(body) + 1 + spaced for body in filled]) - 1 + spaced
    places = np.searchsorted(np.concatenate(commas), borders)
    lengths[[bool(body) for body in bodies]] = np.diff(places + 1, prepend=0)
    return np.concatenate(values), lengths


def _parse(
    words: NDArray[np.uint64],
    widths: NDArray[np.int64],
    spaced: bool,
    signed: bool,
) -> NDArray[np.int32] | None:
    """The number that begins each word (8 bytes of text, the first the lowest; they are overwritten).

    widths: bytes of text that are the number's, the space before it included. None where one is no
    whole number as JSON has them. Eight digits are turned at once by three multiplications, each of which
    joins neighbours (Lemire and Mula's SWAR; simdjson, parse_eight_digits_unrolled).
    """
    first = _WORD(8 * spaced)
    digits = widths - spaced
    zeros = _ZEROS
    if spaced:
        if np.bitwise_or.reduce(words ^ _WORD(_SPACE)) & _BYTE:
            return None
        zeros = _ZEROS - _WORD(_ZERO - _SPACE)  # so that the space counts as a zero
    if signed:
        minus = (words >> first) & _BYTE == _MINUS
        words += minus * (_WORD(_ZERO - _MINUS) << first)
        digits = digits - minus
        if digits.min() < 1:
            return None
    # What follows the number is shifted out; the zero bytes that come in are zeros in front.
    shift = (_MAX_WIDTH - widths).astype(_WORD) << _WORD(3)
    words <<= shift
    words -= zeros << shift
    if np.bitwise_or.reduce((words + _ABOVE_NINE) | words) & _TOP_BITS:
        return None
    words *= _WORD(10 * (1 << 8) + 1)
    words >>= _WORD(8)
    words &= _WORD(0x00FF00FF00FF00FF)
    words *= _WORD(100 * (1 << 16) + 1)
    words >>= _WORD(16)
    words &= _WORD(0x0000FFFF0000FFFF)
    words *= _WORD(10000 * (1 << 32) + 1)
    words >>= _WORD(32)
    if (words < _LEAST[digits]).any():  # 007
        return None
    values = words.astype(np.int32)
    if signed:
        np.negative(values, out=values, where=minus)
    return values


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
