"""The order of a stream, its tail, its state: over HTTP and from a folder."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_service import FakeService
from packs import (
    build_dataset,
    commit_partition,
    fail_dataset,
    finish_dataset,
    numbered_packs,
    random_packs,
    start_dataset,
    taken,
)
from prometheus_client.parser import text_string_to_metric_families
from reading_ahead import once_awaited, until_full

from trainer_client import (
    DatasetFailed,
    DatasetTooSmall,
    MixedStream,
    PackedStream,
    StateMismatch,
    StreamStats,
    StreamTimeout,
    UnknownDataset,
)


def take(stream: PackedStream, count: int) -> list[int]:
    return taken(itertools.islice(iter(stream), count))


# ------------------------------------------------------------------ order


def test_packs_arrive_as_they_were_written(source: str, tmp_path: Path) -> None:
    packs = random_packs(23, seed=3)
    dataset = build_dataset(tmp_path, packs, packs_per_shard=4)
    batches = list(PackedStream(source, dataset=dataset))
    assert len(batches) == 23
    for batch, pack in zip(batches, packs, strict=True):
        assert np.array_equal(batch.input_ids, pack.input_ids)
        assert np.array_equal(batch.loss_mask, pack.loss_mask)
        assert np.array_equal(batch.cu_seqlens, pack.cu_seqlens)
        assert np.array_equal(batch.example_ids, pack.example_ids)
        assert batch.num_items_in_batch == pack.num_trained
        assert batch.step_done


def test_trained_tokens_are_those_of_the_whole_step(source: str, tmp_path: Path) -> None:
    packs = random_packs(12, seed=4)
    dataset = build_dataset(tmp_path, packs, packs_per_shard=5)
    ranks = [
        list(PackedStream(source, dataset=dataset, rank=rank, world_size=2, packs_per_step=3))
        for rank in range(2)
    ]
    for step, (one, two) in enumerate(zip(*ranks, strict=True)):
        whole = sum(pack.num_trained for pack in packs[6 * step : 6 * step + 6])
        assert one.num_items_in_batch == two.num_items_in_batch == whole
        assert one.num_trained + two.num_trained == whole
        assert one.step == two.step == step


def test_epochs_are_permutations_and_follow_each_other(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(40), packs_per_shard=7)
    stream = PackedStream(source, dataset=dataset, epochs=3, shuffle_seed=5)
    batches = list(stream)
    assert len(stream) == len(batches) == 120
    epochs = [[b.example_ids[0] for b in batches if b.epoch == epoch] for epoch in range(3)]
    assert epochs[0] == list(range(40))
    assert sorted(epochs[1]) == sorted(epochs[2]) == list(range(40))
    assert epochs[1] != epochs[0]
    assert epochs[2] != epochs[1]
    assert [b.step for b in batches] == 3 * list(range(40))


def test_each_loop_over_a_stream_of_one_epoch_is_the_next_epoch(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(10), packs_per_shard=4)
    at_once = taken(PackedStream(source, dataset=dataset, epochs=3))
    stream = PackedStream(source, dataset=dataset)
    assert [*taken(stream), *taken(stream), *taken(stream)] == at_once


def test_without_a_seed_every_epoch_is_the_order_of_packing(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(6), packs_per_shard=4)
    assert taken(PackedStream(source, dataset=dataset, epochs=2, shuffle_seed=None)) == 2 * list(range(6))


def test_an_endless_stream_has_no_length(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(3), packs_per_shard=4)
    stream = PackedStream(source, dataset=dataset, epochs=None)
    assert len(take(stream, 10)) == 10
    with pytest.raises(TypeError, match="no end"):
        len(stream)


# ------------------------------------------------------------------ tail


def test_f25_a_dataset_smaller_than_a_step_is_an_error_with_both_numbers(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(3), packs_per_shard=2)
    stream = PackedStream(source, dataset=dataset, packs_per_step=101)
    with pytest.raises(DatasetTooSmall, match=r"101 packs.*only 3") as caught:
        next(iter(stream))
    assert (caught.value.num_packs, caught.value.packs_needed) == (3, 101)
    assert 'use a smaller packs_per_step, tail="pad", or pack it with a smaller max_tokens' in str(
        caught.value
    )
    two = PackedStream(source, dataset=dataset, rank=0, world_size=4)
    with pytest.raises(DatasetTooSmall, match=r"4 packs \(world_size 4\).*use a smaller world_size, tail"):
        next(iter(two))
    with pytest.raises(DatasetTooSmall):
        len(stream)
    padded = PackedStream(source, dataset=dataset, packs_per_step=101, tail="pad")
    batches = list(padded)
    assert len(padded) == len(batches) == 1
    assert batches[0].num_packs == 3
    assert batches[0].example_ids.tolist() == [0, 1, 2]


def test_f25_also_where_the_size_is_known_only_later(source: str, tmp_path: Path) -> None:
    packs = numbered_packs(3)
    dataset = start_dataset(tmp_path, identity="growing")
    stream = PackedStream(source, dataset=dataset, packs_per_step=101)

    def commit_all() -> None:
        commit_partition(tmp_path, dataset, 0, packs, packs_per_shard=2)
        finish_dataset(tmp_path, dataset, 1, packs)

    with once_awaited(stream, commit_all), pytest.raises(DatasetTooSmall) as caught:
        next(iter(stream))
    assert caught.value.num_packs == 3


def test_f27_all_ranks_take_the_same_number_of_steps(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(5), packs_per_shard=2)

    def ranks(tail: Any) -> list[list]:
        return [
            list(PackedStream(source, dataset=dataset, rank=rank, world_size=2, tail=tail))
            for rank in range(2)
        ]

    dropped = ranks("drop")
    assert [len(batches) for batches in dropped] == [2, 2]
    assert sorted(n for batches in dropped for b in batches for n in b.example_ids) == [0, 1, 2, 3]
    assert PackedStream(source, dataset=dataset, world_size=2).num_left_over() == 1
    padded = ranks("pad")
    assert [len(batches) for batches in padded] == [3, 3]
    fillers = [b for batches in padded for b in batches if b.is_padding]
    assert len(fillers) == 1
    assert not fillers[0].loss_mask.any()
    assert (fillers[0].labels == -100).all()
    real = [n for batches in padded for b in batches if not b.is_padding for n in b.example_ids]
    assert sorted(real) == [0, 1, 2, 3, 4]
    # The filler's step counts the trained tokens of the other rank.
    assert fillers[0].num_items_in_batch == 3


# ------------------------------------------------------------------ state


def test_f29_start_and_split_commute(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(16), packs_per_shard=3)
    whole, later = [], []
    for rank in range(2):
        stream = PackedStream(source, dataset=dataset, rank=rank, world_size=2)
        whole.append(taken(stream))
        stream = PackedStream(source, dataset=dataset, rank=rank, world_size=2)
        state = {**stream.state_dict(), "packs": 2, "step": 1}
        stream.load_state_dict(state)
        later.append(taken(stream))
    assert [len(part) for part in later] == [7, 7]
    assert later == [part[1:] for part in whole]
    assert not set(later[0]) & set(later[1])


def test_f30_the_second_resume_is_as_good_as_the_first(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(12), packs_per_shard=5)

    def fresh(state: dict | None = None) -> PackedStream:
        stream = PackedStream(source, dataset=dataset)
        if state is not None:
            stream.load_state_dict(json.loads(json.dumps(state)))
        return stream

    first = fresh()
    assert take(first, 3) == [0, 1, 2]
    s1 = first.state_dict()
    second = fresh(s1)
    assert second.state_dict() == s1
    assert take(second, 2) == [3, 4]
    third = fresh(second.state_dict())
    assert take(third, 1) == [5]


def test_state_is_exact_within_the_loop_body_and_on_the_batch(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(9), packs_per_shard=2)
    stream = PackedStream(source, dataset=dataset, epochs=2, shuffle_seed=3)
    order = taken(PackedStream(source, dataset=dataset, epochs=2, shuffle_seed=3))
    for index, batch in enumerate(stream):
        state = stream.state_dict()
        assert batch.state == state
        other = PackedStream(source, dataset=dataset, epochs=2, shuffle_seed=3)
        other.load_state_dict(state)
        rest = take(other, 18 - index - 1)
        assert rest == order[index + 1 :], index


@pytest.mark.parametrize(("worlds", "steps"), [((4, 2), (1, 4)), ((1, 4), (4, 2)), ((2, 3), (3, 2))])
def test_f31_a_state_goes_on_exactly_on_another_world_size(
    source: str, tmp_path: Path, worlds: tuple[int, int], steps: tuple[int, int]
) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(12), packs_per_shard=5)
    state, before = None, []
    for rank in range(worlds[0]):
        stream = PackedStream(source, dataset=dataset, rank=rank, world_size=worlds[0])
        before += take(stream, steps[0])
        state = stream.state_dict()
    after = []
    for rank in range(worlds[1]):
        stream = PackedStream(source, dataset=dataset, rank=rank, world_size=worlds[1])
        stream.load_state_dict(state)
        batches = list(stream)
        assert [b.step for b in batches] == list(range(steps[0], steps[0] + steps[1]))
        after += [n for b in batches for n in b.example_ids]
    assert not set(before) & set(after)
    assert sorted(before + after) == list(range(12))


def test_f32_what_was_fetched_but_not_taken_is_not_lost(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(12), packs_per_shard=5)
    stream = PackedStream(source, dataset=dataset, prefetch_steps=4)
    iterator = iter(stream)
    assert [next(iterator).example_ids[0] for _ in range(2)] == [0, 1]
    assert len(until_full(stream)) == 4
    state = stream.state_dict()
    assert state["packs"] == 2
    program = (
        "import json, sys; from trainer_client import PackedStream\n"
        "state = json.loads(sys.argv[2]); stream = PackedStream(sys.argv[1], dataset=state['dataset'])\n"
        "stream.load_state_dict(state); print([int(b.example_ids[0]) for b in stream])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program, source, json.dumps(state)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert json.loads(out.stdout) == list(range(2, 12))


def test_f33_state_at_the_end_of_an_epoch_opens_the_next(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=5)
    whole = taken(PackedStream(source, dataset=dataset, epochs=2, shuffle_seed=7))
    for epochs in (2, 3, None):
        stream = PackedStream(source, dataset=dataset, epochs=epochs, shuffle_seed=7)
        assert take(stream, 4) == whole[:4]
        state = stream.state_dict()
        assert (state["epoch"], state["packs"]) == (1, 0)
        resumed = PackedStream(source, dataset=dataset, epochs=epochs, shuffle_seed=7)
        resumed.load_state_dict(state)
        assert take(resumed, 4) == whole[4:]
        assert resumed.state_dict()["epoch"] == 2


def test_f33_also_where_the_end_was_not_known_when_the_state_was_saved(source: str, tmp_path: Path) -> None:
    packs = numbered_packs(4)
    dataset = start_dataset(tmp_path, identity="growing")
    commit_partition(tmp_path, dataset, 0, packs, packs_per_shard=3)
    stream = PackedStream(source, dataset=dataset, epochs=2, shuffle_seed=7)
    assert take(stream, 4) == [0, 1, 2, 3]
    state = stream.state_dict()
    assert (state["epoch"], state["packs"]) == (0, 4)  # more may come
    finish_dataset(tmp_path, dataset, 1, packs)
    resumed = PackedStream(source, dataset=dataset, epochs=2, shuffle_seed=7)
    resumed.load_state_dict(state)
    assert resumed.epoch == resumed.state_dict()["epoch"] == 1
    assert sorted(taken(resumed)) == [0, 1, 2, 3]
    assert resumed.state_dict()["epoch"] == 2


def test_an_end_found_out_while_waiting_makes_no_empty_iteration(source: str, tmp_path: Path) -> None:
    packs = numbered_packs(4)
    dataset = start_dataset(tmp_path, identity="growing")
    commit_partition(tmp_path, dataset, 0, packs, packs_per_shard=3)
    stream = PackedStream(source, dataset=dataset, epochs=2)
    assert take(stream, 4) == [0, 1, 2, 3]
    with once_awaited(stream, lambda: finish_dataset(tmp_path, dataset, 1, packs)):
        assert sorted(taken(stream)) == [0, 1, 2, 3]


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_run_that_came_to_its_end_gives_nothing_more_when_resumed(
    source: str, tmp_path: Path, epochs: int, caplog: Any
) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=5)
    whole = taken(PackedStream(source, dataset=dataset, epochs=5))
    stream = PackedStream(source, dataset=dataset, epochs=epochs)
    last = [batch.state for batch in stream][-1]
    for state in (stream.state_dict(), last):
        resumed = PackedStream(source, dataset=dataset, epochs=epochs)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        caplog.clear()
        assert taken(resumed) == []
        assert f"nothing is left, the stream stands at epoch {epochs} and ends there" in caplog.text
        assert resumed.state_dict() == stream.state_dict()
        assert len(resumed) == 4 * epochs
        # More is to be asked for: by more epochs, or by iterating once more.
        more = PackedStream(source, dataset=dataset, epochs=5)
        more.load_state_dict(state)
        assert taken(more) == whole[4 * epochs :]
        assert taken(resumed) == taken(PackedStream(source, dataset=dataset, epochs=2 * epochs))[4 * epochs :]


def test_a_second_loop_over_several_epochs_says_that_it_goes_on(
    source: str, tmp_path: Path, caplog: Any
) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=5)
    stream = PackedStream(source, dataset=dataset, epochs=3)
    assert len(taken(stream)) == 12
    assert not caplog.records
    assert len(taken(stream)) == 12
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert (
        "(epochs=3) and is iterated once more: it goes on from epoch 3 to the end of epoch 5" in caplog.text
    )


def test_a_second_loop_that_was_asked_for_says_nothing(source: str, tmp_path: Path, caplog: Any) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=5)
    for epochs, by_set_epoch in ((1, False), (2, True)):
        stream = PackedStream(source, dataset=dataset, epochs=epochs)
        for _ in range(2):
            if by_set_epoch:
                stream.set_epoch(stream.epoch)
            assert len(taken(stream)) == 4 * epochs
    broken = PackedStream(source, dataset=dataset, epochs=2)
    assert len(take(broken, 3)) + len(taken(broken)) == 8
    assert not caplog.records


def test_a_stream_is_iterated_and_not_indexed(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=5)
    stream = PackedStream(tmp_path, dataset=dataset)
    with pytest.raises(TypeError, match=r"no item 0, it is iterated.*use trainer_client\.PackedDataset"):
        stream[0]
    assert len(list(stream)) == 4
    assert "pack" not in stream
    assert not isinstance(stream, Sequence)


def test_a_loop_of_one_for_an_epoch_goes_on_at_the_end_of_an_epoch(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=5)
    whole = taken(PackedStream(source, dataset=dataset, epochs=3))
    for stop in range(1, 12):
        for by_set_epoch in (False, True):
            stream = PackedStream(source, dataset=dataset)
            seen = []
            while len(seen) < stop:
                seen += take(stream, stop - len(seen))
            state = json.loads(json.dumps(stream.state_dict()))
            stream = PackedStream(source, dataset=dataset)
            stream.load_state_dict(state)
            if by_set_epoch:
                for epoch in range(stream.epoch, 3):
                    stream.set_epoch(epoch)
                    seen += taken(stream)
            else:
                while stream.epoch < 3:
                    seen += taken(stream)
            assert seen == whole
            assert stream.epoch == 3


def test_set_epoch_never_goes_back(source: str, tmp_path: Path) -> None:
    """Frameworks that resume count epochs from 0 again."""
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=5)
    whole = taken(PackedStream(source, dataset=dataset, epochs=4))
    stream = PackedStream(source, dataset=dataset)
    stream.load_state_dict({**stream.state_dict(), "epoch": 1, "packs": 2, "step": 2, "until_epoch": 2})
    stream.set_epoch(0)
    assert taken(stream) == whole[6:8]
    stream.set_epoch(3)
    assert taken(stream) == whole[12:]


def test_the_length_after_a_change_of_world_size_within_an_epoch(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(11), packs_per_shard=5)
    stream = PackedStream(source, dataset=dataset, world_size=4, epochs=2)
    assert (len(stream), stream.num_left_over()) == (4, 3)
    next(iter(stream))  # 7 packs are left
    state = stream.state_dict()
    for world_size, tail, steps, left_over in [(3, "drop", 2, 1), (2, "pad", 4, 0), (4, "drop", 1, 3)]:
        other = PackedStream(source, dataset=dataset, world_size=world_size, epochs=2, tail=tail)
        whole = len(other)
        other.load_state_dict(state)
        assert other.num_left_over() == left_over
        assert len(other) == other.num_optimizer_steps == 1 + steps + whole // 2
        assert len(list(other)) == steps + whole // 2


def test_a_state_from_beyond_the_end_is_refused_with_both_numbers(source: str, tmp_path: Path) -> None:
    packs = numbered_packs(5)
    dataset = build_dataset(tmp_path, packs, packs_per_shard=5)
    stream = PackedStream(source, dataset=dataset)
    state = stream.state_dict()
    with pytest.raises(StateMismatch, match=r"packs 5.*packs 500.*ends at pack 5") as caught:
        stream.load_state_dict({**state, "packs": 500, "step": 500})
    assert (caught.value.wanted, caught.value.found) == (5, 500)
    assert taken(stream) == list(range(5))  # as if it had not been tried
    # A last step that was filled up before the end was known counts its fillers.
    padded = PackedStream(source, dataset=dataset, world_size=4, tail="pad", epochs=2)
    padded.load_state_dict({**padded.state_dict(), "packs": 8, "step": 2})
    assert padded.epoch == 1
    with pytest.raises(StateMismatch):
        padded.load_state_dict({**padded.state_dict(), "epoch": 0, "packs": 9, "step": 2})


def test_a_state_from_beyond_an_end_that_is_known_later_is_refused_when_it_is(
    source: str, tmp_path: Path
) -> None:
    packs = numbered_packs(4)
    dataset = start_dataset(tmp_path, identity="growing")
    commit_partition(tmp_path, dataset, 0, packs, packs_per_shard=3)
    stream = PackedStream(source, dataset=dataset, epochs=2)
    stream.load_state_dict({**stream.state_dict(), "packs": 7, "step": 7})
    finish_dataset(tmp_path, dataset, 1, packs)
    with pytest.raises(StateMismatch, match=r"packs 4.*packs 7"):
        list(stream)


def test_a_state_of_another_dataset_or_seed_is_refused_with_both(source: str, tmp_path: Path) -> None:
    one = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=5)
    two = build_dataset(tmp_path, numbered_packs(5), packs_per_shard=5)
    state = PackedStream(source, dataset=one).state_dict()
    with pytest.raises(StateMismatch, match=f"{two}.*{one}") as caught:
        PackedStream(source, dataset=two).load_state_dict(state)
    assert (caught.value.wanted, caught.value.found) == (two, one)
    with pytest.raises(StateMismatch, match="shuffle_seed 9"):
        PackedStream(source, dataset=one, shuffle_seed=9).load_state_dict(state)
    with pytest.raises(ValueError, match="version 1"):
        PackedStream(source, dataset=one).load_state_dict({"position": 3})


def test_breaking_off_and_going_on(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(10), packs_per_shard=4)
    stream = PackedStream(source, dataset=dataset)
    seen = []
    for batch in stream:
        seen += batch.example_ids.tolist()
        if len(seen) == 3:
            break
    assert seen + taken(stream) == list(range(10))


def test_only_the_latest_iteration_goes_on(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(10), packs_per_shard=4)
    stream = PackedStream(source, dataset=dataset)
    old = iter(stream)
    next(old)
    new = iter(stream)
    assert next(new).example_ids[0] == 1
    with pytest.raises(RuntimeError, match="this iteration of the stream is over"):
        next(old)
    stream.load_state_dict({**stream.state_dict(), "packs": 5, "step": 5})
    with pytest.raises(RuntimeError, match="a state was loaded"):
        next(new)
    assert taken(stream) == [5, 6, 7, 8, 9]


def test_a_stream_travels_to_another_process_with_its_place(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(10), packs_per_shard=4)
    stream = PackedStream(source, dataset=dataset)
    take(stream, 4)
    assert taken(pickle.loads(pickle.dumps(stream))) == [4, 5, 6, 7, 8, 9]


# ------------------------------------------------------------------ while packing


def test_the_stream_follows_a_dataset_that_is_being_packed(source: str, tmp_path: Path) -> None:
    packs = numbered_packs(9)
    dataset = start_dataset(tmp_path, identity="growing")
    commit_partition(tmp_path, dataset, 0, packs[:4], packs_per_shard=3)
    stream = PackedStream(source, dataset=dataset, world_size=2, rank=1, epochs=2)
    with pytest.raises(TypeError, match="still being packed"):
        len(stream)
    iterator = iter(stream)
    # Steps that are whole come before packing is done.
    assert [next(iterator).example_ids[0] for _ in range(2)] == [1, 3]
    commit_partition(tmp_path, dataset, 1, packs[4:], packs_per_shard=3)
    assert [next(iterator).example_ids[0] for _ in range(2)] == [5, 7]
    finish_dataset(tmp_path, dataset, 2, packs)
    rest = [batch.epoch for batch in iterator]
    assert rest == [1, 1, 1, 1]
    assert len(stream) == 8


def test_while_packing_a_step_is_waited_for_and_not_filled_up(source: str, tmp_path: Path) -> None:
    packs = numbered_packs(5)
    dataset = start_dataset(tmp_path, identity="growing")
    commit_partition(tmp_path, dataset, 0, packs[:3], packs_per_shard=3)
    stream = PackedStream(source, dataset=dataset, world_size=2, rank=1, tail="pad")
    batches = iter(stream)
    assert next(batches).example_ids[0] == 1
    with once_awaited(stream, lambda: commit_partition(tmp_path, dataset, 1, packs[3:], packs_per_shard=3)):
        assert next(batches).example_ids[0] == 3
    finish_dataset(tmp_path, dataset, 2, packs)
    assert [batch.is_padding for batch in batches] == [True]


def test_a_failed_dataset_ends_the_stream_with_the_reason(source: str, tmp_path: Path) -> None:
    packs = numbered_packs(4)
    dataset = start_dataset(tmp_path, identity="failing")
    commit_partition(tmp_path, dataset, 0, packs, packs_per_shard=3)
    iterator = iter(PackedStream(source, dataset=dataset))
    assert [next(iterator).example_ids[0] for _ in range(4)] == [0, 1, 2, 3]
    fail_dataset(tmp_path, dataset, detail="rows.jsonl, line 7: not JSON")
    with pytest.raises(DatasetFailed, match="line 7: not JSON") as caught:
        next(iterator)
    assert caught.value.reason == "rows.jsonl, line 7: not JSON"


def test_an_unknown_dataset_is_told_at_once(source: str, tmp_path: Path) -> None:
    build_dataset(tmp_path, numbered_packs(4), packs_per_shard=5)
    with pytest.raises(UnknownDataset, match="dataset feedbeef"):
        next(iter(PackedStream(source, dataset="feedbeef")))


def test_a_folder_that_is_no_store_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnknownDataset, match="there is no store"):
        next(iter(PackedStream(tmp_path / "nowhere", dataset="feedbeef")))


def test_a_folder_where_nobody_packs_any_more_times_out(tmp_path: Path) -> None:
    dataset = start_dataset(tmp_path, identity="abandoned")
    with pytest.raises(StreamTimeout, match=r"has 0 packs.*none was added for 0.3 s"):
        next(iter(PackedStream(tmp_path, dataset=dataset, timeout_s=0.3)))


# ------------------------------------------------------------------ the rest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank: 0 to 1 is required"),
        ({"rank": -1}, "rank: 0 to 0"),
        ({"world_size": 0}, "world_size: 1 or more"),
        ({"packs_per_step": 0}, "packs_per_step: 1 or more"),
        ({"tail": "keep"}, "tail"),
        ({"epochs": 0}, "epochs: 1 or more"),
        ({"prefetch_steps": 0}, "prefetch_steps"),
        (
            {"rank": "0", "world_size": 2},
            r"""^rank: an int is required, found '0' \(str\); int\(os\.environ\["RANK"\]\)$""",
        ),
        ({"rank": 0, "world_size": "2"}, r"""^world_size: an int .* '2' \(str\); int.*"WORLD_SIZE"\]\)$"""),
        ({"rank": True, "world_size": 2}, r"rank: an int is required, found True \(bool\)"),
        ({"packs_per_step": 1.5}, r"packs_per_step: an int is required, found 1\.5 \(float\)$"),
        ({"micro_batches": "2"}, "micro_batches: an int"),
        ({"epochs": "2"}, "epochs: an int"),
        ({"shuffle_seed": "0"}, "shuffle_seed: an int"),
        ({"prefetch_steps": "4"}, "prefetch_steps: an int"),
        ({"prefetch_bytes": None}, "prefetch_bytes: an int"),
        ({"timeout_s": None}, "timeout_s: seconds, 0 or more, are required, found None"),
        ({"timeout_s": "600"}, "timeout_s: seconds, .* found '600'"),
        ({"timeout_s": float("nan")}, "timeout_s: seconds, .* found nan"),
        ({"timeout_s": -1}, "timeout_s: seconds, .* found -1"),
        ({"report_s": "30"}, "report_s: seconds, .* found '30'"),
        ({"report_s": True}, "report_s: seconds, .* found True"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedStream(tmp_path, dataset="x", **options)
    with pytest.raises(ValueError, match="http"):
        PackedStream("ftp://host/store", dataset="x")


def test_ints_of_numpy_are_ints(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(8), packs_per_shard=3)
    stream = PackedStream(tmp_path, dataset=dataset, rank=np.int64(1), world_size=np.int32(2))
    assert taken(stream) == taken(PackedStream(tmp_path, dataset=dataset, rank=1, world_size=2))
    json.dumps(stream.state_dict())


@pytest.mark.parametrize(
    ("ranks", "options", "is_told"),
    [
        (("1", "4"), {}, True),
        (("0", "4"), {}, True),
        (("1", "4"), {"world_size": 4}, True),
        (("0", "4"), {"rank": 0}, True),
        (("0", "4"), {"world_size": 4}, False),
        (("1", "4"), {"world_size": 1}, False),
        (("1", "4"), {"rank": 0, "world_size": 1}, False),
        (("1", "4"), {"rank": 1, "world_size": 2}, False),
        (("0", "1"), {}, False),
        (("", "many"), {}, False),
        ((None, None), {}, False),
    ],
)
def test_forgotten_ranks_are_warned_of(
    tmp_path: Path, monkeypatch: Any, caplog: Any, ranks: Any, options: dict, is_told: bool
) -> None:
    for name, value in zip(("RANK", "WORLD_SIZE"), ranks, strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    dataset = build_dataset(tmp_path, numbered_packs(8), packs_per_shard=3)
    stream = PackedStream(tmp_path, dataset=dataset, **options)
    assert (stream.rank, stream.world_size) == (options.get("rank", 0), options.get("world_size", 1))
    pickle.loads(pickle.dumps(stream))  # as for a DataLoader's worker
    warned = [one for one in caplog.messages if "RANK" in one]
    assert len(warned) == is_told
    if is_told:
        assert f"RANK={ranks[0]}, WORLD_SIZE={ranks[1]}" in warned[0]
        assert f"rank={ranks[0]}, world_size={ranks[1]}" in warned[0]


def test_f36_few_files_are_open_at_any_time(tmp_path: Path) -> None:
    """2,000 shards of one pack, in order and permuted, under a limit of open files."""
    import os
    import resource

    dataset = build_dataset(tmp_path, numbered_packs(2000), packs_per_shard=1, shards_per_partition=500)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        before, most, kept = len(os.listdir("/proc/self/fd")), 0, []
        seen: Counter[int] = Counter()
        for batch in PackedStream(tmp_path, dataset=dataset, epochs=2):
            seen.update(batch.example_ids.tolist())
            kept.append(batch)  # a batch that is kept keeps no file open
            most = max(most, len(os.listdir("/proc/self/fd")))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert seen == Counter(dict.fromkeys(range(2000), 2))
    assert most - before <= 64


def test_the_import_brings_neither_torch_nor_a_web_framework() -> None:
    program = (
        "import sys, trainer_client; assert trainer_client.PackedStream\n"
        "heavy = {'torch', 'transformers', 'ray', 'fastapi', 'tokenizers', 'datasets', 'requests'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(
    ("use", "what"),
    [
        ("from trainer_client import PackedDataset", "PackedDataset"),
        ("from trainer_client import attention", "trainer_client.attention"),
        ("import trainer_client.static", "trainer_client.static"),
        ("next(iter(PackedStream(*given))).for_transformers()", "a batch as tensors"),
        ("next(iter(PackedStream(*given, device='cuda')))", "a batch as tensors"),
    ],
)
def test_without_torch_an_error_says_what_needs_it(tmp_path: Path, use: str, what: str) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(3), packs_per_shard=2)
    use = use.replace("*given", "sys.argv[1], dataset=sys.argv[2]")
    program = (  # torch is hidden, as if it were not installed
        "import sys; from trainer_client import PackedStream\nclass Hides:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': raise ModuleNotFoundError('No module', name='torch')\n"
        "sys.meta_path.insert(0, Hides())\n"
        f"try:\n    {use}\nexcept ImportError as error:\n    print(error)"
    )
    command = [sys.executable, "-c", program, str(tmp_path), dataset]
    told = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout
    assert told.startswith(what)
    assert "needs torch, which is not installed" in told
    assert "pip install '.[trainer]' in a checkout of padfree" in told


def test_reading_brings_no_pandas(tmp_path: Path) -> None:
    """Arrow imports it to make numpy arrays, which takes a second before the first batch."""
    dataset = build_dataset(tmp_path, numbered_packs(3), packs_per_shard=2)
    program = (
        "import sys; from trainer_client import PackedStream\n"
        "assert len(list(PackedStream(sys.argv[1], dataset=sys.argv[2], epochs=2))) == 6\n"
        "assert 'pandas' not in sys.modules"
    )
    with FakeService(tmp_path) as service:
        for source in (str(tmp_path), service.url):
            subprocess.run([sys.executable, "-c", program, source, dataset], check=True, timeout=120)


def test_stats_add_up(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(10, length=7), packs_per_shard=4)
    stream = PackedStream(source, dataset=dataset, epochs=2)
    batches = list(stream)
    stats = stream.stats()
    assert (stats.num_batches, stats.num_tokens) == (20, 140)
    assert stats.num_bytes == sum(batch.num_bytes for batch in batches)
    assert 0 <= stats.stall_share <= 1
    assert stats.first_batch_s > 0
    assert "padfree_client_num_batches 20\n" in stats.to_prometheus()
    assert stats.bytes_per_s == pytest.approx(stats.num_bytes / stats.elapsed_s)


def test_every_figure_is_told_to_prometheus_in_its_form() -> None:
    stats = StreamStats(
        num_batches=20, num_tokens=140, num_bytes=1000, first_batch_s=0.5, get_wait_s=0.25, put_wait_s=3,
        mean_occupancy=3.5, elapsed_s=4, num_retries=2, idle_share_before=0.4, idle_share_after=0.1,
    )  # fmt: skip
    assert (stats.stall_share, stats.bytes_per_s) == (0.0625, 250)
    assert StreamStats().stall_share == StreamStats().bytes_per_s == 0
    told = {
        family.name.removeprefix("padfree_client_"): family.samples[0].value
        for family in text_string_to_metric_families(stats.to_prometheus())
    }
    assert told == {
        **{name: getattr(stats, name) for name in StreamStats.__slots__},
        "stall_share": 0.0625,
        "bytes_per_s": 250,
    }


@pytest.mark.parametrize(
    "options", [{}, {"micro_batches": 4}, {"device": "cpu"}, {"packs_per_step": 2, "tail": "pad"}]
)
def test_reading_ahead_keeps_to_its_bytes(source: str, tmp_path: Path, options: dict[str, Any]) -> None:
    """Whatever a batch is, of its arrays on the device where there is one (positions too); one larger than
    all of them is read all the same."""
    dataset = build_dataset(tmp_path, numbered_packs(64, length=1000), packs_per_shard=20)
    one = next(iter(PackedStream(tmp_path, dataset=dataset, **options)))
    of_one = one.num_bytes if one.upload is None else one.upload.buffer.nbytes
    assert of_one >= (5000 if one.upload is None else 9000)
    for bound, num_held in [(0, 1), (1, 1), (of_one, 1), (3 * of_one, 3), (1 << 30, 6)]:
        for num_taken in (1, 3):
            with PackedStream(
                source, dataset=dataset, prefetch_steps=6, prefetch_bytes=bound, report_s=None, **options
            ) as stream:
                batches = iter(stream)
                for _ in range(num_taken):
                    next(batches)
                assert len(until_full(stream)) == num_held


def test_the_device_is_that_of_the_thread_that_iterates(tmp_path: Path, monkeypatch: Any) -> None:
    """The current one of CUDA is each thread's own: "cuda" in the reader's would be the first one's."""
    from trainer_client import device

    main, threads = threading.current_thread(), []
    current = lambda: 3 if threading.current_thread() is main else 0  # noqa: E731
    monkeypatch.setattr(device.torch.cuda, "current_device", current)
    found = {one: str(device.meant(one)) for one in ("cuda", "cuda:1", "cpu")}
    assert found == {"cuda": "cuda:3", "cuda:1": "cuda:1", "cpu": "cpu"}

    class Uploader(device.Uploader):
        def __init__(self, where: Any) -> None:
            threads.append(threading.current_thread())
            super().__init__(where)

    monkeypatch.setattr(device, "Uploader", Uploader)
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=6)
    assert taken(PackedStream(tmp_path, dataset=dataset, device="cpu")) == [0, 1, 2, 3]
    assert threads == [main]


