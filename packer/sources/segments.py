"""The segments of a packed dataset as rows: where each lies, and reading those of a partition.

    index_packed    one pass over the boundaries of all packs, no tokens
    read_segments   the segments of a partition, flat; each pack of the source is decoded once

Stream positions are the examples of the dataset in the order of its own source: that of a packing of the same
files. An example that has no segment there (it was left out) keeps its position, with no tokens, so that
mini-batches and steps hold the same examples; one with several (it was split) has a position for each.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from packer.manifest import Manifest, ManifestError, commit_key, read_commit, shard_key
from packer.order import permute
from packer.report import total
from packer.shard import PADDING_ID, Pack, decode_message, iter_boundaries, verify_message
from packer.sources.copies import read_well
from packer.sources.packed import damaged, finished, gone, reading
from packer.sources.streams import spool_key
from packer.sources.values import (
    MARK,
    MARK_BYTES,
    FileIndex,
    Locations,
    Partition,
    Place,
    RecordFile,
    SourceError,
)
from packer.spec import InputFile
from packer.store import Store, StoreError, not_written

_TOKEN_BYTES = 4  # what a token counts as where partitions are measured by text
_POOL_TOKENS = 1 << 22  # of packs that are decoded at once
_SCAN_SEGMENTS = 1 << 20

# Where a segment lies: its shard (partition and number of the source), the message of its pack (bytes in the
# shard) and its tokens there. length 0: the example has no segment.
SEGMENT = np.dtype(
    [
        ("partition", "<i4"),
        ("number", "<i4"),
        ("offset", "<i8"),
        ("num_bytes", "<i4"),
        ("start", "<i4"),
        ("length", "<i4"),
        ("example", "<i8"),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """The rows of a partition, flat and in stream order.

    input_ids: (N,) int32. loss_mask: (N,) bool, false on the first token of each. lengths: (k,) int64, 0 for
    an example without a segment. example_ids: (k,) int64, as in the source dataset. locations: k of them.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    example_ids: NDArray[np.int64]
    locations: Locations


# ------------------------------------------------------------------ index


def index_packed(input: InputFile, *, store: Store, work_key: str) -> FileIndex:
    """Where each example's segment lies, as an array of SEGMENT under `work_key`, by stream position.

    Reads boundaries and example ids of every pack, no tokens. Memory grows only where examples were split:
    12 bytes an example. Raises SourceError, StoreError.
    """
    manifest = finished(input.digest, store)
    num_examples, commits = _num_examples(manifest), manifest.num_commits
    key = spool_key(work_key, input, "segments")
    with _table(store, key) as path:
        places = _place_whole(path, input, store, commits, num_examples)
        if places is None:
            places = _place_pieces(path, input, store, commits, num_examples)
        return _index(input, np.memmap(path, SEGMENT, "r", shape=(places,)), num_examples, key)


def _index(input: InputFile, table: np.ndarray, num_examples: int, key: str | None) -> FileIndex:
    marks, num_tokens = _marks(table)
    file = RecordFile(
        input=input,
        layout="segments",
        unit="example",
        num_records=len(table),
        num_bytes=_TOKEN_BYTES * num_tokens,
        mtime_ns=0,
        offsets=key,
        num_examples=num_examples,
    )
    return FileIndex(file=file, marks=marks)


def _num_examples(manifest: Manifest) -> int:
    """What the example ids of a dataset are below."""
    known = (manifest.read_json("plan.json") or {}).get("num_examples")
    # Of a release that could not repack, its rows are its examples.
    return total(manifest.counters).rows_in if known is None else int(known)


@contextlib.contextmanager
def _table(store: Store, key: str) -> Iterator[str]:
    """The path of a work file that is there under `key` only if the block ends well."""
    with store.stage(key.rpartition("/")[0]) as staged:
        try:
            yield str(staged.path)
        except StoreError:
            raise
        except OSError as error:
            raise not_written(error, staged.path) from error
        staged.publish(key, durable=False)


