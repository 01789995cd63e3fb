"""Best-fit decreasing in blocks, where short pieces are scarce; and what the packing engines share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.packing import blocks
from packer.packing.blocks import in_blocks
from packer.packing.decreasing import best_fit_decreasing
from packer.packing.in_order import next_fit
from packer.packing.shuffle import in_stream_order, layout_of
from packer.packing.values import Int64, Layout, joined


def packs_of(layout: Layout) -> list[list[int]]:
    return (
        [pack.tolist() for pack in np.split(layout.order, layout.offsets[1:-1])] if layout.num_packs else []
    )


def drawn_from(num_kinds: int, seed: int, n: int = 24_000) -> Int64:
    """Sizes of few kinds as the documents of a small collection have: most over half of a pack of 4,096."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice(rng.lognormal(np.log(2600), 0.75, num_kinds).astype(np.int64), n)
    sizes = sizes[(sizes > 20) & (sizes < 4096)]
    return sizes[sizes <= 4096 - sizes.min()]


def plain(sizes: Int64, block: int) -> int:
    parts = np.split(sizes, range(block, len(sizes), block))
    return sum(best_fit_decreasing(part, 4096).num_packs for part in parts)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(20, 3000), st.sampled_from([1, 16, 100, 3000]), st.integers(0, 1500)
)
def test_blocks_of_any_size_pack_each_piece_once(seed: int, capacity: int, block: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(rng.integers(1, capacity + 1), capacity + 1, n)
    layout = in_blocks(sizes, capacity, block)
    assert np.array_equal(np.sort(layout.order), np.arange(n))
    assert all(0 < sizes[pack].sum() <= capacity for pack in packs_of(layout))


@pytest.mark.parametrize("seed", [101, 107])
def test_packs_that_begin_with_what_was_left_save_some(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    sizes = drawn_from(540, seed)
    num_packs = in_blocks(sizes, 4096, 4096).num_packs
    monkeypatch.setattr(
        blocks, "_begun_with_waiting", lambda sizes, *_: Layout(sizes[:0], np.zeros(1, np.int64))
    )
    assert num_packs < in_blocks(sizes, 4096, 4096).num_packs < plain(sizes, 4096)


def test_where_they_would_cost_some_they_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(104)
    sizes = rng.choice(rng.lognormal(np.log(2200), 0.5, 540).astype(np.int64), 24_000)
    sizes = sizes[sizes < 4096]
    always = blocks._in_blocks(sizes, 4096, 4096, begun=True).num_packs
    assert in_blocks(sizes, 4096, 4096).num_packs < always - 20


def test_no_more_packs_of_short_pieces_than_the_tokens_ask_for() -> None:
    # Each long piece is a pack, and the short ones fit beside them: none may begin a pack of their own.
    rng = np.random.default_rng(3)
    sizes = np.where(rng.random(6000) < 0.6, rng.integers(600, 990, 6000), rng.integers(30, 200, 6000))
    num_long = int(np.count_nonzero(2 * sizes > 1000))
    for begun in (False, True):
        assert blocks._in_blocks(sizes, 1000, 1024, begun=begun).num_packs <= num_long + 12


def test_a_piece_waits_for_one_block_at_most() -> None:
    sizes, block = drawn_from(540, 101), 1024
    layout = in_blocks(sizes, 4096, block)
    span = [(max(pack) // block) - (min(pack) // block) for pack in packs_of(layout)]
    assert max(span) == 1


@given(st.lists(st.integers(1, 60), max_size=80), st.integers(1, 50), st.integers(0, 40))
def test_next_fit_can_be_stopped(sizes: list[int], capacity: int, num_packs: int) -> None:
    array = np.array(sizes, np.int64)
    whole = next_fit(array, capacity).tolist()
    assert next_fit(array, capacity, num_packs).tolist() == whole[: num_packs + 1]


@given(st.lists(st.integers(0, 9), max_size=30))
def test_a_layout_is_made_of_the_packs_of_pieces(pack: list[int]) -> None:
    piece = np.arange(len(pack))[::-1] + 5
    expected = [[p for p, k in zip(piece.tolist(), pack, strict=True) if k == number] for number in range(10)]
    assert packs_of(layout_of(np.array(pack, np.int64), piece)) == [pieces for pieces in expected if pieces]


@given(st.lists(st.integers(0, 9), max_size=30), st.randoms(use_true_random=False))
def test_stream_order_is_by_the_oldest_piece_and_by_age(pack: list[int], random: object) -> None:
    layout = layout_of(np.array(pack, np.int64), np.arange(len(pack)))
    packs = packs_of(layout)
    random.shuffle(packs)  # type: ignore[attr-defined]
    mixed = joined([Layout(np.array(pieces[::-1]), np.array([0, len(pieces)])) for pieces in packs])
    assert packs_of(in_stream_order(mixed)) == sorted(sorted(pieces) for pieces in packs)


def test_layouts_joined_and_of_other_pieces() -> None:
    one, none = layout_of(np.array([0, 1, 0]), np.arange(3)), joined([])
    assert packs_of(one.of(np.array([7, 5, 9]))) == [[7, 9], [5]]
    assert packs_of(joined([one, none, one])) == [[0, 2], [1], [0, 2], [1]]
    assert none.num_packs == 0
