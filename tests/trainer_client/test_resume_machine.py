"""Any sequence of steps, saves, kills, changed world sizes and server restarts: no pack lost or doubled."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_service import FakeService, Fault
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from packs import build_dataset, build_step_dataset, numbered_packs

from packer import order
from trainer_client import PackedBatch, PackedStream
from trainer_client.course import Course, Layout, normal
from trainer_client.cursor import Cursor, Split

NUM_PACKS = 13
LAYOUT = Layout(num_packs=NUM_PACKS)
SEED = 3


class Resume(RuleBasedStateMachine):
    """All ranks of a training run. The model is a cursor and the order of each epoch, nothing else."""

    source: str
    dataset: str
    service: FakeService | None = None

    @initialize(
        world_size=st.integers(1, 4), packs_per_step=st.integers(1, 3), tail=st.sampled_from(["drop", "pad"])
    )
    def begin(self, world_size: int, packs_per_step: int, tail: str) -> None:
        self.cursor = Cursor()
        self.saved: tuple[dict, Cursor] | None = None
        self.start_ranks(world_size, packs_per_step, tail, None)

    def start_ranks(self, world_size: int, packs_per_step: int, tail: Any, state: dict | None) -> None:
        self.split = Split(world_size=world_size, packs_per_step=packs_per_step, shuffle_seed=SEED, tail=tail)
        self.streams = []
        for rank in range(world_size):
            stream = PackedStream(
                self.source,
                dataset=self.dataset,
                rank=rank,
                world_size=world_size,
                packs_per_step=packs_per_step,
                tail=tail,
                epochs=None,
                shuffle_seed=SEED,
                prefetch_steps=2,
            )
            if state is not None:
                stream.load_state_dict(state)
            self.streams.append(stream)
        self.iterators: list[Iterator[PackedBatch]] = [iter(stream) for stream in self.streams]
        self.cursor = normal(self.cursor, self.split, LAYOUT)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            first = self.cursor.packs
            whole = np.arange(first, min(first + self.split.packs_of_step, NUM_PACKS))
            due = order.pack_at(
                whole, num_packs=NUM_PACKS, epoch=self.cursor.epoch, shuffle_seed=SEED
            ).tolist()
            size = self.split.packs_per_step
            for rank, iterator in enumerate(self.iterators):
                batch = next(iterator)
                mine = due[rank * size : (rank + 1) * size]
                assert batch.example_ids.tolist() == (mine or [-1])
                assert batch.is_padding == (not mine)
                assert (batch.epoch, batch.step) == (self.cursor.epoch, self.cursor.step)
                assert batch.num_items_in_batch == 3 * len(due)
            self.cursor = Course(split=self.split, layout=LAYOUT, start=self.cursor).after(0)

    @rule(rank=st.integers(0, 3))
    def save(self, rank: int) -> None:
        stream = self.streams[rank % len(self.streams)]
        self.saved = (json.loads(json.dumps(stream.state_dict())), self.cursor)

    @rule(
        world_size=st.integers(1, 4), packs_per_step=st.integers(1, 3), tail=st.sampled_from(["drop", "pad"])
    )
    def kill_and_resume(self, world_size: int, packs_per_step: int, tail: str) -> None:
        self.end_ranks()
        state, self.cursor = self.saved or (None, Cursor())
        self.start_ranks(world_size, packs_per_step, tail, state)

    @rule()
    def break_off_and_iterate_again(self) -> None:
        self.iterators = [iter(stream) for stream in self.streams]

    @rule()
    def restart_server(self) -> None:
        if self.service is not None:
            self.service.stop()
            self.service.start()

    @rule(cut_after=st.integers(0, 6000), reset=st.booleans())
    def cut_a_connection(self, cut_after: int, reset: bool) -> None:
        if self.service is not None:
            self.service.faults.append(Fault(cut_after=cut_after, reset=reset))

    @invariant()
    def all_ranks_tell_the_same_place(self) -> None:
        if not hasattr(self, "streams"):
            return
        for stream in self.streams:
            state = stream.state_dict()
            assert (state["epoch"], state["packs"], state["step"]) == (
                self.cursor.epoch,
                self.cursor.packs,
                self.cursor.step,
            )

    def end_ranks(self) -> None:
        self.iterators = []
        for stream in self.streams:
            stream.close()

    def teardown(self) -> None:
        if hasattr(self, "streams"):
            self.end_ranks()


def run(root: Path, source: str, service: FakeService | None, max_examples: int) -> None:
    dataset = build_dataset(root, numbered_packs(NUM_PACKS), packs_per_shard=4)
    machine = type("Machine", (Resume,), {"source": source, "dataset": dataset, "service": service})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=max_examples, stateful_step_count=15, deadline=None)
    )


@settings(max_examples=40, deadline=None)
@given(
    num_packs=st.integers(6, 15),
    epochs=st.integers(1, 3),
    packs_per_step=st.integers(1, 2),
    micro_batches=st.integers(1, 3),
    tail=st.sampled_from(["drop", "pad"]),
    of_steps=st.booleans(),
    kills=st.lists(st.integers(0, 9), max_size=6),
)
def test_a_run_of_epochs_is_the_same_however_it_is_cut(
    num_packs: int,
    epochs: int,
    packs_per_step: int,
    micro_batches: int,
    tail: Any,
    of_steps: bool,
    kills: list[int],
) -> None:
    """And once it came to its end, resuming it gives nothing more."""
    with tempfile.TemporaryDirectory() as root:
        packs = numbered_packs(num_packs)
        if of_steps:
            dataset = build_step_dataset(root, packs, [2, 1, num_packs - 3])
        else:
            dataset = build_dataset(root, packs, packs_per_shard=4)

        def open_stream() -> PackedStream:
            return PackedStream(
                root,
                dataset=dataset,
                epochs=epochs,
                packs_per_step=packs_per_step,
                micro_batches=micro_batches,
                tail=tail,
            )

        whole = [told(batch) for batch in open_stream()]
        assert {batch[0] for batch in whole} == set(range(epochs))
        state, seen = None, []
        for kill in [*kills, None, None]:
            stream = open_stream()
            assert len(stream) == len(whole)
            if state is not None:
                stream.load_state_dict(json.loads(state))
            assert len(stream) == len(whole)
            seen += [told(batch) for batch in itertools.islice(stream, kill)]
            state = json.dumps(stream.state_dict())
            stream.close()
        assert seen == whole


def told(batch: PackedBatch) -> tuple[Any, ...]:
    return batch.epoch, batch.step, batch.step_done, batch.example_ids.tolist()


def test_from_a_folder() -> None:
    with tempfile.TemporaryDirectory() as root:
        run(Path(root), root, None, 25)


def test_over_http_with_restarts_and_cut_connections() -> None:
    with tempfile.TemporaryDirectory() as root, FakeService(Path(root)) as service:
        run(Path(root), service.url, service, 8)


@pytest.mark.slow
def test_much_longer() -> None:
    with tempfile.TemporaryDirectory() as root, FakeService(Path(root)) as service:
        run(Path(root), root, None, 300)
        run(Path(root), service.url, service, 60)
