"""Packs to bytes: shard files, and single messages of a stream."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.shard import messages
from packer.shard.layout import ROW_INDEX, Pack, Packs, ShardError, check, check_all, padding_pack, schema
from packer.shard.stamp import STAMP_KEY, Stamp, seal

MAGIC_BYTES = 8  # "ARROW1" and two bytes of padding
CONTINUATION = b"\xff\xff\xff\xff"
END_OF_STREAM = CONTINUATION + b"\0\0\0\0"


def _array(values: np.ndarray, of: type) -> pa.Array:
    # pa.array would import pandas where that is installed: half a second of every new process.
    values = np.ascontiguousarray(values.astype(of, copy=False))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _list_array(values: pa.Array, offsets: NDArray[np.int32]) -> pa.Array:
    return pa.ListArray.from_arrays(_array(offsets, np.int32), values)


def _bool_array(mask: NDArray[np.bool_]) -> pa.Array:
    # Packed here, so that the bits behind the last value are zero in every encoding of equal masks.
    bits = np.packbits(mask, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, pa.py_buffer(bits)])


def record_batch(packs: Sequence[Pack], of: pa.Schema) -> pa.RecordBatch:
    def concat(name: str) -> np.ndarray:
        arrays = [getattr(pack, name) for pack in packs]
        # Contiguous and from offset 0: a slice of a larger array would serialise to other bytes.
        return np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))

    def ends(name: str) -> NDArray[np.int32]:
        sizes = [len(getattr(pack, name)) for pack in packs]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)

    tokens = ends("input_ids")
    columns = [
        _list_array(_array(concat("input_ids"), np.int32), tokens),
        _list_array(_array(concat("position_ids"), np.int32), tokens),
        _list_array(_bool_array(concat("loss_mask")), tokens),
        _list_array(_array(concat("cu_seqlens"), np.int32), ends("cu_seqlens")),
        _array(np.array([pack.max_seqlen for pack in packs]), np.int32),
        _list_array(_array(concat("example_ids"), np.int64), ends("example_ids")),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=of)


def _write_options() -> pa.ipc.IpcWriteOptions:
    # One thread: a pack is small, and workers are one process a core.
    return pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)


def encode_shard(packs: Iterable[Pack], dataset: str) -> tuple[memoryview, np.ndarray]:
    """Packs as the bytes of a shard file, and its row index (dtype ROW_INDEX).

    Equal packs give equal bytes. Every pack is checked against the rules first (ShardError).
    """
    given = list(packs)
    for pack in given:
        check(pack)
    return encode_packs(Packs.of(given), dataset)


def encode_packs(packs: Packs, dataset: str) -> tuple[memoryview, np.ndarray]:
    """`encode_shard` of packs that lie in flat arrays. ShardError names the first that breaks a rule."""
    check_all(packs)
    frame = _frame(dataset) if len(packs) else None
    data, bounds = messages.write(packs, frame) if frame is not None else encode_by_arrow(packs, dataset)
    index = _row_index(packs)
    for row, (start, end) in enumerate(bounds):
        header_bytes = 8 + int.from_bytes(data[start + 4 : start + 8], "little")
        index[row]["offset"], index[row]["header_bytes"] = start, header_bytes
        index[row]["body_bytes"] = end - start - header_bytes
    return data, index


def encode_by_arrow(packs: Packs, dataset: str) -> tuple[memoryview, messages.Bounds]:
    """The bytes of a shard file as Arrow's own writer gives them, and where the messages lie."""
    of = schema(dataset)
    sink = pa.BufferOutputStream()
    blank = {STAMP_KEY: Stamp().encode()}
    first = MAGIC_BYTES + len(schema_message(dataset))  # the schema is written with the first batch
    bounds = []
    with pa.ipc.new_file(sink, of, options=_write_options()) as writer:
        for pack in packs:
            start = sink.tell() or first
            writer.write_batch(record_batch([pack], of), custom_metadata=blank)
            bounds.append((start, sink.tell()))
    data = memoryview(sink.getvalue()).cast("B")  # nobody else's: the stamps are written into it
    for start, end in bounds:
        seal(data[start:end], Stamp())
    return data, bounds


@functools.lru_cache(maxsize=64)
def _frame(dataset: str) -> messages.Frame | None:
    """What is the same in all files of a dataset; None where this release of Arrow writes them otherwise than
    is known here: then it writes them itself."""
    data, [(start, stop)] = encode_by_arrow(Packs.of([padding_pack()]), dataset)
    trial = Packs.of([_trial_pack(size) for size in (1, 9, 3000)])
    try:
        frame = messages.Frame.of(data, start, stop)
        same = messages.write(trial, frame) == encode_by_arrow(trial, dataset)
    except (ShardError, ValueError, IndexError, struct.error):
        same = False
    return frame if same else None


def _trial_pack(num_tokens: int) -> Pack:
    """A pack of up to two segments, with all kinds of values."""
    ids = np.arange(num_tokens, dtype=np.int32) ** 2 % 1009
    cu = np.array([0, num_tokens // 3, num_tokens] if num_tokens > 2 else [0, num_tokens], np.int32)
    mask = ids % 3 > 0
    mask[cu[:-1]] = False
    return Pack(input_ids=ids, loss_mask=mask, cu_seqlens=cu, example_ids=np.arange(len(cu) - 1) + num_tokens)


def _longest(packs: Packs) -> np.ndarray:
    return np.maximum.reduceat(packs.lengths, packs.pack_offsets[:-1]) if len(packs) else packs.lengths[:0]


def _row_index(packs: Packs) -> np.ndarray:
    """The row index, without where the messages lie."""
    index = np.zeros(len(packs), ROW_INDEX)
    if len(packs):
        tokens, segments = packs.token_offsets, packs.pack_offsets
        index["num_tokens"] = np.diff(tokens)
        bounds = tokens.tolist()
        # Vectorised in each pack, which reduceat is not.
        index["num_trained"] = [np.count_nonzero(packs.loss_mask[a:b]) for a, b in pairwise(bounds)]
        index["num_segments"] = np.diff(segments)
        index["max_seqlen"] = _longest(packs)
        index["sum_squares"] = np.add.reduceat(packs.lengths**2, segments[:-1])
    return index


def encode_message(packs: Sequence[Pack], *, stamp: Stamp) -> bytes:
    """One record batch message of one or more packs, for a stream. `crc32` and `body_bytes` are set."""
    sink = pa.BufferOutputStream()
    of = schema("")
    with pa.ipc.new_stream(sink, of, options=_write_options()) as writer:
        start = len(schema_message(""))  # written with the first batch
        blank = {STAMP_KEY: Stamp().encode()}
        writer.write_batch(record_batch(packs, of), custom_metadata=blank)
        end = sink.tell()
    message = bytearray(memoryview(sink.getvalue())[start:end])
    seal(memoryview(message), stamp)
    return bytes(message)


@functools.lru_cache(maxsize=64)
def schema_message(dataset: str) -> bytes:
    """The first message of a stream."""
    return schema(dataset).serialize().to_pybytes()
