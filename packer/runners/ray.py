"""Run tasks on Ray: a cluster embedded in this process, or one that is there. The only import of ray.

Each task is one Ray task on one CPU. Ray's own retries are off: the coordinator retries, so that each
retry is counted and told.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

# Read by ray when it is imported. No phoning home; and under `uv run` ray would upload the whole
# working folder to its workers.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import ray
from ray import exceptions

from packer.runners.base import Done, WorkerDied

# One task a core: the libraries' own threads would only get in each other's way.
_WORKER_ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
_OBJECT_STORE_BYTES = 256 << 20  # tasks return metadata; shards go to the store


@ray.remote(num_cpus=1, max_retries=0)
def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class RayRunner:
    """A runner on Ray.

    `address=None` starts a private cluster with `num_cpus` (default: all cores) and ends it on close;
    "auto" or "host:port" joins one that is there.
    """

    name = "ray"

    def __init__(self, address: str | None = None, *, num_cpus: int | None = None) -> None:
        self._folder: str | None = None
        if ray.is_initialized():
            raise RuntimeError("this process has joined a Ray cluster already; use one RayRunner a process")
        if address is None:
            # A folder of its own, short (socket paths are limited to 107 bytes) and removed on close.
            self._folder = tempfile.mkdtemp(prefix="padfree-ray-")
            for name, value in _WORKER_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            ray.init(
                num_cpus=num_cpus or len(os.sched_getaffinity(0)),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=self._folder,
            )
        else:
            ray.init(
                address=address,
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"env_vars": _WORKER_ENVIRONMENT},
            )

    @property
    def num_workers(self) -> int:
        return max(1, int(ray.cluster_resources().get("CPU", 1)))

    @contextlib.contextmanager
    def open(self) -> Iterator[_RayTasks]:
        tasks = _RayTasks()
        try:
            yield tasks
        finally:
            tasks.cancel()

    def close(self) -> None:
        """Leave the cluster; end it where this runner started it."""
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> RayRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _RayTasks:
    def __init__(self) -> None:
        self._running: dict[Any, int] = {}  # object ref: task
        self._next = 0

    def submit(self, function: Callable[..., Any], *args: Any) -> int:
        self._next += 1
        self._running[_call.remote(function, *args)] = self._next
        return self._next

    def wait(self, timeout_s: float) -> list[Done]:
        if not self._running:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_s, fetch_local=True)
        return [self._done(ref) for ref in ready]

    def cancel(self) -> None:
        for ref in self._running:
            with contextlib.suppress(exceptions.RayError):
                ray.cancel(ref, force=True)
        self._running.clear()

    def _done(self, ref: Any) -> Done:
        task = self._running.pop(ref)
        try:
            return Done(task=task, value=ray.get(ref))
        except exceptions.RayTaskError as error:
            return Done(task=task, error=error.cause if isinstance(error.cause, Exception) else error)
        except exceptions.RayError as error:
            return Done(task=task, error=WorkerDied(_first_line(error)))


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
