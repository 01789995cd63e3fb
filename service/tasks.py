"""A runner that counts its tasks: indexing a file and packing a partition is one each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from packer.runners import Done, Runner, Tasks, WorkerDied
from service.metrics import Metrics


class CountedRunner:
    """Another runner, seen by the metrics. Closing it is left to whoever made the other."""

    def __init__(self, runner: Runner, metrics: Metrics) -> None:
        self._runner, self._metrics = runner, metrics
        self.name = runner.name

    @property
    def num_workers(self) -> int:
        return self._runner.num_workers

    @contextlib.contextmanager
    def open(self) -> Iterator[_CountedTasks]:
        with self._runner.open() as tasks:
            counted = _CountedTasks(tasks, self._metrics)
            try:
                yield counted
            finally:
                counted.forget()

    def close(self) -> None:
        pass


class _CountedTasks:
    def __init__(self, tasks: Tasks, metrics: Metrics) -> None:
        self._tasks, self._metrics = tasks, metrics
        self._num_running = 0

    def submit(self, function: Callable[..., Any], *args: Any) -> int:
        task = self._tasks.submit(function, *args)
        self._count(1)
        return task

    def wait(self, timeout_s: float) -> list[Done]:
        ended = self._tasks.wait(timeout_s)
        for done in ended:
            self._count(-1)
            self._metrics.tasks_ended.labels(_how(done.error)).inc()
        return ended

    def forget(self) -> None:
        """Tasks that still run are cancelled by the runner."""
        self._count(-self._num_running)

    def _count(self, change: int) -> None:
        self._num_running += change
        self._metrics.tasks_running.inc(change)


def _how(error: BaseException | None) -> str:
    if error is None:
        return "done"
    return "worker_died" if isinstance(error, WorkerDied) else "failed"
