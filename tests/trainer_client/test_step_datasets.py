"""Datasets of strategy "step": optimiser steps as micro-batches, dealt to any number of ranks."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_service import FakeService
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import (
    PackingSpec,
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

from packer.order import derive_seed, permute
from packer.shard import Pack
from trainer_client import DatasetTooSmall, PackedBatch, PackedDataset, PackedStream, StateMismatch

SEED = 3


def optimizer_steps(sizes: Sequence[int], epoch: int) -> list[list[int]]:
    """The rule, read plainly: packs of each optimiser step of an epoch, in its order."""
    ends = list(itertools.accumulate(sizes, initial=0))
    groups = [list(range(first, end)) for first, end in itertools.pairwise(ends)]
    if epoch == 0:
        return groups
    order = permute(np.arange(len(sizes)), len(sizes), derive_seed(SEED, epoch))
    return [groups[number] for number in order]


def of_all(streams: Sequence[Iterator[PackedBatch]]) -> list[PackedBatch] | None:
    """The next loop step of all ranks; None where all have ended. Ranks never differ in their end."""
    batches = [next(stream, None) for stream in streams]
    if None in batches:
        assert batches == [None] * len(batches)
        return None
    return [batch for batch in batches if batch is not None]


class Trainer:
    """Reads on any number of ranks and holds what it gets against the rule."""

    def __init__(self, source: str, dataset: str, sizes: Sequence[int], epochs: int) -> None:
        self.source, self.dataset, self.sizes, self.epochs = source, dataset, sizes, epochs
        self.due = [steps for epoch in range(epochs) for steps in [optimizer_steps(sizes, epoch)]]
        self.epoch, self.number, self.taken = 0, 0, 0  # optimiser step of the epoch, packs taken of it
        self.state: dict[str, Any] | None = None

    def run(self, world_size: int, max_steps: int | None) -> bool:
        """Take up to max_steps loop steps on fresh ranks; whether all epochs are over."""
        streams = []
        for rank in range(world_size):
            stream = PackedStream(
                self.source, dataset=self.dataset, rank=rank, world_size=world_size, epochs=self.epochs,
                shuffle_seed=SEED, prefetch_steps=2,
            )  # fmt: skip
            if self.state is not None:
                stream.load_state_dict(json.loads(json.dumps(self.state)))
            streams.append(stream)
        iterators = [iter(stream) for stream in streams]
        for _ in itertools.count() if max_steps is None else range(max_steps):
            if (batches := of_all(iterators)) is None:
                assert self.epoch == self.epochs
                return True
            self.check(batches)
            states = [stream.state_dict() for stream in streams]
            assert states == [states[0]] * world_size
            assert states[0] == batches[0].state
            self.state = states[0]
        for stream in streams:
            stream.close()
        return False

    def check(self, batches: list[PackedBatch]) -> None:
        packs = self.due[self.epoch][self.number]
        mine = packs[self.taken : self.taken + len(batches)]
        self.taken += len(mine)
        done = self.taken == len(packs)
        for rank, batch in enumerate(batches):
            assert batch.example_ids.tolist() == (mine[rank : rank + 1] or [-1])
            assert batch.is_padding == (rank >= len(mine))
            assert batch.num_packs == (rank < len(mine))
            assert (batch.epoch, batch.optimizer_step) == (self.epoch, self.number)
            assert batch.step_done == done
            assert batch.num_items_in_batch == 3 * len(packs)
        before = sum(map(len, self.due[self.epoch][: self.number])) + self.taken
        if done:
            self.number, self.taken = self.number + 1, 0
        if self.number == len(self.sizes):
            self.epoch, self.number = self.epoch + 1, 0
            before = 0
        assert (batches[0].state["epoch"], batches[0].state["packs"]) == (self.epoch, before)


cases = {
    "sizes": st.lists(st.integers(1, 7), min_size=1, max_size=7),
    "epochs": st.integers(1, 3),
    "runs": st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), max_size=5),
    "last_world": st.integers(1, 5),
}


def check_case(root: Path, source: str, sizes: Any, epochs: int, runs: Any, last_world: int) -> None:
    dataset = build_step_dataset(root, numbered_packs(sum(sizes)), sizes)
    trainer = Trainer(source, dataset, sizes, epochs)
    for world_size, max_steps in runs:
        if trainer.epoch < epochs:
            trainer.run(world_size, max_steps)
    if trainer.epoch < epochs:
        assert trainer.run(last_world, None)


@settings(max_examples=20)
@given(**cases)
def test_every_rank_gets_what_the_rule_says_from_a_folder(**case: Any) -> None:
    with tempfile.TemporaryDirectory() as root:
        check_case(Path(root), root, **case)


@settings(max_examples=6)
@given(**cases)
def test_every_rank_gets_what_the_rule_says_over_http(**case: Any) -> None:
    with tempfile.TemporaryDirectory() as root, FakeService(Path(root)) as service:
        check_case(Path(root), service.url, **case)


@settings(max_examples=6)
@given(**cases)
def test_every_rank_gets_what_the_rule_says_from_the_service(**case: Any) -> None:
    with tempfile.TemporaryDirectory() as root, running(Path(root)) as server:
        check_case(Path(root), server.url, **case)


@pytest.mark.slow
@settings(max_examples=300)
@given(**cases)
def test_much_longer(**case: Any) -> None:
    with tempfile.TemporaryDirectory() as root, FakeService(Path(root)) as service:
        check_case(Path(root), root, **case)
        check_case(Path(root), service.url, **case)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_the_length_counts_micro_batches(source: str, tmp_path: Path, world_size: int) -> None:
    sizes = [3, 1, 4, 4, 2]
    dataset = build_step_dataset(tmp_path, numbered_packs(14), sizes)
    # packs_per_step and tail have no meaning here, whatever they are.
    stream = PackedStream(source, dataset=dataset, world_size=world_size, packs_per_step=100, epochs=2)
    steps = sum(-(-size // world_size) for size in sizes)
    assert len(stream) == len(list(stream)) == 2 * steps
    assert stream.num_optimizer_steps == 2 * len(sizes)
    assert stream.num_left_over() == 0
    stream = PackedStream(source, dataset=dataset, world_size=world_size, epochs=2)
    stream.skip([1, 3])
    stream.skip([4], epoch=1)
    assert stream.num_optimizer_steps == 2 * len(sizes) - 3
    batches = list(stream)
    assert len(stream) == len(batches)
    assert sum(batch.step_done for batch in batches) == 2 * len(sizes) - 3


def test_the_length_within_an_epoch_after_a_change_of_world_size(source: str, tmp_path: Path) -> None:
    dataset = build_step_dataset(tmp_path, numbered_packs(14), [3, 1, 4, 4, 2])
    stream = PackedStream(source, dataset=dataset)
    for _ in itertools.islice(stream, 2):  # of the first optimiser step
        pass
    other = PackedStream(source, dataset=dataset, world_size=3)
    other.load_state_dict(stream.state_dict())
    assert len(other) == 2 + len(list(other)) == 2 + 1 + 1 + 2 + 2 + 1
    assert other.num_optimizer_steps == 5


def test_an_empty_dataset_is_told(source: str, tmp_path: Path) -> None:
    dataset = build_step_dataset(tmp_path, [], [])
    with pytest.raises(DatasetTooSmall, match="only 0"):
        next(iter(PackedStream(source, dataset=dataset)))


def test_the_stream_follows_packing(source: str, tmp_path: Path) -> None:
    packs = numbered_packs(9)
    dataset = start_dataset(tmp_path, identity="grows", packing=PackingSpec(strategy="step", step_size=4))
    stream = PackedStream(source, dataset=dataset, world_size=2, rank=1, epochs=2, shuffle_seed=SEED)

    def commit_first() -> None:
        commit_partition(tmp_path, dataset, 0, packs[:4], packs_per_shard=2, steps=[0, 0, 0, 1])

    batches = iter(stream)
    with once_awaited(stream, commit_first):
        first = [next(batches) for _ in range(3)]
    assert [batch.example_ids.tolist() for batch in first] == [[1], [-1], [-1]]
    assert [batch.step_done for batch in first] == [False, True, True]
    assert [batch.state["packs"] for batch in first] == [2, 3, 4]
    with pytest.raises(TypeError, match="still being packed"):
        len(stream)
    commit_partition(tmp_path, dataset, 1, packs[4:], packs_per_shard=2, steps=[3, 3, 3, 3, 3])
    finish_dataset(tmp_path, dataset, 2, packs)
    rest = list(batches)
    assert [batch.example_ids.tolist() for batch in rest[:3]] == [[5], [7], [-1]]
    assert [batch.state["packs"] for batch in rest[:2]] == [6, 8]
    # The end, said in one way or the other: whether the reader knew that it is one is a matter of time.
    end = rest[2].state
    assert (end["epoch"], end["packs"]) in ((0, 9), (1, 0))
    assert [(batch.epoch, batch.optimizer_step) for batch in rest[3:]].count((1, 2)) > 0
    assert len(rest) == 9
    assert len(stream) == 12


# ------------------------------------------------------------------ balance


def cost(pack: Pack) -> int:
    lengths = np.diff(pack.cu_seqlens).astype(np.int64)
    return int(lengths @ lengths) + 12 * 2048 * pack.num_tokens


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_balanced_steps_hold_the_same_packs_and_cost_more_evenly(tmp_path: Path, world_size: int) -> None:
    sizes = [7, 1, 12, 5]
    packs = random_packs(25, max_tokens=4000)
    by_example = {int(pack.example_ids[0]): pack for pack in packs}
    dataset = build_step_dataset(tmp_path, packs, sizes)
    waits = {}
    with running(tmp_path) as server:
        for balance, where in itertools.product(("none", "attention"), (tmp_path, server.url)):
            ranks = []
            for rank in range(world_size):
                stream = PackedStream(
                    where, dataset=dataset, rank=rank, world_size=world_size, epochs=2, shuffle_seed=SEED,
                    balance=balance,
                )  # fmt: skip
                ranks.append(
                    [(b.epoch, b.optimizer_step, b.step_done, b.example_ids.tolist()) for b in stream]
                )
            assert waits.setdefault(balance, ranks) == ranks  # folder and service agree
    for epoch in range(2):
        for number, due in enumerate(optimizer_steps(sizes, epoch)):
            for ranks in waits.values():
                got = [ids for rank in ranks for e, n, _, ids in rank if (e, n) == (epoch, number)]
                assert sorted(ids for ids in got if ids != [-1]) == sorted(
                    packs[pack].example_ids.tolist() for pack in due
                )

    def waited(ranks: list) -> int:
        costs = [[cost(by_example[ids[0]]) if ids[0] >= 0 else 0 for *_, ids in rank] for rank in ranks]
        return sum(max(step) * len(step) - sum(step) for step in zip(*costs, strict=True))

    if world_size > 1:
        assert waited(waits["attention"]) < waited(waits["none"])


@pytest.mark.parametrize("where", ["folder", "service"])
def test_balanced_ranks_go_on_exactly_after_any_micro_batch(tmp_path: Path, where: str) -> None:
    """Each rank alone too: another one need not break off."""
    dataset = build_step_dataset(tmp_path, random_packs(16, max_tokens=4000), [7, 1, 8])
    with running(tmp_path) as server:
        for rank in range(2):
            options: dict[str, Any] = {
                "dataset": dataset, "rank": rank, "world_size": 2, "balance": "attention", "epochs": 2,
                "report_s": None,
            }  # fmt: skip
            stream = PackedStream(server.url if where == "service" else tmp_path, **options)
            whole = [(b.example_ids.tolist(), b.step, b.state) for b in stream]
            for number, (_, _, state) in enumerate(whole):
                stream.load_state_dict(state)
                assert [(b.example_ids.tolist(), b.step, b.state) for b in stream] == whole[number + 1 :]


def test_another_balance_is_refused_within_an_optimizer_step(tmp_path: Path) -> None:
    dataset = build_step_dataset(tmp_path, numbered_packs(8), [4, 4])
    stream = PackedStream(tmp_path, dataset=dataset)
    states = [batch.state for batch in stream]
    other = PackedStream(tmp_path, dataset=dataset, balance="attention")
    assert [state["micro_step"] for state in states] == [1, 2, 3, 0, 1, 2, 3, 0]
    with pytest.raises(StateMismatch, match="within an optimiser step"):
        other.load_state_dict(states[1])
    other.load_state_dict(states[3])
    assert sorted(batch.example_ids[0] for batch in other) == [4, 5, 6, 7]


# ------------------------------------------------------------------ loader workers


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_loader_workers_give_the_same_micro_batches(source: str, tmp_path: Path) -> None:
    dataset = build_step_dataset(tmp_path, numbered_packs(19), [3, 1, 7, 4, 4])
    options: dict[str, Any] = {"dataset": dataset, "world_size": 2, "rank": 1, "epochs": 2}
    whole = [(b.epoch, b.step, b.step_done, b.state) for b in PackedStream(source, **options)]
    batches = list(DataLoader(PackedDataset(source, **options), batch_size=None, num_workers=3))
    assert [(b.epoch, b.step, b.step_done, b.state) for b in batches] == whole
    resumed = PackedDataset(source, **options)
    resumed.load_state_dict(batches[4].state)
    rest = list(DataLoader(resumed, batch_size=None, num_workers=2))
    assert [(b.epoch, b.step, b.step_done, b.state) for b in rest] == whole[5:]
