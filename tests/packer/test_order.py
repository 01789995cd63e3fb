"""The order of packs and the seeded permutation."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer import order


@given(st.integers(0, 3000), st.integers(-(2**70), 2**70))
def test_permute_is_a_bijection_and_elementwise(n: int, seed: int) -> None:
    everything = np.arange(n)
    whole = order.permute(everything, n, seed)
    assert sorted(whole.tolist()) == list(range(n))
    half = order.permute(everything[n // 2 :], n, seed)
    assert half.tolist() == whole[n // 2 :].tolist()


def test_permute_is_the_same_on_every_machine_for_ever() -> None:
    # Written down: a change here would reorder every shuffled dataset that people resume.
    assert order.permute(np.arange(10), 10, 0).tolist() == GOLDEN_10
    assert order.permute(np.array([0, 10**12 - 1]), 10**12, 42).tolist() == GOLDEN_BIG


def test_permute_spreads_evenly() -> None:
    """Every element is equally likely in every place: chi-squared over 2,000 seeds and 8 places."""
    counts = np.zeros((8, 8))
    for seed in range(2000):
        counts[np.arange(8), order.permute(np.arange(8), 8, seed)] += 1
    expected = 2000 / 8
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 90  # 49 degrees of freedom: p = 0.0003


def test_permute_leaves_no_correlation_between_place_and_value() -> None:
    n = 100_000
    values = order.permute(np.arange(n), n, 7)
    assert abs(np.corrcoef(np.arange(n), values)[0, 1]) < 0.02
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.02


def test_an_epoch_takes_a_few_integers_a_pack_and_a_part_of_one_takes_its_part() -> None:
    """Also of a "step" dataset, balanced; the peak while it is made counts."""
    num_packs = 300_000
    sizes = np.full(num_packs // 3, 3, np.int64)
    costs = np.arange(num_packs)[::-1].copy()
    part = np.arange(5_000, 6_000)
    found = []
    for work in (
        lambda: order.pack_at(part, num_packs=num_packs, epoch=3, shuffle_seed=1),
        lambda: order.pack_at(np.arange(num_packs), num_packs=num_packs, epoch=3, shuffle_seed=1),
        lambda: order.step_order(sizes, epoch=3, shuffle_seed=1, costs=costs),
        lambda: order.EvenDeal(num_packs=num_packs, world_size=8, packs_per_step=4, costs=lambda at: at).take(
            np.arange(1_000), 3
        ),
    ):
        tracemalloc.start()
        work()
        found.append(tracemalloc.get_traced_memory()[1] / 8)
        tracemalloc.stop()
    assert found[0] < 20 * len(part)
    assert found[1] < 16 * num_packs
    assert found[2] < 16 * num_packs
    assert found[3] < 16 * 32 * 1_000  # the packs of the steps asked for


def test_permute_refuses_what_is_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"\[0, 3\)"):
        order.permute(np.array([3]), 3, 0)


@given(
    num_packs=st.integers(0, 60),
    offset=st.integers(0, 60),
    world_size=st.integers(1, 5),
    packs_per_step=st.integers(1, 4),
    tail=st.sampled_from(["drop", "pad"]),
)
def test_ranks_share_out_an_epoch(
    num_packs: int, offset: int, world_size: int, packs_per_step: int, tail: str
) -> None:
    steps = order.num_steps(
        num_packs, world_size=world_size, packs_per_step=packs_per_step, tail=tail, offset=offset
    )
    taken = []
    for step in range(steps):
        for rank in range(world_size):
            first, end = order.rank_positions(
                step, rank=rank, world_size=world_size, packs_per_step=packs_per_step, offset=offset
            )
            taken += range(first, end)
    left = max(0, num_packs - offset)
    assert taken == list(range(offset, offset + len(taken)))
    if tail == "drop":
        assert left - len(taken) < world_size * packs_per_step
        assert len(taken) <= left
    else:
        assert 0 <= len(taken) - left < world_size * packs_per_step


def test_epoch_0_is_commit_order_and_later_ones_differ_by_seed_and_epoch() -> None:
    places = np.arange(50)

    def epoch(number: int, seed: int | None) -> list[int]:
        return order.pack_at(places, num_packs=50, epoch=number, shuffle_seed=seed).tolist()

    assert epoch(0, 3) == list(range(50)) == epoch(4, None)
    seen = {tuple(epoch(e, s)) for e in (1, 2, 3) for s in (0, 1, 2)}
    assert len(seen) == 9
    assert all(sorted(one) == list(range(50)) for one in seen)


# ------------------------------------------------------------------ deals


@given(
    num_packs=st.integers(0, 60),
    offset=st.integers(0, 20),
    world_size=st.integers(1, 5),
    packs_per_step=st.integers(1, 4),
    tail=st.sampled_from(["drop", "pad"]),
    balanced=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_an_even_deal_gives_each_rank_its_share_of_a_step(
    num_packs: int, offset: int, world_size: int, packs_per_step: int, tail: str, balanced: bool, seed: int
) -> None:
    cost = np.random.default_rng(seed).integers(0, 100, 100)
    deal = order.EvenDeal(
        num_packs=num_packs,
        offset=offset,
        world_size=world_size,
        packs_per_step=packs_per_step,
        tail=tail,
        costs=(lambda positions: cost[positions]) if balanced else None,
    )
    steps = np.arange(deal.num_steps)
    ranks = [deal.take(steps, rank) for rank in range(world_size)]
    whole = deal.all_positions(steps)
    size = world_size * packs_per_step
    for step in range(deal.num_steps):
        first = offset + step * size
        due = list(range(first, min(first + size, num_packs)))
        got = [ranks[rank].position[step].tolist() for rank in range(world_size)]
        assert whole[step].tolist() == got
        assert sorted(p for one in got for p in one if p != order.FILLER) == due
        if balanced and world_size > 1 and packs_per_step > 1:
            of_rounds = [sorted(cost[p] if p >= 0 else -1 for p in each) for each in zip(*got, strict=True)]
            # No pack of a round is cheaper than any of the next.
            assert all(one[0] >= two[-1] for one, two in itertools.pairwise(of_rounds) if one[0] >= 0)
        else:
            assert all([p for p in one if p >= 0] == sorted(p for p in one if p >= 0) for one in got)
        for dealt in ranks:
            assert (dealt.begin[step], dealt.stop[step], dealt.after[step]) == (
                first,
                due[-1] + 1,
                due[-1] + 1,
            )
            assert dealt.done[step]
        if not balanced:
            assert [p for one in got for p in one if p >= 0] == due
        elif len(due) == size:
            loads = [sum(cost[one]) for one in got]
            # The bound of dealing in rounds: what one pack can make of a difference.
            assert max(loads) - min(loads) <= max(cost[due])


def test_a_balanced_deal_by_hand() -> None:
    # Dearest first, in rounds of two: 9 8, then 7 to the one with 8 and 6 to the other, then 1 each.
    cost = np.array([1, 9, 7, 8, 6, 1])
    deal = order.EvenDeal(num_packs=6, world_size=2, packs_per_step=3, costs=lambda at: cost[at])
    assert deal.all_positions(np.arange(1)).tolist() == [[[1, 4, 0], [3, 2, 5]]]
    assert order.rank_costs(deal, lambda at: cost[at]).tolist() == [[16, 16]]
    plain = order.EvenDeal(num_packs=6, world_size=2, packs_per_step=3)
    assert order.rank_costs(plain, lambda at: cost[at]).tolist() == [[17, 15]]


@pytest.mark.parametrize(
    ("costs", "share"), [([[1, 1]], 0.0), ([[2, 0]], 0.5), ([[4, 2], [0, 0]], 0.25), ([[3], [9]], 0.0)]
)
def test_the_idle_share(costs: list[list[int]], share: float) -> None:
    assert order.idle_share(np.array(costs)) == share


def test_a_step_order_sorts_packs_within_steps_by_cost() -> None:
    sizes, cost = np.array([3, 1, 2]), np.array([1, 5, 3, 9, 2, 2])
    plain = order.step_order(sizes, epoch=0, shuffle_seed=0)
    assert (plain.packs.tolist(), plain.bounds.tolist()) == ([0, 1, 2, 3, 4, 5], [0, 3, 4, 6])
    assert order.step_order(sizes, epoch=0, shuffle_seed=0, costs=cost).packs.tolist() == [1, 2, 0, 3, 4, 5]
    for epoch in (1, 2):
        which = order.pack_at(np.arange(3), num_packs=3, epoch=epoch, shuffle_seed=0)
        found = order.step_order(sizes, epoch=epoch, shuffle_seed=0)
        groups = [[0, 1, 2], [3], [4, 5]]
        assert found.packs.tolist() == [pack for number in which for pack in groups[number]]
        assert np.diff(found.bounds).tolist() == sizes[which].tolist()


@pytest.mark.parametrize("steps", [[1, 0], [0, 2, 1], [-1, -1]])
def test_steps_that_are_torn_apart_are_refused(steps: list[int]) -> None:
    with pytest.raises(ValueError, match="steps rising"):
        order.step_sizes(np.array(steps))


def test_step_sizes_count_runs() -> None:
    assert order.step_sizes(np.array([0, 0, 2, 5, 5, 5])).tolist() == [2, 1, 3]
    assert order.step_sizes(np.empty(0, np.int64)).tolist() == []


@given(
    sizes=st.lists(st.integers(1, 9), max_size=8),
    world_size=st.integers(1, 5),
    offset=st.integers(0, 60),
    balanced=st.booleans(),
)
def test_a_step_deal_gives_each_pack_once_and_every_rank_as_many_steps(
    sizes: list[int], world_size: int, offset: int, balanced: bool
) -> None:
    made = order.step_order(np.array(sizes, np.int64), epoch=1, shuffle_seed=5)
    deal = order.StepDeal(order=made, offset=offset, world_size=world_size, balanced=balanced)
    steps = np.arange(deal.num_steps)
    ranks = [deal.take(steps, rank) for rank in range(world_size)]
    seen, at = [], offset
    for step in steps:
        stop = int(ranks[0].stop[step])
        due = list(range(at, min(at + world_size, stop)))
        got = [int(dealt.position[step, 0]) for dealt in ranks]
        assert deal.all_positions(steps[step : step + 1])[0, :, 0].tolist() == got
        assert sorted(p for p in got if p >= 0) == due
        if not balanced:
            assert got == due + [order.FILLER] * (world_size - len(due))
        at = due[-1] + 1
        number = int(ranks[0].optimizer_step[step])
        assert (ranks[0].begin[step], stop) == (made.bounds[number], made.bounds[number + 1])
        assert int(ranks[0].after[step]) == at
        assert bool(ranks[0].done[step]) == (at == stop)
        first, end = deal.loops_of(number)
        assert first <= step < end
        seen += due
    assert seen == list(range(offset, sum(sizes)))


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    world_size=st.integers(1, 5),
    balanced=st.booleans(),
)
def test_a_step_deal_from_within_an_optimizer_step_is_the_rest_of_the_whole(
    sizes: list[int], world_size: int, balanced: bool
) -> None:
    made = order.step_order(np.array(sizes, np.int64), epoch=1, shuffle_seed=5)
    whole = order.StepDeal(order=made, world_size=world_size, balanced=balanced)
    steps = np.arange(whole.num_steps)
    dealt = whole.take(steps, 0)
    for step in steps[:-1]:
        first = whole.loops_of(int(dealt.optimizer_step[step]))[0]
        rest = order.StepDeal(
            order=made,
            offset=int(dealt.after[step]),
            world_size=world_size,
            balanced=balanced,
            micro_step=0 if dealt.done[step] else int(step) + 1 - first,
        )
        left = np.arange(rest.num_steps)
        for rank in range(world_size):
            due = whole.take(steps[step + 1 :], rank).position
            assert np.array_equal(rest.take(left, rank).position, due)
            assert np.array_equal(rest.all_positions(left)[:, rank], due)


GOLDEN_10 = [7, 1, 6, 8, 3, 4, 5, 9, 0, 2]
GOLDEN_BIG = [309407425365, 630364682570]
