"""A worker's machine is lost in the middle of a job: a real service, a real Ray of three workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packing_job import spec_of, write_rows
from serving import Server, free_port, wait_for

from packer.manifest import Manifest
from packer.shard import read_packs
from packer.store import LocalStore

NUM_SHARDS = 30
ROWS_PER_SHARD = 1000
TOKENIZER = Path(__file__).parents[2] / "examples/tokenizer"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away"]

SERVE = """
import functools, sys
from packer import sources
from padfree.cli import main
size = int(sys.argv.pop())
sources.cut = functools.partial(sources.cut, first_bytes=size, max_bytes=size)  # equal partitions
sys.exit(main())
"""


def write_source(folder: Path) -> tuple[Path, int]:
    """Rows of one size; and the bytes of a partition."""
    rows = [
        {"text": f"{number:06d} " + " ".join(20 * (WORDS[number % 12 :] + WORDS[: number % 12]))}
        for number in range(NUM_SHARDS * ROWS_PER_SHARD)
    ]
    path = write_rows(folder / "rows.jsonl", rows)
    return path, path.stat().st_size // NUM_SHARDS


@contextlib.contextmanager
def ray_of(num_workers: int, environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    folder = tempfile.mkdtemp(prefix="pf")  # short: Ray's sockets lie below it
    command = [sys.executable, str(Path(__file__).parents[1] / "ray_cluster.py"), folder, str(num_workers)]
    cluster = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert cluster.stdout is not None
        yield {"folder": folder, **json.loads(cluster.stdout.readline())}
    finally:
        cluster.communicate(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


class Log:
    """The service's lines, read as they come."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.lines: list[dict[str, Any]] = []
        self._process = process
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with contextlib.suppress(ValueError):
                self.lines.append(json.loads(line))

    def shards_by_worker(self) -> Counter[str]:
        return Counter(line["worker"] for line in self.lines if "is committed" in line["message"])

    def join(self) -> None:
        self._thread.join(60)


@contextlib.contextmanager
def service_on(
    address: str, store: Path, source: Path, partition_bytes: int, environment: dict[str, str]
) -> Iterator[tuple[Server, Log]]:
    port = free_port()
    command = [sys.executable, "-c", SERVE, "serve", "--ray", address, "--port", str(port)]
    command += ["--store", str(store), "--data-root", str(source.parent), "--data-root", str(TOKENIZER)]
    command += ["--log-format", "json", str(partition_bytes)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    log = Log(process)
    try:
        server = Server(port=port, process=process)
        wait_for(lambda: process.poll() is not None or ready(server) == 3, timeout_s=120)
        assert process.poll() is None, log.lines
        yield server, log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.join()
        assert process.stderr is not None
        process.stderr.close()


def ready(server: Server) -> int | None:
    """How many workers the service has."""
    try:
        return server.get("/readyz").json["workers"]
    except (OSError, KeyError):
        return None


def is_packing(ray_folder: str, process: int) -> bool:
    """Whether a worker is within a partition, by what it logs."""
    logs = Path(ray_folder, "session_latest/logs").glob(f"worker-*-{process}.err")
    lines = "".join(log.read_text() for log in logs)
    return lines.count(" begins: ") > lines.count(" is packed, to be committed")


def is_caught(ray_folder: str, process: int) -> bool:
    """Stop a worker; it is left so where that was within a partition."""
    os.kill(process, signal.SIGSTOP)
    if is_packing(ray_folder, process):
        return True
    os.kill(process, signal.SIGCONT)
    return False


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_f38_a_lost_worker_is_done_without_and_the_status_shows_it(tmp_path: Path) -> None:
    source, partition_bytes = write_source(tmp_path / "data")
    environment = {**os.environ, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    store = LocalStore(tmp_path / "store")
    with (
        ray_of(3, environment) as cluster,
        service_on(cluster["address"], store.root, source, partition_bytes, environment) as (server, log),
    ):
        packing = {"strategy": "best_fit", "max_tokens": 2048}
        dataset = server.post_spec(spec_of(source, TOKENIZER, packing=packing, shuffle_seed=0)).json["id"]
        # All have begun: none stands idle because the window waits for one that starts slowly.
        wait_for(lambda: len(log.shards_by_worker()) == 3, timeout_s=120)
        wait_for(lambda: max(log.shards_by_worker().values()) >= 3, timeout_s=120)
        worker = log.shards_by_worker().most_common(1)[0][0]
        process = int(worker.rpartition("/")[2])
        raylet = parent_of(process)
        assert raylet in cluster["raylets"]
        wait_for(lambda: is_caught(cluster["folder"], process))
        for one in (raylet, process):  # the machine with all that is on it
            os.kill(one, signal.SIGKILL)
        killed, before = time.monotonic(), sum(log.shards_by_worker().values())
        assert server.get(f"/v1/datasets/{dataset}").json["state"] == "packing"
        wait_for(lambda: ready(server) == 2)
        assert b"padfree_workers 2.0" in server.get("/metrics").body
        print(f"of {before} shards, the status showed it after {time.monotonic() - killed:.1f} s")
        view = server.wait_for_state(dataset, "ready", "failed", timeout_s=180)
    assert view["state"] == "ready", view["error"]
    assert view["progress"]["num_shards"] == NUM_SHARDS
    assert 1 <= view["progress"]["retries"] <= 3
    assert view["report"]["rows_packed"] == view["report"]["rows_in"] == NUM_SHARDS * ROWS_PER_SHARD
    manifest = Manifest(store, dataset)
    manifest.refresh()
    seen = Counter(
        int(example)
        for shard in manifest.shards
        for pack in read_packs(store.get(shard.key))
        for example in pack.example_ids
    )
    assert seen == Counter(range(NUM_SHARDS * ROWS_PER_SHARD))
    # No line again and again: progress is one of each partition, and a warning not even that.
    for line, count in Counter(line["message"] for line in log.lines).items():
        assert count <= 10, line
    warnings = [line["message"] for line in log.lines if line["level"] not in ("info", "debug")]
    for line, count in Counter(re.sub(r"\d+", "N", text) for text in warnings).items():
        assert count <= 10, line
    assert sum(log.shards_by_worker().values()) == NUM_SHARDS
