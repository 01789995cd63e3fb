"""PackedDataset under torch's DataLoader: workers change neither number nor order of batches."""

from __future__ import annotations

import gc
import itertools
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from fake_service import FakeService
from packs import (
    build_dataset,
    commit_partition,
    fail_dataset,
    finish_dataset,
    numbered_packs,
    start_dataset,
    taken,
)
from torch.utils.data import DataLoader, get_worker_info

from trainer_client import DatasetFailed, PackedDataset, PackedStream, StateMismatch


def loader(dataset: PackedDataset, num_workers: int, **options: Any) -> DataLoader:
    return DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)


pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_f28_workers_do_not_change_the_batches(source: str, tmp_path: Path, num_workers: int) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(100), packs_per_shard=30)
    found = loader(PackedDataset(source, dataset=dataset, packs_per_step=4), num_workers)
    batches = list(found)
    assert len(found) == len(batches) == 25
    assert [batch.num_packs for batch in batches] == 25 * [4]
    assert taken(batches) == list(range(100))
    assert [batch.step for batch in batches] == list(range(25))
    assert all(batch.num_items_in_batch == 4 * 3 for batch in batches)


def test_f34_more_workers_than_shard_files(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(8), packs_per_shard=8)
    ranks = [
        taken(loader(PackedDataset(source, dataset=dataset, rank=rank, world_size=2), 4)) for rank in range(2)
    ]
    assert ranks == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.slow
def test_spawned_workers_give_the_same(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(8), packs_per_shard=3)
    batches = loader(PackedDataset(source, dataset=dataset), 2, multiprocessing_context="spawn")
    assert taken(batches) == list(range(8))


def test_workers_go_over_epochs_in_the_order_of_the_stream(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(11), packs_per_shard=3)
    options: dict[str, Any] = {"dataset": dataset, "epochs": 3, "packs_per_step": 2, "tail": "pad"}
    whole = [(b.epoch, b.step, b.example_ids.tolist()) for b in PackedStream(source, **options)]
    found = [(b.epoch, b.step, b.example_ids.tolist()) for b in loader(PackedDataset(source, **options), 3)]
    assert found == whole


def test_workers_follow_a_dataset_that_is_being_packed(source: str, tmp_path: Path) -> None:
    packs = numbered_packs(9)
    dataset = start_dataset(tmp_path, identity="growing")
    commit_partition(tmp_path, dataset, 0, packs[:5], packs_per_shard=3)
    batches = iter(loader(PackedDataset(source, dataset=dataset, epochs=2, timeout_s=60), 2))
    first = [next(batches).example_ids[0] for _ in range(5)]
    commit_partition(tmp_path, dataset, 1, packs[5:], packs_per_shard=3)
    finish_dataset(tmp_path, dataset, 2, packs)
    assert first + taken(batches) == taken(PackedStream(source, dataset=dataset, epochs=2))


def test_the_state_on_a_batch_goes_on_exactly_with_any_number_of_workers(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(20), packs_per_shard=6)
    options: dict[str, Any] = {"dataset": dataset, "epochs": 2}
    whole = taken(PackedStream(tmp_path, **options))
    batches = iter(loader(PackedDataset(tmp_path, **options), 2))
    some = list(itertools.islice(batches, 27))
    assert taken(some) == whole[:27]
    for num_workers in (0, 2):
        resumed = PackedDataset(tmp_path, **options)
        resumed.load_state_dict(some[-1].state)
        assert taken(loader(resumed, num_workers)) == whole[27:]


def test_set_epoch_as_trainers_call_it(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(10), packs_per_shard=6)
    whole = taken(PackedStream(tmp_path, dataset=dataset, epochs=3))
    for num_workers in (0, 2):
        found = []
        packed = PackedDataset(tmp_path, dataset=dataset)
        batches = loader(packed, num_workers)
        for epoch in range(3):
            packed.set_epoch(epoch)
            found += taken(batches)
        assert found == whole
    # Within the epoch that a state says, set_epoch moves nothing; nor does one before it, where a framework
    # counts from 0 again after a resume.
    for epochs in ([1], [0, 1]):
        packed = PackedDataset(tmp_path, dataset=dataset)
        packed.load_state_dict({**packed.state_dict(), "epoch": 1, "packs": 4, "step": 4})
        for epoch in epochs:
            packed.set_epoch(epoch)
        assert taken(packed) == whole[14:20]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_came_to_its_end_gives_nothing_more_when_resumed(
    tmp_path: Path, num_workers: int
) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(10), packs_per_shard=6)
    packed = PackedDataset(tmp_path, dataset=dataset, epochs=2)
    last = [batch.state for batch in loader(packed, num_workers)][-1]
    resumed = PackedDataset(tmp_path, dataset=dataset, epochs=2)
    resumed.load_state_dict(last)
    assert taken(loader(resumed, num_workers)) == []


