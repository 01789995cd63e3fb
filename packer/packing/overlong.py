"""What becomes of examples that are too long: truncate, split, drop or error."""

from __future__ import annotations

import numpy as np

from packer.packing.values import Capacity, Int64, PackingError, Pieces

_NONE = np.zeros(0, np.int64)


def cut(lengths: Int64, capacity: Capacity, *, overlong: str, truncate_side: str, min_piece: int) -> Pieces:
    """The pieces of all examples, none longer than a pack holds.

    truncate keeps one piece an example: its beginning, or with truncate_side "left" its end. split cuts
    full pieces and a rest, and takes from the last full piece what the rest lacks to min_piece. drop
    leaves the example out. error raises PackingError with the first such example.
    """
    longest = capacity.segment
    if lengths.all():
        example, kept = np.arange(len(lengths)), lengths
    else:
        example = np.flatnonzero(lengths)
        kept = lengths[example]
    too_long = kept > longest
    if not too_long.any():
        return Pieces(
            example=example,
            start=np.zeros(len(example), np.int64),
            length=kept,
            truncated=_NONE,
            dropped=_NONE,
        )
    ids = example[too_long]
    if overlong == "error":
        raise PackingError(
            f"a pack takes segments of at most {longest} tokens, found {len(ids)} longer ones, the first "
            f"example {ids[0]} with {lengths[ids[0]]}, the longest {int(kept.max())}; raise max_tokens or "
            'set overlong to "truncate", "split" or "drop"'
        )
    if overlong == "drop":
        example, kept = example[~too_long], kept[~too_long]
        return Pieces(
            example=example, start=np.zeros(len(example), np.int64), length=kept, truncated=_NONE, dropped=ids
        )
    if overlong == "truncate":
        start = np.maximum(kept - longest, 0) if truncate_side == "left" else np.zeros(len(kept), np.int64)
        return Pieces(
            example=example, start=start, length=np.minimum(kept, longest), truncated=ids, dropped=_NONE
        )
    return _split(example, kept, longest, min_piece)


def _split(example: Int64, lengths: Int64, longest: int, min_piece: int) -> Pieces:
    if min_piece > (longest + 1) // 2:
        raise PackingError(
            f"min_piece must be at most {(longest + 1) // 2}, half of what a pack holds ({longest} tokens), "
            f"found {min_piece}; lower it or raise max_tokens"
        )
    counts = -(-lengths // longest)
    first = np.cumsum(counts) - counts
    number = np.arange(int(counts.sum())) - np.repeat(first, counts)  # of the piece in its example
    start = number * longest
    length = np.minimum(np.repeat(lengths, counts) - start, longest)
    last = (first + counts - 1)[counts > 1]
    lack = np.maximum(min_piece - length[last], 0)
    start[last] -= lack
    length[last] += lack
    length[last - 1] -= lack
    return Pieces(
        example=np.repeat(example, counts), start=start, length=length, truncated=_NONE, dropped=_NONE
    )


def _examples(pieces: Pieces, minibatch: int, minibatch_size: int) -> tuple[int, int]:
    """First and last example of a mini-batch that have tokens."""
    own = pieces.example[pieces.example // minibatch_size == minibatch]
    return int(own[0]), int(own[-1])


def fit_minibatches(
    pieces: Pieces, capacity: Capacity, minibatch_size: int, *, overlong: str, truncate_side: str
) -> Pieces:
    """Make each mini-batch fit into one pack.

    A mini-batch is one pack whatever its length, so where its examples together take more than a pack
    holds, `overlong` applies to the mini-batch: truncate cuts its examples at one length, the largest
    that fits; drop leaves out its longest examples until the rest fits; split and error raise
    PackingError, for neither tokens nor the number of packs may change under them.
    """
    group = pieces.example // minibatch_size
    padded = capacity.padded(pieces.length)
    totals = np.bincount(group, weights=padded).astype(np.int64)
    over = np.flatnonzero(totals > capacity.pack)
    if not len(over):
        return pieces
    if overlong in ("error", "split"):
        k = int(over[0])
        raise PackingError(
            f"a mini-batch is one pack of at most {capacity.pack} tokens, found {len(over)} longer ones, the "
            f"first {{mini-batch}} with {totals[k]} tokens, the longest with {totals.max()}; raise "
            f"max_tokens to {totals.max()} (packs take no more than they need), lower minibatch_size, or set "
            'overlong to "truncate" or "drop"',
            minibatch=k,
            examples=_examples(pieces, k, minibatch_size),
        )
    start, length = pieces.start.copy(), pieces.length.copy()
    bounds = np.searchsorted(group, np.stack([over, over + 1]))
    for k, a, b in zip(over.tolist(), *bounds.tolist(), strict=True):
        if overlong == "drop":
            # Longest first, and among equals the last first: the shortest that fit together stay.
            by_length = np.argsort(padded[a:b], kind="stable")
            room = np.cumsum(padded[a:b][by_length])
            length[a:b][by_length[room > capacity.pack]] = 0
            continue
        level = _common_length(pieces.length[a:b], capacity)
        if not level:
            raise PackingError(
                f"{{mini-batch}} has {b - a} examples, which take {capacity.segment_multiple} tokens or more "
                f"each in a pack of {capacity.pack}; raise max_tokens or lower minibatch_size",
                minibatch=k,
                examples=_examples(pieces, k, minibatch_size),
            )
        length[a:b] = np.minimum(length[a:b], level)
    lost = pieces.length - length
    if truncate_side == "left":
        start += lost
    keep = length > 0
    cut_ids, gone = pieces.example[(lost > 0) & keep], pieces.example[~keep]
    return Pieces(
        example=pieces.example[keep],
        start=start[keep],
        length=length[keep],
        truncated=np.union1d(pieces.truncated, cut_ids),
        dropped=np.union1d(pieces.dropped, gone),
    )


def tokens_of_minibatches(lengths: Int64, capacity: Capacity, minibatch_size: int) -> Int64:
    """What each mini-batch takes in a pack uncut, padding counted: (num_minibatches,) int64.

    max_tokens must be as many for a mini-batch to fit. Lengths are in stream order, those of 0 with them.
    """
    starts = np.arange(0, len(lengths), minibatch_size)
    totals = np.add.reduceat(capacity.padded(lengths), starts) if len(lengths) else _NONE
    return -(-totals // capacity.pack_multiple) * capacity.pack_multiple


def _common_length(lengths: Int64, capacity: Capacity) -> int:
    """The largest length at which all can be cut so that they fit into one pack; 0 if there is none."""
    low, high = 0, capacity.pack
    while low < high:
        middle = (low + high + 1) // 2
        if capacity.padded(np.minimum(lengths, middle)).sum() <= capacity.pack:
            low = middle
        else:
            high = middle - 1
    return low
