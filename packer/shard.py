"""The shard format, version 1: schema, encode, decode, validate. Needs numpy and pyarrow alone.

A shard is an Arrow IPC *file*. Each pack (row) is a record batch of its own, its body compressed
with LZ4, so that a rank's stream is the schema message followed by byte ranges of shard files in any
order: the server decodes and encodes nothing (docs/shard-format.md draws the layout).

Each record batch carries one custom metadata value, the *stamp*: fixed-width text that holds the
checksum and length of the message and room for what only the stream knows (epoch, step, trained
tokens of the step over all ranks). At rest that room is zero; serving overwrites it in place, which
moves no byte. The checksum is taken with the room and itself zeroed, so it holds before and after.

Errors: ShardError (a ValueError) for bytes that break a rule of the format.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

FORMAT_VERSION = 1
IGNORE_INDEX = -100
PADDING_ID = -1  # example id of a padding segment

_STAMP_KEY = b"padfree.stamp"
_STAMP_MARK = b"padfree1 crc32="
_STAMP_FORMAT = b"padfree1 crc32=%08x body=%012d epoch=%08d step=%012d items=%012d done=%d pad=%d"
_STAMP_LENGTH = len(_STAMP_FORMAT % (0, 0, 0, 0, 0, 0, 0))
_MAGIC_BYTES = 8  # "ARROW1" and two bytes of padding
_CONTINUATION = b"\xff\xff\xff\xff"
END_OF_STREAM = _CONTINUATION + b"\0\0\0\0"

_FIELDS = [
    pa.field("input_ids", pa.list_(pa.int32())),
    pa.field("position_ids", pa.list_(pa.int32())),
    pa.field("loss_mask", pa.list_(pa.bool_())),
    pa.field("cu_seqlens", pa.list_(pa.int32())),
    pa.field("max_seqlen", pa.int32()),
    pa.field("example_ids", pa.list_(pa.int64())),
]

# One row a pack, in the order of the shard. Offsets are from the start of the shard's file.
ROW_INDEX = np.dtype(
    [
        ("offset", "<i8"),  # first byte of the record batch message
        ("header_bytes", "<i4"),  # prefix and metadata
        ("body_bytes", "<i4"),
        ("num_tokens", "<i4"),
        ("num_trained", "<i4"),
        ("num_segments", "<i4"),
        ("max_seqlen", "<i4"),
        ("sum_squares", "<i8"),  # of segment lengths: what attention costs
    ]
)


class ShardError(ValueError):
    """Bytes that are not a shard of this format, or break one of its rules."""


def schema(dataset: str) -> pa.Schema:
    """The one schema of every shard of `dataset`."""
    return pa.schema(
        _FIELDS, metadata={"padfree.format_version": str(FORMAT_VERSION), "padfree.dataset": dataset}
    )


def position_ids(cu_seqlens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Positions that restart at 0 in every segment, (num_tokens,) int32."""
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    return np.arange(cu_seqlens[-1], dtype=np.int32) - np.repeat(starts, ends - starts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack:
    """Segments laid end to end.

    input_ids: (num_tokens,) int32. loss_mask: (num_tokens,) bool. cu_seqlens: (num_segments + 1,)
    int32. example_ids: (num_segments,) int64.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    cu_seqlens: NDArray[np.int32]
    example_ids: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_segments(self) -> int:
        return len(self.example_ids)

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def max_seqlen(self) -> int:
        return int(np.diff(self.cu_seqlens).max())

    @property
    def position_ids(self) -> NDArray[np.int32]:
        return position_ids(self.cu_seqlens)

    @property
    def labels(self) -> NDArray[np.int32]:
        """`input_ids` where trained, else -100; not shifted. (num_tokens,) int32."""
        return np.where(self.loss_mask, self.input_ids, np.int32(IGNORE_INDEX))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pack) and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("input_ids", "loss_mask", "cu_seqlens", "example_ids")
        )

    __hash__ = None  # type: ignore[assignment]  # holds arrays: equal by value, not hashable


def padding_pack(token_id: int = 0) -> Pack:
    """A pack without trained tokens, for a rank that has none left in the last step."""
    return Pack(
        input_ids=np.array([token_id], np.int32),
        loss_mask=np.zeros(1, np.bool_),
        cu_seqlens=np.array([0, 1], np.int32),
        example_ids=np.array([PADDING_ID], np.int64),
    )


def check(pack: Pack) -> None:
    """Raise ShardError for the first rule of the format that `pack` breaks."""
    cu, total = pack.cu_seqlens, pack.num_tokens
    if len(cu) < 2 or cu[0] != 0 or cu[-1] != total:
        found = cu[[0, -1]].tolist() if len(cu) else "nothing"
        raise ShardError(f"cu_seqlens must start at 0 and end at num_tokens={total}, found {found}")
    if np.any(cu[1:] <= cu[:-1]):
        raise ShardError("cu_seqlens must strictly increase: there is a segment without tokens")
    if len(pack.loss_mask) != total:
        raise ShardError(f"loss_mask has {len(pack.loss_mask)} values for {total} tokens")
    if len(pack.example_ids) != len(cu) - 1:
        raise ShardError(f"{len(pack.example_ids)} example_ids for {len(cu) - 1} segments")
    if np.any(pack.loss_mask[cu[:-1]]):
        raise ShardError("loss_mask must be false on the first token of every segment")
    padding = np.flatnonzero(pack.example_ids == PADDING_ID)
    if len(padding) and any(pack.loss_mask[cu[i] : cu[i + 1]].any() for i in padding):
        raise ShardError("loss_mask must be false in padding (example id -1)")
    if np.any(pack.input_ids < 0):
        raise ShardError("input_ids must not be negative")


# ------------------------------------------------------------------ stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What a record batch message says of itself. At rest all but the first two are zero."""

    crc32: int = 0
    body_bytes: int = 0
    epoch: int = 0
    step: int = 0
    num_items: int = 0  # trained tokens of the whole optimiser step, over all ranks
    step_done: bool = False  # last micro-batch of its optimiser step
    padding: bool = False  # fills up a short last step

    def encode(self) -> bytes:
        return _STAMP_FORMAT % (
            self.crc32,
            self.body_bytes,
            self.epoch,
            self.step,
            self.num_items,
            self.step_done,
            self.padding,
        )


def _find_stamp(header: bytes | bytearray | memoryview) -> int:
    at = bytes(header).find(_STAMP_MARK)
    if at < 0 or at + _STAMP_LENGTH > len(header):
        raise ShardError("the record batch carries no padfree stamp: not written by padfree, or damaged")
    return at


def read_stamp(header: bytes | bytearray | memoryview) -> Stamp:
    """The stamp of a message, from its header (prefix and metadata)."""
    at = _find_stamp(header)
    text = bytes(header[at : at + _STAMP_LENGTH])
    values = [part.partition(b"=")[2] for part in text.split(b" ")[1:]]
    try:
        crc32 = int(values[0], 16)
        body_bytes, epoch, step, num_items, done, padding = (int(value) for value in values[1:])
    except ValueError as error:
        raise ShardError(f"the stamp of a record batch is damaged: {text!r}") from error
    stamp = Stamp(
        crc32=crc32,
        body_bytes=body_bytes,
        epoch=epoch,
        step=step,
        num_items=num_items,
        step_done=bool(done),
        padding=bool(padding),
    )
    if stamp.encode() != text:
        raise ShardError(f"the stamp of a record batch is damaged: {text!r}")
    return stamp


def stamped(header: bytes | memoryview, *, epoch: int, step: int, num_items: int, step_done: bool) -> bytes:
    """The header of a message at rest, as it goes out in a stream."""
    at = _find_stamp(header)
    rest = read_stamp(header)
    stamp = Stamp(
        crc32=rest.crc32,
        body_bytes=rest.body_bytes,
        epoch=epoch,
        step=step,
        num_items=num_items,
        step_done=step_done,
        padding=rest.padding,
    )
    return b"".join((header[:at], stamp.encode(), header[at + _STAMP_LENGTH :]))


def _checksum(message: bytes | memoryview, at: int, stamp: Stamp) -> int:
    zeroed = Stamp(body_bytes=stamp.body_bytes, padding=stamp.padding).encode()
    crc = zlib.crc32(memoryview(message)[:at])
    crc = zlib.crc32(zeroed, crc)
    return zlib.crc32(memoryview(message)[at + _STAMP_LENGTH :], crc)


def verify_message(message: bytes | bytearray | memoryview, header_bytes: int) -> Stamp:
    """Check length and checksum of a whole message; return its stamp. Raises ShardError."""
    view = memoryview(message)
    header = view[:header_bytes]
    stamp, at = read_stamp(header), _find_stamp(header)
    if len(view) != header_bytes + stamp.body_bytes:
        raise ShardError(
            f"a record batch needs {header_bytes + stamp.body_bytes} bytes, {len(view)} are there: cut off"
        )
    found = _checksum(view, at, stamp)
    if found != stamp.crc32:
        raise ShardError(f"checksum of a record batch is {found:08x}, its stamp says {stamp.crc32:08x}")
    return stamp


# ------------------------------------------------------------------ encode


def _list_array(values: pa.Array, offsets: Sequence[int] | NDArray[np.int32]) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def _bool_array(mask: NDArray[np.bool_]) -> pa.Array:
    # Packed here, so that the bits behind the last value are zero in every encoding of equal masks.
    bits = np.packbits(mask, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, pa.py_buffer(bits)])


