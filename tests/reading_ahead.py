"""Wait for what reading ahead does, by what it says of itself and not by the clock."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from trainer_client import PackedStream, reader
from trainer_client.prefetch import Prefetcher


def until(condition: Callable[[], Any]) -> None:
    """Wait for something that must come; pytest's timeout is the limit."""
    while not condition():
        time.sleep(0.002)


@contextlib.contextmanager
def tried_again_soon() -> Iterator[None]:
    """A fault is followed by the next try at once. (How long is waited is tested in test_reader.py.)"""
    defaults = reader.Retry.__init__.__kwdefaults__
    with (
        mock.patch.multiple(reader, _FIRST_DELAY_S=0.005, _LONGEST_DELAY_S=0.05),
        mock.patch.dict(defaults, delay_s=0.005),
    ):
        yield


@contextlib.contextmanager
def once_awaited(stream: PackedStream, act: Callable[[], Any]) -> Iterator[None]:
    """Act, in a thread, once the loop over `stream` within waits for a batch."""

    def wait_and_act() -> None:
        until(lambda: is_awaited(stream))
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def is_awaited(stream: PackedStream) -> bool:
    """Whether its loop waits: for what the reader reads, or within a source that it reads itself."""
    prefetcher = stream._prefetcher() if stream._prefetcher is not None else None
    if prefetcher is None:
        return False
    buffer = prefetcher._buffer
    return buffer._is_awaited or (buffer._is_being_read and buffer._is_parked)


def readers() -> set[threading.Thread]:
    """The threads that read ahead in this process, for whomever."""
    return {thread for thread in threading.enumerate() if thread.name == "padfree-reader"}


def until_full(ahead: Prefetcher[Any] | PackedStream) -> list[Any]:
    """What lies ready once the reader can read no further: it waits for room, without a limit of time."""
    prefetcher = ahead._prefetcher() if isinstance(ahead, PackedStream) else ahead
    assert prefetcher is not None
    buffer = prefetcher._buffer
    until(lambda: buffer._is_parked)
    return [item for item, _ in buffer._items]
