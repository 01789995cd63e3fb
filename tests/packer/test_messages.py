"""Shard files that are written by hand are those that Arrow writes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packs import random_packs

from packer import shard
from packer.shard import Pack, Packs, encode, messages


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    encode._frame.cache_clear()
    yield
    encode._frame.cache_clear()


@given(st.integers(1, 12), st.integers(0, 999), st.text(max_size=40))
def test_every_byte_is_as_arrow_writes_it(num_packs: int, seed: int, dataset: str) -> None:
    packs = Packs.of(random_packs(num_packs, seed=seed))
    assert encode._frame(dataset) is not None
    by_hand, index = shard.encode_packs(packs, dataset)
    by_arrow, bounds = encode.encode_by_arrow(packs, dataset)
    assert bytes(by_hand) == bytes(by_arrow)
    ends = index["offset"] + index["header_bytes"] + index["body_bytes"]
    assert list(zip(index["offset"].tolist(), ends.tolist(), strict=True)) == bounds


@pytest.mark.parametrize("num_tokens", [1, 2, 8192, 100_000])
@pytest.mark.parametrize("num_segments", [1, 2])
def test_sizes_at_the_edges(num_tokens: int, num_segments: int) -> None:
    cu = [0, num_tokens] if num_segments == 1 or num_tokens == 1 else [0, 1, num_tokens]
    pack = Pack(
        input_ids=np.full(num_tokens, 2**31 - 1, np.int32),
        loss_mask=np.zeros(num_tokens, np.bool_),
        cu_seqlens=np.array(cu, np.int32),
        example_ids=np.array([2**62, -1], np.int64)[: len(cu) - 1],
    )
    packs = Packs.of([pack] * 3)
    assert bytes(shard.encode_packs(packs, "d")[0]) == bytes(encode.encode_by_arrow(packs, "d")[0])
    assert list(shard.read_packs(shard.encode_packs(packs, "d")[0])) == [pack] * 3


@pytest.mark.parametrize("what", ["other bytes", "an error"])
def test_where_arrow_writes_otherwise_it_writes_itself(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = Packs.of(random_packs(3))
    wanted = bytes(shard.encode_packs(packs, "d")[0])
    encode._frame.cache_clear()

    def write(packs: Packs, frame: messages.Frame) -> tuple[memoryview, messages.Bounds]:
        if what == "an error":
            raise shard.ShardError("a list of 11 is required in the header of a record batch, found 12")
        return memoryview(b"other"), [(0, 5)]

    monkeypatch.setattr(messages, "write", write)
    data, index = shard.encode_packs(packs, "d")
    assert bytes(data) == wanted
    assert index["offset"][0] > 0
