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
_LOOK_S = 0.1  # between two looks whether to go on joining
_TELL_S, _TELL_AGAIN_S = 5.0, 60.0  # of a cluster that cannot be joined
_END_S = 10.0
_TERM_S = 0.5  # from SIGTERM to SIGKILL


class Cluster:
    """The Ray cluster at `address`: calling it joins, as often as the cluster is lost. See `Joins`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._cancelled = threading.Event()
        self._since_s: float | None = None  # when joining was begun that has not come to an end well
        self._tell_s = 0.0
        self.waits_for = ""

    def __call__(self) -> ApartRunner:
        """Raises RuntimeError where it cannot join, or shall not any more."""
        if self._since_s is None:
            self._since_s = time.monotonic()
            self._tell_s = self._since_s + _TELL_S
        try:
            runner = ApartRunner(self._address, goes_on=self._goes_on)
        finally:
            self.waits_for = ""
        self._since_s = None
        return runner

    def cancel(self) -> None:
        self._cancelled.set()

    def _goes_on(self) -> bool:
        assert self._since_s is not None
        now = time.monotonic()
        if now - self._since_s >= _TELL_S:
            self.waits_for = (
                f"a Ray head is required at {self._address}, found no answer for {now - self._since_s:.0f} "
                "s; start one there (`ray start --head`), or give the address of one (--ray, "
                "PADFREE_RAY_ADDRESS)"
            )
        if now >= self._tell_s:
            self._tell_s = now + _TELL_AGAIN_S
            log.warning("packing waits for its cluster: %s", self.waits_for)
        return not self._cancelled.is_set()


class ApartRunner:
    """A runner on the Ray cluster at `address` ("auto" or host:port).

    goes_on: asked while it joins, several times a second; False ends that.
    Raises RuntimeError where it cannot join.
    """

    name = "ray"

    def __init__(self, address: str, *, goes_on: Callable[[], bool] = lambda: True) -> None:
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
        what, told = self._joined(goes_on)
        if what == "failed":
            self._end(0.0)
            raise RuntimeError(f"the Ray cluster at {address} cannot be joined: {told}")
        self._heard_s = time.monotonic()
        self._reader = threading.Thread(target=self._read, name="ray", daemon=True)
        self._reader.start()

    def _joined(self, goes_on: Callable[[], bool]) -> tuple[str, str]:
        """("joined", ""), or ("failed", why)."""
        until = time.monotonic() + _JOIN_S
        try:
            while not self._connection.poll(_LOOK_S):
                if not goes_on():
                    return "failed", "it was given up"
                if time.monotonic() > until:
                    return "failed", f"no answer for {_JOIN_S:g} s"
            return self._connection.recv()
        except (EOFError, OSError):
            return "failed", "its process ended"

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
        self._end(_END_S)

    def _end(self, patience_s: float) -> None:
        """End the other process: it has `patience_s` to leave in order, which it does not while it joins."""
        self._is_lost = True
        self._connection.close()  # it ends when it reads that
        for end, wait_s in ((self._process.terminate, patience_s), (self._process.kill, _TERM_S)):
            try:
                self._process.wait(wait_s)
                return
            except subprocess.TimeoutExpired:
                end()
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
