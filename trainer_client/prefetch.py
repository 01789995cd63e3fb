"""Reading ahead in a thread of its own: bounded in steps and in bytes, measured, and ended cleanly."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

_JOIN_S = 5.0
_MOMENT_S = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStats:
    """What reading ahead has done since the stream was made.

    get_wait_s: the training loop waited for data (the first batch of each iteration is told apart, in
    first_batch_s). put_wait_s: the reader waited for room, which is good. mean_occupancy: batches that
    lay ready when the loop asked. elapsed_s: from each iteration's first batch to its latest.
    idle_share_before, idle_share_after: with balance="attention", the share of all ranks' time that goes by
    waiting for a step's slowest, by what packs cost, without and with it (of the first thousand steps).
    """

    num_batches: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    first_batch_s: float = 0.0
    get_wait_s: float = 0.0
    put_wait_s: float = 0.0
    mean_occupancy: float = 0.0
    elapsed_s: float = 0.0
    num_retries: int = 0
    idle_share_before: float = 0.0
    idle_share_after: float = 0.0

    @property
    def stall_share(self) -> float:
        """Share of the time in which the training loop stood still for want of data."""
        return self.get_wait_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.elapsed_s if self.elapsed_s else 0.0

    def to_prometheus(self) -> str:
        """Prometheus text exposition of all figures."""
        values = [(name, float(getattr(self, name))) for name in self.__slots__]
        values += [("stall_share", self.stall_share), ("bytes_per_s", self.bytes_per_s)]
        return "".join(
            f"# TYPE padfree_client_{name} gauge\npadfree_client_{name} {value:g}\n" for name, value in values
        )


class Meter:
    """Counts for StreamStats, over all iterations of a stream."""

    def __init__(self) -> None:
        self.num_batches = self.num_tokens = self.num_bytes = self.num_retries = 0
        self.first_batch_s = self.get_wait_s = self.put_wait_s = self.elapsed_s = 0.0
        self.idle_share_before = self.idle_share_after = 0.0
        self.occupancy = 0
        self.waiting_since: float | None = None  # the loop waits for a batch, not its first, now

    def stats(self) -> StreamStats:
        return StreamStats(
            num_batches=self.num_batches,
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            first_batch_s=self.first_batch_s,
            get_wait_s=self.get_wait_s,
            put_wait_s=self.put_wait_s,
            mean_occupancy=self.occupancy / self.num_batches if self.num_batches else 0.0,
            elapsed_s=self.elapsed_s,
            num_retries=self.num_retries,
            idle_share_before=self.idle_share_before,
            idle_share_after=self.idle_share_after,
        )


class _Buffer(Generic[T]):
    """A queue bounded in items and in bytes, with an end. One item always fits.

    A side that waits is woken when half of what it may get is there: to wake it for each item takes more time
    than to make one. It waits so for a moment only; then the least change wakes it.
    """

    def __init__(self, max_items: int, max_bytes: int, meter: Meter) -> None:
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._max_items, self._max_bytes = max_items, max_bytes
        self._half = max(1, max_items // 2)
        self._meter = meter
        self._lock = threading.Lock()
        self._arrived = _Wakeup(self._lock)  # for who waits for items
        self._freed = _Wakeup(self._lock)  # for who waits for room
        self._ended = False
        self._error: BaseException | None = None
        self.closed = threading.Event()
        self._first: float | None = None

    def put(self, item: T, num_bytes: int) -> bool:
        """Wait for room. False where nobody wants any more."""
        with self._lock:
            if self._full(num_bytes):
                start = time.monotonic()
                self._arrived.wake()
                self._freed.wait(lambda: self.closed.is_set() or not self._full(num_bytes), self._half)
                self._meter.put_wait_s += time.monotonic() - start
            if self.closed.is_set():
                return False
            self._items.append((item, num_bytes))
            self._bytes += num_bytes
            self._arrived.change(len(self._items))
        return True

    def _full(self, num_bytes: int) -> bool:
        more = self._bytes + num_bytes > self._max_bytes
        return bool(self._items) and (len(self._items) >= self._max_items or more)

    def end(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._ended, self._error = True, error
            self._arrived.wake()

    def get(self) -> T:
        """The next item. Raises what the reader raised, StopIteration at the end."""
        start = time.monotonic()
        with self._lock:
            occupancy = len(self._items)
            if not self._items:
                self._meter.waiting_since = None if self._first is None else start
                self._freed.wake()
                self._arrived.wait(self._has_news, self._half)
                self._meter.waiting_since = None
            if not self._items:
                error, self._error = self._error, None
                raise error or StopIteration
            item, num_bytes = self._items.popleft()
            self._bytes -= num_bytes
            self._measure(start, occupancy)
            self._freed.change(self._max_items - len(self._items))
        return item

    def _has_news(self) -> bool:
        return bool(self._items) or self._ended or self.closed.is_set()

    def _measure(self, start: float, occupancy: int) -> None:
        now, meter = time.monotonic(), self._meter
        if self._first is None:
            meter.first_batch_s += now - start
        else:
            meter.get_wait_s += now - start
            meter.elapsed_s += now - self._first
        self._first = now
        meter.occupancy += occupancy

    def close(self) -> None:
        self.closed.set()
        with self._lock:
            self._items.clear()
            self._arrived.wake()
            self._freed.wake()


class _Wakeup:
    """The wait of one thread for another, under their lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self._condition = threading.Condition(lock)
        self._enough = 1  # of items or of room: then who waits is woken

    def wait(self, is_over: Callable[[], bool], enough: int) -> None:
        """Until `is_over`; for a moment only woken at `enough`."""
        self._enough = enough
        if not is_over():
            self._condition.wait(_MOMENT_S)
        self._enough = 1
        while not is_over():
            self._condition.wait()

    def change(self, num_there: int) -> None:
        """There is so much of what is waited for."""
        if num_there >= self._enough:
            self._condition.notify()

    def wake(self) -> None:
        self._condition.notify()