def _new_table(path: str, places: int) -> np.memmap:
    """An empty table. Its room on the disk is taken now: a mapped page that finds none ends the process."""
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, places * SEGMENT.itemsize)
    return np.memmap(path, SEGMENT, "r+", shape=(places,))


def _place_whole(
    path: str, input: InputFile, store: Store, num_commits: int, num_examples: int
) -> int | None:
    """Fill the table where each example has one segment at most; None, as soon as one has two."""
    table = _new_table(path, num_examples)
    for found in _segments(input, store, num_commits, num_examples):
        ids = found["example"]
        if table["length"][ids].any() or len(np.unique(ids)) < len(ids):
            return None
        table[ids] = found
    table.flush()
    return num_examples


def _place_pieces(path: str, input: InputFile, store: Store, num_commits: int, num_examples: int) -> int:
    """Fill the table where examples have several segments: those of one stand together, in commit order."""
    counts = np.zeros(num_examples, np.int32)
    for found in _segments(input, store, num_commits, num_examples):
        np.add.at(counts, found["example"], 1)
    following = np.cumsum(np.maximum(counts, 1), dtype=np.int64) - np.maximum(counts, 1)
    places = int(following[-1]) + max(1, int(counts[-1]))
    table = _new_table(path, places)
    for found in _segments(input, store, num_commits, num_examples):
        found = found[np.argsort(found["example"], kind="stable")]
        ids, firsts, times = np.unique(found["example"], return_index=True, return_counts=True)
        rank = np.arange(len(found)) - np.repeat(firsts, times)
        table[following[found["example"]] + rank] = found
        following[ids] += times
    table.flush()
    return places


def _segments(input: InputFile, store: Store, num_commits: int, num_examples: int) -> Iterator[np.ndarray]:
    """The segments of each shard in commit order, padding left out, as arrays of SEGMENT."""
    dataset = input.digest
    for partition in range(num_commits):
        try:
            commit = read_commit(store, dataset, partition)
        except ManifestError as error:
            raise SourceError(f"{input.path}: {error}") from error
        if commit is None:
            raise gone(input, commit_key(dataset, partition))
        for shard in commit.shards:
            rows = commit.rows[commit.rows["shard"] == shard.index]
            with reading(input, shard.key):
                _, boundaries = read_well(store, shard.key, _boundaries, sha256=shard.sha256)
            if len(boundaries) != len(rows):
                raise damaged(input, shard.key, f"{len(boundaries)} packs, its index lists {len(rows)}")
            found = _of_shard(rows, boundaries)
            found["partition"], found["number"] = partition, shard.index
            if len(found) and not 0 <= found["example"].min() <= found["example"].max() < num_examples:
                raise damaged(input, shard.key, f"an example id that is not below {num_examples}")
            yield found


