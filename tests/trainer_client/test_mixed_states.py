"""States of mixtures and of loader workers: what is none is named by its part; ends while packing runs."""

from __future__ import annotations

import copy
import itertools
import json
import math
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packs import (
    build_dataset,
    build_step_dataset,
    commit_partition,
    finish_dataset,
    numbered_packs,
    start_dataset,
)
from torch.utils.data import DataLoader

from trainer_client import MixedStream, PackedDataset, PackedStream, StateMismatch

GARBAGE = [
    None,
    "x",
    -1,
    1.5,
    math.nan,
    math.inf,
    [],
    {},
    True,
    10**30,
    [1],
    {"a": 1},
    [None, None],
    [{}, {}],
]
# Parts of which a wrong value changes nothing, or that are for messages alone.
_FREE = {"epochs", "spec", "tail", "balance"}
_CALLED = {"mixed": "", "sources": "source"}  # what messages call them


def mixed(root: Path, datasets: dict[str, str], **options: Any) -> MixedStream:
    streams = {name: PackedStream(root, dataset=one) for name, one in datasets.items()}
    return MixedStream(streams, **{"weights": [1] * len(datasets), **options})


def told(batch: Any) -> tuple:
    return batch.step, batch.num_items_by_source, batch.example_ids.tolist(), batch.source_ids.tolist()