def test_persistent_workers_go_on_to_the_next_epoch(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(7), packs_per_shard=6)
    whole = taken(PackedStream(tmp_path, dataset=dataset, epochs=2))
    batches = loader(PackedDataset(tmp_path, dataset=dataset), 2, persistent_workers=True)
    assert taken(batches) + taken(batches) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_its_own_loader_goes_on_where_the_loop_is(tmp_path: Path, num_workers: int) -> None:
    """Epoch after epoch without a word, broken off at will, and by the dataset's state."""
    dataset = build_dataset(tmp_path, numbered_packs(10), packs_per_shard=6)
    whole = taken(PackedStream(tmp_path, dataset=dataset, epochs=3))

    def number(batch: Any) -> int:
        return int(batch.example_ids[0])

    packed = PackedDataset(tmp_path, dataset=dataset, transform=number)
    batches = packed.loader(num_workers=num_workers)
    assert len(batches) == 10
    found = list(batches)
    for item in batches:
        found.append(item)
        if len(found) == 14:
            break
    assert (packed.state_dict()["epoch"], packed.state_dict()["packs"]) == (1, 4)
    resumed = PackedDataset(tmp_path, dataset=dataset, transform=number)
    resumed.load_state_dict(packed.state_dict())
    assert found + list(resumed.loader(num_workers=1)) == whole[:20]
    found += list(batches)
    found += list(batches)
    assert found == whole
    assert packed.state_dict()["epoch"] == 3


@pytest.mark.parametrize("num_taken", [4, 5, 6])
def test_a_state_says_the_spec_also_where_workers_read(source: str, tmp_path: Path, num_taken: int) -> None:
    """Within an epoch, at its last batch, and past it: as `batch.state` does, and as without workers."""
    packed = PackedDataset(source, dataset=build_dataset(tmp_path, numbered_packs(5), packs_per_shard=6))
    for batch in itertools.islice(packed.loader(num_workers=2), num_taken):
        state = batch.state
    assert state["spec"]["packing.strategy"] == '"best_fit"'
    assert packed.state_dict() == state
    with pytest.raises(ValueError, match="found NoneType"):
        packed.load_state_dict(None)  # type: ignore[arg-type]


def test_its_own_loader_with_persistent_workers(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(7), packs_per_shard=6)
    packed = PackedDataset(tmp_path, dataset=dataset)
    packed.stream.skip([6])  # the end of the epoch comes before its last step
    batches = packed.loader(num_workers=2, persistent_workers=True)
    whole = taken(PackedStream(tmp_path, dataset=dataset, epochs=2))
    assert taken(batches) + taken(batches) == whole[:6] + whole[7:]
    assert packed.state_dict()["epoch"] == 2


def test_its_own_loader_with_persistent_workers_goes_where_the_stream_is_put(tmp_path: Path) -> None:
    """Broken off, set to an epoch, given a state, told to skip: workers that stay know nothing of that."""
    dataset = build_dataset(tmp_path, numbered_packs(20), packs_per_shard=6)
    whole = taken(PackedStream(tmp_path, dataset=dataset, epochs=6))
    packed = PackedDataset(tmp_path, dataset=dataset)
    batches = packed.loader(num_workers=2, persistent_workers=True)
    assert taken(itertools.islice(batches, 5)) + taken(batches) == whole[:20]
    stayed = [worker.pid for worker in batches._iterator._workers]
    packed.set_epoch(1)  # where they go on anyway
    assert taken(batches) == whole[20:40]
    assert [worker.pid for worker in batches._iterator._workers] == stayed
    packed.set_epoch(3)
    assert taken(batches) == whole[60:80]
    packed.stream.skip([2])
    assert taken(batches) == whole[80:82] + whole[83:100]
    state = packed.state_dict()
    packed.load_state_dict({**state, "epoch": 1, "packs": 4, "step": 4, "until_epoch": 2, "skip": []})
    assert taken(batches) == whole[24:40]
    packed.load_state_dict(packed.state_dict())  # of a run that came to its end
    assert taken(batches) == []
    assert taken(batches) == whole[40:60]


