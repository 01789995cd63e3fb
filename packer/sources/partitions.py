"""Cutting a source into partitions: pure, a function of the indexes and the spec alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from packer.order import derive_seed
from packer.sources.values import MIB, FileIndex, Partition, Span

FIRST_PARTITION_BYTES = 1 * MIB
MAX_PARTITION_BYTES = 64 * MIB
# The largest partitions are about a sixteenth of all the text, so that some workers share it evenly (all wait
# for one that packs half of it alone), but not so small that their ends cost fill: half a pack each.
_SHARES = 16
_LEAST_BYTES = 8 * MIB
_LEAST_PACKS = 256
_TOKEN_BYTES = 4  # of text, about


def cut(
    indexes: Sequence[FileIndex],
    *,
    shuffle_seed: int | None,
    multiple: int = 1,
    max_tokens: int = 1,
    first_bytes: int = FIRST_PARTITION_BYTES,
    max_bytes: int = MAX_PARTITION_BYTES,
) -> list[Partition]:
    """Partitions of about `first_bytes` of text at first, then twice as many each time, to `max_bytes` or a
    sixteenth of all (not less than 256 packs of `max_tokens` take).

    So the first shard is there in seconds, workers share the text, and few partition ends cost fill. Each
    partition but the last holds a multiple of `multiple` records (of minibatches or steps, that are not to
    be torn). With `shuffle_seed` positions are those of a permutation of all records.
    """
    firsts = np.concatenate([[0], np.cumsum([index.file.num_records for index in indexes])]).astype(np.int64)
    total = int(firsts[-1])
    if total == 0:
        return []
    ordinals, num_bytes = _scale(indexes, firsts, even=shuffle_seed is not None)
    least = max(_LEAST_BYTES, _LEAST_PACKS * max_tokens * _TOKEN_BYTES)
    max_bytes = min(max_bytes, max(least, int(num_bytes[-1]) // _SHARES))
    bounds = _bounds(ordinals, num_bytes, total, multiple, first_bytes, max_bytes)
    seed = None if shuffle_seed is None else derive_seed(shuffle_seed)
    everything = tuple(
        Span(file=index.file, first=int(first), start=0, stop=index.file.num_records)
        for index, first in zip(indexes, firsts, strict=False)
        if index.file.num_records
    )
    return [
        Partition(
            index=number,
            start=start,
            stop=stop,
            num_records=total,
            seed=seed,
            spans=everything if seed is not None else _spans(indexes, firsts, start, stop),
        )
        for number, (start, stop) in enumerate(pairwise(bounds))
    ]


def num_examples(partitions: Sequence[Partition]) -> int:
    """What the example ids of a source are below: its records, readable or not."""
    if not partitions:
        return 0
    known = partitions[0].spans[0].file.num_examples
    return partitions[0].num_records if known is None else known


def _scale(indexes: Sequence[FileIndex], firsts: np.ndarray, *, even: bool) -> tuple[np.ndarray, np.ndarray]:
    """Stream positions and how much text comes before each: marks of all files, or, shuffled, a line."""
    sizes = np.cumsum([0, *(index.file.num_bytes for index in indexes)])
    if even:
        return np.array([0, firsts[-1]]), np.array([0, sizes[-1]])
    ordinals = [index.marks["ordinal"] + first for index, first in zip(indexes, firsts, strict=False)]
    num_bytes = [index.marks["num_bytes"] + size for index, size in zip(indexes, sizes, strict=False)]
    return np.append(np.concatenate(ordinals), firsts[-1]), np.append(np.concatenate(num_bytes), sizes[-1])


def _bounds(
    ordinals: np.ndarray, num_bytes: np.ndarray, total: int, multiple: int, first_bytes: int, max_bytes: int
) -> list[int]:
    bounds = [0]
    size = first_bytes
    done, end = 0, int(num_bytes[-1])
    even = len(ordinals) == 2  # between two points any position will do
    while end - done >= 2 * size:  # a short rest goes to the last partition
        if even:
            at = max(bounds[-1] + 1, total * (done + size) // end)
        else:
            mark = int(np.searchsorted(num_bytes, done + size))
            at = int(ordinals[min(mark, len(ordinals) - 1)])
        at = max(at // multiple, bounds[-1] // multiple + 1) * multiple
        if at >= total:
            break
        bounds.append(at)
        # How much text that was, by the scale; positions between marks count as the mark's.
        done = end * at // total if even else int(num_bytes[np.searchsorted(ordinals, at, side="right") - 1])
        size = min(2 * size, max_bytes)
    return [*bounds, total]


def _spans(indexes: Sequence[FileIndex], firsts: np.ndarray, start: int, stop: int) -> tuple[Span, ...]:
    spans = []
    number = int(np.searchsorted(firsts, start, side="right")) - 1
    while number < len(indexes) and firsts[number] < stop:
        index, first = indexes[number], int(firsts[number])
        low, high = max(start - first, 0), min(stop - first, index.file.num_records)
        if low < high:
            mark = index.marks[np.searchsorted(index.marks["ordinal"], low, side="right") - 1]
            place = (int(mark["begin"]), int(mark["offset"]), int(mark["line"]))
            spans.append(Span(file=index.file, first=first, start=low, stop=high, mark=place))
        number += 1
    return tuple(spans)
