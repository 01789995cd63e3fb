"""What a token costs: no Python object for each, and no pause between epochs."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
from packs import build_dataset, numbered_packs
from reading_ahead import until_full

import trainer_client.adapters  # noqa: F401  # torch is imported before calls are counted
from packer.shard import Pack
from trainer_client import PackedBatch, PackedStream


def long_packs(num_packs: int, length: int) -> list[Pack]:
    """Packs of two segments of random tokens."""
    rng = np.random.default_rng(0)
    packs = []
    for index in range(num_packs):
        loss_mask = rng.random(length) < 0.5
        loss_mask[[0, length // 2]] = False
        packs.append(
            Pack(
                input_ids=rng.integers(300, 32_000, length, dtype=np.int32),
                loss_mask=loss_mask,
                cu_seqlens=np.array([0, length // 2, length], np.int32),
                example_ids=np.array([2 * index, 2 * index + 1], np.int64),
            )
        )
    return packs


def num_calls(work: Callable[[], None]) -> int:
    """Python and C calls that `work` makes, in all threads it starts."""
    count = 0

    def profile(*_: object) -> None:
        nonlocal count
        count += 1

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return count


def test_f49_calls_do_not_grow_with_the_length_of_packs(source: str, tmp_path: Path) -> None:
    counts = []
    for length in (1_000, 1_000, 64_000):  # the first one warms up what is made once
        dataset = build_dataset(tmp_path, long_packs(8, length), packs_per_shard=4)

        def read(dataset: str = dataset, length: int = length) -> None:
            stream = PackedStream(source, dataset=dataset, packs_per_step=2, prefetch_steps=1)
            for batch in stream:
                assert batch.num_tokens == 2 * length
                batch.for_transformers()

        counts.append(num_calls(read))
    # Waiting and reading in pieces make a few calls more or less; 63,000 tokens a pack must not show.
    assert counts[2] < counts[1] + 8 * 500


def test_f49_memory_is_arrays_and_nothing_else(tmp_path: Path) -> None:
    length = 500_000
    dataset = build_dataset(tmp_path, long_packs(2, length), packs_per_shard=4)
    stream = PackedStream(tmp_path, dataset=dataset, prefetch_steps=1)
    tracemalloc.start()
    try:
        for batch in stream:
            batch.position_ids.sum()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A list of the tokens alone would be 36 bytes a token: 8 for the place, 28 for the number.
    assert peak < 36 * length


def test_f50_the_next_epoch_lies_ready_before_the_present_one_is_over(source: str, tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(20), packs_per_shard=6)
    stream = PackedStream(source, dataset=dataset, epochs=3, prefetch_steps=4)
    batches = iter(stream)
    for epoch in range(2):
        for step in range(18):
            assert (next(batches).step, epoch) == (step, epoch)
        ready = [(batch.epoch, batch.step) for batch in until_full(stream)]
        assert ready == [(epoch, 18), (epoch, 19), (epoch + 1, 0), (epoch + 1, 1)]
        next(batches), next(batches)
    assert len(list(batches)) == 20


def test_batches_that_were_let_go_are_gone(source: str, tmp_path: Path) -> None:
    """At once, without the garbage collector: a cycle would keep arrays of many batches until it runs."""
    dataset = build_dataset(tmp_path, numbered_packs(40), packs_per_shard=6)

    def num_alive() -> int:
        return sum(type(one) is PackedBatch for one in gc.get_objects())

    gc.collect()
    gc.freeze()  # what there is already is looked at no more: it takes long
    gc.disable()
    try:
        before, most = num_alive(), 0
        with PackedStream(source, dataset=dataset, epochs=2, prefetch_steps=4) as stream:
            for batch in stream:
                batch.for_transformers()
                most = max(most, num_alive() - before)
        del batch
        assert num_alive() == before
    finally:
        gc.enable()
        gc.unfreeze()
    assert most <= 4 + 2  # ready, the loop's, and the one that is being made
