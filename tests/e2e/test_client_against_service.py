"""The client and the real service: what comes over HTTP is what lies in the store."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from packs import (
    build_dataset,
    commit_partition,
    fail_dataset,
    finish_dataset,
    numbered_packs,
    random_packs,
    start_dataset,
)
from serving import running

from trainer_client import DatasetFailed, DatasetTooSmall, PackedBatch, PackedStream, UnknownDataset


def all_of(batch: PackedBatch) -> tuple:
    return (
        batch.epoch,
        batch.step,
        batch.input_ids.tolist(),
        batch.loss_mask.tolist(),
        batch.cu_seqlens.tolist(),
        batch.example_ids.tolist(),
        batch.num_items_in_batch,
        batch.step_done,
        batch.is_padding,
        batch.state,
    )


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize(("world_size", "packs_per_step"), [(1, 1), (2, 1), (3, 2)])
def test_the_service_sends_what_the_folder_holds(
    tmp_path: Path, world_size: int, packs_per_step: int, tail: Any
) -> None:
    dataset = build_dataset(tmp_path, random_packs(23), packs_per_shard=5)
    with running(tmp_path) as server:
        for rank in range(world_size):
            options: dict[str, Any] = {
                "dataset": dataset,
                "rank": rank,
                "world_size": world_size,
                "packs_per_step": packs_per_step,
                "tail": tail,
                "epochs": 3,
            }
            sent = [all_of(batch) for batch in PackedStream(server.url, **options)]
            assert sent == [all_of(batch) for batch in PackedStream(tmp_path, **options)]
            assert len(sent) == len(PackedStream(server.url, **options))


def test_a_state_goes_on_at_the_service_on_another_world_size(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(12), packs_per_shard=5)
    with running(tmp_path) as server:
        first = PackedStream(server.url, dataset=dataset, world_size=4)
        next(iter(first))
        after = []
        for rank in range(2):
            stream = PackedStream(server.url, dataset=dataset, rank=rank, world_size=2)
            stream.load_state_dict(first.state_dict())
            after += [batch.example_ids[0] for batch in stream]
        assert sorted(after) == list(range(4, 12))


def test_the_stream_follows_packing_through_the_service(tmp_path: Path) -> None:
    packs = numbered_packs(9)
    dataset = start_dataset(tmp_path, identity="growing")
    commit_partition(tmp_path, dataset, 0, packs[:4], packs_per_shard=3)
    with running(tmp_path) as server:
        batches = iter(PackedStream(server.url, dataset=dataset, epochs=2))
        assert [next(batches).example_ids[0] for _ in range(4)] == [0, 1, 2, 3]
        commit_partition(tmp_path, dataset, 1, packs[4:], packs_per_shard=3)
        finish_dataset(tmp_path, dataset, 2, packs)
        rest = [batch.example_ids[0] for batch in batches]
        assert rest[:5] == [4, 5, 6, 7, 8]
        assert sorted(rest[5:]) == list(range(9))


def test_what_goes_wrong_arrives_as_the_clients_errors(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(3), packs_per_shard=2)
    growing = start_dataset(tmp_path, identity="failing")
    commit_partition(tmp_path, growing, 0, numbered_packs(2), packs_per_shard=2)
    with running(tmp_path) as server:
        with pytest.raises(DatasetTooSmall) as caught:
            next(iter(PackedStream(server.url, dataset=dataset, packs_per_step=101)))
        assert (caught.value.num_packs, caught.value.packs_needed) == (3, 101)
        with pytest.raises(UnknownDataset):
            next(iter(PackedStream(server.url, dataset="0" * 32)))
        batches = iter(PackedStream(server.url, dataset=growing))
        assert [next(batches).example_ids[0] for _ in range(2)] == [0, 1]
        fail = threading.Timer(
            0.2, fail_dataset, (tmp_path, growing), {"type": "packing-failed", "detail": "line 7: not JSON"}
        )
        fail.start()
        with pytest.raises(DatasetFailed, match="line 7: not JSON"):
            next(batches)
        fail.join()
