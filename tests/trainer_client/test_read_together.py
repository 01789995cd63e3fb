"""A folder that grows while two threads look at it, or one that interrupts itself."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from packs import commit_partition, finish_dataset, numbered_packs, start_dataset

from packer.manifest import step_sizes_of
from trainer_client.cursor import Split
from trainer_client.folder import FolderTransport
from trainer_client.prefetch import Meter, Prefetcher
from trainer_client.transport import Request

PACKS = numbered_packs(12)


class Growing:
    """Ten packs of twelve; the others and the end come when they are asked for."""

    def __init__(self, root: Path) -> None:
        self.root, self.dataset = root, start_dataset(root, identity="growing")
        commit_partition(root, self.dataset, 0, PACKS[:10], packs_per_shard=50)
        self.transport = FolderTransport(root, self.dataset, timeout_s=3)
        self.transport.layout()

    def grow(self) -> None:
        commit_partition(self.root, self.dataset, 1, PACKS[10:], packs_per_shard=50)
        finish_dataset(self.root, self.dataset, 2, PACKS)


@pytest.fixture
def growing(tmp_path: Path) -> Growing:
    return Growing(tmp_path)


@pytest.mark.parametrize("ask", ["layout", "idle_shares"])
def test_what_the_training_thread_saw_first_the_reader_sees_too(
    growing: Growing, ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked for a state, or the length, while the reader waited for a commit."""
    transport, waits = growing.transport, []

    def wait(timeout_s: float) -> bool:
        if not waits:
            growing.grow()
            transport.layout() if ask == "layout" else transport.idle_shares(Split(), 0, 9)
        waits.append(timeout_s)
        return False

    monkeypatch.setattr(transport._closed, "wait", wait)
    found = [received.pack.example_ids[0] for received in transport.packs(Request(split=Split(), epoch=0))]
    assert found == list(range(12))
    assert len(waits) == 1


def test_packs_that_come_while_an_epoch_is_looked_at_are_not_taken_for_none(
    growing: Growing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last step were filled up, and they never given."""

    def meanwhile(rows: Any, dataset: str) -> Any:
        if growing.transport._manifest.finished is None:
            growing.grow()
            growing.transport._manifest.refresh()
        return step_sizes_of(rows, dataset)

    monkeypatch.setattr("trainer_client.folder.step_sizes_of", meanwhile)
    request = Request(split=Split(world_size=8, tail="pad"), epoch=0)
    assert growing.transport._epoch(request).num_steps == 1  # the ten that were seen, and no end
    assert growing.transport._epoch(request).num_steps == 2
    dealt = [
        growing.transport.packs(Request(split=Split(rank=rank, world_size=8, tail="pad"), epoch=0))
        for rank in range(8)
    ]
    found = [received for packs in dealt for received in packs if not received.stamp.padding]
    assert sorted(int(received.pack.example_ids[0]) for received in found) == list(range(12))


def in_time(call: Any) -> Any:
    """What `call` gives, in a thread; fails where it never does."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it waits for itself"
    return found[0]


def test_a_signal_within_reading_on_may_ask_for_a_state(growing: Growing) -> None:
    def interrupted() -> int | None:
        with growing.transport._reading as is_mine:
            assert is_mine
            growing.grow()
            return growing.transport.layout().num_packs  # what is known: reading on is not to be done twice

    assert in_time(interrupted) is None
    assert growing.transport.layout().num_packs == 12


@pytest.mark.parametrize("num_ready", [0, 1])
def test_a_signal_within_taking_a_batch_may_close_the_stream(num_ready: int) -> None:
    cancelled = threading.Event()

    def source() -> Any:
        yield from range(num_ready)
        cancelled.wait(60)

    items = Prefetcher(
        source, size=lambda _: 1, cancel=cancelled.set, max_items=4, max_bytes=1 << 20, meter=Meter()
    )
    buffer = items._buffer

    def interrupted() -> bool:
        with buffer._lock:  # as `get` holds it
            items.close()
            return buffer._taken(True) is None

    assert in_time(interrupted)
    with pytest.raises(StopIteration):
        next(items)
