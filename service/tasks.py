"""A runner that counts its tasks: indexing a file and packing a partition is one each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from packer import logs
from packer.runners import Done, Runner, Tasks, WorkerDied
from packer.store import NoSpaceLeft, StoreError
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
        self._running: dict[int, str] = {}  # task: its kind

    def submit(self, function: Callable[..., Any], *args: Any) -> int:
        task = self._tasks.submit(function, *args)
        kind = self._running[task] = "input" if logs.partition_number.get() is None else "partition"
        self._metrics.tasks_running.labels(kind).inc()
        return task

    def wait(self, timeout_s: float) -> list[Done]:
        ended = self._tasks.wait(timeout_s)
        for done in ended:
            self._metrics.tasks_running.labels(self._running.pop(done.task)).dec()
            self._metrics.tasks_ended.labels(_how(done.error)).inc()
        return ended

    def forget(self) -> None:
        """Tasks that still run are cancelled by the runner."""
        for kind in self._running.values():
            self._metrics.tasks_running.labels(kind).dec()
        self._running.clear()


def _how(error: BaseException | None) -> str:
    if error is None:
        return "done"
    if isinstance(error, WorkerDied):
        return "worker_died"
    is_transient = isinstance(error, StoreError) and not isinstance(error, NoSpaceLeft)
    return "store_failed" if is_transient else "failed"
