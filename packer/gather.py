"""From a plan to packs: which tokens stand where, a shard at a time, in one gather."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.packing import PackPlan
from packer.shard import PADDING_ID, Packs

_LONG_RUN = 64  # tokens

Int64 = NDArray[np.int64]


def gather(
    input_ids: NDArray[np.int32],
    loss_mask: NDArray[np.bool_],
    offsets: Int64,
    example_ids: Int64,
    planned: PackPlan,
    *,
    segment_multiple: int,
    pack_multiple: int,
    shard_tokens: int,
) -> Iterator[Packs]:
    """The packs of each shard: it ends with the pack that reaches `shard_tokens`.

    Rows lie in flat arrays: row i has the tokens offsets[i] to offsets[i + 1] and the name example_ids[i].
    Padding is a segment of its own, id -1, directly behind what it pads, so that real and padded boundaries
    can both be read off.
    """
    lengths, source, pack_offsets = _with_padding(
        planned, planned.pack_offsets, segment_multiple=segment_multiple, pack_multiple=pack_multiple
    )
    # The last of everything stands for padding: source -1 reads it, and it is overwritten.
    starts = np.append(offsets[planned.example] + planned.start, 0)
    names = np.append(example_ids[planned.example], PADDING_ID)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    for first, last in _shards(ends[pack_offsets], shard_tokens):
        segments = slice(pack_offsets[first], pack_offsets[last])
        sizes, of = lengths[segments], source[segments]
        ids, mask = _copied([input_ids, loss_mask], starts[of], sizes, of < 0)
        # The last token of one example never predicts the first of the next.
        mask[ends[segments] - ends[segments.start]] = False
        yield Packs(
            input_ids=ids,
            loss_mask=mask,
            lengths=sizes,
            example_ids=names[of],
            pack_offsets=pack_offsets[first : last + 1] - pack_offsets[first],
        )


def _copied(
    arrays: Sequence[NDArray[Any]], starts: Int64, sizes: Int64, padding: NDArray[np.bool_]
) -> list[NDArray[Any]]:
    """Of each array the runs [starts, starts + sizes) end to end; zeros for the runs that are padding."""
    if int(sizes.sum()) >= _LONG_RUN * len(sizes):  # a copy of memory each is faster than an index a token
        zeros = [np.zeros(sizes.max(where=padding, initial=0), array.dtype) for array in arrays]
        runs = list(zip(starts.tolist(), (starts + sizes).tolist(), padding.tolist(), strict=True))
        return [
            np.concatenate([zero[: b - a] if padded else array[a:b] for a, b, padded in runs])
            for array, zero in zip(arrays, zeros, strict=True)
        ]
    # The token at place t of run s is token starts[s] + t of the rows.
    begins = np.cumsum(sizes) - sizes
    places = np.arange(int(sizes.sum())) + np.repeat(starts - begins, sizes)
    if not padding.any():
        return [array[places] for array in arrays]
    padded = np.repeat(padding, sizes)
    places[padded] = 0
    return [np.where(padded, array.dtype.type(0), array[places]) for array in arrays]


def _with_padding(
    planned: PackPlan, pack_offsets: Int64, *, segment_multiple: int, pack_multiple: int
) -> tuple[Int64, Int64, Int64]:
    """(lengths, source, pack_offsets) with padding among the segments; source: of the plan's, -1 of none.

    There is room for padding behind every segment and every pack; what is empty is taken out again.
    """
    num_segments, num_packs = planned.num_segments, planned.num_packs
    if segment_multiple == 1 and pack_multiple == 1:
        return planned.length, np.arange(num_segments), pack_offsets
    behind_segment = -planned.length % segment_multiple
    totals = np.concatenate([[0], np.cumsum(planned.length + behind_segment)])[pack_offsets]
    of_segment = np.repeat(np.arange(num_packs), np.diff(pack_offsets))
    lengths = np.zeros(2 * num_segments + num_packs, np.int64)
    source = np.full(len(lengths), -1, np.int64)
    places = 2 * np.arange(num_segments) + of_segment
    lengths[places], lengths[places + 1] = planned.length, behind_segment
    source[places] = np.arange(num_segments)
    lengths[2 * pack_offsets[1:] + np.arange(num_packs)] = -np.diff(totals) % pack_multiple
    full = lengths > 0
    kept = np.concatenate([[0], np.cumsum(full)])
    return lengths[full], source[full], kept[2 * pack_offsets + np.arange(num_packs + 1)]


def _shards(token_offsets: Int64, shard_tokens: int) -> Iterator[tuple[int, int]]:
    """Runs [first, last) of packs. token_offsets: (num_packs + 1,), where each pack's tokens begin."""
    bounds = [0]
    num_packs = len(token_offsets) - 1
    while bounds[-1] < num_packs:
        reached = np.searchsorted(token_offsets, token_offsets[bounds[-1]] + shard_tokens)
        bounds.append(min(int(reached), num_packs))
    yield from pairwise(bounds)
