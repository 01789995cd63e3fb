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

_Unpack = Callable[[memoryview, int], tuple[Any, ...]]
_uint16: _Unpack = struct.Struct("<H").unpack_from
_int32: _Unpack = struct.Struct("<i").unpack_from
_int64: _Unpack = struct.Struct("<q").unpack_from

_PREFIX_BYTES = 8  # continuation mark and length
_HEADER_TYPE, _HEADER = 1, 2  # fields of Message
_RECORD_BATCH = 3  # value of header_type
_LENGTH, _NODES, _BUFFERS, _COMPRESSION = range(4)  # fields of RecordBatch
_CODEC = 0  # field of BodyCompression
_FIELDS: tuple[_Unpack, ...] = tuple(struct.Struct(f"<{count}H").unpack_from for count in range(5))

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


def read_places(header: memoryview) -> Places:
    """What the header of a record batch message of our schema says. Raises ShardError for any other."""
    try:
        message = _fields(header, _follow(header, _PREFIX_BYTES))
        if header[message[_HEADER_TYPE]] != _RECORD_BATCH:
            raise ShardError("not a record batch message")
        table = _follow(header, message[_HEADER])
        batch = _fields(header, table)
        return Places(
            _int64(header, batch[_LENGTH])[0],
            _lengths(header, _vector(header, batch[_NODES], _NUM_NODES)),
            _extents(header, _vector(header, batch[_BUFFERS], _NUM_BUFFERS)),
            _is_there(table, batch, _COMPRESSION) and _is_lz4(header, batch[_COMPRESSION]),
        )
    except (struct.error, IndexError) as error:
        raise ShardError(f"the header of a record batch is not of this format: {error}") from error


def _follow(header: memoryview, at: int) -> int:
    found: int = _int32(header, at)[0]
    return at + found


def _fields(header: memoryview, table: int) -> list[int]:
    """Where the first four fields of a table lie; at the table itself where one is left out."""
    vtable = table - _int32(header, table)[0]
    count = min(_uint16(header, vtable)[0] // 2 - 2, len(_FIELDS) - 1)
    return [table + offset for offset in _FIELDS[count](header, vtable + 4)]


def _is_there(table: int, fields: list[int], number: int) -> bool:
    return number < len(fields) and fields[number] != table


def _vector(header: memoryview, at: int, length: int) -> int:
    """Where the items of a vector lie."""
    vector = _follow(header, at)
    found = _int32(header, vector)[0]
    if found != length:
        raise ShardError(f"a list of {length} is required in the header of a record batch, found {found}")
    return vector + 4


def _is_lz4(header: memoryview, at: int) -> bool:
    """Whether a table BodyCompression says so; we write nothing else."""
    table = _follow(header, at)
    fields = _fields(header, table)
    codec = header[fields[_CODEC]] if _is_there(table, fields, _CODEC) else 0
    if codec != 0:
        raise ShardError(f"compression with LZ4 (0) is required, found codec {codec}")
    return True
