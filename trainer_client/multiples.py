"""Segments padded to a multiple at the client, so that one packed dataset serves every parallel layout.

Context parallelism deals each segment to its ranks in 2 x size pieces, sequence parallelism and FP8 want
multiples of their own. What a dataset packed with `segment_multiple` has, packs get here on their way into a
batch: behind each segment untrained tokens (token 0, example id -1), up to the next multiple.
"""

from __future__ import annotations

import math

import numpy as np

from packer.shard import PADDING_ID, Pack


def parallel_multiple(*, context_parallel: int = 1, tensor_parallel: int = 1, also: int = 1) -> int:
    """The segment_multiple of a parallel layout: the least common multiple of what each part asks for.

    context_parallel: 2 x its size, for the two pieces of each segment that a rank gets; 1 asks for nothing.
    tensor_parallel: of Megatron, with sequence parallelism: context_parallel x its size. also: for example 16
    for FP8, of the tokens that a context-parallel rank sees.
    """
    for name, size in (
        ("context_parallel", context_parallel),
        ("tensor_parallel", tensor_parallel),
        ("also", also),
    ):
        _require_count(name, size)
    pieces = 2 * context_parallel if context_parallel > 1 else 1
    return math.lcm(pieces, context_parallel * tensor_parallel, context_parallel * also)


def require_multiple(value: int) -> int:
    """Raise ValueError unless `value` can be a segment_multiple."""
    return _require_count("segment_multiple", value)


def _require_count(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: a whole number of 1 or more is required, found {value!r}")
    return value


def with_multiple(pack: Pack, multiple: int) -> Pack:
    """The pack with every segment padded to a multiple of `multiple` tokens.

    Padding that is there already belongs to the segment before it and is made longer where it does not
    reach; so a pack grows by at most multiple - 1 tokens a segment.
    """
    lengths = np.diff(pack.cu_seqlens)
    begins = pack.example_ids != PADDING_ID  # a segment with the padding behind it
    begins[0] = True
    first = np.flatnonzero(begins)
    lack = -np.add.reduceat(lengths, first) % multiple
    if not lack.any():
        return pack
    last = np.append(first[1:], len(lengths)) - 1
    # New padding behind a segment that has none; what has some gets more of it.
    is_new = (pack.example_ids[last] != PADDING_ID) & (lack > 0)
    places = (
        np.arange(len(lengths)) + np.cumsum(np.bincount(last[is_new] + 1, minlength=len(lengths) + 1))[:-1]
    )
    grown = np.zeros(len(lengths) + int(is_new.sum()), np.int64)
    ids = np.full(len(grown), PADDING_ID, np.int64)
    grown[places], ids[places] = lengths, pack.example_ids
    grown[places[last] + is_new] += lack
    cu = np.zeros(len(grown) + 1, np.int32)
    np.cumsum(grown, out=cu[1:])
    to = np.arange(pack.num_tokens) + np.repeat(cu[places] - pack.cu_seqlens[:-1], lengths)
    input_ids, loss_mask = np.zeros(cu[-1], np.int32), np.zeros(cu[-1], np.bool_)
    input_ids[to], loss_mask[to] = pack.input_ids, pack.loss_mask
    return Pack(input_ids=input_ids, loss_mask=loss_mask, cu_seqlens=cu, example_ids=ids)
