"""The linear programme behind scope="global": whole plans, fewer packs, the same for ever."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.packing import cutting_stock as module
from packer.packing import histogram, plan
from packer.packing.bin_slack import Pattern, packs_of, slack_patterns
from packer.packing.cutting_stock import cutting_stock
from packer.packing.histogram import lower_bound_of, patterns
from packer.packing.values import Int64


def check(found: list[Pattern], counts: Int64, capacity: int) -> int:
    """All pieces are used, none twice, and every pack fits; the number of packs."""
    used = np.zeros_like(counts)
    for repeats, lengths in found:
        assert repeats > 0
        assert 0 < sum(length * copies for length, copies in lengths) <= capacity
        for length, copies in lengths:
            used[length] += repeats * copies
    assert np.array_equal(used, counts)
    return packs_of(found)


def scarce(capacity: int = 4096, kinds: int = 200, n: int = 40_000) -> Int64:
    """A histogram like that of whole documents: few lengths, many over half a pack, few to go beside them."""
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(np.log(capacity / 2), 0.7, kinds).astype(np.int64), 40, capacity)
    return np.bincount(rng.choice(lengths, n), minlength=capacity + 1)


@st.composite
def histograms(draw: st.DrawFn) -> tuple[Int64, int]:
    capacity = draw(st.integers(4, 200))
    lengths = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=25, unique=True))
    counts = np.zeros(capacity + 1, np.int64)
    high = draw(st.sampled_from([1, 30, 1000, 10**6]))
    counts[lengths] = draw(st.lists(st.integers(1, high), min_size=len(lengths), max_size=len(lengths)))
    return counts, capacity


@settings(max_examples=200)
@given(histograms(), st.sampled_from([0, 3 * 10**3, module._WORK]))
def test_the_plan_is_whole_wherever_the_search_ends(case: tuple[Int64, int], work: int) -> None:
    counts, capacity = case
    greedy = slack_patterns(counts, capacity)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_WORK", work)
        num_packs = check(cutting_stock(counts, capacity, greedy), counts, capacity)
    assert num_packs >= lower_bound_of(counts, capacity)


@settings(max_examples=100)
@given(histograms())
def test_it_is_taken_only_where_it_gains(case: tuple[Int64, int]) -> None:
    counts, capacity = case
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(histogram, "_FEWEST_PIECES", 1)
        patched.setattr(histogram, "_NEAR", 1.0)
        found = check(patterns(counts, capacity), counts, capacity)
    assert found <= packs_of(slack_patterns(counts, capacity))


def test_a_plan_of_more_packs_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = scarce()
    alone = [Pattern(int(counts[length]), ((length, 1),)) for length in np.flatnonzero(counts).tolist()]
    asked = []
    monkeypatch.setattr(histogram, "cutting_stock", lambda *case: asked.append(case) or alone)
    assert packs_of(patterns(counts, 4096)) == packs_of(slack_patterns(counts, 4096))
    assert len(asked) == 1


def solve(counts: Int64, capacity: int) -> module._Programme:
    sizes = np.flatnonzero(counts)
    made = module._Programme(sizes, counts[sizes], capacity, slack_patterns(counts, capacity))
    made.run()
    return made


@settings(max_examples=100)
@given(histograms())
def test_the_basis_covers_every_piece_and_no_price_is_too_high(case: tuple[Int64, int]) -> None:
    counts, capacity = case
    solved = solve(counts, capacity)
    basis = np.zeros((len(solved.sizes), len(solved.sizes)))
    for number, column in enumerate(solved.columns):
        for row, places in column:
            basis[row, number] = places
    assert np.allclose(basis @ solved.packs, solved.demand)
    assert np.allclose(solved.prices @ basis, solved.costs)
    assert (solved.packs >= 0).all()


def test_the_programme_of_a_small_case_is_solved() -> None:
    # Five packs of 6 + 4 and 15 of 3 + 3 + 4: 20 full packs, and no other way to close one of them.
    counts = np.bincount([6] * 5 + [4] * 20 + [3] * 30, minlength=11)
    solved = solve(counts, 10)
    total = sum(packs for packs, cost in zip(solved.packs.tolist(), solved.costs, strict=True) if cost)
    assert total == pytest.approx(20)


@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(0, 50)), min_size=1, max_size=4, unique_by=lambda x: x[0]
    ),
    st.integers(12, 30),
)
def test_the_knapsack_is_that_of_trying_everything(items: list[tuple[int, int]], capacity: int) -> None:
    items.sort()
    most = module._knapsack(
        np.array([size for size, _ in items]), np.array([worth for _, worth in items], np.int32), capacity
    )
    for room in range(capacity + 1):
        copies = itertools.product(*(range(room // size + 1) for size, _ in items))
        sums = (
            (
                sum(k * size for k, (size, _) in zip(each, items, strict=True)),
                sum(k * worth for k, (_, worth) in zip(each, items, strict=True)),
            )
            for each in copies
        )
        assert most[room] == max(worth for size, worth in sums if size <= room)


def test_a_place_that_no_piece_of_its_length_is_left_for_takes_the_next_shorter() -> None:
    counts = np.bincount([5, 5, 4, 4, 4, 2], minlength=11)
    found, left = module._dealt([(3, [(5, 2)]), (1, [(4, 1), (3, 2)])], counts)
    assert left.sum() == 0
    # The place of 4 comes first, then those of 5: two 5s, two 4s; both places of 3 share what is left: a 2.
    assert sorted(found) == [Pattern(1, ((4, 1), (2, 1))), Pattern(1, ((4, 2),)), Pattern(1, ((5, 2),))]


def test_documents_take_fewer_packs_than_any_greedy_search_finds() -> None:
    counts = scarce()
    greedy = packs_of(slack_patterns(counts, 4096))
    refined = check(patterns(counts, 4096), counts, 4096)
    assert greedy > lower_bound_of(counts, 4096) * 1.002
    assert refined < greedy * 0.999
    # And as many times the pieces take as many times the packs: fractions are lost once.
    assert packs_of(patterns(counts * 50, 4096)) < refined * 50
    sizes = np.random.default_rng(2).permutation(np.repeat(np.arange(4097), counts))
    assert plan(sizes, 4096, scope="global", seed=0).num_packs == refined


def test_its_patterns_are_the_same_on_every_machine_for_ever() -> None:
    # Written down: a change here gives other bytes for the same spec. Raise spec.ENGINE_VERSION with it.
    found = patterns(scarce(), 4096)
    digest = sum(
        (place + 1) * repeats * length * copies
        for place, (repeats, lengths) in enumerate(found)
        for length, copies in lengths
    )
    assert (packs_of(found), len(found), digest) == GOLDEN


GOLDEN = (21518, 199, 8698513838)
