"""What a runner is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


class WorkerDied(RuntimeError):
    """The process that ran a task is gone: killed, out of memory, or its machine was lost. Transient."""


class ClusterLost(RuntimeError):
    """The cluster that ran the tasks is gone, and the runner with it. Transient: another may come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A task that ended: with a value, or with the error it raised (WorkerDied if it could not end).

    worker, seconds: the process that did it (host/pid), and how long that took; "" where it failed.
    """

    task: int
    value: Any = None
    error: BaseException | None = None
    worker: str = ""
    seconds: float = 0.0


class Tasks(Protocol):
    """The running tasks of one job."""

    def submit(self, function: Callable[..., Any], *args: Any) -> int:
        """Start `function(*args)`; both must be picklable. Returns the task's number. Raises ClusterLost.

        What it logs carries the ids that are in use here (packer.logs).
        """
        ...

    def wait(self, timeout_s: float) -> list[Done]:
        """Tasks that ended, as soon as there is one; none after `timeout_s`. Raises ClusterLost."""
        ...


class Runner(Protocol):
    """Runs tasks. A context manager: leaving it ends what it started."""

    name: str

    @property
    def num_workers(self) -> int:
        """How many tasks can run at once, now. Raises ClusterLost."""
        ...

    def open(self) -> AbstractContextManager[Tasks]:
        """Tasks for one job; leaving the block cancels those that still run."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Joins(Protocol):
    """What makes a runner by joining a cluster, which may take long, or for ever."""

    waits_for: str  # while a call waits: what is required and what was found; "" else

    def __call__(self) -> Runner: ...

    def cancel(self) -> None:
        """End a call that runs (it raises RuntimeError, soon), and each later one. From any thread."""
        ...