def test_of_a_mixture_each_stream_keeps_to_its_own_bytes(source: str, tmp_path: Path) -> None:
    datasets = [
        build_dataset(tmp_path, numbered_packs(20, length=length), packs_per_shard=6)
        for length in (1000, 2000)
    ]
    streams = [
        PackedStream(source, dataset=one, prefetch_steps=9, prefetch_bytes=15_000, report_s=None)
        for one in datasets
    ]
    with MixedStream(streams, weights=[1, 1], batches_per_step=2) as mixed:
        batches = iter(mixed)
        next(batches)
        assert [len(until_full(stream)) for stream in streams] == [3, 2]


def test_the_token_is_sent_and_never_shown(tmp_path: Path) -> None:
    from trainer_client import StreamRefused

    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=5)
    with FakeService(tmp_path, token="secret-token") as service:
        assert taken(PackedStream(service.url, dataset=dataset, token="secret-token")) == [0, 1, 2, 3]
        with pytest.raises(StreamRefused, match="401") as caught:
            next(iter(PackedStream(service.url, dataset=dataset, token="other-token")))
        assert "other-token" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"packs": 2.5}, "packs of the state"),
        ({"epoch": True}, "epoch of the state"),
        ({"epoch": "1"}, "epoch of the state"),
        ({"packs": -1}, "packs of the state"),
        ({"version": 99}, "version"),
        ({"skip": None}, "skip of the state must be a list, .* found None"),
        ({"skip": "0-8"}, "skip of the state must be a list, .* found '0-8'"),
        ({"skip": [8]}, "skip of the state: each as in .* found 8"),
        ({"skip": [{"epoch": 0, "packs": [0, float("inf")]}]}, "skip of the state: each as .* found .*inf"),
        ({"spec": "best_fit"}, "spec of the state must be an object, or left out, found 'best_fit'"),
        ({"spec": [1], "dataset": "0" * 32}, r"spec of the state must be an object, .* found \[1\]"),
    ],
)
def test_a_state_of_wrong_values_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=2)
    with PackedStream(tmp_path, dataset=dataset) as stream:
        state = stream.state_dict()
        with pytest.raises(ValueError, match=says):
            stream.load_state_dict({**state, **change})
        with pytest.raises(ValueError, match="found NoneType"):
            stream.load_state_dict(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("dataset", ["", "  ", None])
@pytest.mark.parametrize("source", ["http://127.0.0.1:9", "store"])
def test_a_dataset_must_be_named(tmp_path: Path, source: str, dataset: Any) -> None:
    where = source if source.startswith("http") else tmp_path
    with pytest.raises(ValueError, match="dataset: an id, the beginning of one or a name is required"):
        PackedStream(where, dataset=dataset, timeout_s=1.0)


@pytest.mark.parametrize("packs_per_step", [2, 3])
def test_broken_off_at_a_padded_last_step_while_packing_runs_it_goes_on(
    source: str, tmp_path: Path, packs_per_step: int
) -> None:
    """The step ends behind the last pack, since it came before the end was known: that is no wrong state."""
    packs, dataset = numbered_packs(5), start_dataset(tmp_path, identity="padded")
    commit_partition(tmp_path, dataset, 0, packs, packs_per_shard=5)
    stream = PackedStream(
        source, dataset=dataset, packs_per_step=packs_per_step, tail="pad", epochs=2, report_s=None
    )
    batches = iter(stream)
    seen = list(itertools.islice(batches, 5 // packs_per_step))
    finish_dataset(tmp_path, dataset, 1, packs)
    seen.append(next(batches))
    state = stream.state_dict()
    assert (state["epoch"], state["packs"]) == (1, 0)
    assert len(stream) == 2 * len(seen)
    seen += stream  # iterated again, in the same process
    assert [batch.epoch for batch in seen] == [0] * (len(seen) // 2) + [1] * (len(seen) // 2)
    for epoch in (0, 1):
        ids = [number for batch in seen if batch.epoch == epoch for number in batch.example_ids.tolist()]
        assert sorted(ids) == [0, 1, 2, 3, 4]