def parts(document: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each part of a JSON document lies."""
    inner = document.items() if isinstance(document, dict) else enumerate(document)
    for name, value in inner:
        yield (*place, name)
        if isinstance(value, dict | list):
            yield from parts(value, (*place, name))


def with_part(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    document = copy.deepcopy(document)
    at = document
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    return document


def without_part(document: Any, place: tuple[Any, ...]) -> Any:
    document = with_part(document, place, None)
    at = document
    for name in place[:-1]:
        at = at[name]
    del at[place[-1]]
    return document


def refusal(stream: Any, state: Any) -> str:
    """Why a state is refused; "" where it is not. Only these errors may come."""
    try:
        stream.load_state_dict(state)
        next(iter(stream), None)
    except ValueError as error:  # StateMismatch is one
        return str(error)
    return ""


def check_garbage(stream: Any, state: dict[str, Any]) -> None:
    """Every part of the state, replaced by anything or left out, is refused by its name or goes on."""
    num_refused = 0
    for place in parts(state):
        if _FREE & set(place):
            continue
        names = [_CALLED.get(name, name) for name in place if isinstance(name, str)]
        for other in [*(with_part(state, place, value) for value in GARBAGE), without_part(state, place)]:
            if why := refusal(stream, other):
                num_refused += 1
                assert names[0] in why, (place, why)
                assert len(names) == 1 or names[-1] in why, (place, why)
        stream.load_state_dict(state)
        assert stream.state_dict() == state
    assert num_refused > 100


def test_garbage_deep_in_a_state_is_named(tmp_path: Path) -> None:
    datasets = {
        "a": build_dataset(tmp_path, numbered_packs(20), packs_per_shard=7),
        "b": build_step_dataset(tmp_path, numbered_packs(20), [3, 2, 5, 4, 1, 5]),
    }
    mixture = mixed(tmp_path, datasets, schedule={5: [1, 3]})
    mixture.streams[0].skip([9])
    mixture.streams[1].skip([4])
    for _ in zip(range(3), mixture):  # noqa: B905  # the last one is within an optimiser step
        pass
    assert mixture.state_dict()["turn"] is not None
    check_garbage(mixture, json.loads(json.dumps(mixture.state_dict())))
    with PackedStream(tmp_path, dataset=datasets["a"], micro_batches=2) as stream:
        stream.skip([7])
        next(iter(stream))
        check_garbage(stream, json.loads(json.dumps(stream.state_dict())))


def test_a_state_that_is_refused_moves_nothing(tmp_path: Path) -> None:
    """Of a mixture neither the sources before the one that is wrong."""
    datasets = {
        name: build_dataset(tmp_path, numbered_packs(20, length=length), packs_per_shard=7)
        for name, length in (("a", 4), ("b", 6))
    }
    mixture = mixed(tmp_path, datasets)
    batches = iter(mixture)
    for _ in range(6):
        last = next(batches)
    early = mixed(tmp_path, datasets).state_dict()
    foreign = {**early, "sources": [early["sources"][0], early["sources"][0]]}
    with pytest.raises(StateMismatch, match="this stream has dataset of source 'b' ") as caught:
        mixture.load_state_dict(foreign)
    assert (caught.value.wanted, caught.value.found) == (datasets["b"], datasets["a"])
    with pytest.raises(
        ValueError, match="source 'b' of the state: packs of the state: an int is required, found 'x'"
    ):
        mixture.load_state_dict(with_part(early, ("sources", 1, "packs"), "x"))
    assert mixture.state_dict() == last.state
    assert told(next(batches))[0] == 6  # the iteration goes on too


@pytest.mark.parametrize(
    ("lane", "says"),
    [
        (None, "lane of the state: worker, num_workers, num_given are required, found None"),
        ([1, 2], r"lane of the state: .* found \[1, 2\]"),
        ({}, "worker in the lane of the state: an int is required, found None"),
        ({"worker": 0, "num_workers": "0", "num_given": 3}, "num_workers in the lane of the state: an int"),
        ({"worker": 0, "num_workers": 0, "num_given": -3}, "num_given in the lane of the state: 0 or more"),
    ],
)
def test_garbage_in_a_workers_state_is_named(tmp_path: Path, lane: Any, says: str) -> None:
    packed = PackedDataset(tmp_path, dataset=build_dataset(tmp_path, numbered_packs(9), packs_per_shard=7))
    with pytest.raises(ValueError, match=says):
        packed.load_state_dict({**packed.state_dict(), "lane": lane})


def test_what_is_skipped_may_be_numpys(tmp_path: Path) -> None:
    with PackedStream(
        tmp_path, dataset=build_dataset(tmp_path, numbered_packs(9), packs_per_shard=7)
    ) as stream:
        stream.skip(np.arange(2, 4), epoch=np.int64(0))  # type: ignore[arg-type]
        stream.set_epoch(np.int64(0))
        state = json.loads(json.dumps(stream.state_dict()))
        assert [batch.step for batch in stream] == [0, 1, 4, 5, 6, 7, 8]
        for steps in ([2.0], ["2"]):
            with pytest.raises(ValueError, match="skip: an int is required"):
                stream.skip(steps)  # type: ignore[arg-type]
        stream.load_state_dict(state)
        assert len(stream) == 7


class _Packing:
    """A dataset of five packs, whose packing is over once its packs were read."""

    def __init__(self, root: Path) -> None:
        self.packs = numbered_packs(5)
        self.root, self.dataset = root, start_dataset(root, identity="packing")
        commit_partition(root, self.dataset, 0, self.packs, packs_per_shard=5)
        self._finish: list[Callable[[], None]] = [lambda: finish_dataset(root, self.dataset, 1, self.packs)]

    def finish_soon(self) -> threading.Timer:
        timer = threading.Timer(0.3, self._finish.pop())
        timer.start()
        return timer


@pytest.mark.parametrize("until", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("batches_per_step", [1, 2, 3, 4])
def test_broken_off_at_a_short_last_batch_while_packing_runs_it_is_at_its_end(
    tmp_path: Path, until: Any, batches_per_step: int
) -> None:
    """However often it is iterated and saved then: as the mixture of a dataset that was finished before."""
    ended = build_dataset(tmp_path, numbered_packs(9, length=4), packs_per_shard=7)
    packing = _Packing(tmp_path)
    how = {"until": until, "batches_per_step": batches_per_step}
    stream = mixed(tmp_path, datasets := {"packing": packing.dataset, "ended": ended}, **how)
    timer = packing.finish_soon()
    seen, count = [], {("first_exhausted", 1): 10, ("first_exhausted", 2): 5, ("first_exhausted", 3): 4,
                       ("first_exhausted", 4): 3, ("all_exhausted", 1): 19, ("all_exhausted", 2): 10,
                       ("all_exhausted", 3): 7, ("all_exhausted", 4): 5}[until, batches_per_step]  # fmt: skip
    for batch in itertools.islice(iter(stream), count):
        seen.append(told(batch))
        last = batch
    timer.join()
    undisturbed = mixed(tmp_path, datasets, **how)
    assert seen == [told(batch) for batch in undisturbed]
    states = [last.state, stream.state_dict()]
    assert list(stream) == []
    states.append(stream.state_dict())
    for state in states:
        resumed = mixed(tmp_path, datasets, **how)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert list(resumed) == []
    assert [told(batch) for batch in stream] == [told(batch) for batch in undisturbed]  # iterated once more


def test_a_signal_while_a_batch_is_drawn_saves_the_state_before_it(tmp_path: Path) -> None:
    """A handler that saves, and goes on or ends the job: nothing of the batch counts as taken."""
    ended = build_dataset(tmp_path, numbered_packs(9, length=4), packs_per_shard=7)
    packing = _Packing(tmp_path)
    datasets = {"ended": ended, "packing": packing.dataset}
    stream = mixed(tmp_path, datasets, batches_per_step=4)
    saved: list[dict[str, Any]] = []

    def handler(*_: object) -> None:
        saved.append(json.loads(json.dumps(stream.state_dict())))
        packing.finish_soon()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        batches = iter(stream)
        states = [next(batches).state for _ in range(2)]
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        rest = [told(batch) for batch in batches]  # waits for what is still being packed, with two drawn
    finally:
        signal.signal(signal.SIGALRM, before)
    assert saved == states[1:]
    resumed = mixed(tmp_path, datasets, batches_per_step=4)
    resumed.load_state_dict(saved[0])
    assert [told(batch) for batch in resumed] == rest


def test_weights_of_steps_that_were_taken_cannot_change(tmp_path: Path) -> None:
    """They would be of no effect, silently, where others are scheduled behind them."""
    dataset = build_dataset(tmp_path, numbered_packs(20), packs_per_shard=7)
    stream = mixed(tmp_path, {"a": dataset, "b": dataset}, schedule={2: [1, 3]})
    for _ in itertools.islice(iter(stream), 4):
        pass
    with pytest.raises(ValueError, match="at_step: 4 or more is required, found 3"):
        stream.change_weights([1, 0], at_step=3)
    stream.change_weights([1, 0], at_step=4)
    assert stream.weights_at(4) == {"a": 1, "b": 0}


def test_a_mixture_has_no_length_and_says_what_to_do(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=7)
    stream = mixed(tmp_path, {"a": dataset, "b": dataset})
    assert stream
    with pytest.raises(TypeError, match=r"no length.*iterate it.*without a DataLoader"):
        next(iter(DataLoader(stream, batch_size=None)))  # type: ignore[arg-type]


def test_stats_of_a_mixture_are_those_of_its_batches(tmp_path: Path) -> None:
    datasets = {
        name: build_dataset(tmp_path, numbered_packs(20, length=length), packs_per_shard=7)
        for name, length in (("a", 4), ("b", 4))
    }
    stream = mixed(tmp_path, datasets, batches_per_step=4)
    assert stream.stats().num_batches == 0
    batches = list(stream)
    stats, each = stream.stats(), [one.stats() for one in stream.streams]
    assert stats.num_batches == len(batches) == 10
    assert (
        stats.num_tokens == sum(batch.num_tokens for batch in batches) == sum(one.num_tokens for one in each)
    )
    assert stats.num_bytes == sum(one.num_bytes for one in each) > 0
    assert 0 < stats.get_wait_s <= stats.elapsed_s
    assert stats.first_batch_s > 0
    assert 0 <= stats.mean_occupancy <= 4
    assert "padfree_client_stall_share" in stats.to_prometheus()
