"""Run tasks on Ray: a cluster embedded in this process, or one that is there. The only import of ray.

Each task is one Ray task on one CPU. Ray's own retries are off: the coordinator retries, so that each
retry is counted and told.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

# Read by ray when it is imported. No phoning home; and under `uv run` ray would upload the whole
# working folder to its workers.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import ray
from ray import exceptions

from packer import logs
from packer.runners import leftovers
from packer.runners.base import Done, WorkerDied

log = logging.getLogger("padfree.worker")


def _hush(name: str, beginning: str) -> None:
    """Leave out what one of Ray's loggers says with this beginning."""
    logging.getLogger(name).addFilter(lambda record: not record.getMessage().startswith(beginning))


# It leaves SIGTERM alone where a thread joins its cluster, as one does here: that is meant. So is the secret
# of an embedded cluster, which it would tell people how to do without.
_hush("ray._private.worker", "SIGTERM handler is not set")
_hush("ray._private.authentication.authentication_token_setup", "Token authentication is enabled")

# One task a core: the libraries' own threads would only get in each other's way.
_WORKER_ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
_OBJECT_STORE_BYTES = 256 << 20  # tasks return metadata; shards go to the store


@ray.remote(num_cpus=1, max_retries=0)
def _call(ids: dict[str, Any], function: Callable[..., Any], *args: Any) -> tuple[Any, str, float]:
    """On a worker: the value, this process and the seconds. Logs to the worker's file of Ray."""
    logs.configure_worker()
    since = time.monotonic()
    with logs.using(ids):
        try:
            value = function(*args)
        except Exception as error:
            expected = isinstance(error, ValueError | OSError)
            log.error("%s: %s", type(error).__name__, error, exc_info=not expected)
            raise
    return value, logs.this_worker(), time.monotonic() - since


class RayRunner:
    """A runner on Ray.

    `address=None` starts a private cluster with `num_cpus` (default: all cores) and ends it on close;
    "auto" or "host:port" joins one that is there.
    """

    name = "ray"

    def __init__(self, address: str | None = None, *, num_cpus: int | None = None) -> None:
        if ray.is_initialized():
            raise RuntimeError("this process has joined a Ray cluster already; use one RayRunner a process")
        self._folder: str | None = None
        # Linux ends the processes of an embedded Ray with the *thread* that started them, and then its
        # agents stay behind. So one thread of our own joins the cluster, waits, and leaves it.
        joined: Future[None] = Future()
        self._leave = threading.Event()
        self._thread = threading.Thread(
            target=self._live, args=(address, num_cpus, joined), name="ray", daemon=True
        )
        self._thread.start()
        joined.result()

    def _live(self, address: str | None, num_cpus: int | None, joined: Future[None]) -> None:
        try:
            with _keep_signal_handlers():
                self._join(address, num_cpus)
        except BaseException as error:  # handed to the caller of __init__, whatever it is
            self._remove_folder()
            joined.set_exception(error)
            return
        joined.set_result(None)
        self._leave.wait()
        ray.shutdown()
        self._remove_folder()

    def _join(self, address: str | None, num_cpus: int | None) -> None:
        if address is not None:
            ray.init(
                address=address,
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"env_vars": _WORKER_ENVIRONMENT},
            )
            return
        leftovers.sweep()
        self._folder = leftovers.make_folder()
        for name, value in _WORKER_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # Ray would write its cluster's secret into the home folder; this one ends with the cluster.
        if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"} & os.environ.keys():
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        with _keep_loopback():
            ray.init(
                num_cpus=num_cpus or len(os.sched_getaffinity(0)),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=self._folder,
                _node_ip_address="127.0.0.1",  # nobody else's business
            )

    def _remove_folder(self) -> None:
        if self._folder is not None:
            leftovers.remove(self._folder)
            self._folder = None

    @property
    def num_workers(self) -> int:
        return max(1, int(ray.cluster_resources().get("CPU", 1)))

    def count(self) -> int:
        """CPUs of the cluster. Raises RuntimeError where this process's own node is not part of it any more.

        Where the cluster was replaced by another, Ray ends this process here.
        """
        node = ray.get_runtime_context().get_node_id()
        alive = {one["NodeID"]: one["Resources"] for one in ray.nodes() if one["Alive"]}
        if node not in alive:
            raise RuntimeError("the Ray node of this program has ended")
        return int(sum(resources.get("CPU", 0) for resources in alive.values()))

    @contextlib.contextmanager
    def open(self) -> Iterator[_RayTasks]:
        tasks = _RayTasks()
        try:
            yield tasks
        finally:
            tasks.cancel()

    def close(self) -> None:
        """Leave the cluster; end it where this runner started it."""
        self._leave.set()
        self._thread.join()

    def __enter__(self) -> RayRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Ray's core takes over SIGTERM and SIGINT, from any thread, and kills the process with a stack
    trace; put back at the level of the operating system what was there, since only the main thread
    may do so in Python."""
    api = ctypes.pythonapi
    api.PyOS_getsig.argtypes, api.PyOS_getsig.restype = [ctypes.c_int], ctypes.c_void_p
    api.PyOS_setsig.argtypes, api.PyOS_setsig.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before = {number: api.PyOS_getsig(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            api.PyOS_setsig(number, handler)


@contextlib.contextmanager
def _keep_loopback() -> Iterator[None]:
    """Let 127.0.0.1 be the address of a node. Ray puts one that others reach in its place, and listens to the
    whole network then; and a machine that goes to another network would lose its own cluster."""
    services, name = ray._private.services, "resolve_ip_for_localhost"
    before = getattr(services, name, None)  # of Ray's own, not promised to stay
    if before is None:
        yield
        return
    setattr(services, name, lambda host: host)
    try:
        yield
    finally:
        setattr(services, name, before)


class _RayTasks:
    def __init__(self) -> None:
        self._running: dict[Any, int] = {}  # object ref: task
        self._next = 0

    def submit(self, function: Callable[..., Any], *args: Any) -> int:
        self._next += 1
        self._running[_call.remote(logs.ids(), function, *args)] = self._next
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
            value, worker, seconds = ray.get(ref)
            return Done(task=task, value=value, worker=worker, seconds=seconds)
        except exceptions.RayTaskError as error:
            return Done(task=task, error=error.cause if isinstance(error.cause, Exception) else error)
        except exceptions.RayError as error:
            return Done(task=task, error=WorkerDied(_first_line(error)))


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