def _of_shard(rows: np.ndarray, boundaries: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    found = np.empty(sum(len(ids) for _, ids in boundaries), SEGMENT)
    counts = np.array([len(ids) for _, ids in boundaries], np.int64)
    found["example"] = np.concatenate([ids for _, ids in boundaries])
    found["start"] = np.concatenate([cu[:-1] for cu, _ in boundaries])
    found["length"] = np.concatenate([np.diff(cu) for cu, _ in boundaries])
    found["offset"] = np.repeat(rows["offset"], counts)
    found["num_bytes"] = np.repeat(rows["header_bytes"] + rows["body_bytes"], counts)
    return found[found["example"] != PADDING_ID]


def _marks(table: np.ndarray) -> tuple[np.ndarray, int]:
    """Where partitions may begin, and all tokens. Positions are found by number: there is nothing to skip."""
    marks, num_tokens = [np.zeros(1, MARK)], 0
    for low in range(0, len(table), _SCAN_SEGMENTS):
        ends = num_tokens + np.cumsum(table["length"][low : low + _SCAN_SEGMENTS], dtype=np.int64)
        before = np.concatenate([[num_tokens], ends[:-1]]) * _TOKEN_BYTES
        buckets = before // MARK_BYTES
        new = np.flatnonzero(np.diff(buckets, prepend=marks[-1]["num_bytes"][-1] // MARK_BYTES))
        fresh = np.zeros(len(new), MARK)
        fresh["ordinal"] = fresh["begin"] = low + new
        fresh["num_bytes"] = before[new]
        if len(fresh):
            marks.append(fresh)
        num_tokens = int(ends[-1])
    return np.concatenate(marks), num_tokens


# ------------------------------------------------------------------ read


def read_segments(partition: Partition, *, store: Store) -> Segments:
    """The segments of a partition in stream order. Raises SourceError.

    Packs are decoded in the order in which they lie, each once; a partition in another order than the
    source's meets packs of which it needs but a part.
    """
    span = partition.spans[0]
    table = _rows_of(partition, store)
    lengths = table["length"].astype(np.int64)
    ends = np.cumsum(lengths)
    num_tokens = int(ends[-1]) if len(ends) else 0
    input_ids, loss_mask = np.empty(num_tokens, np.int32), np.empty(num_tokens, np.bool_)
    order = np.lexsort((table["start"], table["offset"], table["number"], table["partition"]))
    order = order[lengths[order] > 0]
    for group, packs, first_of in _pools(span.file.input, table[order], store):
        mine = order[group]
        sizes = lengths[mine]
        pool_starts = first_of + table["start"][mine]
        steps = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        to = np.repeat(ends[mine] - sizes, sizes) + steps
        source = np.repeat(pool_starts, sizes) + steps
        input_ids[to] = np.concatenate([pack.input_ids for pack in packs])[source]
        loss_mask[to] = np.concatenate([pack.loss_mask for pack in packs])[source]
    example_ids = table["example"].astype(np.int64)
    return Segments(
        input_ids=input_ids,
        loss_mask=loss_mask,
        lengths=lengths,
        example_ids=example_ids,
        locations=_locations(span.file.input, example_ids),
    )


def segment_table(input: InputFile, *, store: Store) -> tuple[FileIndex, np.ndarray]:
    """The index of a dataset and its table of SEGMENT by stream position; nothing is written to the store.

    Reads no token. length 0: an example without a segment.
    """
    manifest = finished(input.digest, store)
    num_examples = _num_examples(manifest)
    parts = list(_segments(input, store, manifest.num_commits, num_examples))
    found = np.concatenate([np.empty(0, SEGMENT), *parts])
    # An example that was left out has a place too, without tokens.
    empty = np.zeros(num_examples - len(np.unique(found["example"])), SEGMENT)
    empty["example"] = np.setdiff1d(np.arange(num_examples), found["example"])
    table = np.concatenate([found, empty])
    table = table[np.argsort(table["example"], kind="stable")]
    return _index(input, table, num_examples, None), table


def segment_masks(
    input: InputFile, table: np.ndarray, *, store: Store
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]]:
    """What is trained of the segments of a table, some packs at a time, each pack once.

    Yields (positions in the table, where each begins in the mask, the mask). Raises SourceError.
    """
    order = np.lexsort((table["start"], table["offset"], table["number"], table["partition"]))
    order = order[table["length"][order] > 0]
    for group, packs, first_of in _pools(input, table[order], store):
        mine = order[group]
        yield mine, first_of + table["start"][mine], np.concatenate([pack.loss_mask for pack in packs])


def first_segments(input: InputFile, *, store: Store, at_least: int) -> Segments:
    """The segments of the first packs, as they lie there: no more packs are read than `at_least` takes."""
    manifest = finished(input.digest, store)
    found: list[np.ndarray] = []
    packs: list[Pack] = []
    held = 0
    for row in manifest.rows[:at_least]:
        key = manifest.shards[int(row["shard"])].key
        with reading(input, key):
            begin, size = int(row["offset"]), int(row["header_bytes"]) + int(row["body_bytes"])
            _, pack = read_well(store, key, functools.partial(_decoded, begin=begin, size=size))
        packs.append(pack)
        real = pack.example_ids != PADDING_ID
        mine = np.zeros(int(real.sum()), SEGMENT)
        mine["example"] = pack.example_ids[real]
        mine["start"], mine["length"] = held + pack.cu_seqlens[:-1][real], np.diff(pack.cu_seqlens)[real]
        found.append(mine)
        held += pack.num_tokens
        if sum(map(len, found)) >= at_least:
            break
    table = np.concatenate(found)
    lengths = table["length"].astype(np.int64)
    places = np.repeat(table["start"] - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
    example_ids = table["example"].astype(np.int64)
    return Segments(
        input_ids=np.concatenate([pack.input_ids for pack in packs])[places],
        loss_mask=np.concatenate([pack.loss_mask for pack in packs])[places],
        lengths=lengths,
        example_ids=example_ids,
        locations=_locations(input, example_ids),
    )


def _locations(input: InputFile, example_ids: NDArray[np.int64]) -> Locations:
    return Locations(
        [Place(file=input.path, unit="example")], np.zeros(len(example_ids), np.int64), example_ids
    )


def _rows_of(partition: Partition, store: Store) -> np.ndarray:
    """The part of the table that a partition takes, in stream order."""
    positions = np.arange(partition.start, partition.stop, dtype=np.int64)
    if partition.seed is not None:
        positions = permute(positions, partition.num_records, partition.seed)
    return np.array(_open_table(partition.spans[0].file, store)[positions])


def _open_table(file: RecordFile, store: Store) -> np.ndarray:
    assert file.offsets is not None
    try:
        return np.frombuffer(store.map(file.offsets), SEGMENT)
    except FileNotFoundError as error:
        raise SourceError(
            f"work file {file.offsets} of {file.input.path} is gone; post the dataset again"
        ) from error


def _pools(
    input: InputFile, segments: np.ndarray, store: Store
) -> Iterator[tuple[slice, list[Pack], NDArray[np.int64]]]:
    """Packs of about _POOL_TOKENS at a time: which of `segments` are in them, the packs, and where each
    segment's pack begins in the pool. `segments` are in the order in which they lie."""
    fresh = np.ones(len(segments), np.bool_)
    names = ("partition", "number", "offset")
    fresh[1:] = np.logical_or.reduce([np.diff(segments[name]) != 0 for name in names])
    firsts = np.append(np.flatnonzero(fresh), len(segments)).tolist()
    data, opened = memoryview(b""), ""
    packs: list[Pack] = []
    begins: list[int] = []
    counts: list[int] = []
    low = held = 0
    for first, stop in pairwise(firsts):
        row = segments[first]
        key = shard_key(input.digest, int(row["partition"]), int(row["number"]))
        with reading(input, key):
            begin, size = int(row["offset"]), int(row["num_bytes"])
            read = functools.partial(_decoded, begin=begin, size=size)
            data, pack = read_well(store, key, read, data=data if opened == key else None)
            opened = key
        if not _holds(pack, segments[first:stop]):
            raise damaged(input, key, f"the pack at byte {begin} has other segments than its boundaries said")
        packs.append(pack)
        begins.append(held)
        counts.append(stop - first)
        held += pack.num_tokens
        if held >= _POOL_TOKENS or stop == len(segments):
            yield slice(low, stop), packs, np.repeat(np.array(begins, np.int64), counts)
            packs, begins, counts, held, low = [], [], [], 0, stop


def _boundaries(data: memoryview) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(iter_boundaries(data))


def _holds(pack: Pack, segments: np.ndarray) -> bool:
    """Whether segments of SEGMENT are the pack's, which was checked; boundaries were read without that."""
    places = np.minimum(np.searchsorted(pack.cu_seqlens, segments["start"]), pack.num_segments - 1)
    starts, ends = pack.cu_seqlens[places], pack.cu_seqlens[places + 1]
    return bool(
        np.array_equal(starts, segments["start"])
        and np.array_equal(ends - starts, segments["length"])
        and np.array_equal(pack.example_ids[places], segments["example"])
    )


def _decoded(data: memoryview, *, begin: int, size: int) -> Pack:
    message = data[begin : begin + size]
    header_bytes = 8 + int.from_bytes(message[4:8], "little")
    verify_message(message, header_bytes)
    (pack,) = decode_message(message)
    return pack
