"""A runner on a Ray cluster that is there, in a process of its own: when the cluster goes, that process goes.

Ray ends a program whose cluster was replaced (its core aborts), and a program cannot leave one cluster
for another. So the program that uses it is a small one: it joins, hands tasks on and tells how many
workers there are. Where it ends, or has nothing to tell for a while, the cluster is lost: ClusterLost
for all that ran, and whoever holds this runner closes it and makes another.

    us                    the other process
    open, submit, close →                          one pair of sockets; pickled
                        ← joined | failed, done, workers
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from packer import logs
from packer.runners.base import ClusterLost, Done

log = logging.getLogger("padfree.packer")

SILENT_S = 30.0  # without word of the workers: the cluster's head does not answer
_JOIN_S = 120.0
_END_S = 10.0


class ApartRunner:
    """A runner on the Ray cluster at `address` ("auto" or host:port).

    Raises RuntimeError where it cannot join.
    """

    name = "ray"

    def __init__(self, address: str) -> None:
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "packer.runners.apart_main", str(theirs.fileno()), address],
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,  # where Ray speaks to people
                env=os.environ | {"PYTHONPATH": paths},
                start_new_session=True,  # a Ctrl-C is for us; we end it
            )
        self._connection = Connection(ours.detach())
        self._sending, self._lock = threading.Lock(), threading.Lock()
        self._jobs: dict[int, queue.Queue[Done]] = {}
        self._next_job = 0
        self._num_workers, self._heard_s = 0, time.monotonic()
        self._is_lost = False
        try:
            what, told = (
                self._connection.recv() if self._connection.poll(_JOIN_S) else ("failed", "no answer")
            )
        except (EOFError, OSError):
            what, told = "failed", "its process ended"
        if what == "failed":
            self.close()
            raise RuntimeError(f"the Ray cluster at {address} cannot be joined: {told}")
        self._heard_s = time.monotonic()
        self._reader = threading.Thread(target=self._read, name="ray", daemon=True)
        self._reader.start()

    @property
    def num_workers(self) -> int:
        """Raises ClusterLost."""
        self._check()
        return max(1, self._num_workers)

    @contextlib.contextmanager
    def open(self) -> Iterator[_ApartTasks]:
        with self._lock:
            self._next_job += 1
            job = self._next_job
            done = self._jobs[job] = queue.Queue()
        try:
            self._send("open", job)
            yield _ApartTasks(self, job, done)
        finally:
            with self._lock:
                del self._jobs[job]
            with contextlib.suppress(ClusterLost):
                self._send("close", job)

    def close(self) -> None:
        """Leave the cluster."""
        self._is_lost = True
        self._connection.close()  # it ends when it reads that
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> ApartRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if not self._is_lost and time.monotonic() - self._heard_s > SILENT_S:
            log.warning("the Ray cluster has not answered for %g s", SILENT_S)
            self._is_lost = True
        if self._is_lost:
            raise ClusterLost(
                "the Ray cluster is gone (its head ended, or does not answer); what is packed stays, and "
                "packing goes on once there is a cluster again"
            )

    def _send(self, *message: Any) -> None:
        self._check()
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:  # a broken pipe, or closed
            self._is_lost = True
            self._check()

    def _read(self) -> None:
        try:
            while True:
                what, *told = self._connection.recv()
                self._heard_s = time.monotonic() if what == "workers" else self._heard_s
                if what == "workers":
                    (self._num_workers,) = told
                elif what == "done":
                    job, done = told
                    with self._lock:
                        if job in self._jobs:
                            self._jobs[job].put(done)
        except (EOFError, OSError, TypeError):  # TypeError: closed by us in the middle of a read
            self._is_lost = True


class _ApartTasks:
    def __init__(self, runner: ApartRunner, job: int, done: queue.Queue[Done]) -> None:
        self._runner, self._job, self._done = runner, job, done
        self._next = 0

    def submit(self, function: Callable[..., Any], *args: Any) -> int:
        """Raises ClusterLost."""
        self._next += 1
        self._runner._send("submit", self._job, self._next, logs.ids(), function, args)
        return self._next

    def wait(self, timeout_s: float) -> list[Done]:
        """Raises ClusterLost."""
        self._runner._check()
        try:
            return [self._done.get(timeout=timeout_s)]
        except queue.Empty:
            self._runner._check()
            return []
