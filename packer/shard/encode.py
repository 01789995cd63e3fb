"""Packs to bytes: shard files, and single messages of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.shard.layout import ROW_INDEX, Pack, check, schema
from packer.shard.stamp import STAMP_KEY, Stamp, seal

MAGIC_BYTES = 8  # "ARROW1" and two bytes of padding
CONTINUATION = b"\xff\xff\xff\xff"
END_OF_STREAM = CONTINUATION + b"\0\0\0\0"


def _list_array(values: pa.Array, offsets: Sequence[int] | NDArray[np.int32]) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


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


def encode_shard(packs: Iterable[Pack], dataset: str) -> tuple[memoryview, np.ndarray]:
    """Packs as the bytes of a shard file, and its row index (dtype ROW_INDEX).

    Equal packs give equal bytes. Every pack is checked against the rules first (ShardError).
    """
    sink = pa.BufferOutputStream()
    rows: list[tuple[int, ...]] = []
    ends: list[int] = []
    of = schema(dataset)
    blank = {STAMP_KEY: Stamp().encode()}
    first = MAGIC_BYTES + len(schema_message(dataset))
    with pa.ipc.new_file(sink, of, options=_write_options()) as writer:
        for pack in packs:
            check(pack)
            start = sink.tell() or first  # the schema is written with the first batch
            writer.write_batch(record_batch([pack], of), custom_metadata=blank)
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
        seal(message, Stamp())
    return data, index


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


def schema_message(dataset: str) -> bytes:
    """The first message of a stream."""
    return schema(dataset).serialize().to_pybytes()
