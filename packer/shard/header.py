"""Where the values of a record batch message lie, read from its header by hand.

The header is a flatbuffer: the table Message of Arrow's Message.fbs, whose format is fixed for good. Arrow's
own reader makes a record batch of every message and an array of every column; for a single pack that costs
twice as much as decompressing it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from packer.shard.layout import ShardError

_Unpack = Callable[..., tuple[Any, ...]]
_uint16: _Unpack = struct.Struct("<H").unpack_from
_int32: _Unpack = struct.Struct("<i").unpack_from
_int64: _Unpack = struct.Struct("<q").unpack_from

_PREFIX_BYTES = 8  # continuation mark and length
_HEADER_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3  # fields of Message
_RECORD_BATCH = 3  # value of header_type
_LENGTH, _NODES, _BUFFERS, _COMPRESSION = range(4)  # fields of RecordBatch
_CODEC = 0  # field of BodyCompression
_SCHEMA, _DICTIONARIES, _RECORD_BATCHES = 1, 2, 3  # fields of Footer

# Of the schema's columns in depth-first order: a list has a node of its own and its values one, a column of
# numbers one. Each node has a buffer of validity and one of offsets or values.
_NUM_NODES, _NUM_BUFFERS = 11, 22
# Of input_ids, loss_mask, cu_seqlens and example_ids: which node and which buffer are of the list's values.
_VALUE_NODES, _VALUE_BUFFERS = (1, 5, 7, 10), (3, 11, 15, 21)


def _picked(places: tuple[int, ...], form: str, size: int) -> _Unpack:
    """Reads those entries of a vector of entries of `size` bytes, of each the values of `form`."""
    gaps = (place - before - 1 for before, place in itertools.pairwise((-1, *places)))
    used = struct.calcsize(f"<{form}")
    return struct.Struct("<" + "".join(f"{gap * size}x{form}{size - used}x" for gap in gaps)).unpack_from


_lengths = _picked(_VALUE_NODES, "q", 16)  # an entry: length, number of nulls
_extents = _picked(_VALUE_BUFFERS, "2q", 16)  # an entry: start, size


class Places(NamedTuple):
    """Where the values of input_ids, loss_mask, cu_seqlens and example_ids lie in the body.

    lengths: how many values, of all rows. extents: start and size in bytes of each one's buffer, end to end.
    is_compressed: each buffer for itself, with LZ4.
    """

    num_rows: int
    lengths: tuple[int, ...]
    extents: tuple[int, ...]
    is_compressed: bool


class _Form(NamedTuple):
    """How a header is built: which of its bytes say where the rest lies, and where that is.

    Headers by one release of Arrow differ in the numbers alone. So what was looked at in one is compared with
    the same bytes of the next, and only the numbers are read: a third of the time.
    """

    num_bytes: int  # of the header, at least
    look: _Unpack  # gives the bytes that were looked at
    seen: tuple[Any, ...]
    length_at: int
    nodes_at: int
    buffers_at: int
    is_compressed: bool


_last: _Form | None = None  # a form is never changed, so threads may share it


def read_places(message: memoryview, header_bytes: int) -> Places:
    """What the header of a record batch message of our schema says. Raises ShardError for any other.

    message: its header at least.
    """
    global _last
    form = _last
    try:
        if form is None or header_bytes < form.num_bytes or form.look(message) != form.seen:
            form = _last = _Look(message[:header_bytes]).form()
        return Places(
            _int64(message, form.length_at)[0],
            _lengths(message, form.nodes_at),
            _extents(message, form.buffers_at),
            form.is_compressed,
        )
    except (struct.error, IndexError) as error:
        raise ShardError(f"the header of a record batch is not of this format: {error}") from error


def places_to_fill(header: memoryview) -> tuple[int, int, int]:
    """Where a header says how long the body is, and where its nodes and its buffers begin."""
    look = _Look(header)
    form = look.form()
    return look.message[_BODY_LENGTH], form.nodes_at, form.buffers_at


def footer_places(footer: memoryview) -> tuple[tuple[int, int], int]:
    """Of the footer of a file: where it says how far it is from there to what lies behind its list of record
    batches, and where that list is (their number, then a block of 24 bytes each)."""
    look = _Look(footer)
    fields = look.fields(look.follow(0))
    return (fields[_SCHEMA], fields[_DICTIONARIES]), look.follow(fields[_RECORD_BATCHES])


class _Look:
    """Finds its way through a header, and keeps account of what it looked at."""

    def __init__(self, header: memoryview) -> None:
        self._header = header
        self._seen: list[tuple[int, int]] = []  # start, stop of bytes
        self.message: list[int] = []  # where the fields of Message lie, once `form` was called

    def form(self) -> _Form:
        message = self.message = self.fields(self.follow(_PREFIX_BYTES))
        if self._byte(message[_HEADER_TYPE]) != _RECORD_BATCH:
            raise ShardError("not a record batch message")
        table = self.follow(message[_HEADER])
        batch = self.fields(table)
        is_compressed = _is_there(table, batch, _COMPRESSION)
        if is_compressed:
            self._require_lz4(batch[_COMPRESSION])
        nodes_at = self._vector(batch[_NODES], _NUM_NODES)
        buffers_at = self._vector(batch[_BUFFERS], _NUM_BUFFERS)
        look = self._again()
        return _Form(
            num_bytes=len(self._header),
            look=look,
            seen=look(self._header),
            length_at=batch[_LENGTH],
            nodes_at=nodes_at,
            buffers_at=buffers_at,
            is_compressed=is_compressed,
        )

    def _again(self) -> _Unpack:
        """Gives the bytes looked at, of any header."""
        pieces: list[list[int]] = []
        for start, stop in sorted(self._seen):
            if pieces and start <= pieces[-1][1]:
                pieces[-1][1] = max(stop, pieces[-1][1])
            else:
                pieces.append([start, stop])
        ends = [0, *(stop for _, stop in pieces)]
        gaps = (f"{start - end}x{stop - start}s" for end, (start, stop) in zip(ends, pieces, strict=False))
        return struct.Struct("<" + "".join(gaps)).unpack_from

    def _byte(self, at: int) -> int:
        self._seen.append((at, at + 1))
        return self._header[at]

    def _number(self, at: int, read: _Unpack = _int32, num_bytes: int = 4) -> int:
        self._seen.append((at, at + num_bytes))
        found: int = read(self._header, at)[0]
        return found

    def follow(self, at: int) -> int:
        return at + self._number(at)

    def fields(self, table: int) -> list[int]:
        """Where the first four fields of a table lie; at the table itself where one is left out."""
        vtable = table - self._number(table)
        count = min(self._number(vtable, _uint16, 2) // 2 - 2, 4)
        return [table + self._number(vtable + 4 + 2 * place, _uint16, 2) for place in range(count)]

    def _vector(self, at: int, length: int) -> int:
        """Where the items of a vector lie."""
        vector = self.follow(at)
        found = self._number(vector)
        if found != length:
            raise ShardError(f"a list of {length} is required in the header of a record batch, found {found}")
        return vector + 4

    def _require_lz4(self, at: int) -> None:
        """Raise unless a table BodyCompression says so; we write nothing else."""
        table = self.follow(at)
        fields = self.fields(table)
        codec = self._byte(fields[_CODEC]) if _is_there(table, fields, _CODEC) else 0
        if codec != 0:
            raise ShardError(f"compression with LZ4 (0) is required, found codec {codec}")


def _is_there(table: int, fields: list[int], number: int) -> bool:
    return number < len(fields) and fields[number] != table
