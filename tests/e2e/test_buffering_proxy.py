"""A proxy between service and trainer that holds answers back: the run is the undisturbed one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from buffering_proxy import BufferingProxy
from packs import build_dataset, commit_partition, finish_dataset, numbered_packs, start_dataset
from serving import Server, running

from trainer_client import PackedBatch, PackedStream

NUM_PACKS = 150
EPOCHS = 2
PACK_BYTES = 2300  # of a pack of 300 tokens on its way, about


def told(batch: PackedBatch) -> tuple[Any, ...]:
    return batch.epoch, batch.step, batch.example_ids.tolist(), batch.input_ids.tolist(), batch.state


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path) as server:
        yield server


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    return build_dataset(tmp_path, numbered_packs(NUM_PACKS, length=300), packs_per_shard=40)


def run(
    url: str, dataset: str, *, epochs: int = EPOCHS, **options: Any
) -> tuple[PackedStream, list[tuple[Any, ...]]]:
    stream = PackedStream(url, dataset=dataset, epochs=epochs, packs_per_step=2, **options)
    return stream, [told(batch) for batch in stream]


@pytest.mark.parametrize("piece_bytes", [None, 5_000, 1 << 20], ids=["whole", "small-pieces", "large-pieces"])
def test_what_a_proxy_holds_back_is_what_was_sent(
    server: Server, dataset: str, piece_bytes: int | None
) -> None:
    with BufferingProxy(server.port, piece_bytes=piece_bytes) as proxy:
        stream, through = run(proxy.url, dataset)
    assert through == run(server.url, dataset)[1]
    assert len(through) == EPOCHS * NUM_PACKS // 2
    assert stream.stats().num_retries == 0


def test_a_proxy_that_drops_what_it_held_loses_and_doubles_nothing(server: Server, dataset: str) -> None:
    """In the schema, before the first byte, in the middle of a pack, and before the end mark."""
    drops = [0.5, 0.0, None, 0.001, 0.93, 0.31, None, 0.9999, 0.5, None, 0.77]
    with BufferingProxy(server.port, drops=list(drops)) as proxy:
        stream, through = run(proxy.url, dataset)
    assert through == run(server.url, dataset)[1]
    assert (
        proxy.num_dropped == stream.stats().num_retries == len([drop for drop in drops if drop is not None])
    )


def test_a_proxy_that_can_hold_little_is_asked_for_little(server: Server, dataset: str) -> None:
    """An epoch, and the first answer, are more than it takes."""
    most_bytes = 20 * PACK_BYTES
    with BufferingProxy(server.port, most_bytes=most_bytes) as proxy:
        stream, through = run(proxy.url, dataset)
    assert through == run(server.url, dataset)[1]
    assert proxy.num_refused == stream.stats().num_retries > 0


def test_slow_bytes_that_are_held_back_are_no_silence(server: Server, dataset: str) -> None:
    """An epoch takes longer than timeout_s; what is asked for grows only while it comes soon."""
    bytes_a_second = NUM_PACKS * PACK_BYTES / 1.5
    with BufferingProxy(server.port, bytes_a_second=bytes_a_second) as proxy:
        stream, through = run(proxy.url, dataset, epochs=1, timeout_s=1.0)
    assert through == run(server.url, dataset, epochs=1)[1]
    # The first asks for too much; few others, where the machine stands still.
    assert 0 < stream.stats().num_retries < proxy.num_streams / 4
    assert proxy.most_held_bytes < NUM_PACKS * PACK_BYTES / 2


def test_a_step_that_takes_longer_than_a_silence_comes_in_the_end(server: Server, tmp_path: Path) -> None:
    """Of half a second to come, where an answer is given up after a quarter at first."""
    dataset = build_dataset(tmp_path, numbered_packs(6, length=2000), packs_per_shard=40)
    with BufferingProxy(server.port, bytes_a_second=40_000) as proxy:
        stream, through = run(proxy.url, dataset, epochs=1, timeout_s=3)
    assert through == run(server.url, dataset, epochs=1)[1]
    # What was learned of the first step holds for the others: else each were given up as often.
    assert 0 < stream.stats().num_retries <= 5


@pytest.mark.parametrize("piece_bytes", [None, 5_000, 1 << 20], ids=["whole", "small-pieces", "large-pieces"])
def test_a_dataset_is_followed_through_a_proxy_while_it_is_packed(
    server: Server, tmp_path: Path, piece_bytes: int | None
) -> None:
    """Each partition is packed only when all of the one before was trained on: nothing may be held back until
    there is more. And packing takes longer than timeout_s."""
    packs = numbered_packs(12, length=300)
    dataset = start_dataset(tmp_path, identity="slow")
    commit_partition(tmp_path, dataset, 0, packs[:2], packs_per_shard=3)
    through = []
    with BufferingProxy(server.port, piece_bytes=piece_bytes) as proxy:
        stream = PackedStream(proxy.url, dataset=dataset, epochs=EPOCHS, packs_per_step=2, timeout_s=0.5)
        for batch in stream:
            through.append(told(batch))
            done = len(through)
            if done < 6:
                part = packs[2 * done : 2 * done + 2]
                commit_partition(tmp_path, dataset, done, part, packs_per_shard=3)
            elif done == 6:
                finish_dataset(tmp_path, dataset, 6, packs)
    # Of a dataset that is packed, a state tells the end of an epoch as the start of the next one.
    assert [one[:4] for one in through] == [one[:4] for one in run(server.url, dataset)[1]]
    assert len(through) == EPOCHS * 6
