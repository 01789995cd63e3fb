"""Any sequence of steps, saves, kills, changed world sizes and server restarts: no pack lost or doubled."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from trainer_client import PackedBatch, PackedStream, StateMismatch

NUM_PACKS = 13
STEP_SIZES = [3, 1, 5, 2, 2]  # packs of each optimiser step of the "step" dataset
SEED = 3
SPLITS = st.builds(
    dict,
    world_size=st.integers(1, 4),
    packs_per_step=st.integers(1, 3),
    micro_batches=st.integers(1, 3),
    tail=st.sampled_from(["drop", "pad"]),
)


@dataclass(frozen=True, slots=True)
class Due:
    """What one rank is to get next."""

    ids: list[int]
    epoch: int
    step: int
    num_items: int
    step_done: bool


@dataclass(slots=True)
class Model:
    """All ranks of a run, in plain lists: where it stands, and what each rank is to get next.

    The place is told as a state tells it: packs and steps that all ranks took of the epoch, and micro-batches
    of a step that is not done.
    """

    of_steps: bool
    world_size: int = 1
    packs_per_step: int = 1
    micro_batches: int = 1
    tail: str = "drop"
    epoch: int = 0
    packs: int = 0
    step: int = 0
    micro_step: int = 0

    @property
    def size(self) -> int:
        """Packs of an optimiser step of an ordinary dataset."""
        return self.world_size * self.packs_per_step * self.micro_batches

    @property
    def place(self) -> tuple[int, int, int, int]:
        return self.epoch, self.packs, self.step, self.micro_step

    def groups(self) -> list[list[int]]:
        """The epoch's optimiser steps, of the "step" dataset."""
        bounds = [0, *itertools.accumulate(STEP_SIZES)]
        groups = [list(range(first, last)) for first, last in itertools.pairwise(bounds)]
        return [groups[number] for number in self.permuted(len(groups))]

    def permuted(self, count: int) -> list[int]:
        return order.pack_at(np.arange(count), num_packs=count, epoch=self.epoch, shuffle_seed=SEED).tolist()

    def due(self) -> list[Due]:
        """By rank. Moves on behind it."""
        due = self.of_marked_step() if self.of_steps else self.of_plain_step()
        self.turn_epoch()
        return due

    def of_plain_step(self) -> list[Due]:
        whole = self.permuted(NUM_PACKS)[self.packs : self.packs + self.size]
        self.micro_step += 1
        done = self.micro_step == self.micro_batches
        number = self.step * self.micro_batches + self.micro_step - 1
        due = []
        for rank in range(self.world_size):
            first = (rank * self.micro_batches + self.micro_step - 1) * self.packs_per_step
            mine = whole[first : first + self.packs_per_step]
            due.append(Due(mine or [-1], self.epoch, number, 3 * len(whole), done))
        if done:
            self.packs, self.step, self.micro_step = self.packs + self.size, self.step + 1, 0
        return due

    def of_marked_step(self) -> list[Due]:
        at = self.packs
        for group in self.groups():
            if at < len(group):
                break
            at -= len(group)
        mine = group[at : at + self.world_size]
        done = at + self.world_size >= len(group)
        filled = mine + [-1] * (self.world_size - len(mine))
        due = [Due([pack], self.epoch, self.step, 3 * len(group), done) for pack in filled]
        self.packs, self.step = self.packs + len(mine), self.step + 1
        self.micro_step = 0 if done else self.micro_step + 1
        return due

    def turn_epoch(self) -> None:
        """The end of an epoch is the start of the next one."""
        left = NUM_PACKS - self.packs
        drops = not self.of_steps and self.tail == "drop" and left < self.size
        if left <= 0 or drops:
            self.epoch, self.packs, self.step, self.micro_step = self.epoch + 1, 0, 0, 0

    def refuses(self, other: Model) -> bool:
        """Whether what was saved here cannot go on as `other` deals: within a step of micro-batches only as
        it was."""
        same = (self.world_size, self.size, self.micro_batches, self.tail) == (
            other.world_size,
            other.size,
            other.micro_batches,
            other.tail,
        )
        return not self.of_steps and self.micro_step > 0 and not same