def _record_batch(packs: Sequence[Pack], of: pa.Schema) -> pa.RecordBatch:
    def concat(name: str) -> np.ndarray:
        arrays = [getattr(pack, name) for pack in packs]
        # Contiguous and from offset 0: a slice of a larger array would serialise to other bytes.
        return np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))

    def ends(name: str) -> NDArray[np.int32]:
        sizes = [len(getattr(pack, name)) for pack in packs]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)

    tokens = ends("input_ids")
    columns = [
        _list_array(pa.array(concat("input_ids").astype(np.int32, copy=False)), tokens),
        _list_array(pa.array(concat("position_ids")), tokens),
        _list_array(_bool_array(concat("loss_mask")), tokens),
        _list_array(pa.array(concat("cu_seqlens").astype(np.int32, copy=False)), ends("cu_seqlens")),
        pa.array([pack.max_seqlen for pack in packs], pa.int32()),
        _list_array(pa.array(concat("example_ids").astype(np.int64, copy=False)), ends("example_ids")),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=of)


def _write_options() -> pa.ipc.IpcWriteOptions:
    # One thread: a pack is small, and workers are one process a core.
    return pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)


def _seal(message: memoryview, stamp_of: Stamp) -> None:
    """Write checksum and length into the stamp of a fresh message, in place."""
    header_bytes = 8 + int.from_bytes(message[4:8], "little")
    at = _find_stamp(message[:header_bytes])
    stamp = Stamp(body_bytes=len(message) - header_bytes, padding=stamp_of.padding)
    message[at : at + _STAMP_LENGTH] = stamp.encode()
    crc32 = _checksum(message, at, stamp)
    message[at : at + _STAMP_LENGTH] = Stamp(
        crc32=crc32,
        body_bytes=stamp.body_bytes,
        epoch=stamp_of.epoch,
        step=stamp_of.step,
        num_items=stamp_of.num_items,
        step_done=stamp_of.step_done,
        padding=stamp_of.padding,
    ).encode()


