"""The head of a Ray cluster is replaced during a job: the service lives on, and packs on the new one."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from packing_job import pack_document, spec_of, write_rows, write_tokenizer
from serving import free_port, messages, spawned, wait_for

from packer.manifest import dataset_key
from packer.runners import apart
from packer.runners.apart import ApartRunner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def head(port: int, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Ray's head with one CPU, and all its processes; killed at the end."""
    folder = tempfile.mkdtemp(prefix="pf")  # short: Ray's sockets lie below it
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += ["--num-cpus=1", "--include-dashboard=false", f"--temp-dir={folder}"]
    command += ["--node-ip-address=127.0.0.1", "--object-store-memory=80000000", "--disable-usage-stats"]
    started = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert started.stdout is not None
        for line in started.stdout:
            if b"Ray runtime started" in line:
                break
        yield started
    finally:
        _kill(started)
        shutil.rmtree(folder, ignore_errors=True)


def _kill(started: subprocess.Popen[bytes]) -> None:
    """All at once, as a machine that loses its power. `ray start` makes one session of all it starts."""
    mark = f"/proc/{started.pid}"
    if os.path.exists(mark) and started.poll() is None:
        for process in _of_session(started.pid):
            os.kill(process, signal.SIGKILL)
        started.wait()
    if started.stdout is not None:
        started.stdout.close()


def _of_session(session: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            found.append(int(process.name))
    return found


@pytest.fixture
def environment() -> dict[str, str]:
    return os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }


def test_packing_goes_on_with_a_new_head_and_the_service_lives_on(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    rows = [{"text": " ".join("abcd"[(n + i) % 4] for i in range(n % 60))} for n in range(60_000)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    spec = spec_of(source, write_tokenizer(tmp_path / "tokenizer"), packing={"max_tokens": 256})
    here = pack_document(tmp_path / "folder", spec)
    port, store = free_port(), tmp_path / "store"
    address = f"127.0.0.1:{port}"
    with (
        head(port, environment) as first,
        spawned(
            store, data_root=tmp_path, **environment, PADFREE_RAY_ADDRESS=address, PADFREE_LOG_LEVEL="warning"
        ) as service,
    ):
        dataset = service.post_spec(spec).json["id"]
        commits = store / dataset_key(dataset, "commits")
        wait_for(lambda: commits.is_dir() and any(commits.iterdir()), timeout_s=120)
        _kill(first)
        assert not (store / dataset_key(dataset, "finished.json")).exists()
        assert service.stream(dataset, max_steps=1).status == 200  # what is packed is served meanwhile
        with head(port, environment):
            finished = store / dataset_key(dataset, "finished.json")
            wait_for(finished.exists, timeout_s=240)
            assert service.process is not None
            assert service.process.poll() is None
            shards = service.get(f"/v1/datasets/{dataset}/shards").json["shards"]
            assert [one["sha256"] for one in shards] == here.digests
            assert len(messages(service.stream(dataset).body)) == len(here.packs)


def test_a_runner_tells_values_errors_deaths_and_the_end_of_its_cluster(environment: dict[str, str]) -> None:
    code = """
import sys, time, os, signal
from packer.runners import ClusterLost, WorkerDied
from packer.runners.apart import ApartRunner
runner = ApartRunner(sys.argv[1])
with runner.open() as tasks:
    names = {tasks.submit(len, "abc"): "value", tasks.submit(int, "x"): "error"}
    names[tasks.submit(os._exit, 1)] = "death"
    while names:
        for done in tasks.wait(60):
            name = names.pop(done.task)
            assert (name == "value") == (done.value == 3)
            assert (name == "error") == isinstance(done.error, ValueError), done
            assert (name == "death") == isinstance(done.error, WorkerDied), done
    assert runner.num_workers == 1
    tasks.submit(time.sleep, 600)
    print("ready", flush=True)
    try:
        while True:
            assert tasks.wait(1.0) == []  # no partition is to be blamed for what comes now
    except ClusterLost as error:
        print("lost", error)
runner.close()
"""
    port = free_port()
    with head(port, environment) as first:
        using = subprocess.Popen(
            [sys.executable, "-c", code, f"127.0.0.1:{port}"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert using.stdout is not None
            assert using.stdout.readline().strip() == "ready"
            _kill(first)
            assert using.stdout.readline().startswith("lost the Ray cluster is gone")
            assert using.wait(60) == 0
        finally:
            if using.poll() is None:
                using.kill()
            using.wait()
            using.stdout.close()


def test_a_cluster_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_JOIN_S", 5.0)
    monkeypatch.setattr(apart, "_END_S", 0.5)
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:9 cannot be joined"):
        ApartRunner("127.0.0.1:9")
