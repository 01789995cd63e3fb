"""What the service tells of a dataset's steps: their sizes, strides, and how even the ranks are."""

from __future__ import annotations

from pathlib import Path

import pytest
from packs import (
    PackingSpec,
    build_dataset,
    build_step_dataset,
    commit_partition,
    finish_dataset,
    numbered_packs,
    random_packs,
    start_dataset,
)
from serving import messages, running


def test_sizes_of_optimizer_steps_grow_with_the_dataset(tmp_path: Path) -> None:
    packs = numbered_packs(7)
    dataset = start_dataset(tmp_path, identity="grows", packing=PackingSpec(strategy="step", step_size=2))
    path = f"/v1/datasets/{dataset}/steps"
    with running(tmp_path) as server:
        assert server.get(path).json == {"start": 0, "num_packs": [], "finished": False}
        commit_partition(tmp_path, dataset, 0, packs[:4], packs_per_shard=2, steps=[0, 0, 0, 2])
        assert server.get(path).json == {"start": 0, "num_packs": [3, 1], "finished": False}
        commit_partition(tmp_path, dataset, 1, packs[4:], packs_per_shard=2, steps=[3, 3, 4])
        finish_dataset(tmp_path, dataset, 2, packs)
        assert server.get(path + "?start=1").json == {"start": 1, "num_packs": [1, 2, 1], "finished": True}
        assert server.get(path + "?start=9").json == {"start": 9, "num_packs": [], "finished": True}
        assert server.get(path + "?begin=9").status == 422


def test_a_dataset_without_optimizer_steps_says_so(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(3), packs_per_shard=2)
    with running(tmp_path) as server:
        assert server.get(f"/v1/datasets/{dataset}/steps").json["num_packs"] is None
        assert server.get(f"/v1/datasets/{'0' * 32}/steps").status == 404


def test_a_step_dataset_that_is_torn_apart_is_damaged(tmp_path: Path) -> None:
    dataset = start_dataset(tmp_path, identity="torn", packing=PackingSpec(strategy="step", step_size=2))
    commit_partition(tmp_path, dataset, 0, numbered_packs(3), packs_per_shard=2, steps=[1, 0, 1])
    with running(tmp_path) as server:
        answer = server.stream(dataset)
        assert (answer.status, answer.json["type"]) == (409, "urn:padfree:problem:dataset-failed")


@pytest.mark.parametrize("stride", [1, 2, 3, 50])
@pytest.mark.parametrize("batches", ["step", "pack"])
def test_a_stride_sends_every_so_many_th_step(tmp_path: Path, stride: int, batches: str) -> None:
    dataset = build_dataset(tmp_path, random_packs(23), packs_per_shard=4)
    query = {"packs_per_step": 2, "batches": batches, "epoch": 1, "shuffle_seed": 2}
    with running(tmp_path) as server:
        whole = messages(server.stream(dataset, **query).body)
        found = messages(server.stream(dataset, start=1, stride=stride, max_steps=3, **query).body)
    wanted = [m for step in range(1, 11, stride)[:3] for m in whole if m.stamp.step == step]
    assert found == wanted


def test_packs_per_step_is_not_used_for_a_step_dataset(tmp_path: Path) -> None:
    dataset = build_step_dataset(tmp_path, numbered_packs(6), [4, 2])
    with running(tmp_path) as server:
        for query in ({}, {"packs_per_step": 3}, {"packs_per_step": 3, "batches": "pack", "tail": "pad"}):
            found = messages(server.stream(dataset, world_size=3, rank=1, **query).body)
            assert [m.packs[0].example_ids[0] for m in found] == [1, -1, 5]
            assert [m.stamp.step_done for m in found] == [False, True, True]
            assert [m.stamp.padding for m in found] == [False, True, False]


@pytest.mark.parametrize("sizes", [None, [9, 20, 3]])
def test_the_idle_share_without_and_with_balance(tmp_path: Path, sizes: list[int] | None) -> None:
    packs = random_packs(32, max_tokens=5000)
    if sizes is None:
        dataset = build_dataset(tmp_path, packs, packs_per_shard=4)
    else:
        dataset = build_step_dataset(tmp_path, packs, sizes)
    with running(tmp_path) as server:
        path = f"/v1/datasets/{dataset}/balance?world_size=2&packs_per_step=4&epoch=1&shuffle_seed=1"
        found = server.get(path).json
        assert found["num_steps"] == (4 if sizes is None else 5 + 10 + 2)
        assert 0 < found["idle_share"]["attention"] < found["idle_share"]["none"] < 1
        assert server.get(f"{path}&max_steps=1").json["num_steps"] == 1
        assert server.get(f"/v1/datasets/{dataset}/balance").json["idle_share"] == {"none": 0, "attention": 0}