def encode_shard(packs: Iterable[Pack], dataset: str) -> tuple[memoryview, np.ndarray]:
    """Packs as the bytes of a shard file, and its row index (dtype ROW_INDEX).

    Equal packs give equal bytes. Every pack is checked against the rules first (ShardError).
    """
    sink = pa.BufferOutputStream()
    rows: list[tuple[int, ...]] = []
    ends: list[int] = []
    of = schema(dataset)
    blank = {_STAMP_KEY: Stamp().encode()}
    first = _MAGIC_BYTES + len(schema_message(dataset))
    with pa.ipc.new_file(sink, of, options=_write_options()) as writer:
        for pack in packs:
            check(pack)
            start = sink.tell() or first  # the schema is written with the first batch
            writer.write_batch(_record_batch([pack], of), custom_metadata=blank)
            lengths = np.diff(pack.cu_seqlens).astype(np.int64)
            rows.append(
                (
                    start,
                    0,
                    0,
                    pack.num_tokens,
                    pack.num_trained,
                    pack.num_segments,
                    int(lengths.max()),
                    int(lengths @ lengths),
                )
            )
            ends.append(sink.tell())
    data = memoryview(bytearray(sink.getvalue()))
    index = np.array(rows, ROW_INDEX)
    for row, end in zip(index, ends, strict=True):
        message = data[row["offset"] : end]
        row["header_bytes"] = 8 + int.from_bytes(message[4:8], "little")
        row["body_bytes"] = len(message) - row["header_bytes"]
        _seal(message, Stamp())
    return data, index


