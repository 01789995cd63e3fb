"""The process of `packer.runners.apart`: `python -m packer.runners.apart_main DESCRIPTOR ADDRESS`.

A dead worker is told only after the cluster has answered since: else it is the cluster that is gone, and
no partition is to be blamed for that.

It ends with the process that started it, however that ended and whatever Ray is doing: a thread watches.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from packer import logs
from packer.runners.base import Done, WorkerDied

_TELL_S = 2.0  # between two words of the workers
_WAIT_S = 0.1
_LOOK_S = 1.0  # between two looks for the other process
_LEAVE_S = 10.0  # to leave the cluster in order once nobody is there to tell


class _Talk:
    """The connection, and the dead workers that are held back. Safe for threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._held: list[tuple[int, Done]] = []

    def send(self, *message: Any) -> None:
        with self._lock:
            self._connection.send(message)

    def done(self, job: int, done: Done) -> None:
        if isinstance(done.error, WorkerDied):
            with self._lock:
                self._held.append((job, done))
        else:
            self.send("done", job, done)

    def tell_workers(self, runner: Any) -> None:
        with self._lock:
            held, self._held = self._held, []
        num_workers = runner.count()  # ends this process, or waits, where the cluster is gone
        for one in held:
            self.send("done", *one)
        self.send("workers", num_workers)


class _Job:
    """One job's tasks, and the thread that waits for them."""

    def __init__(self, runner: Any, number: int, talk: _Talk) -> None:
        self._opened, self._number, self._talk = runner.open(), number, talk
        self._tasks = self._opened.__enter__()
        self._numbers: dict[int, int] = {}  # ours: the other side's
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def submit(self, task: int, ids: dict[str, Any], function: Any, args: tuple[Any, ...]) -> None:
        with self._lock, logs.using(ids):
            self._numbers[self._tasks.submit(function, *args)] = task

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._opened.__exit__(None, None, None)

    def _wait(self) -> None:
        while not self._end.is_set():
            for done in self._tasks.wait(_WAIT_S):
                with self._lock:  # it may be done before submit has noted its number
                    task = self._numbers.pop(done.task)
                told = Done(
                    task=task, value=done.value, error=done.error, worker=done.worker, seconds=done.seconds
                )
                self._talk.done(self._number, told)


def _end_with(parent: int, descriptor: int, has_joined: threading.Event) -> None:
    """End this process once `parent`, or its end of the connection, is gone: at once while Ray joins (its
    core may try for many minutes), else when it had time to leave."""
    poll = select.poll()
    poll.register(descriptor, 0)  # no event but a hang-up, which is always told
    while os.getppid() == parent and not poll.poll(1000 * _LOOK_S):
        pass
    if has_joined.is_set():
        time.sleep(_LEAVE_S)
    os._exit(1)


def main(descriptor: int, address: str) -> None:
    has_joined = threading.Event()
    watch = (os.getppid(), descriptor, has_joined)
    threading.Thread(target=_end_with, args=watch, name="parent", daemon=True).start()
    talk = _Talk(connection := Connection(descriptor))
    try:
        from packer.runners.ray import RayRunner

        runner = RayRunner(address)
    except Exception as error:  # whatever Ray raises
        talk.send("failed", f"{type(error).__name__}: {error}")
        return
    has_joined.set()
    talk.send("joined", "")

    def tell() -> None:
        end = threading.Event()
        while not end.wait(_TELL_S):
            try:
                talk.tell_workers(runner)
            except Exception as error:  # of the connection or the cluster: either way this process is done
                print(f"padfree: the Ray cluster is gone: {error}", file=sys.stderr, flush=True)
                os._exit(1)

    threading.Thread(target=tell, daemon=True).start()
    jobs: dict[int, _Job] = {}
    try:
        while True:
            what, job, *rest = connection.recv()
            if what == "open":
                jobs[job] = _Job(runner, job, talk)
            elif what == "submit":
                jobs[job].submit(*rest)
            elif what == "close":
                jobs.pop(job).close()
    except (EOFError, OSError):  # the other side is gone, or closed
        for left in jobs.values():
            left.close()
    runner.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(int(sys.argv[1]), sys.argv[2])
