"""Gradient accumulation by the stream: several batches make an optimiser step, of any dataset."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packs import build_dataset, build_step_dataset, numbered_packs, random_packs
from torch.utils.data import DataLoader

from trainer_client import (
    DatasetTooSmall,
    MixedStream,
    PackedBatch,
    PackedDataset,
    PackedStream,
    StateMismatch,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def told(batch: PackedBatch) -> tuple[Any, ...]:
    ids = [number for number in batch.example_ids.tolist() if number >= 0]
    return batch.epoch, batch.optimizer_step, batch.step_done, batch.num_items_in_batch, ids


def in_groups(batches: list[PackedBatch], size: int) -> list[list[PackedBatch]]:
    return [batches[first : first + size] for first in range(0, len(batches), size)]


@pytest.mark.parametrize(("micro_batches", "packs_per_step"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_the_batches_of_a_step_are_the_step(
    source: str, tmp_path: Path, micro_batches: int, packs_per_step: int, tail: Any
) -> None:
    dataset = build_dataset(tmp_path, random_packs(29), packs_per_shard=5)
    options: dict[str, Any] = {"dataset": dataset, "world_size": 2, "epochs": 2, "tail": tail}
    for rank in range(2):
        whole = PackedStream(source, rank=rank, packs_per_step=micro_batches * packs_per_step, **options)
        stream = PackedStream(
            source, rank=rank, packs_per_step=packs_per_step, micro_batches=micro_batches, **options
        )
        steps, batches = list(whole), list(stream)
        assert len(stream) == len(batches) == micro_batches * len(steps)
        assert stream.num_optimizer_steps == whole.num_optimizer_steps == len(steps)
        assert stream.num_left_over() == whole.num_left_over()
        for step, part in zip(steps, in_groups(batches, micro_batches), strict=True):
            assert [one.step_done for one in part] == [False] * (micro_batches - 1) + [True]
            assert {one.optimizer_step for one in part} == {step.optimizer_step}
            assert {one.num_items_in_batch for one in part} == {step.num_items_in_batch}
            real = [one for one in part if not one.is_padding]
            assert sum(one.num_packs for one in real) == step.num_packs
            joined = np.concatenate([one.input_ids for one in real or part[:1]])
            assert joined.tolist() == step.input_ids.tolist()
        of_epoch = len(batches) // 2
        assert [one.step for one in batches] == 2 * list(range(of_epoch))


def test_a_state_within_a_step_goes_on_within_it(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(27), packs_per_shard=5)
    options: dict[str, Any] = {"dataset": dataset, "world_size": 2, "epochs": 2, "micro_batches": 4}
    whole = list(PackedStream(source, rank=1, **options))
    assert len(whole) == 2 * 3 * 4
    for stop in range(1, len(whole)):
        stream = PackedStream(source, rank=1, **options)
        seen = [told(one) for one in itertools.islice(stream, stop)]
        state = json.loads(json.dumps(stream.state_dict()))
        assert state == whole[stop - 1].state
        for again in (stream, PackedStream(source, rank=1, **options)):  # broken off, and in another process
            again.load_state_dict(state)
            assert again.state_dict() == state
            assert seen + [told(one) for one in again] == [told(one) for one in whole]


def test_whole_steps_go_on_on_another_split_and_parts_of_one_are_refused(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(24), packs_per_shard=5)
    states = [one.state for one in PackedStream(tmp_path, dataset=dataset, world_size=2, micro_batches=3)]
    for split in ({"world_size": 3}, {"world_size": 2, "micro_batches": 2}, {"packs_per_step": 6}):
        seen: list[int] = []
        for rank in range(split.get("world_size", 1)):
            stream = PackedStream(tmp_path, dataset=dataset, rank=rank, **split)
            with pytest.raises(
                StateMismatch, match=r"micro_batches.*\(2, 1, 3, 'drop'\).*load a state of a whole step"
            ):
                stream.load_state_dict(states[1])
            stream.load_state_dict(states[5])  # two steps of six packs
            seen += [int(number) for one in stream for number in one.example_ids]
        assert sorted(seen) == list(range(12, 24))


@pytest.mark.parametrize("balance", ["none", "attention"])
def test_a_whole_step_is_evened_out_and_side_by_side_too(tmp_path: Path, balance: Any) -> None:
    """Balanced over all micro-batches of the step, the ranks' sums are closer than within each alone."""
    dataset = build_dataset(tmp_path, random_packs(96, max_tokens=6000), packs_per_shard=9)
    options: dict[str, Any] = {"dataset": dataset, "world_size": 4, "epochs": 3, "balance": balance}
    ranks = [list(PackedStream(tmp_path, rank=rank, micro_batches=6, **options)) for rank in range(4)]
    costs = np.array([[cost_of(one) for one in rank] for rank in ranks])  # (ranks, micro-batches)
    sums = costs.reshape(4, -1, 6).sum(axis=2)
    apart, together = idle(costs), idle(sums)
    if balance == "attention":
        assert together < 0.02
        assert apart < 0.10
    else:
        assert together > 0.02
        assert apart > 0.10
    for epoch in range(3):
        seen = [n for rank in ranks for one in rank if one.epoch == epoch for n in one.example_ids.tolist()]
        assert (
            len(seen)
            == len(set(seen))
            == sum(pack.num_segments for pack in random_packs(96, max_tokens=6000))
        )