def encode_message(packs: Sequence[Pack], *, stamp: Stamp) -> bytes:
    """One record batch message of one or more packs, for a stream. `crc32` and `body_bytes` are set."""
    sink = pa.BufferOutputStream()
    of = schema("")
    with pa.ipc.new_stream(sink, of, options=_write_options()) as writer:
        start = len(schema_message(""))  # written with the first batch
        blank = {_STAMP_KEY: Stamp().encode()}
        writer.write_batch(_record_batch(packs, of), custom_metadata=blank)
        end = sink.tell()
    message = bytearray(memoryview(sink.getvalue())[start:end])
    _seal(memoryview(message), stamp)
    return bytes(message)


def schema_message(dataset: str) -> bytes:
    """The first message of a stream."""
    return schema(dataset).serialize().to_pybytes()


# ------------------------------------------------------------------ decode


def decode_batch(batch: pa.RecordBatch) -> list[Pack]:
    """The packs of a record batch; arrays are views of its buffers where Arrow allows it."""

    def column(name: str) -> tuple[np.ndarray, np.ndarray]:
        array = batch.column(name)
        values = array.values
        flat = (
            values.to_numpy(zero_copy_only=False)
            if pa.types.is_boolean(values.type)
            else values.to_numpy(zero_copy_only=True)
        )
        return flat, array.offsets.to_numpy(zero_copy_only=True)

    ids, mask, cu, examples = (
        column(name) for name in ("input_ids", "loss_mask", "cu_seqlens", "example_ids")
    )

    def cut(pair: tuple[np.ndarray, np.ndarray], row: int) -> np.ndarray:
        flat, offsets = pair
        return flat[offsets[row] : offsets[row + 1]]

    return [
        Pack(
            input_ids=cut(ids, row),
            loss_mask=cut(mask, row),
            cu_seqlens=cut(cu, row),
            example_ids=cut(examples, row),
        )
        for row in range(batch.num_rows)
    ]


def decode_message(message: bytes | bytearray | memoryview, of: pa.Schema | None = None) -> list[Pack]:
    """The packs of one record batch message (not checked: see verify_message). Raises ShardError."""
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(message), of or schema(""))
    except (pa.ArrowException, OSError) as error:
        raise ShardError(f"not a record batch of this format: {error}") from error
    return decode_batch(batch)


def iter_messages(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """(offset, header_bytes, body_bytes) of every pack of a shard file, without its footer."""
    view = memoryview(data)
    if bytes(view[:6]) != b"ARROW1":
        raise ShardError("not an Arrow file: it does not begin with ARROW1")
    at = _MAGIC_BYTES
    at += 8 + int.from_bytes(view[at + 4 : at + 8], "little")  # the schema message has no body
    while True:
        if at + 8 > len(view) or bytes(view[at : at + 4]) != _CONTINUATION:
            raise ShardError(f"the file is cut off or damaged at byte {at}")
        metadata = int.from_bytes(view[at + 4 : at + 8], "little")
        if metadata == 0:
            return
        header_bytes = 8 + metadata
        stamp = read_stamp(view[at : at + header_bytes])
        yield at, header_bytes, stamp.body_bytes
        at += header_bytes + stamp.body_bytes


def open_shard(data: bytes | memoryview | pa.Buffer) -> pa.RecordBatchFileReader:
    """Open the bytes of a shard file and check schema and format version. Raises ShardError."""
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
    except (pa.ArrowException, OSError) as error:
        raise ShardError(f"not a readable Arrow file: {error}") from error
    found = reader.schema
    version = (found.metadata or {}).get(b"padfree.format_version", b"none").decode()
    if version != str(FORMAT_VERSION):
        raise ShardError(f"shard format version {FORMAT_VERSION} wanted, found {version}")
    if not found.equals(pa.schema(_FIELDS), check_metadata=False):
        raise ShardError(f"the schema differs from the format's: {found.remove_metadata()}")
    return reader


def read_packs(data: bytes | memoryview | pa.Buffer) -> Iterator[Pack]:
    """All packs of a shard file, in order."""
    reader = open_shard(data)
    for index in range(reader.num_record_batches):
        yield from decode_batch(reader.get_batch(index))


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
            _validate_row(reader.get_batch(row), max_tokens)
        except ShardError as error:
            raise ShardError(f"pack {row}: {error}") from None
    return len(messages)


def _validate_row(batch: pa.RecordBatch, max_tokens: int | None) -> None:
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