class Prefetcher(Generic[T]):
    """Runs `source()` in a thread and hands out what it yields.

    `cancel` wakes a source that waits for the network. Closed when the loop ends, breaks off or
    fails, when the prefetcher is forgotten, and at the interpreter's exit.
    """

    def __init__(
        self,
        source: Callable[[], Iterator[T]],
        *,
        size: Callable[[T], int],
        cancel: Callable[[], None],
        max_items: int,
        max_bytes: int,
        meter: Meter,
    ) -> None:
        self._buffer: _Buffer[T] = _Buffer(max_items, max_bytes, meter)
        thread = threading.Thread(
            target=_run, args=(source, size, self._buffer), name="padfree-reader", daemon=True
        )
        # Holds no reference to self, so that forgetting the prefetcher ends the thread. It also runs at
        # exit, before daemon threads are frozen in the middle of a native call.
        self._finalizer = weakref.finalize(self, _shut, self._buffer, thread, cancel, os.getpid())
        thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._buffer.get()

    def close(self) -> None:
        """End the thread. May be called again."""
        self._finalizer()


def _run(source: Callable[[], Iterator[Any]], size: Callable[[Any], int], buffer: _Buffer[Any]) -> None:
    try:
        for item in source():
            if not buffer.put(item, size(item)):
                return
    except BaseException as error:
        buffer.end(error)
    else:
        buffer.end()


def _shut(buffer: _Buffer[Any], thread: threading.Thread, cancel: Callable[[], None], owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child's copy: the thread, its locks and its socket are the parent's
    buffer.close()
    cancel()
    if thread is not threading.current_thread():
        thread.join(_JOIN_S)
        if thread.is_alive():
            log.warning("the reader did not end within %g s; it ends with the process", _JOIN_S)
