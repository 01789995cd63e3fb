"""Reading ahead: bounds, order, ends, errors."""

from __future__ import annotations

import gc
import threading
import time
import types
from collections import deque
from collections.abc import Iterator

import pytest
from reading_ahead import readers, until, until_full

from trainer_client import prefetch
from trainer_client.prefetch import Meter, Prefetcher


def prefetcher(
    source, *, max_items: int = 4, max_bytes: int = 1 << 30, size=lambda _: 1, **more
) -> Prefetcher:
    options = {"cancel": lambda: None, "meter": Meter(), **more}
    return Prefetcher(source, size=size, max_items=max_items, max_bytes=max_bytes, **options)


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


def settled(source: Counting, items: Prefetcher) -> int:
    """How many items were made once nothing more happens."""
    until_full(items)
    return source.made


@pytest.mark.parametrize("max_items", [1, 4])
def test_no_more_items_lie_ready_than_allowed(max_items: int) -> None:
    source = Counting()
    items = prefetcher(source, max_items=max_items)
    assert settled(source, items) == max_items
    assert [next(items) for _ in range(10)] == list(range(10))
    assert settled(source, items) == 10 + max_items
    items.close()


def test_no_more_bytes_lie_ready_than_allowed_but_one_item_always_fits() -> None:
    source = Counting()
    items = prefetcher(source, max_items=100, max_bytes=10, size=lambda _: 4)
    assert settled(source, items) == 2 + 1  # the one that fills it up
    items.close()
    source = Counting()
    items = prefetcher(source, max_items=100, max_bytes=10, size=lambda _: 400)
    assert settled(source, items) == 1
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


def who_reads(num_items: int, monkeypatch: pytest.MonkeyPatch, *, in_a_hurry: bool) -> list[str]:
    """Which thread made each item, for a loop that takes no time for one, or until the reader has read on."""
    now_s = [1.0]
    monkeypatch.setattr(prefetch, "time", types.SimpleNamespace(monotonic=lambda: now_s[0]))

    def source() -> Iterator[tuple[int, str]]:
        for number in range(num_items):
            yield number, threading.current_thread().name

    items = prefetcher(source, max_items=2)
    found = []
    for item in items:
        found.append(item)
        if not in_a_hurry and len(found) < num_items - 2:
            until_full(items)
            now_s[0] += 0.005
    assert [number for number, _ in found] == list(range(num_items))
    return [name for _, name in found]


def test_a_loop_in_a_hurry_reads_itself_and_any_other_is_read_for(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = threading.current_thread().name
    # Of what comes in a moment the reader can make a part only: it rests once the loop finds nothing ready.
    assert who_reads(20_000, monkeypatch, in_a_hurry=True).count(mine) > 5_000
    assert who_reads(100, monkeypatch, in_a_hurry=False).count("padfree-reader") >= 99  # all but the first


def test_the_reader_goes_on_once_a_hurry_is_over() -> None:
    source = Counting()
    items, taken = prefetcher(source, max_items=3), 0
    settled(source, items)
    for count in (1_000, 1, 2, 5_000, 2, 3, 4, 1, 2):
        assert [next(items) for _ in range(count)] == list(range(taken, taken + count))
        taken += count
        assert settled(source, items) == taken + 3
    items.close()


def test_what_the_loop_reads_itself_ends_and_fails_as_what_is_read_for_it() -> None:
    """20,000 items are more than the reader makes before the loop finds nothing ready."""

    def failing(error: BaseException | None) -> Iterator[int]:
        yield from range(20_000)
        if error is not None:
            raise error

    assert list(prefetcher(lambda: failing(None))) == list(range(20_000))
    for error in (OSError("gone"), KeyboardInterrupt()):
        items, found = prefetcher(lambda error=error: failing(error)), []
        with pytest.raises(type(error)):
            deque(map(found.append, items), 0)
        assert found == list(range(20_000))
        assert list(items) == []
        items.close()


def test_closed_while_the_loop_reads_itself_the_source_lets_go() -> None:
    """Another thread closes; the loop is within the source, which waits there until it is cancelled."""
    wake, asked, ended, others = threading.Event(), threading.Event(), threading.Event(), readers()
    loop = threading.current_thread()

    def waiting() -> Iterator[int]:
        try:
            while threading.current_thread() is not loop:
                yield 1
            asked.set()
            wake.wait()
            yield 2
        finally:
            ended.set()

    items = prefetcher(waiting, cancel=wake.set)
    closer = threading.Thread(target=lambda: (asked.wait(), items.close()))
    closer.start()
    assert set(items) <= {1}
    closer.join()
    assert ended.wait(30)
    until(lambda: readers() <= others)


@pytest.mark.parametrize("how", ["close", "forget"])
def test_the_thread_ends_when_nobody_listens(how: str) -> None:
    source, others = Counting(), readers()
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
    until(lambda: readers() <= others)


def test_a_source_that_waits_is_cancelled() -> None:
    wake, others = threading.Event(), readers()

    def waiting() -> Iterator[int]:
        wake.wait()
        yield 1

    items = prefetcher(waiting, cancel=wake.set)
    items.close()
    until(lambda: readers() <= others)


def test_waits_are_measured_on_both_sides() -> None:
    meter, loop, made = Meter(), threading.current_thread(), []

    def is_awaited() -> bool:
        return threading.current_thread() is loop or (made and made[0]._buffer._is_awaited)

    def slow() -> Iterator[int]:
        for number in range(5):
            until(is_awaited)
            time.sleep(0.02)
            yield number

    made.append(prefetcher(slow, meter=meter))
    assert list(made[0]) == list(range(5))
    assert meter.get_wait_s >= 4 * 0.02
    assert meter.first_batch_s >= 0.02
    assert meter.get_wait_s <= meter.elapsed_s
    meter = Meter()
    items = prefetcher(lambda: iter(range(5)), max_items=1, meter=meter)
    for _ in range(5):
        until_full(items)
        time.sleep(0.02)
        next(items)
    assert meter.put_wait_s >= 4 * 0.02
    assert meter.occupancy == 5
