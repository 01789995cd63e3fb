"""Bytes to packs, and the validator of every rule of the format."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.shard.encode import CONTINUATION, MAGIC_BYTES, schema_message
from packer.shard.header import read_places
from packer.shard.layout import FIELDS, FORMAT_VERSION, Bits, Pack, ShardError, check
from packer.shard.stamp import Stamp, read_stamp, verify_message

_NAMES = [each.name for each in FIELDS]
_BOUNDARIES = [_NAMES.index(name) for name in ("cu_seqlens", "example_ids")]
_PLACES = [_NAMES.index(name) for name in ("input_ids", "loss_mask", "cu_seqlens", "example_ids")]


def decode_batch(batch: pa.RecordBatch) -> list[Pack]:
    """The packs of a record batch; arrays are views of its buffers where Arrow allows it."""
    # A batch of all columns, or of those that are needed.
    places = _PLACES if batch.num_columns == len(FIELDS) else range(len(_PLACES))
    ids, mask, cu, examples = (batch.column(place) for place in places)
    columns: tuple[tuple[Any, NDArray[np.int32]], ...] = (
        (_numbers(ids.values, np.int32), _offsets(ids)),
        (_numbers(cu.values, np.int32), _offsets(cu)),
        (_numbers(examples.values, np.int64), _offsets(examples)),
        (_bools(mask.values), _offsets(mask)),
    )
    packs = []
    for row in range(batch.num_rows):
        cut = [flat[offsets[row] : offsets[row + 1]] for flat, offsets in columns]
        packs.append(Pack(input_ids=cut[0], cu_seqlens=cut[1], example_ids=cut[2], loss_mask=cut[3]))
    return packs


# Arrow's own to_numpy imports pandas, where that is installed: a second, and 60 MB in every training process.


def _numbers(array: pa.Array, dtype: type[np.integer]) -> np.ndarray:
    if len(array) == 0:
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype)[array.offset : array.offset + len(array)]


def _offsets(array: pa.ListArray) -> NDArray[np.int32]:
    return np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]


def _bools(array: pa.Array) -> NDArray[np.bool_]:
    """Arrow's bits as booleans."""
    if len(array) == 0:
        return np.empty(0, np.bool_)
    bits = np.frombuffer(array.buffers()[1], np.uint8)
    unpacked = np.unpackbits(bits, count=array.offset + len(array), bitorder="little")
    return unpacked[array.offset :].view(np.bool_)


@functools.cache
def _before_batch() -> tuple[bytes, pa.ipc.IpcReadOptions]:
    return schema_message(""), pa.ipc.IpcReadOptions(use_threads=False, included_fields=_PLACES)


def decode_message(message: bytes | bytearray | memoryview) -> list[Pack]:
    """The packs of one record batch message (not checked: see verify_message). Raises ShardError.

    The message is copied and read as a stream of its own, behind the schema: only so can Arrow be told to
    leave out the columns that follow from others, and not to use its threads, which cost more than they
    save on a pack (85 against 23 microseconds of CPU for 4,096 tokens) and take cores from a training loop.
    """
    head, options = _before_batch()
    try:
        stream = pa.ipc.open_stream(pa.py_buffer(b"".join((head, message))), options=options)
        batch = stream.read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise ShardError(f"not a record batch of this format: {error}") from error
    return decode_batch(batch)


_decompress = pa.Codec("lz4").decompress
_int64 = struct.Struct("<q").unpack_from
# Looked up once: names and types found anew take a microsecond a pack.
_frombuffer = np.frombuffer
_INT32, _INT64, _UINT8 = map(np.dtype, (np.int32, np.int64, np.uint8))
_UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError, struct.error)


