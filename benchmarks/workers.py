"""How packing scales with workers: the same files on 1, 2, 4, … of Ray's, as many as there are cores.

    python benchmarks/workers.py
    python benchmarks/workers.py --tokenizer package/models --rows 40000 --workers 1 2 4

Writes --files files of --rows rows of about 500 English-like words (seeded), packs them with each number of
workers in a process of its own, and compares the datasets shard by shard. Wall seconds are from the first
task to the report, workers started and tokenizer loaded before. CPU seconds say what does not depend on how
busy the machine is: of all workers together (more workers should not make more of it), and of the process
that coordinates, which no number of workers makes less. Prints Markdown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import children  # noqa: E402

MAX_TOKENS = 8192


def write_files(folder: Path, num_files: int, num_rows: int) -> None:
    """Rows of 400 to 600 words of 2 to 9 letters; a few thousand words in all, by Zipf's law."""
    random = np.random.default_rng(52)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = np.array(["".join(random.choice(letters[:18], n)) for n in random.integers(2, 10, 5000)])
    folder.mkdir()
    for number in range(num_files):
        with (folder / f"{number:03}.jsonl").open("w") as file:
            for _ in range(num_rows // num_files):
                chosen = np.minimum(random.zipf(1.3, int(random.integers(400, 601))), len(words)) - 1
                file.write(json.dumps({"text": " ".join(words[chosen])}) + "\n")


def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """A task's value and its CPU seconds."""
    since = time.process_time()
    return function(*args), time.process_time() - since


def warm(job: Any, store: Any) -> None:
    """Load what a worker loads once; held a little, so that each worker gets one of these."""
    from packer.rows import renderer_of

    tokenizer = renderer_of(job, store).tokenizer
    assert tokenizer is not None
    tokenizer.encode(["word " * (1 << 17)])
    time.sleep(2)


class MeasuredRunner:
    """Another runner; `cpu_s` is what its tasks took."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.cpu_s = runner, 0.0
        self.name = runner.name

    @property
    def num_workers(self) -> int:
        return self._runner.num_workers

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        with self._runner.open() as tasks:
            self._tasks = tasks
            yield self

    def submit(self, function: Callable[..., Any], *args: Any) -> int:
        return self._tasks.submit(timed, function, *args)

    def wait(self, timeout_s: float) -> list[Any]:
        found = []
        for done in self._tasks.wait(timeout_s):
            if done.error is None:
                value, cpu_s = done.value
                self.cpu_s += cpu_s
                done = dataclasses.replace(done, value=value)
            found.append(done)
        return found

    def close(self) -> None:
        self._runner.close()


def run_child(options: dict[str, Any]) -> dict[str, Any]:
    from packer.coordinator import pack
    from packer.manifest import Manifest
    from packer.resolve import resolve
    from packer.runners.ray import RayRunner
    from packer.spec import parse_spec
    from packer.store import LocalStore

    store = LocalStore(options["store"])
    job = resolve(parse_spec(options["spec"]), store=store)
    with RayRunner(num_cpus=options["workers"]) as ray:
        with ray.open() as tasks:
            left = [tasks.submit(warm, job, store) for _ in range(options["workers"])]
            while left:
                for done in tasks.wait(1.0):
                    assert done.error is None, done.error
                    left.remove(done.task)
        runner = MeasuredRunner(ray)
        cpu, wall = time.process_time(), time.monotonic()
        report = pack(job, store, runner)
        wall_s, own_s = time.monotonic() - wall, time.process_time() - cpu
    manifest = Manifest(store, job.dataset)
    manifest.refresh()
    return {
        "wall_s": wall_s,
        "coordinator_s": own_s,
        "workers_s": runner.cpu_s,
        "partitions": manifest.num_commits,
        "shards": [shard.sha256 for shard in manifest.shards],
        **{name: report[name] for name in ("rows_packed", "tokens_packed")},
    }


def measured(options: dict[str, Any], fast: bool) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])  # of Ray's workers too
    environ = {"PADFREE_FAST": str(int(fast)), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "PYTHONPATH": path}
    return children.measured(__file__, options, **environ)


def main() -> None:
    parser = children.parser_of(__doc__)
    cores = len(os.sched_getaffinity(0))
    counts = [n for n in (1, 2, 4, 8, 16, 32) if n <= cores]
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--workers", type=int, nargs="+", default=counts)
    parser.add_argument("--plain", action="store_true", help="without the `fast` extra")
    options = children.parsed(parser, run_child)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        files = Path(folder) / "files"
        write_files(files, options.files, options.rows)
        size = sum(path.stat().st_size for path in files.iterdir()) / 1e6
        print(f"{options.rows:,} rows in {options.files} files, {size:.0f} MB, {cores} cores\n")
        print("| workers | rows/s | times 1 | wall s | workers' CPU s | coordinator's CPU s | same shards |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        first: dict[str, Any] = {}
        for count in options.workers:
            spec = {
                "source": {"paths": [str(files)]},
                "tokenizer": {"path": str(options.tokenizer.absolute())},
                "packing": {"max_tokens": MAX_TOKENS},
            }
            asked = {"workers": count, "spec": spec, "store": f"{folder}/store-{count}"}
            found = measured(asked, not options.plain)
            first = first or found
            cells = [
                str(count),
                f"{found['rows_packed'] / found['wall_s']:,.0f}",
                f"{first['wall_s'] / found['wall_s']:.2f}",
                f"{found['wall_s']:.1f}",
                f"{found['workers_s']:.1f}",
                f"{found['coordinator_s']:.2f}",
                "yes" if found["shards"] == first["shards"] else "NO",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
