"""Reading ahead: bounds, order, ends, errors."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest

from trainer_client.prefetch import Meter, Prefetcher


def prefetcher(
    source, *, max_items: int = 4, max_bytes: int = 1 << 30, size=lambda _: 1, **more
) -> Prefetcher:
    options = {"cancel": lambda: None, "meter": Meter(), **more}
    return Prefetcher(source, size=size, max_items=max_items, max_bytes=max_bytes, **options)


def until(condition) -> None:
    """Wait for something that must come; pytest's timeout is the limit."""
    while not condition():
        time.sleep(0.005)


class Counting:
    """Counts on, and says how far it was asked."""

    def __init__(self) -> None:
        self.made = 0
        self.ended = threading.Event()

    def __call__(self) -> Iterator[int]:
        try:
            while True:
                self.made += 1
                yield self.made - 1
        finally:
            self.ended.set()


def settled(source: Counting) -> int:
    """How many items were made once nothing more happens."""
    before = -1
    while before != source.made:
        before = source.made
        time.sleep(0.05)
    return before


@pytest.mark.parametrize("max_items", [1, 4])
def test_no_more_items_lie_ready_than_allowed(max_items: int) -> None:
    source = Counting()
    items = prefetcher(source, max_items=max_items)
    # One more is made and waits for room.
    assert settled(source) == max_items + 1
    assert [next(items) for _ in range(10)] == list(range(10))
    assert settled(source) == 10 + max_items + 1
    items.close()


def test_no_more_bytes_lie_ready_than_allowed_but_one_item_always_fits() -> None:
    source = Counting()
    items = prefetcher(source, max_items=100, max_bytes=10, size=lambda _: 4)
    assert settled(source) == 2 + 1
    items.close()
    source = Counting()
    items = prefetcher(source, max_items=100, max_bytes=10, size=lambda _: 400)
    assert settled(source) == 1 + 1
    assert [next(items) for _ in range(5)] == list(range(5))
    items.close()


def test_the_end_and_an_error_come_after_what_was_read() -> None:
    def failing() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("gone")

    items = prefetcher(failing)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(OSError, match="gone"):
        next(items)
    assert list(items) == []
    assert list(prefetcher(lambda: iter([7, 8]))) == [7, 8]


@pytest.mark.parametrize("how", ["close", "forget"])
def test_the_thread_ends_when_nobody_listens(how: str) -> None:
    source = Counting()
    items = prefetcher(source)
    assert next(items) == 0
    if how == "close":
        items.close()
        items.close()
        assert list(items) == []
    else:
        del items
        gc.collect()
    assert source.ended.wait(30)
    until(lambda: not [t for t in threading.enumerate() if t.name == "padfree-reader"])


def test_a_source_that_waits_is_cancelled() -> None:
    wake = threading.Event()

    def waiting() -> Iterator[int]:
        wake.wait()
        yield 1

    items = prefetcher(waiting, cancel=wake.set)
    items.close()
    until(lambda: not [t for t in threading.enumerate() if t.name == "padfree-reader"])


def test_waits_are_measured_on_both_sides() -> None:
    def slow() -> Iterator[int]:
        for number in range(5):
            time.sleep(0.02)
            yield number

    meter = Meter()
    list(prefetcher(slow, meter=meter))
    assert meter.get_wait_s > 4 * 0.01
    assert meter.first_batch_s > 0.01
    assert meter.get_wait_s <= meter.elapsed_s
    meter = Meter()
    items = prefetcher(lambda: iter(range(5)), max_items=1, meter=meter)
    for _ in range(5):
        time.sleep(0.02)
        next(items)
    assert meter.put_wait_s > 3 * 0.01
    assert meter.occupancy >= 4