def decode_pack(message: memoryview, header_bytes: int) -> Pack:
    """The pack of a record batch message that holds one (not checked: see verify_message). Raises ShardError.

    The same as `decode_message`, at half the cost: values are decompressed right out of the message, without
    Arrow's reader between. No array is a view of the message.
    """
    num_rows, lengths, extents, is_compressed = read_places(message, header_bytes)
    if num_rows != 1:
        raise ShardError(f"one pack a record batch is required, found {num_rows}")
    if min(lengths + extents) < 0:
        raise ShardError(f"lengths must not be negative, found {lengths} and {extents}")
    num_tokens, num_bits, num_bounds, num_segments = lengths
    ids_at, ids_size, mask_at, mask_size, cu_at, cu_size, examples_at, examples_size = extents
    body, take = message[header_bytes:], _decompressed if is_compressed else _copied
    try:
        return Pack(
            input_ids=take(body, ids_at, ids_size, _INT32, num_tokens),
            loss_mask=Bits(take(body, mask_at, mask_size, _UINT8, -(-num_bits // 8)), num_bits),
            cu_seqlens=take(body, cu_at, cu_size, _INT32, num_bounds),
            example_ids=take(body, examples_at, examples_size, _INT64, num_segments),
        )
    except _UNREADABLE as error:
        raise ShardError(f"not a record batch of this format: {error}") from error


def _decompressed(body: memoryview, start: int, size: int, dtype: np.dtype, count: int) -> np.ndarray:
    """`count` values out of a compressed buffer of a message, as an array of its own."""
    if count == 0:
        return np.empty(0, dtype)
    (num_bytes,) = _int64(body, start)
    if num_bytes == -1:  # left as it was: compression would not have made it smaller
        return _copied(body, start + 8, size - 8, dtype, count)
    if num_bytes < count * dtype.itemsize:
        raise ValueError(f"{count} values need more than {num_bytes} bytes")
    return _frombuffer(_decompress(body[start + 8 : start + size], num_bytes, True), dtype, count)


def _copied(body: memoryview, start: int, size: int, dtype: np.dtype, count: int) -> np.ndarray:
    return _frombuffer(body[start : start + size], dtype, count).copy()


def iter_messages(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """(offset, header_bytes, body_bytes) of every pack of a shard file, without its footer."""
    view = memoryview(data)
    if bytes(view[:6]) != b"ARROW1":
        raise ShardError("not an Arrow file: it does not begin with ARROW1")
    at = MAGIC_BYTES
    at += 8 + int.from_bytes(view[at + 4 : at + 8], "little")  # the schema message has no body
    while True:
        if at + 8 > len(view) or bytes(view[at : at + 4]) != CONTINUATION:
            raise ShardError(f"the file is cut off or damaged at byte {at}")
        metadata = int.from_bytes(view[at + 4 : at + 8], "little")
        if metadata == 0:
            return
        header_bytes = 8 + metadata
        stamp = read_stamp(view[at : at + header_bytes])
        yield at, header_bytes, stamp.body_bytes
        at += header_bytes + stamp.body_bytes


def open_shard(
    data: bytes | memoryview | pa.Buffer, *, columns: list[int] | None = None
) -> pa.RecordBatchFileReader:
    """Open the bytes of a shard file and check schema and format version. Raises ShardError.

    columns: places of those that are to be read; None: all.
    """
    options = pa.ipc.IpcReadOptions(use_threads=columns is None, included_fields=columns)
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data), options=options)
    except (pa.ArrowException, OSError) as error:
        raise ShardError(f"not a readable Arrow file: {error}") from error
    found = reader.schema
    version = (found.metadata or {}).get(b"padfree.format_version", b"none").decode()
    if version != str(FORMAT_VERSION):
        raise ShardError(f"shard format version {FORMAT_VERSION} wanted, found {version}")
    fields = FIELDS if columns is None else [FIELDS[place] for place in columns]
    if not found.equals(pa.schema(fields), check_metadata=False):
        raise ShardError(f"the schema differs from the format's: {found.remove_metadata()}")
    return reader


def read_packs(data: bytes | memoryview | pa.Buffer) -> Iterator[Pack]:
    """All packs of a shard file, in order."""
    reader = open_shard(data)
    for index in range(reader.num_record_batches):
        yield from decode_batch(reader.get_batch(index))


def iter_boundaries(data: bytes | memoryview) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """cu_seqlens and example_ids of every pack of a shard file, in order; tokens are not unpacked."""
    reader = open_shard(data, columns=_BOUNDARIES)
    for index in range(reader.num_record_batches):
        cu, examples = reader.get_batch(index).columns
        yield _numbers(cu.values, np.int32), _numbers(examples.values, np.int64)


def validate(data: bytes | memoryview, *, dataset: str | None = None, max_tokens: int | None = None) -> int:
    """Check every rule of the format in one shard file. Returns the number of packs.

    Raises ShardError that names the first pack (by row) that breaks a rule, and the rule.
    """
    reader = open_shard(data)
    named = reader.schema.metadata.get(b"padfree.dataset", b"").decode()
    if dataset is not None and named != dataset:
        raise ShardError(f"the shard belongs to dataset {named!r}, not {dataset!r}")
    view = memoryview(data)
    messages = list(iter_messages(view))
    if len(messages) != reader.num_record_batches:
        raise ShardError(f"{len(messages)} messages, but the footer lists {reader.num_record_batches}")
    for row, (at, header_bytes, body_bytes) in enumerate(messages):
        try:
            stamp = verify_message(view[at : at + header_bytes + body_bytes], header_bytes)
            if stamp != Stamp(crc32=stamp.crc32, body_bytes=stamp.body_bytes):
                raise ShardError(f"the stamp is not at rest: {stamp}")
            validate_row(reader.get_batch(row), max_tokens)
        except ShardError as error:
            raise ShardError(f"pack {row}: {error}") from None
    return len(messages)


def validate_row(batch: pa.RecordBatch, max_tokens: int | None) -> None:
    if batch.num_rows != 1:
        raise ShardError(f"one pack a record batch, found {batch.num_rows}")
    if any(column.null_count for column in batch.columns):
        raise ShardError("no value may be null")
    pack = decode_batch(batch)[0]
    check(pack)
    if max_tokens is not None and pack.num_tokens > max_tokens:
        raise ShardError(f"{pack.num_tokens} tokens, more than max_tokens={max_tokens}")
    stored = batch.column("position_ids")[0].values.to_numpy()
    if not np.array_equal(stored, pack.position_ids):
        raise ShardError("position_ids must count from 0 in every segment")
    if batch.column("max_seqlen")[0].as_py() != pack.max_seqlen:
        raise ShardError(f"max_seqlen must be {pack.max_seqlen}, the longest segment")
