"""Shard files written by hand, a record batch message a pack, byte for byte as Arrow's writer writes them.

Arrow makes arrays and a record batch of each pack and builds its header anew, which costs as much as
compressing it. But the headers of two packs differ in a few numbers alone, and so do the ends of two files.
Both are taken from a file that Arrow wrote, and the numbers filled in. Arrow's codec compresses the values.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.shard.header import footer_places, places_to_fill
from packer.shard.layout import Packs, position_ids
from packer.shard.stamp import Stamp, locate_stamp, seal_at

_ALIGNMENT = 8
_NUM_NODES, _NUM_BUFFERS = 11, 22
_BLOCK = np.dtype([("offset", "<i8"), ("header_bytes", "<i8"), ("body_bytes", "<i8")])  # of a footer
_TAIL_BYTES = 10  # of a file: the footer's length and "ARROW1"

Bounds = list[tuple[int, int]]


class Frame(NamedTuple):
    """What is the same in all files of a dataset, with where the numbers go.

    head: up to the first message. header: of a message. footer: from the last message to the end of the file,
    with one record batch in it.
    """

    head: bytes
    header: bytes
    footer: bytes

    @classmethod
    def of(cls, data: memoryview, start: int, stop: int) -> Frame:
        """Of a file that Arrow wrote, whose one message lies from `start` to `stop`."""
        header_bytes = 8 + int.from_bytes(data[start + 4 : start + 8], "little")
        return cls(bytes(data[:start]), bytes(data[start : start + header_bytes]), bytes(data[stop:]))


def write(packs: Packs, frame: Frame) -> tuple[memoryview, Bounds]:
    """The bytes of a shard file, stamps sealed, and where the messages lie in it (start, stop)."""
    bodies, sizes = _bodies(packs)
    padded = -(-sizes // _ALIGNMENT) * _ALIGNMENT
    headers, stamp_at = _headers(packs, frame.header, sizes, padded)
    body_bytes = padded.sum(axis=1)
    stops = len(frame.head) + np.cumsum(body_bytes + len(frame.header))
    starts = stops - body_bytes - len(frame.header)
    parts = [frame.head]
    for header, body in zip(headers, bodies, strict=True):
        parts.append(header.tobytes())
        parts += body
    parts.append(_footer(frame.footer, starts, len(frame.header), body_bytes))
    data = memoryview(bytearray().join(parts))
    bounds = list(zip(starts.tolist(), stops.tolist(), strict=True))
    for start, stop in bounds:
        seal_at(data[start:stop], stamp_at)
    return data, bounds


def _bodies(packs: Packs) -> tuple[list[list[bytes]], NDArray[np.int64]]:
    """Of each pack its buffers, padded, and how long they are without: (P, 11), those that are not empty."""
    ids, mask, cu, names = packs.input_ids, packs.loss_mask, packs.cu_seqlens, packs.example_ids
    tokens, segments = packs.token_offsets.tolist(), packs.pack_offsets.tolist()
    bodies, sizes = [], []
    for number in range(len(packs)):
        first, stop = tokens[number : number + 2]
        low, high = segments[number : number + 2]
        borders = cu[low + number : high + number + 1]
        positions = _compressed(position_ids(borders)) if high - low > 1 else _run(stop - first)
        offsets = _small(0, stop - first)
        body = [
            *(offsets, _compressed(ids[first:stop])),
            *(offsets, positions),
            *(offsets, _compressed(np.packbits(mask[first:stop], bitorder="little"))),
            *(_small(0, len(borders)), _compressed(borders)),
            _small(int(np.diff(borders).max())),
            *(_small(0, high - low), _compressed(names[low:high])),
        ]
        sizes.append([len(buffer) for buffer in body])
        bodies.append([part for buffer in body for part in (buffer, _PADDING[-len(buffer) % _ALIGNMENT])])
    return bodies, np.array(sizes, np.int64).reshape(len(packs), _NUM_BUFFERS // 2)


_PADDING = [bytes(size) for size in range(_ALIGNMENT)]


def _compressed(values: NDArray[np.generic]) -> bytes:
    """A buffer as a compressed message has it: its length, then a frame of LZ4."""
    found: bytes = _codec().compress(values.data, asbytes=True)
    return values.nbytes.to_bytes(8, "little") + found


@functools.lru_cache(maxsize=1 << 12)
def _small(*values: int) -> bytes:
    """int32 values that come again: where a list ends, the longest segment."""
    return _compressed(np.array(values, np.int32))


@functools.lru_cache(maxsize=8)
def _run(num_tokens: int) -> bytes:
    """Positions of a pack of one segment: long documents are all cut to the same length."""
    return _compressed(np.arange(num_tokens, dtype=np.int32))


@functools.lru_cache(maxsize=1)
def _codec() -> pa.Codec:
    return pa.Codec("lz4")


def _headers(
    packs: Packs, header: bytes, sizes: NDArray[np.int64], padded: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], int]:
    """The headers of all messages, (P, bytes), and where in them the stamp is."""
    num_packs = len(packs)
    body_at, nodes_at, buffers_at = places_to_fill(memoryview(header))
    _, stamp_at = locate_stamp(header)
    headers = np.tile(np.frombuffer(header, np.uint8), (num_packs, 1))
    nodes = np.zeros((num_packs, _NUM_NODES, 2), "<i8")  # length and number of nulls
    nodes[:, :, 0] = 1  # a list; its values are of the next node
    nodes[:, [1, 3, 5], 0] = np.diff(packs.token_offsets)[:, None]
    nodes[:, 10, 0] = np.diff(packs.pack_offsets)
    nodes[:, 7, 0] = nodes[:, 10, 0] + 1
    extents = np.zeros((num_packs, _NUM_BUFFERS, 2), "<i8")  # start and size; every other one is empty
    extents[:, 1::2, 0] = extents[:, ::2, 0] = np.cumsum(padded, axis=1) - padded
    extents[:, 1::2, 1] = sizes
    body_bytes = padded.sum(axis=1)
    stamps = b"".join([Stamp(body_bytes=size).encode() for size in body_bytes.tolist()])
    for at, values in (
        (body_at, body_bytes.astype("<i8")),
        (nodes_at, nodes),
        (buffers_at, extents),
        (stamp_at, np.frombuffer(stamps, np.uint8)),
    ):
        filled = values.reshape(num_packs, -1).view(np.uint8)
        headers[:, at : at + filled.shape[1]] = filled
    return headers, stamp_at


def _footer(
    footer: bytes, starts: NDArray[np.int64], header_bytes: int, body_bytes: NDArray[np.int64]
) -> bytes:
    """The end of a file: that of one with a single record batch, with more of them in its list."""
    num_bytes = int.from_bytes(footer[-_TAIL_BYTES:-6], "little")
    begin = len(footer) - _TAIL_BYTES - num_bytes
    table = footer[begin:-_TAIL_BYTES]
    distances, list_at = footer_places(memoryview(table))
    blocks = np.zeros(len(starts), _BLOCK)
    blocks["offset"], blocks["header_bytes"], blocks["body_bytes"] = starts, header_bytes, body_bytes
    more = (len(starts) - 1) * _BLOCK.itemsize
    head = bytearray(table[:list_at])
    for at in distances:
        head[at : at + 4] = (int.from_bytes(head[at : at + 4], "little") + more).to_bytes(4, "little")
    rest = table[list_at + 4 + _BLOCK.itemsize :]
    count = len(starts).to_bytes(4, "little")
    size = (num_bytes + more).to_bytes(4, "little")
    return b"".join((footer[:begin], head, count, blocks.tobytes(), rest, size, footer[-6:]))
