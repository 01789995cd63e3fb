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


@pytest.mark.parametrize("seed", [101, 107, 110])
def test_full_packs_of_three_save_some(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    sizes = drawn_from(540, seed)
    num_packs = in_blocks(sizes, 4096, 4096).num_packs
    none = np.zeros(blocks._CLASSES, np.int64)
    monkeypatch.setattr(blocks, "_looked_at", lambda *block: (best_fit_decreasing(*block), none))
    assert num_packs < in_blocks(sizes, 4096, 4096).num_packs < plain(sizes, 4096)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.2, 1.2), st.integers(2, 600))
def test_a_block_has_no_more_packs_than_longest_first(seed: int, sigma: float, num_kinds: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.choice(np.clip(rng.lognormal(np.log(500), sigma, num_kinds), 1, 1000).astype(np.int64), 1000)
    assert in_blocks(sizes, 1000, 1000).num_packs <= best_fit_decreasing(sizes, 1000).num_packs


def test_no_more_packs_of_short_pieces_than_the_tokens_ask_for() -> None:
    # Each long piece is a pack, and the short ones fit beside them: none may begin a pack of their own.
    rng = np.random.default_rng(3)
    sizes = np.where(rng.random(6000) < 0.6, rng.integers(600, 630, 6000), rng.integers(300, 370, 6000))
    num_long = int(np.count_nonzero(2 * sizes > 1000))
    layout = blocks._threes_first(sizes, 1000, np.full(blocks._CLASSES, blocks._ONE))
    assert num_long * 1000 > sizes.sum()
    assert layout.num_packs == best_fit_decreasing(sizes, 1000).num_packs


def test_the_share_that_is_left_over_is_picked_of_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.array([340] * 400 + [400] * 400 + [360] * 100 + [900] * 100)
    share = np.zeros(blocks._CLASSES, np.int64)
    share[blocks._class(np.array([340, 400]), 1024)] = blocks._ONE // 2, blocks._ONE // 4
    picked: list[Int64] = []

    def seen(chosen: Int64, sizes: Int64, *_: int) -> Layout:
        picked.append(sizes[chosen])
        return Layout(chosen[:0], np.zeros(1, np.int64))

    monkeypatch.setattr(blocks, "_threes", seen)
    blocks._threes_first(sizes, 1024, share)
    assert np.bincount(picked[0])[[340, 360, 400]].tolist() == [200, 0, 100]


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
