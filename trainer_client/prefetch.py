"""Reading ahead in a thread of its own: bounded in steps and in bytes, measured, and ended cleanly."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

_JOIN_S = 5.0
_HURRY_S = 0.0002  # a loop that comes back sooner does next to nothing with a batch
_REST_S = 0.005
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStats:
    """What reading ahead has done since the stream was made.

    get_wait_s: the training loop waited for data, or made a batch itself (the first batch of each iteration
    is told apart, in first_batch_s). put_wait_s: the reader waited for room, which is good.
    mean_occupancy: batches that lay ready when the loop asked. elapsed_s: from each iteration's first batch
    to its latest.
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
        self.begin()

    def begin(self) -> None:
        """An iteration begins."""
        self.left_at = _NEVER  # when the loop got its last batch
        self.waiting_since: float | None = None  # the loop waits for a batch, not its first, now

    def got(self, asked_at: float) -> None:
        """The loop got a batch."""
        now, left_at = time.monotonic(), self.left_at
        if left_at == _NEVER:
            self.first_batch_s += now - asked_at
        else:
            self.get_wait_s += now - asked_at
            self.elapsed_s += now - left_at
        self.left_at = now

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
    """A source, and what was read of it ahead: bounded in items and in bytes. One item always fits.

    Two threads read the source, in turns: the reader's ahead, as long as there is room; and the training
    loop's own where it finds nothing ready and the reader is not at it. A loop in such a hurry would else
    wait for another thread to be woken and to get the interpreter's lock, twice a few items, which takes
    about as long as to make them. The reader rests then, until the loop has not come for a moment.
    """

    def __init__(
        self, source: Iterator[T], size: Callable[[T], int], max_items: int, max_bytes: int, meter: Meter
    ) -> None:
        self._source, self._size = source, size
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._max_items, self._max_bytes = max_items, max(1, max_bytes)
        self._meter = meter
        self._lock = threading.RLock()  # a signal's handler may close the stream from within
        self._arrived = threading.Condition(self._lock)  # the loop waits for an item
        self._freed = threading.Condition(self._lock)  # the reader waits for its turn
        self._is_awaited = False  # the loop does so
        self._is_parked = False  # the reader does so without a limit
        self._is_being_read = False  # the source, by one of the two
        self._rest_until = 0.0  # the reader's
        self._ended = False
        self._error: BaseException | None = None
        self._is_closed = False
        meter.begin()

    # -------------------------------------------------------------- the reader's thread

    def fill(self) -> None:
        """Read ahead until the end."""
        while self._wait_for_turn():
            self._read(keep=True)
        self._close_source()

    def _wait_for_turn(self) -> bool:
        """Until there is room and the loop is in no hurry. False where nobody wants any more."""
        with self._lock:
            while not (self._ended or self._is_closed):
                start = time.monotonic()
                is_full = len(self._items) >= self._max_items or self._bytes >= self._max_bytes
                rest_s = self._rest_until - start
                if not (is_full or self._is_being_read or rest_s > 0):
                    self._is_being_read = True
                    return True
                self._is_parked = is_full or rest_s <= 0
                self._freed.wait(None if self._is_parked else rest_s)
                self._is_parked = False
                if is_full:
                    self._meter.put_wait_s += time.monotonic() - start
        return False

    # -------------------------------------------------------------- the training loop's thread

    def get(self) -> T:
        """The next item. Raises what the source raised, StopIteration at the end."""
        start, meter = time.monotonic(), self._meter
        is_hurried = start - meter.left_at < _HURRY_S
        with self._lock:
            occupancy = len(self._items)
            is_mine = not occupancy and self._wants_turn(start, is_hurried)
            entry = self._taken(is_hurried)
        if is_mine:
            entry = self._read(keep=False)
        meter.waiting_since = None
        if entry is None:
            raise self._end()
        meter.got(start)
        meter.occupancy += occupancy
        meter.num_bytes += entry[1]
        return entry[0]

    def _taken(self, is_hurried: bool) -> tuple[T, int] | None:
        """Take what lies ready, if anything does, and let the reader know of the room."""
        try:
            entry = self._items.popleft()
        except IndexError:
            return None
        self._bytes -= entry[1]
        if self._is_parked or not is_hurried:
            self._is_parked = False
            self._freed.notify()
        return entry

    def _end(self) -> BaseException:
        """What is raised, once. No variable may hold it there: it would keep the frames of who called."""
        error, self._error = self._error, None
        return error or StopIteration()

    def _wants_turn(self, start: float, is_hurried: bool) -> bool:
        """Take the turn where nothing is ready and the reader is not at it; else wait for what it reads."""
        self._meter.waiting_since = None if self._meter.left_at == _NEVER else start
        self._rest_until = start + _REST_S if is_hurried else 0.0
        while not (self._items or self._ended or self._is_closed):
            if not self._is_being_read:
                self._is_being_read = True
                return True
            self._is_awaited = True
            self._arrived.wait()
            self._is_awaited = False
        return False

    # -------------------------------------------------------------- either

    def _read(self, *, keep: bool) -> tuple[T, int] | None:
        """Read one item, or the end, for whoever has the turn: to be kept ready, or to be taken at once."""
        entry = None
        try:
            item = next(self._source)
            entry = item, self._size(item)
        except BaseException as error:
            with self._lock:
                self._ended, self._error = True, None if isinstance(error, StopIteration) else error
                self._give_turn()
                self._freed.notify()
        else:
            with self._lock:
                if self._is_closed:
                    entry = None
                elif keep:
                    self._items.append(entry)
                    self._bytes += entry[1]
                self._give_turn()
        if self._is_closed:
            self._close_source()
        return entry

    def _give_turn(self) -> None:
        self._is_being_read = False
        if self._is_awaited:
            self._arrived.notify()
        if self._is_parked and not self._items:
            self._is_parked = False
            self._freed.notify()

    def _close_source(self) -> None:
        """Let the source let go of what it holds, unless it is being read: who reads it comes here then."""
        with self._lock:
            if self._is_being_read:
                return
            self._is_being_read = True  # for good
        if isinstance(self._source, Generator):
            self._source.close()

    def is_held_here(self) -> bool:
        """Whether this thread is within it, and the reader may wait for it to go on."""
        return self._lock._is_owned()  # type: ignore[attr-defined]  # what Condition itself asks of it

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._items.clear()
            self._arrived.notify()
            self._freed.notify()


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
        self._buffer: _Buffer[T] = _Buffer(source(), size, max_items, max_bytes, meter)
        thread = threading.Thread(target=self._buffer.fill, name="padfree-reader", daemon=True)
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


def _shut(buffer: _Buffer[Any], thread: threading.Thread, cancel: Callable[[], None], owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child's copy: the thread, its locks and its socket are the parent's
    buffer.close()
    cancel()
    if thread is not threading.current_thread() and not buffer.is_held_here():
        thread.join(_JOIN_S)
        if thread.is_alive():
            log.warning("the reader did not end within %g s; it ends with the process", _JOIN_S)
