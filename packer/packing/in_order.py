"""The strategies that keep stream order: sequential, wrapped, minibatch and padded."""

from __future__ import annotations

import numpy as np

from packer.packing.values import Capacity, Int64, Layout, Pieces


def sequential(sizes: Int64, capacity: int) -> Layout:
    """Next fit: a piece that no longer fits opens the next pack; no pack is looked at again."""
    return Layout(np.arange(len(sizes)), next_fit(sizes, capacity))


def next_fit(sizes: Int64, capacity: int, num_packs: int | None = None) -> Int64:
    """Where the packs of next fit begin and the last ends, (packs + 1,) int64; at most `num_packs` of them.

    A piece over the capacity is a pack of its own.
    """
    most = len(sizes) if num_packs is None else num_packs
    # Pieces that so many packs can take at most: no more are looked at.
    sizes = sizes[: np.searchsorted(np.cumsum(np.minimum(sizes, capacity)), most * capacity, side="right")]
    ends = np.cumsum(sizes)
    num_pieces, offsets, first = len(sizes), [0], 0
    # Where the pack that begins at each piece would end, all at once; then only follow the links.
    links = np.searchsorted(ends, ends - sizes + capacity, side="right")
    following = np.maximum(links, np.arange(1, num_pieces + 1)).tolist()
    while first < num_pieces and len(offsets) <= most:
        first = following[first]
        offsets.append(first)
    return np.array(offsets, np.int64)


def padded(sizes: Int64) -> Layout:
    """One piece a pack."""
    return Layout(np.arange(len(sizes)), np.arange(len(sizes) + 1))


def minibatch(example: Int64, minibatch_size: int) -> Layout:
    """The pieces of each `minibatch_size` examples in one pack; mini-batches without a piece have none."""
    group = example // minibatch_size
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    return Layout(np.arange(len(example)), np.append(starts, len(example)).astype(np.int64))


def wrapped(example: Int64, length: Int64, capacity: Capacity) -> tuple[Pieces, Layout]:
    """One stream of all tokens, cut every `capacity`; what is left of an example opens the next pack.

    With a segment multiple the stream is that of the padded segments, so that cuts fall on multiples.
    """
    size = capacity.segment
    ends = np.cumsum(capacity.padded(length))
    begins = ends - capacity.padded(length)
    total = int(ends[-1]) if len(ends) else 0
    edges = np.union1d(begins, np.arange(0, total, size))  # where a piece begins in the stream
    owner = np.searchsorted(ends, edges, side="right")
    start = edges - begins[owner]
    stop = np.minimum(np.append(edges[1:], total) - begins[owner], length[owner])
    none = np.zeros(0, np.int64)
    pieces = Pieces(example=example[owner], start=start, length=stop - start, truncated=none, dropped=none)
    offsets = np.append(np.flatnonzero(edges % size == 0), len(edges)).astype(np.int64)
    return pieces, Layout(np.arange(len(edges)), offsets)
