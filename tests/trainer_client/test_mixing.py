"""Several streams as one: shares, resumes, ends, schedules."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import build_dataset, build_step_dataset, numbered_packs, random_packs

from trainer_client import MixedStream, PackedDataset, PackedStream, StateMismatch, StreamTimeout


def lengths_of(root: Path, sizes: dict[str, tuple[int, int]]) -> dict[str, str]:
    """Datasets by name: (number of packs, tokens a pack)."""
    return {
        name: build_dataset(root, numbered_packs(num, length=length), packs_per_shard=7, name=name)
        for name, (num, length) in sizes.items()
    }


def mixed(root: Path, datasets: dict[str, str], *, rank: int = 0, world_size: int = 1, **options: Any) -> Any:
    epochs = options.pop("epochs", 1)
    streams = {
        name: PackedStream(root, dataset=one, rank=rank, world_size=world_size, epochs=epochs)
        for name, one in datasets.items()
    }
    return MixedStream(streams, **options)


def told(batch: Any) -> tuple:
    return batch.step, batch.num_items_by_source, batch.example_ids.tolist(), batch.source_ids.tolist()


def test_shares_are_of_trained_tokens_and_never_stray_by_more_than_a_step(tmp_path: Path) -> None:
    datasets = lengths_of(tmp_path, {"short": (900, 3), "long": (300, 41)})  # 2 and 40 trained tokens
    weights = {"short": 0.3, "long": 0.7}
    given = dict.fromkeys(weights, 0)
    for number, batch in enumerate(mixed(tmp_path, datasets, weights=weights)):
        assert batch.step == batch.optimizer_step == number
        assert sum(batch.num_items_by_source.values()) == batch.num_items_in_batch
        for name, items in batch.num_items_by_source.items():
            given[name] += items
        for name, weight in weights.items():
            assert abs(given[name] - weight * sum(given.values())) <= 40
    assert number > 500
    assert given["short"] / sum(given.values()) == pytest.approx(0.3, abs=0.02)


def test_every_rank_draws_from_the_same_sources(tmp_path: Path) -> None:
    datasets = lengths_of(tmp_path, {"a": (40, 5), "b": (60, 9)})
    ranks = [
        [
            (batch.num_items_by_source, batch.num_items_in_batch, batch.source_ids[0])
            for batch in mixed(tmp_path, datasets, rank=rank, world_size=3, weights=[1, 2])
        ]
        for rank in range(3)
    ]
    assert ranks[0] == ranks[1] == ranks[2]
    assert {source for _, _, source in ranks[0]} == {0, 1}


def test_a_step_of_several_batches_mixes_sources(tmp_path: Path) -> None:
    datasets = lengths_of(tmp_path, {"a": (40, 5), "b": (40, 5)})
    stream = mixed(tmp_path, datasets, weights=[1, 3], batches_per_step=4)
    for step, batch in enumerate(itertools.islice(stream, 8)):
        assert batch.num_packs == batch.num_segments == 4
        assert batch.num_items_by_source == {"a": 4, "b": 12}
        assert batch.num_items_in_batch == batch.num_trained == 16
        assert sorted(batch.source_ids.tolist()) == [0, 1, 1, 1]
        assert batch.cu_seqlens.tolist() == [0, 5, 10, 15, 20]
        of_b = batch.example_ids[batch.source_ids == 1].tolist()
        assert of_b == [3 * step, 3 * step + 1, 3 * step + 2]
    assert stream.num_items() == {"a": 32, "b": 96}


@pytest.mark.parametrize(("until", "num_small"), [("first_exhausted", 10), ("all_exhausted", 30)])
def test_the_end_policy(tmp_path: Path, until: Any, num_small: int) -> None:
    datasets = lengths_of(tmp_path, {"small": (10, 4), "large": (30, 4)})
    stream = mixed(tmp_path, datasets, weights=[1, 1], until=until)
    batches = list(stream)
    of_each = [[b.example_ids[0] for b in batches if b.source_ids[0] == source] for source in (0, 1)]
    assert abs(len(of_each[0]) - len(of_each[1])) <= 1
    assert abs(len(of_each[0]) - num_small) <= 1
    for first in range(0, len(of_each[0]) - 9, 10):  # whole epochs, each in its own order
        assert sorted(of_each[0][first : first + 10]) == list(range(10))
    # The next iteration goes on: the large one where it was.
    again = [b.example_ids[0] for b in stream if b.source_ids[0] == 1]
    if until == "first_exhausted":
        assert (of_each[1] + again)[:20] == list(range(20))


def test_weights_that_change_at_a_step(tmp_path: Path) -> None:
    datasets = lengths_of(tmp_path, {"a": (90, 5), "b": (90, 5), "c": (90, 5)})
    stream = mixed(tmp_path, datasets, weights=[1, 1, 0], schedule={20: [0, 1, 1]})
    stream.change_weights({"a": 1, "b": 0, "c": 0}, at_step=40)
    sources = [int(batch.source_ids[0]) for batch in itertools.islice(stream, 60)]
    assert [sources[:20].count(one) for one in range(3)] == [10, 10, 0]
    assert [sources[20:40].count(one) for one in range(3)] == [0, 10, 10]  # c has nothing to catch up
    assert set(sources[40:]) == {0}
    assert stream.weights_at(39) == {"a": 0, "b": 0.5, "c": 0.5}


@pytest.mark.parametrize("batches_per_step", [1, 3])
def test_counts_of_each_source_are_of_all_ranks(tmp_path: Path, batches_per_step: int) -> None:
    datasets = {name: build_dataset(tmp_path, random_packs(24, seed=seed), packs_per_shard=7, name=name)
                for seed, name in enumerate("ab")}  # fmt: skip
    how: dict[str, Any] = {"weights": [2, 1], "batches_per_step": batches_per_step, "world_size": 3}
    ranks = [list(mixed(tmp_path, datasets, rank=rank, **how)) for rank in range(3)]
    for step in zip(*ranks, strict=True):
        found = dict.fromkeys(datasets, 0)
        for batch in step:
            trained = np.add.reduceat(batch.loss_mask, batch.cu_seqlens[:-1], dtype=np.int64)
            for source, name in enumerate(datasets):
                found[name] += int(trained[batch.source_ids == source].sum())
        assert all(batch.num_items_by_source == found for batch in step)
        assert all(batch.num_items_in_batch == sum(found.values()) for batch in step)


def test_the_schedule_is_that_of_the_state(tmp_path: Path, caplog: Any) -> None:
    """Whatever the stream that goes on was made with, and whatever was changed on the way."""
    datasets = lengths_of(tmp_path, {"a": (90, 5), "b": (90, 5)})
    how: dict[str, Any] = {"weights": [3, 1], "schedule": {12: [1, 1], 30: [0, 1]}}

    def first(stream: MixedStream, count: int) -> list[tuple]:
        found = []
        for batch in itertools.islice(stream, count):
            found.append(told(batch))
            if len(found) == 20:
                stream.change_weights([1, 4])
                stream.change_weights({"a": 1, "b": 0}, at_step=40)
        return found

    whole = first(mixed(tmp_path, datasets, **how), 50)
    sources = [by_source[0] for *_, by_source in whole]
    assert [sources[start : start + 10].count(0) for start in (20, 30)] == [2, 0]
    assert set(sources[40:]) == {0}
    stream = mixed(tmp_path, datasets, **how)
    seen = first(stream, 24)
    state = json.loads(json.dumps(stream.state_dict()))
    other = mixed(tmp_path, datasets, weights=[1, 1])
    other.load_state_dict(state)
    assert "weights and schedule are those of the state" in caplog.text
    assert other.state_dict() == state
    assert seen + [told(batch) for batch in itertools.islice(other, 26)] == whole


options = {
    "sizes": st.lists(st.tuples(st.integers(1, 9), st.integers(2, 9)), min_size=2, max_size=3),
    "weights": st.lists(st.integers(1, 5), min_size=3, max_size=3),
    "changed": st.lists(st.integers(1, 5), min_size=3, max_size=3),
    "until": st.sampled_from(["first_exhausted", "all_exhausted"]),
    "batches_per_step": st.integers(1, 3),
    "kills": st.lists(st.integers(0, 6), max_size=4),
}


@settings(max_examples=25)
@given(**options)
def test_a_resumed_run_is_the_undisturbed_one(
    sizes: Any, weights: Any, changed: Any, until: Any, batches_per_step: int, kills: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        datasets = lengths_of(root, {f"source {i}": size for i, size in enumerate(sizes)})
        how: dict[str, Any] = {
            "weights": weights[: len(sizes)], "schedule": {3: changed[: len(sizes)]},
            "until": until, "batches_per_step": batches_per_step, "epochs": 2,
        }  # fmt: skip
        whole = [told(batch) for batch in mixed(root, datasets, **how)]
        state, seen = None, []
        for kill in [*kills, None]:
            stream = mixed(root, datasets, **how)
            if state is not None:
                stream.load_state_dict(json.loads(json.dumps(state)))
                assert stream.state_dict() == state
            for batch in itertools.islice(stream, kill):
                seen.append(told(batch))
                assert batch.state == stream.state_dict()
            state = json.loads(json.dumps(stream.state_dict()))
            stream.close()
        assert seen == whole  # nothing more where it had come to its end before


@pytest.mark.parametrize("until", ["first_exhausted", "all_exhausted"])
def test_an_error_loses_nothing_that_was_drawn_for_the_same_batch(
    tmp_path: Path, until: Any, monkeypatch: Any
) -> None:
    """Whoever goes on behind it, by iterating again or by a state, gets what the undisturbed run got."""
    datasets = lengths_of(tmp_path, {"a": (5, 5), "b": (21, 7)})
    how: dict[str, Any] = {"weights": [1, 2], "batches_per_step": 4, "until": until}
    whole = [told(batch) for batch in mixed(tmp_path, datasets, **how)]
    draw, calls = MixedStream._draw, itertools.count(1)

    def drawing(stream: MixedStream, *args: Any) -> Any:
        if next(calls) % 7 == 0:  # each time with another number drawn before
            raise StreamTimeout("nothing came")
        return draw(stream, *args)

    monkeypatch.setattr(MixedStream, "_draw", drawing)
    stream = mixed(tmp_path, datasets, **how)
    seen, num_errors = [], 0
    while len(seen) < len(whole):
        try:
            seen.extend(told(batch) for batch in stream)
        except StreamTimeout:
            num_errors += 1
            if num_errors % 2:
                state = json.loads(json.dumps(stream.state_dict()))
                stream = mixed(tmp_path, datasets, **how)
                stream.load_state_dict(state)
    assert seen == whole
    assert num_errors >= 2


@pytest.mark.parametrize("until", ["first_exhausted", "all_exhausted"])
def test_a_mixture_at_its_end_gives_nothing_more_when_resumed(
    tmp_path: Path, until: Any, caplog: Any
) -> None:
    datasets = lengths_of(tmp_path, {"small": (4, 4), "large": (9, 4)})
    how: dict[str, Any] = {"weights": [1, 1], "until": until}
    stream = mixed(tmp_path, datasets, **how)
    list(stream)
    state = stream.state_dict()
    resumed = mixed(tmp_path, datasets, **how)
    resumed.load_state_dict(state)
    assert list(resumed) == []
    assert "nothing is left of the mixture of small, large" in caplog.text
    assert [told(batch) for batch in resumed] == [told(batch) for batch in stream]  # iterated once more
    longer = mixed(tmp_path, datasets, **how, epochs=2)
    longer.load_state_dict(state)
    assert list(longer)


@pytest.mark.parametrize("until", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("batches_per_step", [1, 2, 3])
def test_weights_behind_the_end_of_a_mixture_do_not_make_it_go_on(
    tmp_path: Path, until: Any, batches_per_step: int
) -> None:
    """Where the source that came to its end is not drawn from any more from the next step on."""
    datasets = lengths_of(tmp_path, {"small": (4, 4), "large": (9, 4)})
    how: dict[str, Any] = {"weights": [1, 1], "until": until, "batches_per_step": batches_per_step}
    whole = list(mixed(tmp_path, datasets, **how))
    num_steps = len(whole)
    is_short = whole[-1].num_packs < batches_per_step  # else the end is found in drawing the next one
    for to in ([1, 0], [0, 1]):
        how["schedule"] = {num_steps + (not is_short): to}
        stream = mixed(tmp_path, datasets, **how)
        assert len(list(stream)) == num_steps
        resumed = mixed(tmp_path, datasets, **how)
        resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert list(resumed) == []
        assert list(resumed)  # iterated once more


@pytest.mark.parametrize("until", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("batches_per_step", [1, 2, 5])
def test_broken_off_at_the_last_batch_it_goes_on_as_its_state_does(
    tmp_path: Path, batches_per_step: int, until: Any
) -> None:
    """As a PackedStream: nothing is left of that iteration first, then the next epochs."""
    datasets = lengths_of(tmp_path, {"small": (3, 4), "large": (7, 4)})
    how: dict[str, Any] = {"weights": [1, 1], "until": until, "batches_per_step": batches_per_step}
    num_batches = len(list(mixed(tmp_path, datasets, **how)))
    stream, resumed = mixed(tmp_path, datasets, **how), mixed(tmp_path, datasets, **how)
    for batch in itertools.islice(iter(stream), num_batches):
        last = batch
    resumed.load_state_dict(last.state)
    assert list(stream) == list(resumed) == []
    assert stream.state_dict() == resumed.state_dict()
    again = [told(batch) for batch in stream]
    assert again
    assert [told(batch) for batch in resumed] == again


def test_micro_batches_of_a_step_dataset_stay_together(tmp_path: Path) -> None:
    datasets = {
        "steps": build_step_dataset(tmp_path, numbered_packs(20), [3, 2, 5, 4, 1, 5]),
        "plain": build_dataset(tmp_path, numbered_packs(40, length=7), packs_per_shard=7),
    }
    how: dict[str, Any] = {"weights": [1, 1], "world_size": 2}
    whole = list(mixed(tmp_path, datasets, **how))
    assert [batch.optimizer_step for batch in whole] == sorted(batch.optimizer_step for batch in whole)
    for _, group in itertools.groupby(whole, lambda batch: batch.optimizer_step):
        batches = list(group)
        assert len({int(batch.source_ids[0]) for batch in batches}) == 1
        assert [batch.step_done for batch in batches] == [False] * (len(batches) - 1) + [True]
        assert len({batch.num_items_in_batch for batch in batches}) == 1
    for at in range(len(whole)):
        resumed = mixed(tmp_path, datasets, **how)
        resumed.load_state_dict(whole[at].state)
        assert [told(batch) for batch in resumed] == [told(batch) for batch in whole[at + 1 :]]
    with pytest.raises(ValueError, match="batches_per_step: 1"):
        list(mixed(tmp_path, datasets, weights=[1, 1], batches_per_step=2))


def test_wrong_options_and_states_are_named(tmp_path: Path) -> None:
    datasets = lengths_of(tmp_path, {"a": (4, 5), "b": (4, 5)})
    for how, message in [
        ({"weights": [1]}, "2 numbers"),
        ({"weights": [0, 0]}, "not all 0"),
        ({"weights": [1, -1]}, "0 or more"),
        ({"weights": {"a": 1, "x": 1}}, "weights: of a, b"),
        ({"weights": [1, 1], "until": "never"}, "until"),
        ({"weights": [1, 1], "batches_per_step": 0}, "batches_per_step"),
        ({"weights": [1, 1], "batches_per_step": "2"}, "batches_per_step: an int is required, found '2'"),
        ({"weights": [1, 1], "schedule": {"5": [1, 1]}}, "at_step: an int is required, found '5'"),
        ({"weights": [1, 1], "rank": "0", "world_size": 2}, "rank: an int is required, found '0'"),
    ]:
        with pytest.raises(ValueError, match=message):
            mixed(tmp_path, datasets, **how)
    stream = mixed(tmp_path, datasets, weights=[1, 1])
    state = stream.state_dict()
    with pytest.raises(StateMismatch, match=r"sources \['a', 'b'\].*\['a', 'c'\]"):
        stream.load_state_dict({**state, "mixed": ["a", "c"]})
    with pytest.raises(StateMismatch, match="until"):
        stream.load_state_dict({**state, "until": "all_exhausted"})
    of_one = state["sources"][0]
    for other, says in [
        (of_one, f"found that of a PackedStream of dataset {datasets['a']}; load it into such a stream$"),
        ({**state, "version": 99}, "version 1 is required, found version 99$"),
        ({"step": 3}, "found one with step$"),
        (None, "found NoneType$"),
    ]:
        with pytest.raises(ValueError, match=rf"a MixedStream's state of .*{says}"):
            stream.load_state_dict(other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"found that of a MixedStream of \['a', 'b'\]"):
        stream.streams[0].load_state_dict(state)
    one, packed = (kind(tmp_path, dataset=datasets["a"]) for kind in (PackedStream, PackedDataset))
    for streams, says in [
        ({"a": "chat", "b": one}, "PackedStreams are required, found str at 'a'; give PackedStream"),
        (["chat", one], "PackedStreams are required, found str at 0"),
        ({"a": packed, "b": one}, "PackedDataset at 'a'; give its `.stream`"),
        ({"a": one, "b": one}, "found one for both 'a' and 'b'; open the dataset once for each"),
        ([one, one], "found one for both 0 and 1"),
    ]:
        with pytest.raises(ValueError, match=f"streams: .*{says}"):
            MixedStream(streams, weights=[1, 1])  # type: ignore[arg-type]
    two = [PackedStream(tmp_path, dataset=name, world_size=size) for name, size in (("a", 1), ("b", 2))]
    with pytest.raises(ValueError, match=r"one rank and world_size.*\(0, 1\), \(0, 2\)"):
        MixedStream(two, weights=[1, 1])
    assert np.isclose(sum(stream.weights_at(0).values()), 1)