def test_persistent_workers_of_another_loader_that_was_broken_off_lose_nothing_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(20), packs_per_shard=6)
    batches = loader(PackedDataset(tmp_path, dataset=dataset), 2, persistent_workers=True)
    assert taken(itertools.islice(batches, 5)) == list(range(5))
    with pytest.raises(RuntimeError, match=r"broken off.*PackedDataset.loader\(\)"):
        next(iter(batches))
    # torch does not tell these workers of the end, and would wait for each for five seconds.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.05)
    del batches
    gc.collect()


@pytest.mark.parametrize("own", [False, True])
def test_a_failed_dataset_ends_every_worker_with_the_reason(source: str, tmp_path: Path, own: bool) -> None:
    dataset = start_dataset(tmp_path, identity="failing")
    commit_partition(tmp_path, dataset, 0, numbered_packs(5), packs_per_shard=3)
    each = [PackedDataset(source, dataset=dataset) for _ in range(2)]
    started = [iter(packed.loader(num_workers=2) if own else loader(packed, 2)) for packed in each]
    for batches in started:
        assert taken(itertools.islice(batches, 5)) == list(range(5))
    fail_dataset(tmp_path, dataset, detail="rows.jsonl, line 7: not JSON")
    for batches in started:
        with pytest.raises(DatasetFailed, match=r"rows\.jsonl, line 7: not JSON"):
            next(batches)


def test_transform_is_applied_to_each_batch(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(3), packs_per_shard=6)
    packed = PackedDataset(tmp_path, dataset=dataset, transform=lambda batch: batch.for_transformers())
    assert [kwargs["input_ids"][0, 0].item() for kwargs in loader(packed, 0)] == [0, 1, 2]
    assert packed.state_dict()["epoch"] == 1


def test_forgotten_ranks_are_warned_of_once(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dataset = build_dataset(tmp_path, numbered_packs(3), packs_per_shard=6)
    assert taken(loader(PackedDataset(tmp_path, dataset=dataset), 0)) == [0, 1, 2]
    assert sum("RANK=1, WORLD_SIZE=4" in one for one in caplog.messages) == 1
    with pytest.raises(ValueError, match="world_size: an int is required, found '2'"):
        PackedDataset(tmp_path, dataset=dataset, rank=0, world_size="2")


def test_options_of_a_loader_that_mean_nothing_here_are_named(tmp_path: Path) -> None:
    packed = PackedDataset(tmp_path, dataset=build_dataset(tmp_path, numbered_packs(4), packs_per_shard=2))
    for options, says in [
        ({"batch_size": 4}, "batch_size: nothing, or None, is required, found 4: .*packs_per_step"),
        ({"shuffle": True}, "shuffle: .*shuffle_seed"),
        ({"collate_fn": list}, "collate_fn: .*`transform`"),
        ({"sampler": [0]}, "sampler: .*rank and world_size"),
        ({"batch_sampler": [[0]]}, "batch_sampler: .*packs_per_step"),
        (
            {"num_workers": 2, "in_order": False},
            "in_order: .*True, is required, found False: .*untrained after",
        ),
    ]:
        with pytest.raises(ValueError, match=says):
            packed.loader(**options)
    assert taken(packed.loader(batch_size=None, shuffle=False)) == [0, 1, 2, 3]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_that_collates_is_told_what_to_do(tmp_path: Path, num_workers: int) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=2)
    with pytest.raises(TypeError, match=r"a PackedBatch is a whole batch.*batch_size=None"):
        list(DataLoader(PackedDataset(tmp_path, dataset=dataset), num_workers=num_workers))
    for batch_size in (None, 2):
        with pytest.raises(TypeError, match=r"use trainer_client\.PackedDataset"):
            list(DataLoader(PackedStream(tmp_path, dataset=dataset), batch_size=batch_size))  # type: ignore


def test_a_device_is_refused_in_workers(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(3), packs_per_shard=6)
    packed = PackedDataset(tmp_path, dataset=dataset, device="cpu")
    assert taken(loader(packed, 0)) == [0, 1, 2]
    with pytest.raises(ValueError, match="num_workers=0"):
        next(iter(loader(packed, 1)))


