"""What holds for every plan, whatever the lengths and options."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.packing import Capacity, PackingError, PackPlan, estimate, lower_bound, plan

STRATEGIES = ["best_fit", "sequential", "wrapped", "minibatch", "step", "padded"]

lengths_lists = st.lists(st.integers(0, 60), max_size=80)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    strategy = draw(st.sampled_from(STRATEGIES))
    numbers = st.integers(16, 48)
    several = strategy in ("best_fit", "sequential", "padded")
    chosen: dict[str, Any] = {
        "max_tokens": draw(numbers | st.lists(numbers, min_size=1, max_size=4) if several else numbers),
        "strategy": strategy,
        "seed": draw(st.none() | st.integers(0, 2**63)),
        "overlong": draw(st.sampled_from(["truncate", "split", "drop"])),
        "truncate_side": draw(st.sampled_from(["left", "right"])),
        "min_piece": draw(st.integers(1, 4)),
        "segment_multiple": draw(st.sampled_from([1, 1, 2, 3])),
        "pack_multiple": draw(st.sampled_from([1, 1, 4, 5])),
        "minibatch_size": draw(st.integers(1, 4)),
        "step_size": draw(st.integers(1, 20)),
    }
    if strategy == "best_fit":
        chosen["scope"] = draw(st.sampled_from(["window", "global"]))
        chosen["balance"] = draw(st.sampled_from(["none", "attention"]))
    if strategy == "minibatch" and chosen["overlong"] == "split":
        chosen["overlong"] = "drop"  # split may be refused; tested by itself
    return chosen


def numbers_of(chosen: dict[str, Any]) -> list[int]:
    """max_tokens, rising."""
    return sorted(chosen["max_tokens"]) if isinstance(chosen["max_tokens"], list) else [chosen["max_tokens"]]


def capacity_of(chosen: dict[str, Any], max_tokens: int | None = None) -> Capacity:
    """Of one of the capacities; of the largest if none is named."""
    multiples = {name: chosen[name] for name in ("segment_multiple", "pack_multiple")}
    return Capacity(max_tokens=max_tokens or numbers_of(chosen)[-1], **multiples)


def pack_of_segment(planned: PackPlan) -> np.ndarray[Any, Any]:
    return np.repeat(np.arange(planned.num_packs), np.diff(planned.pack_offsets))


@settings(max_examples=400)
@given(lengths_lists, options())
def test_every_token_is_in_one_segment_or_counted(lengths: list[int], chosen: dict[str, Any]) -> None:
    planned = plan(lengths, **chosen)
    seen = [np.zeros(length, int) for length in lengths]
    for example, start, length in zip(planned.example, planned.start, planned.length, strict=True):
        assert 0 <= start < start + length <= lengths[example]
        seen[example][start : start + length] += 1
    assert all((tokens <= 1).all() for tokens in seen)
    lost = [int((tokens == 0).sum()) for tokens in seen]
    assert planned.tokens_dropped == sum(lost) == sum(lengths) - planned.num_tokens
    whole = [k for k, length in enumerate(lengths) if length and lost[k] == length]
    part = [k for k, length in enumerate(lengths) if 0 < lost[k] < length]
    assert planned.dropped.tolist() == whole
    assert planned.truncated.tolist() == part
    counts = np.bincount(planned.example, minlength=len(lengths))
    assert planned.split.tolist() == np.flatnonzero(counts > 1).tolist()
    if chosen["overlong"] == "split":
        assert not planned.tokens_dropped


@settings(max_examples=400)
@given(lengths_lists, options())
def test_packs_are_never_empty_and_never_too_long(lengths: list[int], chosen: dict[str, Any]) -> None:
    planned = plan(lengths, **chosen)
    capacity = capacity_of(chosen)
    offsets = planned.pack_offsets
    assert offsets[0] == 0
    assert offsets[-1] == planned.num_segments
    assert (np.diff(offsets) > 0).all()
    assert (planned.length > 0).all()
    taken = np.bincount(
        pack_of_segment(planned), weights=capacity.padded(planned.length), minlength=planned.num_packs
    )
    padded = -(-taken // chosen["pack_multiple"]) * chosen["pack_multiple"]
    assert (padded <= planned.pack_capacity).all()
    for array in (planned.example, planned.start, planned.length, offsets, planned.pack_capacity):
        assert array.dtype == np.int64


@settings(max_examples=300)
@given(lengths_lists, options())
def test_each_segment_is_in_the_smallest_pack_that_holds_it(
    lengths: list[int], chosen: dict[str, Any]
) -> None:
    planned = plan(lengths, **chosen)
    capacities = [capacity_of(chosen, number) for number in numbers_of(chosen)]
    of_segment = np.repeat(planned.pack_capacity, np.diff(planned.pack_offsets)).tolist()
    for length, found in zip(planned.length.tolist(), of_segment, strict=True):
        assert found == next(c.max_tokens for c in capacities if length <= c.segment)
    # So a pack's own capacity can be told from its tokens, padding counted: readers do.
    taken = np.bincount(
        pack_of_segment(planned), weights=capacities[0].padded(planned.length), minlength=planned.num_packs
    )
    padded = -(-taken // chosen["pack_multiple"]) * chosen["pack_multiple"]
    if len(capacities) > 1:
        for tokens, found in zip(padded.tolist(), planned.pack_capacity.tolist(), strict=True):
            assert found == next(c.max_tokens for c in capacities if tokens <= c.max_tokens)


@given(lengths_lists, options())
def test_the_same_input_gives_the_same_plan(lengths: list[int], chosen: dict[str, Any]) -> None:
    one, two = plan(lengths, **chosen), plan(np.array(lengths, np.int32), **chosen)
    for name in ("example", "start", "length", "pack_offsets"):
        assert np.array_equal(getattr(one, name), getattr(two, name))


@given(lengths_lists, options())
def test_a_seed_changes_the_order_alone(lengths: list[int], chosen: dict[str, Any]) -> None:
    def content(seed: int | None) -> list[list[int]]:
        planned = plan(lengths, **{**chosen, "seed": seed, "scope": "window"})
        pack = pack_of_segment(planned)
        return sorted(sorted(planned.length[pack == p].tolist()) for p in range(planned.num_packs))

    assert content(None) == content(1) == content(2)


@given(lengths_lists, options())
def test_split_pieces_are_full_but_the_last(lengths: list[int], chosen: dict[str, Any]) -> None:
    if chosen["strategy"] in ("wrapped", "minibatch"):
        return
    planned = plan(lengths, **{**chosen, "overlong": "split"})
    longest = capacity_of(chosen).segment
    for example in planned.split:
        here = planned.example == example
        pieces = planned.length[here][np.argsort(planned.start[here])]
        assert pieces.min() >= chosen["min_piece"]
        assert (pieces[:-2] == longest).all()
        assert pieces[-2] == longest or pieces[-1] == chosen["min_piece"]


@given(lengths_lists, st.integers(16, 48))
def test_sequential_is_the_textbook_next_fit(lengths: list[int], max_tokens: int) -> None:
    expected: list[list[int]] = []
    room = 0
    for example, length in enumerate(min(x, max_tokens) for x in lengths):
        if length > room:
            expected.append([])
            room = max_tokens
        if length:
            expected[-1].append(example)
            room -= length
    planned = plan(lengths, max_tokens, strategy="sequential")
    found = [a.tolist() for a in np.split(planned.example, planned.pack_offsets[1:-1])]
    assert [pack for pack in found if pack] == expected


@given(lengths_lists, st.integers(1, 48))
def test_wrapped_is_one_stream_cut_at_the_capacity(lengths: list[int], max_tokens: int) -> None:
    stream = [(example, token) for example, length in enumerate(lengths) for token in range(length)]
    planned = plan(lengths, max_tokens, strategy="wrapped")
    edges = planned.pack_offsets.tolist()
    for number, (a, b) in enumerate(itertools.pairwise(edges)):
        laid = [
            (int(planned.example[s]), int(planned.start[s]) + t)
            for s in range(a, b)
            for t in range(planned.length[s])
        ]
        assert laid == stream[number * max_tokens : (number + 1) * max_tokens]
    assert planned.num_packs == -(-len(stream) // max_tokens)


@given(st.lists(st.integers(1, 12), max_size=60), st.integers(1, 5), st.none() | st.integers(0, 9))
def test_minibatch_makes_as_many_steps_as_padding(lengths: list[int], size: int, seed: int | None) -> None:
    planned = plan(lengths, 60, strategy="minibatch", minibatch_size=size, seed=seed)
    assert planned.num_packs == -(-len(lengths) // size)
    for number, pack in enumerate(np.split(planned.example, planned.pack_offsets[1:-1])):
        assert pack.tolist() == list(range(len(lengths)))[number * size : (number + 1) * size]
    assert planned.tokens_dropped == 0


@given(lengths_lists, options())
def test_a_step_is_planned_as_if_it_were_alone(lengths: list[int], chosen: dict[str, Any]) -> None:
    chosen = {**chosen, "strategy": "step", "scope": "window", "balance": "none", "seed": None}
    chosen["max_tokens"] = numbers_of(chosen)[-1]
    size = chosen["step_size"]
    planned = plan(lengths, **chosen)
    assert planned.pack_step is not None
    assert (np.diff(planned.pack_step) >= 0).all()
    step_of_segment = planned.pack_step[pack_of_segment(planned)]
    assert (step_of_segment == planned.example // size).all()
    for number in range(-(-len(lengths) // size)):
        alone = plan(lengths[number * size : (number + 1) * size], **chosen)
        assert alone.num_packs == int((planned.pack_step == number).sum())


@given(lengths_lists, st.integers(1, 4), st.sampled_from(["minibatch", "step"]))
def test_partitions_cut_at_the_multiple_change_nothing(lengths: list[int], size: int, strategy: str) -> None:
    def contents(part: list[int], first: int) -> list[list[int]]:
        planned = plan(part, 48, strategy=strategy, minibatch_size=size, step_size=size)
        return [sorted((a + first).tolist()) for a in np.split(planned.example, planned.pack_offsets[1:-1])]

    cut = len(lengths) // (2 * size) * size
    parts = contents(lengths[:cut], 0) + contents(lengths[cut:], cut)
    assert [p for p in parts if p] == [p for p in contents(lengths, 0) if p]


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 4))
def test_a_minibatch_is_cut_no_more_than_it_must(lengths: list[int], size: int) -> None:
    planned = plan(lengths, 48, strategy="minibatch", minibatch_size=size)
    kept = np.bincount(planned.example, weights=planned.length, minlength=len(lengths)).astype(int)
    for first in range(0, len(lengths), size):
        before = np.minimum(lengths[first : first + size], 48)
        after = kept[first : first + size]
        if before.sum() <= 48:
            assert after.tolist() == before.tolist()
        else:
            level = after.max()
            assert after.tolist() == np.minimum(before, level).tolist()
            assert np.minimum(before, level + 1).sum() > 48


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(2, 4))
def test_minibatch_refuses_to_split(lengths: list[int], size: int) -> None:
    groups = [sum(lengths[a : a + size]) for a in range(0, len(lengths), size)]
    if max(groups, default=0) > 48:
        with pytest.raises(PackingError, match="raise max_tokens to"):
            plan(lengths, 48, strategy="minibatch", minibatch_size=size, overlong="split")
    else:
        assert plan(
            lengths, 48, strategy="minibatch", minibatch_size=size, overlong="split"
        ).num_tokens == sum(lengths)


@given(
    lengths_lists,
    st.integers(16, 48) | st.lists(st.integers(16, 48), min_size=1, max_size=3),
    st.sampled_from([1, 2, 5]),
)
def test_an_estimate_is_what_the_plans_have(
    lengths: list[int], max_tokens: int | list[int], multiple: int
) -> None:
    estimated = estimate(lengths, max_tokens, minibatch_size=2, segment_multiple=multiple)
    rows = {row.name: row for row in estimated.rows}
    assert estimated.lower_bound_packs == lower_bound(lengths, max_tokens, segment_multiple=multiple)
    assert estimated.volume_packs <= estimated.lower_bound_packs
    for name in ("best_fit", "sequential", "padded"):
        planned = plan(lengths, max_tokens, strategy=name, segment_multiple=multiple)
        row = rows[name]
        assert (row.num_packs, row.tokens_packed, row.tokens_dropped) == (
            planned.num_packs,
            planned.num_tokens,
            planned.tokens_dropped,
        )
        assert row.num_packs >= estimated.lower_bound_packs
        assert row.fill == pytest.approx(planned.num_tokens / max(1, planned.pack_capacity.sum()))
    whole = plan(lengths, max_tokens, scope="global", segment_multiple=multiple)
    row = rows["best_fit (global)"]
    assert row.num_packs == whole.num_packs >= estimated.lower_bound_packs
    assert row.fill == pytest.approx(whole.num_tokens / max(1, whole.pack_capacity.sum()))
    refused = isinstance(max_tokens, list) and len(set(max_tokens)) > 1
    for name in ("wrapped", "minibatch", "step"):
        assert ("must be one number" in (rows[name].problem or "")) == refused
    assert rows["padding"].tokens_computed >= rows["padding"].tokens_packed
