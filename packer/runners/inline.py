"""Run tasks in this process, one at a time, in order: for tests and for small machines."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from typing import Any

from packer import logs
from packer.runners.base import Done


class InlineRunner:
    """The runner without a cluster."""

    name = "inline"
    num_workers = 1

    @contextlib.contextmanager
    def open(self) -> Iterator[_InlineTasks]:
        yield _InlineTasks()

    def close(self) -> None:
        pass

    def __enter__(self) -> InlineRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _InlineTasks:
    def __init__(self) -> None:
        self._queue: deque[tuple[int, Context, Callable[..., Any], tuple[Any, ...]]] = deque()
        self._next = 0

    def submit(self, function: Callable[..., Any], *args: Any) -> int:
        self._next += 1
        self._queue.append((self._next, copy_context(), function, args))
        return self._next

    def wait(self, timeout_s: float) -> list[Done]:  # runs the next, however long
        if not self._queue:
            time.sleep(timeout_s)  # nobody who waits is to spin
            return []
        task, context, function, args = self._queue.popleft()
        since = time.monotonic()
        try:
            value = context.run(function, *args)
            seconds = time.monotonic() - since
            return [Done(task=task, value=value, worker=logs.this_worker(), seconds=seconds)]
        except Exception as error:  # handed on, whatever it is: the coordinator decides
            return [Done(task=task, error=error)]
