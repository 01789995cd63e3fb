"""Gathering a plan's packs in one go gives what one pack after another gives."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packs import random_packs

from packer import gather as gathering
from packer import shard
from packer.gather import gather
from packer.packing import PackPlan, plan
from packer.shard import PADDING_ID, Pack, Packs, ShardError


def one_by_one(
    rows: list[list[int]],
    trained: list[list[bool]],
    planned: PackPlan,
    segment_multiple: int,
    pack_multiple: int,
) -> list[Pack]:
    """As the format says it, a segment at a time."""
    packs = []
    for first, last in zip(planned.pack_offsets, planned.pack_offsets[1:], strict=False):
        ids: list[int] = []
        mask: list[bool] = []
        cu, examples = [0], []

        def put(tokens: list[int], flags: list[bool], example: int) -> None:
            if tokens:
                ids.extend(tokens)  # noqa: B023  # called at once
                mask.extend([False, *flags[1:]])  # noqa: B023
                cu.append(len(ids))  # noqa: B023
                examples.append(example)  # noqa: B023

        for s in range(first, last):
            example, start, length = planned.example[s], planned.start[s], planned.length[s]
            put(
                rows[example][start : start + length], trained[example][start : start + length], 100 + example
            )
            padding = -length % segment_multiple
            put([0] * padding, [False] * padding, PADDING_ID)
        padding = -len(ids) % pack_multiple
        put([0] * padding, [False] * padding, PADDING_ID)
        packs.append(
            Pack(
                input_ids=np.array(ids, np.int32),
                loss_mask=np.array(mask, np.bool_),
                cu_seqlens=np.array(cu, np.int32),
                example_ids=np.array(examples, np.int64),
            )
        )
    return packs


@given(
    lengths=st.lists(st.integers(0, 9), max_size=30),
    seed=st.integers(0, 9),
    multiples=st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 4), (3, 8)]),
    shard_tokens=st.integers(1, 40),
    long_run=st.sampled_from([0, 3, 1000]),
)
def test_equal_to_one_pack_after_another(
    lengths: list[int], seed: int, multiples: tuple[int, int], shard_tokens: int, long_run: int
) -> None:
    """Whichever way runs of tokens are copied."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(1, 1000, length).tolist() for length in lengths]
    trained = [(rng.random(length) < 0.5).tolist() for length in lengths]
    segment_multiple, pack_multiple = multiples
    planned = plan(
        np.array(lengths, np.int64), 16, segment_multiple=segment_multiple, pack_multiple=pack_multiple
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "_LONG_RUN", long_run)
        shards = list(
            gather(
                np.array([*chain(*rows)], np.int32),
                np.array([*chain(*trained)], np.bool_),
                np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                100 + np.arange(len(lengths)),
                planned,
                segment_multiple=segment_multiple,
                pack_multiple=pack_multiple,
                shard_tokens=shard_tokens,
            )
        )
    found = [pack for packs in shards for pack in packs]
    assert found == one_by_one(rows, trained, planned, segment_multiple, pack_multiple)
    for packs in shards[:-1]:  # a shard ends with the pack that fills it
        sizes = np.diff(packs.token_offsets)
        assert sizes.sum() >= shard_tokens > sizes[:-1].sum()


# ------------------------------------------------------------------ flat packs


@given(st.integers(0, 12), st.integers(0, 99))
def test_flat_packs_are_the_packs(num_packs: int, seed: int) -> None:
    packs = random_packs(num_packs, seed=seed)
    flat = Packs.of(packs)
    assert len(flat) == num_packs
    assert list(flat) == packs
    data, index = shard.encode_packs(flat, "d" * 32)
    assert list(shard.read_packs(data)) == packs
    assert shard.validate(data) == num_packs
    assert index["num_trained"].tolist() == [pack.num_trained for pack in packs]
    assert index["max_seqlen"].tolist() == [pack.max_seqlen for pack in packs]
    squares = [int((np.diff(pack.cu_seqlens).astype(np.int64) ** 2).sum()) for pack in packs]
    assert index["sum_squares"].tolist() == squares


def flat(**more: Any) -> Packs:
    values: dict[str, Any] = {
        "input_ids": np.array([1, 2, 3, 4, 5], np.int32),
        "loss_mask": np.array([0, 1, 0, 1, 1], np.bool_),
        "lengths": np.array([2, 3]),
        "example_ids": np.array([0, 1]),
        "pack_offsets": np.array([0, 1, 2]),
    }
    return Packs(**{**values, **more})


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"loss_mask": np.array([0, 1, 1, 1, 1], np.bool_)}, "pack 1: loss_mask must be false on the first"),
        ({"input_ids": np.array([1, -2, 3, 4, 5], np.int32)}, "pack 0: input_ids must not be negative"),
        ({"example_ids": np.array([0, -1])}, "pack 1: loss_mask must be false in padding"),
        ({"lengths": np.array([5, 0])}, "pack 1: cu_seqlens must strictly increase"),
        ({"pack_offsets": np.array([0, 0, 2])}, "pack 0: cu_seqlens must start at 0"),
        ({"lengths": np.array([2, 2])}, "do not hold all the tokens"),
    ],
)
def test_the_first_pack_that_breaks_a_rule_is_named(broken: dict[str, Any], reason: str) -> None:
    shard.encode_packs(flat(), "d")
    with pytest.raises(ShardError, match=reason):
        shard.encode_packs(flat(**broken), "d")
