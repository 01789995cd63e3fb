"""Even ranks within a step, steps that are left out, and what a refused state says."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_service import FakeService
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
from reading_ahead import once_awaited
from serving import running
from torch.utils.data import DataLoader

from packer.manifest import lock_key, remove_dataset
from packer.store import LocalStore
from trainer_client import PackedDataset, PackedStream, StateMismatch, StreamTimeout
from trainer_client.specs import of_state

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def ids(batches: Any) -> list[list[int]]:
    return [batch.example_ids.tolist() for batch in batches]


# ------------------------------------------------------------------ balance


@pytest.mark.parametrize(("num_packs", "world_size", "packs_per_step"), [(24, 2, 3), (31, 3, 4), (29, 2, 2)])
@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_balance_moves_packs_within_a_step_only(
    tmp_path: Path, num_packs: int, world_size: int, packs_per_step: int, tail: Any
) -> None:
    packs = random_packs(num_packs, max_tokens=6000)
    dataset = build_dataset(tmp_path, packs, packs_per_shard=5)
    steps, waits = {}, {}
    with running(tmp_path) as server:
        for balance in ("none", "attention"):
            options: dict[str, Any] = {
                "dataset": dataset, "world_size": world_size, "packs_per_step": packs_per_step,
                "tail": tail, "epochs": 2, "balance": balance,
            }  # fmt: skip
            here, there = (
                [seen(PackedStream(where, rank=rank, **options)) for rank in range(world_size)]
                for where in (tmp_path, server.url)
            )
            assert here == there
            by_step = list(zip(*here, strict=True))
            # A rank without any pack has a filler; evened out, it may have one.
            steps[balance] = [sorted({n for ids, _, _ in step for n in ids} - {-1}) for step in by_step]
            costs = [[cost for _, _, cost in step] for step in by_step]
            waits[balance] = sum(max(step) * len(step) - sum(step) for step in costs)
            assert all(len({items for _, items, _ in step}) == 1 for step in by_step)
    assert steps["none"] == steps["attention"]
    assert waits["attention"] < waits["none"]


def seen(stream: PackedStream) -> list[tuple[list[int], int, int]]:
    return [(b.example_ids.tolist(), b.num_items_in_batch, sum_of_costs(b)) for b in stream]


def sum_of_costs(batch: Any) -> int:
    lengths = np.diff(batch.cu_seqlens).astype(np.int64)
    return 0 if batch.is_padding else int(lengths @ lengths) + 12 * 2048 * batch.num_tokens


def test_stats_tell_the_spread_before_and_after(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, random_packs(64, max_tokens=6000), packs_per_shard=9)
    with running(tmp_path) as server:
        found = []
        for where in (tmp_path, server.url):
            stream = PackedStream(where, dataset=dataset, world_size=4, packs_per_step=4, balance="attention")
            assert len(list(stream)) == 4
            found.append((stream.stats().idle_share_before, stream.stats().idle_share_after))
    assert found[0] == found[1]
    before, after = found[0]
    assert 0 < after < before < 1


def test_a_service_that_cannot_tell_the_spread_is_no_fault(tmp_path: Path) -> None:
    from fake_service import FakeService

    dataset = build_dataset(tmp_path, numbered_packs(8), packs_per_shard=9)
    with FakeService(tmp_path) as service:
        stream = PackedStream(service.url, dataset=dataset, world_size=2, balance="attention")
        assert len(list(stream)) == 4
        assert stream.stats().idle_share_before == 0


# ------------------------------------------------------------------ skip


def test_skipped_steps_are_left_out_and_nothing_else_changes(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(20), packs_per_shard=6)
    options: dict[str, Any] = {"dataset": dataset, "epochs": 2, "world_size": 2}
    whole = [(b.epoch, b.step, b.example_ids.tolist()) for b in PackedStream(source, **options)]
    stream = PackedStream(source, **options)
    stream.skip([3, 4, 9])
    stream.skip([0, 5], epoch=1)
    left_out = {(0, 3), (0, 4), (0, 9), (1, 0), (1, 5)}
    wanted = [one for one in whole if one[:2] not in left_out]
    assert len(stream) == len(wanted) == 15
    states = []
    for count, batch in enumerate(stream, start=1):
        assert (batch.epoch, batch.step, batch.example_ids.tolist()) == wanted[count - 1]
        states.append(json.loads(json.dumps(stream.state_dict())))
    for count in (1, 2, 3, 4, 7, 8, 11):
        resumed = PackedStream(source, **options)
        resumed.load_state_dict(states[count - 1])
        assert [(b.epoch, b.step, b.example_ids.tolist()) for b in resumed] == wanted[count:]


def test_skipped_packs_stay_out_on_another_world_size(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(24), packs_per_shard=6)
    stream = PackedStream(source, dataset=dataset, world_size=2)
    stream.skip([4])  # packs 8 and 9
    next(iter(stream))
    for world_size, gone in [(1, {8, 9}), (3, {8, 9, 10}), (4, {6, 7, 8, 9})]:
        seen = []
        for rank in range(world_size):
            other = PackedStream(source, dataset=dataset, rank=rank, world_size=world_size)
            other.load_state_dict(stream.state_dict())
            seen += [example for one in ids(other) for example in one]
        last = 2 + 22 // world_size * world_size
        assert sorted(seen) == [n for n in range(2, last) if n not in gone]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_loader_workers_leave_out_the_same(source: str, tmp_path: Path, num_workers: int) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(20), packs_per_shard=6)
    packed = PackedDataset(source, dataset=dataset)
    packed.stream.skip([0, 3, 4, 11, 19])
    batches = list(DataLoader(packed, batch_size=None, num_workers=num_workers))
    assert ids(batches) == [[n] for n in range(20) if n not in (0, 3, 4, 11, 19)]


def test_whole_optimizer_steps_are_left_out_of_a_step_dataset(source: str, tmp_path: Path) -> None:
    sizes = [3, 1, 2, 5, 2]
    dataset = build_step_dataset(tmp_path, numbered_packs(13), sizes)
    for epoch in (0, 1):
        options: dict[str, Any] = {"dataset": dataset, "world_size": 2, "epochs": 2}
        whole = [
            (b.epoch, b.optimizer_step, b.step, b.example_ids.tolist())
            for b in PackedStream(source, **options)
        ]
        stream = PackedStream(source, **options)
        stream.skip([1, 3], epoch=epoch)
        wanted = [one for one in whole if one[:2] not in ((epoch, 1), (epoch, 3))]
        assert len(stream) == len(wanted)
        assert places(stream) == wanted


def places(stream: PackedStream) -> list[tuple[int, int, int, list[int]]]:
    return [(b.epoch, b.optimizer_step, b.step, b.example_ids.tolist()) for b in stream]


def test_a_step_that_is_not_packed_yet_is_left_out_too(source: str, tmp_path: Path) -> None:
    packs = numbered_packs(6)
    dataset = start_dataset(tmp_path, identity="skips", packing=PackingSpec(strategy="step", step_size=4))
    commit_partition(tmp_path, dataset, 0, packs[:2], packs_per_shard=2, steps=[0, 1])
    stream = PackedStream(source, dataset=dataset)
    stream.skip([3])
    batches = iter(stream)
    assert [next(batches).example_ids[0] for _ in range(2)] == [0, 1]

    def go_on() -> None:
        commit_partition(tmp_path, dataset, 1, packs[2:], packs_per_shard=2, steps=[2, 3, 3, 4])
        finish_dataset(tmp_path, dataset, 2, packs)

    with once_awaited(stream, go_on):
        assert ids(batches) == [[2], [5]]


def test_skipping_bears_a_service_that_is_away_as_reading_does(service: FakeService, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=3)
    stream = PackedStream(service.url, dataset=dataset, timeout_s=20, report_s=None)
    service.num_views_refused = 2
    stream.skip([1])
    assert stream.stats().num_retries == 2
    assert [batch.step for batch in stream] == [0, 2, 3]
    hasty = PackedStream(service.url, dataset=dataset, timeout_s=0.2, report_s=None)
    service.num_views_refused = 100
    with pytest.raises(StreamTimeout, match=r"asking for its state.*answered 503"):
        hasty.skip([1])
    with pytest.raises(TypeError, match="length is not known"):
        len(hasty)


def test_steps_that_were_taken_cannot_be_skipped(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(10), packs_per_shard=6)
    stream = PackedStream(tmp_path, dataset=dataset)
    batches = iter(stream)
    for _ in range(4):
        next(batches)
    with pytest.raises(ValueError, match=r"from 4 of epoch 0.*found \[3, 5\]"):
        stream.skip([5, 3])
    with pytest.raises(ValueError, match="skip of the state: each as in"):
        stream.load_state_dict({**stream.state_dict(), "skip": [{"epoch": 0}]})
    stream.skip([4])
    assert ids(stream) == [[5], [6], [7], [8], [9]]


# ------------------------------------------------------------------ states and slow packers


def test_a_state_of_another_dataset_says_what_differs(source: str, tmp_path: Path) -> None:
    packs = numbered_packs(4)
    one = build_dataset(tmp_path, packs, packs_per_shard=5, packing=PackingSpec(max_tokens=2048))
    two = build_dataset(tmp_path, packs, packs_per_shard=5, packing=PackingSpec(max_tokens=4096))
    state = PackedStream(source, dataset=one).state_dict()
    with pytest.raises(StateMismatch, match=r"max_tokens \(4096 here, 2048 in the state's\)") as caught:
        PackedStream(source, dataset=two).load_state_dict(state)
    assert {two, one} == {caught.value.wanted, caught.value.found}
    three = build_dataset(
        tmp_path, numbered_packs(5), packs_per_shard=5, packing=PackingSpec(max_tokens=2048)
    )
    with pytest.raises(StateMismatch, match="content of inputs or tokenizer differs"):
        PackedStream(source, dataset=three).load_state_dict(state)
    with pytest.raises(StateMismatch, match="its position means nothing here"):
        PackedStream(source, dataset=three).load_state_dict({**state, "dataset": "f" * 32})


def test_a_state_says_what_differs_also_where_its_dataset_is_gone(source: str, tmp_path: Path) -> None:
    """Or is in another store: the state itself knows its spec, in about a kilobyte."""
    packs = numbered_packs(4)
    one = build_dataset(tmp_path, packs, packs_per_shard=5, packing=PackingSpec(max_tokens=2048))
    two = build_dataset(tmp_path, packs, packs_per_shard=5, packing=PackingSpec(max_tokens=4096))
    stream = PackedStream(source, dataset=one)
    batch = next(iter(stream))
    states = [json.loads(json.dumps(state)) for state in (stream.state_dict(), batch.state)]
    stream.close()
    remove_dataset(LocalStore(tmp_path), one)
    for state in states:
        assert len(json.dumps(state)) < 2000
        with pytest.raises(StateMismatch, match=r"max_tokens \(4096 here, 2048 in the state's\)") as caught:
            PackedStream(source, dataset=two).load_state_dict(state)
        assert (caught.value.wanted, caught.value.found) == (two, one)


def test_long_values_of_specs_differ_where_they_do() -> None:
    """And are short in a state."""
    fields = [of_state({"tokenizer": {"chat_template": 4000 * "a" + end}})["spec"] for end in "bc"]
    assert fields[0] != fields[1]
    assert all(len(value) < 80 for one in fields for value in one.values())


def test_a_slow_packer_is_waited_for_in_a_folder(tmp_path: Path) -> None:
    dataset = start_dataset(tmp_path, identity="slow")
    store = LocalStore(tmp_path)
    packs = numbered_packs(2)
    packing, commit = threading.Event(), threading.Event()

    def pack() -> None:
        with store.lock(lock_key(dataset)):
            packing.set()
            commit.wait(0.6)  # longer than the stream's timeout
            commit_partition(tmp_path, dataset, 0, packs, packs_per_shard=3)
            finish_dataset(tmp_path, dataset, 1, packs)

    thread = threading.Thread(target=pack)
    thread.start()
    assert packing.wait(30)
    assert ids(PackedStream(tmp_path, dataset=dataset, timeout_s=0.2)) == [[0], [1]]
    thread.join()
