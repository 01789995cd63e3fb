"""A service at an address where no Ray head is: it says so, and nothing of it is left behind."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
from serving import free_port, running, spawned, wait_for

from packer.runners import apart
from packer.runners.apart import Cluster


def joining(parent: int) -> list[int]:
    """Processes that `parent` started to join a cluster."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            ppid = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if ppid == parent and b"packer.runners.apart_main" in words:
            found.append(int(process.name))
    return found


def is_there(process: int) -> bool:
    try:
        return (Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]) != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_joining_process_ends_with_the_service(tmp_path: Path, number: signal.Signals) -> None:
    address = f"127.0.0.1:{free_port()}"
    with spawned(tmp_path / "store", data_root=tmp_path, PADFREE_RAY_ADDRESS=address) as service:
        assert service.process is not None
        parent = service.process.pid
        (helper,) = wait_for(lambda: joining(parent))
        wait_for(lambda: b"/ray/" in Path(f"/proc/{helper}/maps").read_bytes())  # Ray is at work
        try:
            service.process.send_signal(number)
            assert service.process.wait(60) == (0 if number == signal.SIGTERM else -number)
            if number == signal.SIGKILL:
                wait_for(
                    lambda: not is_there(helper),
                )
            assert not is_there(helper)
        finally:
            if is_there(helper):
                os.kill(helper, signal.SIGKILL)


def test_a_process_that_does_not_end_by_itself_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    # As one whose interpreter Ray's core holds: it neither reads, nor heeds SIGTERM.
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    real = apart.subprocess.Popen
    started = []

    def deaf(command: list[str], **options: object) -> object:
        started.append(real([command[0], "-c", code], **options))
        return started[-1]

    monkeypatch.setattr(apart.subprocess, "Popen", deaf)
    cluster = Cluster("127.0.0.1:9")
    cluster.cancel()
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:9 cannot be joined: it was given up"):
        cluster()
    assert started[0].poll() is not None


def test_a_missing_head_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(apart, "_TELL_S", 0.3)
    monkeypatch.setattr(apart, "_TELL_AGAIN_S", 0.5)
    address = f"127.0.0.1:{free_port()}"
    required = f"a Ray head is required at {address}, found no answer for"
    with (
        caplog.at_level(logging.WARNING, "padfree"),
        running(tmp_path / "store", runner=Cluster(address)) as server,
    ):
        assert server.get("/readyz").json["checks"]["runner"].startswith("starting")
        told = wait_for(lambda: (a := server.get("/readyz").json["checks"]["runner"]) != "starting" and a)
        assert told.startswith(f"starting: {required}")
        assert "ray start --head" in told
        assert server.get("/readyz").status == 200
        wait_for(lambda: sum(required in line for line in caplog.messages) >= 2)
    assert joining(os.getpid()) == []
    assert "packing cannot start" not in caplog.text