def cost_of(batch: PackedBatch) -> int:
    lengths = np.diff(batch.cu_seqlens).astype(np.int64)
    return int(lengths @ lengths) + 12 * 2048 * batch.num_tokens


def idle(costs: np.ndarray) -> float:
    """(ranks, steps): the share of all ranks' time spent waiting for the dearest."""
    return 1 - costs.mean(axis=0).sum() / costs.max(axis=0).sum()


def test_steps_are_left_out_whole(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(12), packs_per_shard=5)
    stream = PackedStream(source, dataset=dataset, micro_batches=3)
    stream.skip([1])
    assert [one.example_ids[0] for one in stream] == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    assert (len(stream), stream.num_optimizer_steps) == (9, 3)


def test_a_step_dataset_has_its_own(tmp_path: Path) -> None:
    dataset = build_step_dataset(tmp_path, numbered_packs(7), [3, 2, 2])
    plain, asked = (
        [told(one) for one in PackedStream(tmp_path, dataset=dataset, micro_batches=count)]
        for count in (1, 4)
    )
    assert plain == asked


def test_within_a_step_that_a_step_dataset_marks_they_change_nothing(source: str, tmp_path: Path) -> None:
    """A state goes on with another number of them, and on another world size."""
    dataset = build_step_dataset(tmp_path, numbered_packs(7), [5, 2])
    options: dict[str, Any] = {"dataset": dataset, "micro_batches": 3}
    stream = PackedStream(source, **options, world_size=2)
    assert [int(one.example_ids[0]) for one in itertools.islice(stream, 2)] == [0, 2]
    assert stream.state_dict()["micro_step"] == 2
    again = PackedStream(source, **options)
    again.load_state_dict(stream.state_dict())
    assert [int(one.example_ids[0]) for one in again] == [4, 5, 6]


def test_within_a_step_the_tail_is_not_changed(tmp_path: Path) -> None:
    """A last step that is not full is not left half trained."""
    dataset = build_dataset(tmp_path, numbered_packs(5), packs_per_shard=5)
    stream = PackedStream(tmp_path, dataset=dataset, micro_batches=3, tail="pad")
    taken = list(itertools.islice(stream, 4))
    with pytest.raises(StateMismatch, match=r"tail.*'drop'.*'pad'.*load a state of a whole step"):
        PackedStream(tmp_path, dataset=dataset, micro_batches=3).load_state_dict(taken[3].state)


def test_a_refused_state_says_packs_per_step_as_it_was_given(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(64), packs_per_shard=5)
    stream = PackedStream(tmp_path, dataset=dataset, packs_per_step=2, micro_batches=4)
    state = next(iter(stream)).state
    with pytest.raises(StateMismatch, match=r"\(2, 1, 4, 'drop'\).*\(1, 2, 4, 'drop'\)") as caught:
        PackedStream(tmp_path, dataset=dataset, rank=0, world_size=2, micro_batches=4).load_state_dict(state)
    assert caught.value.what == "world_size, packs_per_step, micro_batches, tail"


def test_a_mixture_keeps_micro_batches_together(tmp_path: Path) -> None:
    datasets = {name: build_dataset(tmp_path, numbered_packs(12, length=length), packs_per_shard=5)
                for name, length in (("a", 4), ("b", 6))}  # fmt: skip
    streams = {name: PackedStream(tmp_path, dataset=one, micro_batches=3) for name, one in datasets.items()}
    batches = list(MixedStream(streams, weights=[1, 1]))
    for part in in_groups(batches, 3):
        assert len({int(one.source_ids[0]) for one in part}) == 1
        assert [one.step_done for one in part] == [False, False, True]


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(5), packs_per_shard=5)
    with pytest.raises(ValueError, match="micro_batches: 1 or more"):
        PackedStream(tmp_path, dataset=dataset, micro_batches=0)
    with pytest.raises(
        DatasetTooSmall,
        match=r"6 packs \(world_size 2 x micro_batches 3\).*only 5.*smaller world_size or micro_batches, ",
    ):
        list(PackedStream(tmp_path, dataset=dataset, world_size=2, micro_batches=3))
    packed = PackedDataset(tmp_path, dataset=dataset, micro_batches=2)
    with pytest.raises(ValueError, match="use one worker, or none"):
        packed.loader(num_workers=2)
    alone = DataLoader(packed, batch_size=None, num_workers=1)
    assert [one.example_ids[0] for one in alone] == [0, 1, 2, 3]