def test_f50_workers_begin_the_next_epoch_before_the_present_one_is_over(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(20), packs_per_shard=6)
    with FakeService(tmp_path) as service:
        packed = PackedDataset(service.url, dataset=dataset, epochs=3, prefetch_steps=4)
        batches = iter(packed.loader(num_workers=2))
        for epoch in range(3):
            assert [next(batches).step for _ in range(18)] == list(range(18))
            while epoch < 2 and num_lanes(service, epoch + 1) < 2:  # pytest's timeout is the limit
                threading.Event().wait(0.01)
            assert [next(batches).step for _ in range(2)] == [18, 19]
        assert list(batches) == []


def num_lanes(service: FakeService, epoch: int) -> int:
    """How many workers have asked for an epoch."""
    asked = [query["start"] for query in list(service.requests) if int(query["epoch"]) == epoch]
    return len(set(asked))


# ------------------------------------------------------------------ state of single workers


class Worker:
    """One worker as a stateful loader drives it: iterate, take the state with each batch, load it anew."""

    def __init__(self, dataset: bytes, worker: int, num_workers: int) -> None:
        self.dataset = pickle.loads(dataset)
        self.info = type("Info", (), {"id": worker, "num_workers": num_workers})()
        self.batches: Any = None

    def __enter__(self) -> None:
        torch.utils.data._utils.worker._worker_info = self.info

    def __exit__(self, *_: object) -> None:
        torch.utils.data._utils.worker._worker_info = None

    def next(self) -> Any:
        with self:
            if self.batches is None:
                self.batches = iter(self.dataset)
            return next(self.batches, None)

    def state(self) -> dict:
        with self:
            return self.dataset.state_dict()

    def load(self, state: dict) -> None:
        with self:
            self.dataset.load_state_dict(state)


def drive(workers: list[Worker], first: int, count: int) -> list[int]:
    """Ask the workers in turn, from worker `first` on, as a DataLoader does."""
    found: list[int] = []
    for index in range(first, first + count):
        batch = workers[index % len(workers)].next()
        if batch is not None:
            found += batch.example_ids.tolist()
    return found


@pytest.mark.parametrize("stop", range(13))
def test_the_states_of_workers_are_exact_twice_in_a_row(tmp_path: Path, stop: int) -> None:
    """What torchdata's StatefulDataLoader does: it saves each worker's state as of the batches taken."""
    dataset = build_dataset(tmp_path, numbered_packs(7), packs_per_shard=6)
    whole = taken(PackedStream(tmp_path, dataset=dataset, epochs=2))
    start = pickle.dumps(PackedDataset(tmp_path, dataset=dataset, epochs=2))
    workers = [Worker(start, worker, 3) for worker in range(3)]
    found = drive(workers, 0, stop)
    states = [worker.state() for worker in workers]
    for _ in range(2):
        workers = [Worker(start, worker, 3) for worker in range(3)]
        for worker, state in zip(workers, states, strict=True):
            worker.load(state)
        assert [worker.state() for worker in workers] == states
    found += drive(workers, stop, 20)
    assert found == whole
    with workers[0]:
        assert get_worker_info() is not None
    assert get_worker_info() is None


def test_a_workers_state_is_refused_elsewhere(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(7), packs_per_shard=6)
    start = pickle.dumps(PackedDataset(tmp_path, dataset=dataset))
    worker = Worker(start, 0, 3)
    worker.next()
    state = worker.state()
    for other in (Worker(start, 0, 2), Worker(start, 1, 3)):
        with pytest.raises(StateMismatch, match="as many workers"):
            other.load(state)
    with pytest.raises(StateMismatch, match="as many workers"):
        PackedDataset(tmp_path, dataset=dataset).load_state_dict(state)
    with pytest.raises(ValueError, match="one DataLoader worker"):
        PackedStream(tmp_path, dataset=dataset).load_state_dict(state)


def test_a_worker_asks_once_for_all_its_steps(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(40), packs_per_shard=6)
    with FakeService(tmp_path) as service:
        assert taken(loader(PackedDataset(service.url, dataset=dataset), 2)) == list(range(40))
        assert sorted((query["start"], query["stride"]) for query in service.requests) == [
            ("0", "2"),
            ("1", "2"),
        ]
