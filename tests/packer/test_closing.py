"""Filling many packs at once from one pool."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.packing.closing import EVEN, UNEVEN, Closing
from packer.packing.values import Int64
from packer.packing.window import window_best_fit


def rooms_after(rooms: list[int], pool: list[int], part: int = UNEVEN) -> tuple[list[int], list[int]]:
    """What is left of each room, and of the pool; checks that no piece is in two packs."""
    packs, places = Closing(np.array(rooms, np.int64), np.array(pool, np.int64), part).run()
    assert len(np.unique(places)) == len(places)
    left = np.array(rooms, np.int64)
    np.subtract.at(left, packs, np.array(pool, np.int64)[places])
    assert left.min(initial=0) >= 0
    return left.tolist(), [size for place, size in enumerate(pool) if place not in set(places.tolist())]


def test_one_piece_that_fills_a_pack_comes_first() -> None:
    assert rooms_after([7, 5], [2, 3, 5, 7]) == ([0, 0], [2, 3])


def test_two_pieces_that_fill_a_pack_come_before_the_longest_that_fits() -> None:
    # Best fit alone would take 8 and leave 2 open.
    assert rooms_after([10], [4, 6, 8]) == ([0], [8])


def test_two_equal_pieces_fill_a_pack_only_if_there_are_two() -> None:
    assert rooms_after([10], [5, 5]) == ([0], [])
    assert rooms_after([10], [5]) == ([5], [])


def test_every_pair_is_looked_at_in_the_end() -> None:
    # Only 306 and 695 fill the room: far from its half, and 900 is the longest that fits.
    assert rooms_after([1001], [*range(10, 410, 2), 695, 900])[0] == [0]


def test_what_cannot_be_closed_takes_the_longest_that_fits() -> None:
    assert rooms_after([9, 2], [4, 8, 8]) == ([1, 2], [4, 8])


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 60), max_size=40),
    st.lists(st.integers(1, 60), max_size=120).map(sorted),
)
def test_nothing_that_is_left_fits_anywhere(rooms: list[int], pool: list[int]) -> None:
    left, pieces = rooms_after(rooms, pool)
    if left and pieces:
        assert max(left) < min(pieces)


@settings(max_examples=300)
@given(
    st.lists(st.integers(1, 40), max_size=30),
    st.lists(st.integers(1, 30), max_size=60).map(sorted),
    st.sampled_from([EVEN, UNEVEN]),
)
def test_exact_fills_packs_or_leaves_them_as_they_are(rooms: list[int], pool: list[int], part: int) -> None:
    packs, places = Closing(np.array(rooms, np.int64), np.array(pool, np.int64), part).exact()
    assert len(np.unique(places)) == len(places)
    left = np.array(rooms, np.int64)
    np.subtract.at(left, packs, np.array(pool, np.int64)[places])
    assert set(left[packs].tolist()) <= {0}
    open_packs = np.setdiff1d(np.arange(len(rooms)), packs)
    assert left[open_packs].tolist() == np.array(rooms, np.int64)[open_packs].tolist()
    # No pack that is left could have been closed with what is left.
    rest = np.delete(np.array(pool, np.int64), places).tolist()
    sums = {*rest, *(a + b for a, b in itertools.combinations(rest, 2))}
    assert not sums & set(left[open_packs].tolist())


@pytest.mark.parametrize(("part", "pair"), [(EVEN, [8, 9]), (UNEVEN, [5, 12])])
def test_the_longer_of_a_pair_takes_its_part_of_the_room(part: int, pair: list[int]) -> None:
    pool = [2, 5, 8, 9, 12, 15]
    _, places = Closing(np.array([17]), np.array(pool), part).exact()
    assert sorted(pool[place] for place in places) == pair


def test_many_packs_with_one_room_take_pairs_of_one_kind_and_then_of_the_next() -> None:
    rooms, pool = [10] * 5, [3] * 3 + [4] * 2 + [5] + [6] * 2 + [7] * 4
    packs, places = Closing(np.array(rooms), np.array(pool), EVEN).exact()
    pairs = [sorted(pool[i] for i in places[packs == pack]) for pack in range(5)]
    assert pairs == [[4, 6], [4, 6], [3, 7], [3, 7], [3, 7]]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([64, 256, 1024]))
def test_no_piece_waits_for_ever(seed: int, window: int) -> None:
    rng = np.random.default_rng(seed)
    sizes: Int64 = np.where(
        rng.random(6000) < 0.05, rng.integers(400, 1000, 6000), rng.integers(1, 300, 6000)
    )
    order = window_best_fit(sizes, 1000, window).order
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    assert (place - np.arange(len(order))).max() < 6 * window
