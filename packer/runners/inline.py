"""Run tasks in this process, one at a time, in order: for tests and for small machines."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

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
        self._queue: deque[tuple[int, Callable[..., Any], tuple[Any, ...]]] = deque()
        self._next = 0

    def submit(self, function: Callable[..., Any], *args: Any) -> int:
        self._next += 1
        self._queue.append((self._next, function, args))
        return self._next

    def wait(self, timeout_s: float) -> list[Done]:  # runs the next, however long
        if not self._queue:
            return []
        task, function, args = self._queue.popleft()
        try:
            return [Done(task=task, value=function(*args))]
        except Exception as error:  # handed on, whatever it is: the coordinator decides
            return [Done(task=task, error=error)]
