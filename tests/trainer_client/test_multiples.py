"""Segments padded at the client: as a dataset packed with the multiple has them, on any layout."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packing_job import pack_document, spec_of, write_rows
from packs import build_dataset, build_step_dataset, pack_of, random_packs

from packer.shard import PADDING_ID, Pack, check, padding_pack
from packer.spec import PackingSpec
from trainer_client import MixedStream, PackedBatch, PackedDataset, PackedStream, parallel_multiple
from trainer_client.batch import padded_boundaries
from trainer_client.multiples import with_multiple
from trainer_client.static import ShapeExceeded, StaticShape

ARRAYS = ("input_ids", "loss_mask", "cu_seqlens", "example_ids", "position_ids", "labels")


def packed(tmp_path: Path, **packing: Any) -> str:
    """Rows of 1 to 30 tokens in packs that do not depend on multiples."""
    random = np.random.default_rng(3)
    rows = [
        {"input_ids": random.integers(1, 90, size).tolist(), "labels": None}
        for size in random.integers(2, 31, 70)
    ]
    source = write_rows(tmp_path / "rows.jsonl", [{"input_ids": row["input_ids"]} for row in rows])
    layout = {"strategy": "minibatch", "minibatch_size": 4, "max_tokens": 256, **packing}
    return pack_document(tmp_path / "store", spec_of(source, None, packing=layout)).job.dataset


def told(batch: PackedBatch) -> list[Any]:
    arrays = [getattr(batch, name).tolist() for name in ARRAYS]
    return [*arrays, batch.step, batch.num_packs, batch.num_items_in_batch, batch.is_padding]


def real_segments(batch: PackedBatch) -> list[tuple[int, list[int], list[int], list[bool]]]:
    """(example, ids, positions, trained) of every segment that is no padding."""
    return [
        (
            example,
            *(getattr(batch, name)[a:b].tolist() for name in ("input_ids", "position_ids", "loss_mask")),
        )
        for example, (a, b) in zip(
            batch.example_ids.tolist(), itertools.pairwise(batch.cu_seqlens.tolist()), strict=True
        )
        if example != PADDING_ID
    ]


@pytest.mark.parametrize("multiple", [2, 8, 13])
@pytest.mark.parametrize("packs_per_step", [1, 3])
def test_it_equals_a_dataset_packed_with_the_multiple(
    tmp_path: Path, multiple: int, packs_per_step: int
) -> None:
    plain, padded = packed(tmp_path), packed(tmp_path, segment_multiple=multiple)
    options: dict[str, Any] = {"packs_per_step": packs_per_step, "tail": "pad"}
    store = tmp_path / "store"
    here = PackedStream(store, dataset=plain, segment_multiple=multiple, **options)
    there = PackedStream(store, dataset=padded, **options)
    for one, other in zip(here, there, strict=True):
        assert told(one) == told(other)
        theirs, mine = (batch.for_megatron()["packed_seq_params"] for batch in (other, one))
        for name in ("cu_seqlens_q", "cu_seqlens_q_padded", "max_seqlen_q"):
            torch.testing.assert_close(mine[name], theirs[name])
    assert len(list(PackedStream(store, dataset=plain, **options))) == len(here)


def test_both_lengths_are_kept_and_nothing_else_changes(tmp_path: Path) -> None:
    dataset = packed(tmp_path)
    store = tmp_path / "store"
    plain = list(PackedStream(store, dataset=dataset))
    padded = list(PackedStream(store, dataset=dataset, segment_multiple=16))
    assert len(plain) == len(padded) == 18
    for one, other in zip(plain, padded, strict=True):
        assert real_segments(one) == real_segments(other)
        assert (one.num_items_in_batch, one.num_trained) == (other.num_items_in_batch, other.num_trained)
        real, where = padded_boundaries(other)
        assert real.tolist() == one.cu_seqlens.tolist()
        assert not (np.diff(where) % 16).any()
        growth = other.num_tokens - one.num_tokens
        assert 0 < growth <= 15 * one.num_segments


@pytest.mark.parametrize("first", [1, 4, 6])
def test_padding_that_is_there_is_made_longer(tmp_path: Path, first: int) -> None:
    before = packed(tmp_path, segment_multiple=first, pack_multiple=16)
    straight = packed(tmp_path)
    store = tmp_path / "store"
    for one, other in zip(
        PackedStream(store, dataset=before, segment_multiple=8),
        PackedStream(store, dataset=straight, segment_multiple=8),
        strict=True,
    ):
        assert real_segments(one) == real_segments(other)
        real, where = padded_boundaries(one)
        assert not (np.diff(where) % 8).any()
        assert real.tolist() == padded_boundaries(other)[0].tolist()


@pytest.mark.parametrize("multiple", [1, 2, 7, 64])
def test_random_packs_keep_the_rules_of_the_format(multiple: int) -> None:
    for pack in random_packs(40, max_tokens=64, seed=multiple):
        found = with_multiple(pack, multiple)
        check(found)
        again = with_multiple(found, multiple)
        assert again is found
        kept = np.repeat(found.example_ids != PADDING_ID, np.diff(found.cu_seqlens))
        mine = np.repeat(pack.example_ids != PADDING_ID, np.diff(pack.cu_seqlens))
        assert found.input_ids[kept].tolist() == pack.input_ids[mine].tolist()
        assert found.loss_mask[kept].tolist() == pack.loss_mask[mine].tolist()
        assert found.num_trained == pack.num_trained
        assert not found.num_tokens % multiple


def test_by_hand() -> None:
    found = with_multiple(pack_of([[1, 2, 3], [4, 5, 6, 7], [8]], [5, 6, 7]), 4)
    assert found.input_ids.tolist() == [1, 2, 3, 0, 4, 5, 6, 7, 8, 0, 0, 0]
    assert found.cu_seqlens.tolist() == [0, 3, 4, 8, 9, 12]
    assert found.example_ids.tolist() == [5, PADDING_ID, 6, 7, PADDING_ID]
    assert found.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0, 0, 1, 2]


def test_a_filler_is_padded_too(tmp_path: Path) -> None:
    assert with_multiple(padding_pack(), 8).cu_seqlens.tolist() == [0, 8]
    dataset = build_step_dataset(tmp_path, random_packs(4), [3, 1])
    options: dict[str, Any] = {"dataset": dataset, "rank": 1, "world_size": 2, "segment_multiple": 8}
    batches = list(PackedStream(tmp_path, **options))
    assert [batch.is_padding for batch in batches].count(True)
    assert all(batch.num_tokens % 8 == 0 and batch.num_tokens for batch in batches)


def test_resume_on_another_layout(tmp_path: Path) -> None:
    dataset = packed(tmp_path)
    store = tmp_path / "store"
    whole = [told(batch) for batch in PackedStream(store, dataset=dataset, segment_multiple=8)]
    plain = PackedStream(store, dataset=dataset)
    for batch in plain:
        if batch.step == 6:
            break
    resumed = PackedStream(store, dataset=dataset, segment_multiple=8)
    resumed.load_state_dict(plain.state_dict())
    assert [told(batch) for batch in resumed] == whole[7:]


def test_over_http_as_from_a_folder(tmp_path: Path, source: str) -> None:
    dataset = build_dataset(tmp_path, random_packs(12, max_tokens=64), packs_per_shard=5)
    options: dict[str, Any] = {"dataset": dataset, "packs_per_step": 2, "segment_multiple": 4}
    here = [told(batch) for batch in PackedStream(tmp_path, **options)]
    assert here == [told(batch) for batch in PackedStream(source, **options)]
    assert here == [told(batch) for batch in PackedDataset(source, **options)]


def test_mixed_streams_agree_on_it(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, random_packs(12, max_tokens=64), packs_per_shard=5)
    one, other = (
        {"one": PackedStream(tmp_path, dataset=dataset, segment_multiple=8), "other": another}
        for another in (
            PackedStream(tmp_path, dataset=dataset, segment_multiple=8),
            PackedStream(tmp_path, dataset=dataset, segment_multiple=4),
        )
    )
    batches = list(MixedStream(one, weights=[1, 1], batches_per_step=2))
    assert batches
    for batch in batches:
        assert not (np.diff(padded_boundaries(batch)[1]) % 8).any()
    with pytest.raises(ValueError, match=r"one segment_multiple for all is required, found \[4, 8\]"):
        MixedStream(other, weights=[1, 1])


def test_static_shapes_hold_it_or_say_what_is_missing(tmp_path: Path) -> None:
    dataset = build_dataset(
        tmp_path, random_packs(12, max_tokens=64), packs_per_shard=5, packing=PackingSpec(max_tokens=64)
    )
    batches = list(PackedStream(tmp_path, dataset=dataset, segment_multiple=16))
    longest = max(batch.num_tokens for batch in batches)
    assert longest > 64
    shape = StaticShape(num_tokens=longest + 16, num_segments=64)
    assert {batch.for_transformers(static=shape)["input_ids"].shape for batch in batches} == {
        (1, longest + 16)
    }
    too_long = next(batch for batch in batches if batch.num_tokens > 64)
    with pytest.raises(ShapeExceeded, match=rf"{too_long.num_tokens} tokens, .* allow 64.*StaticShape"):
        too_long.for_transformers(static=True)


def test_what_a_layout_asks_for() -> None:
    assert parallel_multiple() == 1
    assert parallel_multiple(context_parallel=4) == 8
    assert parallel_multiple(tensor_parallel=4) == 4
    assert parallel_multiple(context_parallel=2, tensor_parallel=8) == 16  # lcm of 2 x 2 and 2 x 8
    assert parallel_multiple(context_parallel=2, tensor_parallel=3) == 12
    assert parallel_multiple(context_parallel=2, also=16) == 32
    with pytest.raises(ValueError, match="tensor_parallel: a whole number of 1 or more"):
        parallel_multiple(tensor_parallel=0)


@pytest.mark.parametrize("wrong", [0, -2, 1.5, True, "8"])
def test_a_wrong_multiple_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match="segment_multiple: a whole number of 1 or more is required"):
        PackedStream(tmp_path, dataset="0" * 32, segment_multiple=wrong)


def test_the_pack_itself_is_given_where_nothing_lacks() -> None:
    pack: Pack = pack_of([[1, 2], [3, 4]], [0, 1])
    assert with_multiple(pack, 2) is pack
