"""The client and the real service: what comes over HTTP is what lies in the store."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from packs import (
    PackingSpec,
    build_dataset,
    commit_partition,
    fail_dataset,
    finish_dataset,
    numbered_packs,
    random_packs,
    start_dataset,
)
from serving import running, wait_for

from trainer_client import (
    DatasetFailed,
    DatasetTooSmall,
    MixedStream,
    PackedBatch,
    PackedStream,
    UnknownDataset,
)


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


def test_a_failed_dataset_ends_every_open_stream_with_the_reason(tmp_path: Path) -> None:
    """Over HTTP and from a folder, whatever it waits for: its step, a later epoch, the dataset's size."""
    plain = start_dataset(tmp_path, identity="failing")
    commit_partition(tmp_path, plain, 0, numbered_packs(7), packs_per_shard=3)
    of_steps = start_dataset(
        tmp_path, identity="failing too", packing=PackingSpec(strategy="step", step_size=4)
    )
    commit_partition(tmp_path, of_steps, 0, numbered_packs(5), packs_per_shard=3, steps=[0, 0, 1, 1, 2])
    ready = build_dataset(tmp_path, numbered_packs(60), packs_per_shard=50)
    found: dict[tuple[str, str], Any] = {}

    def drain(where: str, kind: str, stream: Any) -> None:
        try:
            found[where, kind] = len(list(stream))
        except DatasetFailed as error:
            found[where, kind] = error.reason

    with running(tmp_path) as server:
        readers = []
        for where in (server.url, str(tmp_path)):
            later = PackedStream(where, dataset=plain, epochs=3)
            later.set_epoch(1)
            streams = {
                "rank 0": PackedStream(where, dataset=plain, world_size=2),
                "rank 1": PackedStream(where, dataset=plain, world_size=2, rank=1, tail="pad"),
                "micro-batches": PackedStream(where, dataset=plain, micro_batches=4, balance="attention"),
                "a later epoch": later,
                "a step not packed": PackedStream(where, dataset=plain, packs_per_step=100),
                "steps": PackedStream(where, dataset=of_steps, world_size=2),
                "a mixture": MixedStream(
                    [PackedStream(where, dataset=one) for one in (plain, ready)],
                    weights=[1, 1],
                    batches_per_step=2,
                ),
            }
            readers += [
                threading.Thread(target=drain, args=(where, kind, one)) for kind, one in streams.items()
            ]
        for reader in readers:
            reader.start()
        wait_for(lambda: server.service is not None and server.service.num_streams >= 6)
        assert found == {}
        for dataset in (plain, of_steps):
            fail_dataset(tmp_path, dataset, detail="rows.jsonl, line 7: not JSON")
        for reader in readers:
            reader.join()
    assert len(found) == len(readers) == 14
    assert all("rows.jsonl, line 7: not JSON" in str(reason) for reason in found.values()), found


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
