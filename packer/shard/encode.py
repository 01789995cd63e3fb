"""Packs to bytes: shard files, and single messages of a stream."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.shard.layout import ROW_INDEX, Pack, Packs, check, check_all, schema
from packer.shard.stamp import STAMP_KEY, Stamp, seal

MAGIC_BYTES = 8  # "ARROW1" and two bytes of padding
CONTINUATION = b"\xff\xff\xff\xff"
_LONG_SEGMENT = 64  # tokens: from here on copying memory is faster than computing
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
    of = schema(dataset)
    sink = pa.BufferOutputStream()
    blank = {STAMP_KEY: Stamp().encode()}
    first = MAGIC_BYTES + len(schema_message(dataset))  # the schema is written with the first batch
    bounds = []
    with pa.ipc.new_file(sink, of, options=_write_options()) as writer:
        for batch in _batches(packs, of):
            start = sink.tell() or first
            writer.write_batch(batch, custom_metadata=blank)
            bounds.append((start, sink.tell()))
    data = memoryview(sink.getvalue()).cast("B")  # nobody else's: the stamps are written into it
    index = _row_index(packs)
    for row, (start, end) in enumerate(bounds):
        message = data[start:end]
        header_bytes = seal(message, Stamp())
        index[row]["offset"], index[row]["header_bytes"] = start, header_bytes
        index[row]["body_bytes"] = len(message) - header_bytes
    return data, index


def _batches(packs: Packs, of: pa.Schema) -> Iterator[pa.RecordBatch]:
    """A record batch of each pack, over slices of the flat arrays: no value is copied but the mask's bits."""
    tokens, segments = packs.token_offsets, packs.pack_offsets
    num_tokens, num_segments = np.diff(tokens), np.diff(segments)
    positions = _positions(packs.lengths)
    longest = _longest(packs).astype(np.int32)
    numbers = np.arange(len(packs))
    columns = [
        _slices(of, "input_ids", packs.input_ids, tokens[:-1], num_tokens),
        _slices(of, "position_ids", positions, tokens[:-1], num_tokens),
        _masks(of, packs.loss_mask, tokens),
        _slices(of, "cu_seqlens", packs.cu_seqlens, segments[:-1] + numbers, num_segments + 1),
        (pa.Array.from_buffers(pa.int32(), 1, [None, buffer]) for buffer in _pieces(longest, numbers, 1)),
        _slices(of, "example_ids", packs.example_ids, segments[:-1], num_segments),
    ]
    for arrays in zip(*columns, strict=True):
        yield pa.RecordBatch.from_arrays(list(arrays), schema=of)


def _positions(lengths: np.ndarray) -> NDArray[np.int32]:
    """Positions that restart at 0 in every segment, (sum of lengths,) int32."""
    if lengths.sum() >= _LONG_SEGMENT * len(lengths):
        longest = np.arange(lengths.max(initial=0), dtype=np.int32)
        return np.concatenate([longest[:0], *(longest[:length] for length in lengths.tolist())])
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    return np.arange(int(lengths.sum()), dtype=np.int32) - np.repeat(starts, lengths)


def _slices(
    of: pa.Schema, name: str, values: np.ndarray, starts: np.ndarray, sizes: np.ndarray
) -> Iterator[pa.Array]:
    """Each slice of `values` as a column of one list."""
    column = of.field(name).type
    values = np.ascontiguousarray(values)
    for buffer, offsets, size in zip(
        _pieces(values, starts, sizes), _list_offsets(sizes), sizes.tolist(), strict=True
    ):
        child = pa.Array.from_buffers(column.value_type, size, [None, buffer])
        yield pa.Array.from_buffers(column, 1, [None, offsets], children=[child])


def _masks(of: pa.Schema, mask: NDArray[np.bool_], tokens: np.ndarray) -> Iterator[pa.Array]:
    column = of.field("loss_mask").type
    places = tokens.tolist()
    for start, end, offsets in zip(places, places[1:], _list_offsets(np.diff(tokens)), strict=False):
        child = _bool_array(mask[start:end])
        yield pa.Array.from_buffers(column, 1, [None, offsets], children=[child])


def _list_offsets(sizes: np.ndarray) -> Iterator[pa.Buffer]:
    """The offsets of a column of one list, for each size."""
    pairs = np.zeros((len(sizes), 2), np.int32)
    pairs[:, 1] = sizes
    return _pieces(pairs, np.arange(len(sizes)), 1)


def _pieces(values: np.ndarray, starts: np.ndarray, sizes: np.ndarray | int) -> Iterator[pa.Buffer]:
    """Slices of an array's memory, along its first axis."""
    width = values.strides[0]
    whole = pa.py_buffer(values)
    wide = np.broadcast_to(np.asarray(sizes) * width, np.shape(starts))
    for start, size in zip((starts * width).tolist(), wide.tolist(), strict=True):
        yield whole.slice(start, size)


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
