"""Runners: inline, and a real embedded Ray in processes of its own."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from serving import wait_for

from packer.runners import InlineRunner

# Each runs in a process of its own, since a process can have one Ray.
ALONE = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "PATH": os.environ["PATH"],
    "HOME": os.environ.get("HOME", "/"),
}


def run(code: str, tmp_path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**ALONE, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def marked(folder: str) -> list[int]:
    """Processes that carry the mark of an embedded Ray's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"PADFREE_RAY_FOLDER={folder}".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_inline_runs_in_order_and_hands_errors_on() -> None:
    with InlineRunner() as runner, runner.open() as tasks:
        first, second = tasks.submit(len, "abc"), tasks.submit(int, "x")
        assert [(done.task, done.value) for done in tasks.wait(0)] == [(first, 3)]
        (failed,) = tasks.wait(0)
        assert failed.task == second
        assert isinstance(failed.error, ValueError)
        assert tasks.wait(0) == []


@pytest.mark.parametrize("name", ["inline", "ray"])
def test_who_waits_for_nothing_waits_and_does_not_spin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runners = importlib.import_module(f"packer.runners.{name}")
    tasks = runners._InlineTasks() if name == "inline" else runners._RayTasks()
    waited: list[float] = []
    monkeypatch.setattr(runners.time, "sleep", waited.append)
    assert tasks.wait(0.5) == []
    assert waited == [0.5]


def test_ray_runs_tasks_tells_errors_and_deaths_and_leaves_nothing(short_tmp: Path) -> None:
    code = """
import contextlib, os, pathlib, signal, sys, threading
from packer import logs
from packer.runners import WorkerDied
from packer.runners.ray import RayRunner

def die():
    os.kill(os.getpid(), signal.SIGKILL)

sys.stderr = sys.stdout
before = signal.getsignal(signal.SIGTERM)
made = []
# From a thread that ends, as a service does it: Ray must live on.
thread = threading.Thread(target=lambda: made.append(RayRunner(num_cpus=1)))
thread.start(); thread.join()
runner = made[0]
assert runner.num_workers == 1
with runner.open() as tasks:
    with logs.using({"request_id": "post-7", "job": "j1", "dataset": "d1", "partition": 3}):
        failing = tasks.submit(int, "x")
    names = {tasks.submit(len, "abc"): "value", failing: "error", tasks.submit(die): "death"}
    while names:
        for done in tasks.wait(60):
            name = names.pop(done.task)
            assert (name == "value") == (done.value == 3)
            assert (name == "error") == isinstance(done.error, ValueError), done
            assert (name == "death") == isinstance(done.error, WorkerDied), done
            assert (name == "value") == (done.worker != "")
files = set()
for process in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):  # it may have ended
        if os.environ["PADFREE_RAY_FOLDER"].encode() in (process / "environ").read_bytes():
            files |= {os.readlink(one) for one in (process / "fd").iterdir()}
lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
listening = {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in files}
assert listening and all(one.endswith("0100007F") for one in listening), listening  # 127.0.0.1
folder = os.environ["PADFREE_RAY_FOLDER"]
print(folder)
for path in pathlib.Path(folder, "session_latest/logs").glob("worker-*.err"):
    print(*(line for line in path.read_text().splitlines() if line.startswith("{")), sep="\\n")
runner.close()
"""
    printed = run(code, short_tmp).splitlines()  # Ray tells of the death in there too
    assert not [text for text in printed if "authentication" in text]  # of no interest to who starts it
    (folder,) = [text for text in printed if text.startswith(str(short_tmp))]
    (line,) = [json.loads(text) for text in printed if text.startswith("{")]
    assert (line["level"], line["logger"]) == ("error", "padfree.worker")
    assert [line[name] for name in ("request_id", "job", "dataset", "partition")] == ["post-7", "j1", "d1", 3]
    assert line["message"].startswith("ValueError: invalid literal")
    assert "/" in line["worker"]
    assert list(short_tmp.iterdir()) == []
    assert marked(folder) == []


def test_sigterm_is_the_processes_own_and_the_next_start_ends_what_a_killed_one_left(short_tmp: Path) -> None:
    code = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))  # not Ray's
from packer.runners.ray import RayRunner
runner = RayRunner(num_cpus=1)
os.kill(os.getpid(), signal.SIGTERM)
print(os.environ["PADFREE_RAY_FOLDER"], flush=True)
time.sleep(600)
"""
    killed = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**ALONE, "TMPDIR": str(short_tmp)},
    )
    assert killed.stdout is not None
    assert killed.stdout.readline().strip() == "handled"
    folder = killed.stdout.readline().strip()
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    assert Path(folder).is_dir()
    run("from packer.runners import leftovers; leftovers.sweep()", short_tmp)
    wait_for(lambda: marked(folder) == [])
    assert list(short_tmp.iterdir()) == []


def test_an_exit_while_ray_starts_leaves_nothing(short_tmp: Path) -> None:
    """Ctrl-C right after the start: the thread that starts Ray ends with the process."""
    code = """
import os, threading, time
from packer.runners.ray import RayRunner
threading.Thread(target=lambda: RayRunner(num_cpus=1), daemon=True).start()
def started():
    return os.environ.get("PADFREE_RAY_FOLDER") and os.listdir(os.environ["PADFREE_RAY_FOLDER"])
while not started():
    time.sleep(0.01)
print(os.environ["PADFREE_RAY_FOLDER"], flush=True)
"""
    folder = run(code, short_tmp).strip().splitlines()[-1]
    assert folder.startswith(str(short_tmp))
    assert list(short_tmp.iterdir()) == []
    assert marked(folder) == []