class Resume(RuleBasedStateMachine):
    """All ranks of a training run, of an ordinary dataset or a "step" one, and the model of them."""

    source: str
    datasets: dict[bool, str]
    service: FakeService | None = None

    @initialize(of_steps=st.booleans(), split=SPLITS)
    def begin(self, of_steps: bool, split: dict[str, Any]) -> None:
        self.saved: tuple[dict, Model] | None = None
        self.start_ranks(self.model_of(Model(of_steps), split), None)

    def model_of(self, place: Model, split: dict[str, Any]) -> Model:
        """At the same place, dealt as drawn; a tail that would leave out all is kept."""
        model = replace(place, **split)
        return replace(model, tail="pad") if model.size > NUM_PACKS else model

    def start_ranks(self, model: Model, state: dict | None) -> None:
        self.model = model
        self.streams = []
        for rank in range(model.world_size):
            stream = self.open(model, rank)
            if state is not None:
                stream.load_state_dict(state)
            self.streams.append(stream)
        self.iterators: list[Iterator[PackedBatch]] = [iter(stream) for stream in self.streams]
        self.model.turn_epoch()

    def open(self, model: Model, rank: int = 0) -> PackedStream:
        return PackedStream(
            self.source,
            dataset=self.datasets[model.of_steps],
            rank=rank,
            world_size=model.world_size,
            packs_per_step=model.packs_per_step,
            micro_batches=model.micro_batches,
            tail=model.tail,  # type: ignore[arg-type]
            epochs=None,
            shuffle_seed=SEED,
            prefetch_steps=2,
        )

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            for iterator, due in zip(self.iterators, self.model.due(), strict=True):
                batch = next(iterator)
                ids = batch.example_ids.tolist()
                assert due == Due(ids, batch.epoch, batch.step, batch.num_items_in_batch, batch.step_done)
                assert batch.is_padding == (due.ids == [-1])

    @rule(rank=st.integers(0, 3))
    def save(self, rank: int) -> None:
        stream = self.streams[rank % len(self.streams)]
        self.saved = (json.loads(json.dumps(stream.state_dict())), replace(self.model))

    @rule(split=SPLITS)
    def kill_and_resume(self, split: dict[str, Any]) -> None:
        self.end_ranks()
        state, place = self.saved or (None, Model(self.model.of_steps))
        model = self.model_of(place, split)
        if state is not None and place.refuses(model):
            with pytest.raises(StateMismatch, match="load a state of a whole step"):
                self.open(model).load_state_dict(state)
            model = replace(place)
        self.start_ranks(model, state)

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
            place = tuple(state[name] for name in ("epoch", "packs", "step", "micro_step"))
            assert place == self.model.place

    def end_ranks(self) -> None:
        self.iterators = []
        for stream in self.streams:
            stream.close()

    def teardown(self) -> None:
        if hasattr(self, "streams"):
            self.end_ranks()


def run(root: Path, source: str, service: FakeService | None, max_examples: int) -> None:
    packs = numbered_packs(NUM_PACKS)
    datasets = {
        False: build_dataset(root, packs, packs_per_shard=4),
        True: build_step_dataset(root, packs, STEP_SIZES, steps_per_partition=2),
    }
    machine = type("Machine", (Resume,), {"source": source, "datasets": datasets, "service": service})
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


@pytest.mark.usefixtures("soon")
def test_over_http_with_restarts_and_cut_connections() -> None:
    with tempfile.TemporaryDirectory() as root, FakeService(Path(root)) as service:
        run(Path(root), service.url, service, 8)


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
@pytest.mark.timeout(1800)
def test_much_longer() -> None:
    with tempfile.TemporaryDirectory() as root, FakeService(Path(root)) as service:
        run(Path(root), root, None, 300)
        run(Path(root), service.url, service, 60)
