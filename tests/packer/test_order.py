"""The order of packs and the seeded permutation."""

from __future__ import annotations

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


GOLDEN_10 = [7, 1, 6, 8, 3, 4, 5, 9, 0, 2]
GOLDEN_BIG = [309407425365, 630364682570]
