"""Packing on several workers at once: all of them work, and the dataset is the same."""

from __future__ import annotations

import heapq
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packing_job import pack_document, spec_of, write_rows, write_tokenizer

from packer.manifest import Manifest
from packer.sources import FileIndex, RecordFile, partitions
from packer.sources.values import MARK, MIB
from packer.spec import InputFile
from packer.store import LocalStore

NUM_FILES, ROWS_A_FILE, WORDS_A_ROW = 40, 25, 500
FIRST_BYTES, MAX_BYTES = 64 << 10, 256 << 10  # partitions as small as the test's files

# In a process of its own, since a process can have one Ray. A partition's task tells that it has begun and
# waits until as many others have: that it comes back says that they ran at once.
DRIVER = """
import json, os, sys, time
from pathlib import Path
from packer import coordinator
from packer.coordinator import pack
from packer.resolve import resolve
from packer.runners.ray import RayRunner
from packer.sources import partitions
from packer.spec import parse_spec
from packer.store import LocalStore

asked = json.loads(sys.argv[1])
cutting = {"first_bytes": asked["first_bytes"], "max_bytes": asked["max_bytes"]}
partitions.cut.__kwdefaults__.update(cutting)
here = Path(asked["folder"])


def together(function, num_workers, *args):
    (here / f"{os.getpid()}").touch()
    until = time.monotonic() + 120
    while len(list(here.iterdir())) < num_workers:
        if time.monotonic() > until:
            raise RuntimeError(f"only {len(list(here.iterdir()))} of {num_workers} workers at once")
        time.sleep(0.01)
    return function(*args)


pack_one = coordinator._pack_one
coordinator._pack_one = lambda *args: together(pack_one, asked["num_workers"], *args)
store = LocalStore(asked["store"])
job = resolve(parse_spec(asked["spec"]), store=store)
with RayRunner(num_cpus=asked["num_workers"]) as runner:
    report = pack(job, store, runner)
print(json.dumps({"dataset": job.dataset, "report": report, "workers": len(list(here.iterdir()))}))
"""


def write_files(folder: Path) -> Path:
    random = np.random.default_rng(52)
    for number in range(NUM_FILES):
        words = random.integers(36, 512, (ROWS_A_FILE, WORDS_A_ROW))
        rows = [{"text": " ".join(f"w{word}" for word in row)} for row in words.tolist()]
        write_rows(folder / f"{number:02}.jsonl", rows)
    return folder


def packed_on(num_workers: int, spec: dict[str, Any], store: Path, tmp: Path) -> dict[str, Any]:
    folder = tmp / f"at-once-{num_workers}"
    folder.mkdir()
    asked = {
        "spec": spec,
        "store": str(store),
        "folder": str(folder),
        "num_workers": num_workers,
        "first_bytes": FIRST_BYTES,
        "max_bytes": MAX_BYTES,
    }
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "TMPDIR": str(tmp)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def index_of(number: int, num_records: int, num_bytes: int) -> FileIndex:
    """A JSON Lines file as `index_input` tells it, a mark a MiB."""
    input = InputFile(path=f"{number}.jsonl", num_bytes=num_bytes, digest=str(number), reader="jsonl")
    file = RecordFile(
        input=input, layout="lines", unit="line", num_records=num_records, num_bytes=num_bytes, mtime_ns=0
    )
    marks = np.zeros(num_bytes // MIB + 1, MARK)
    marks["num_bytes"] = marks["offset"] = np.arange(len(marks)) * MIB
    marks["ordinal"] = marks["begin"] = marks["num_bytes"] * num_records // num_bytes
    return FileIndex(file=file, marks=marks)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize(("num_files", "file_bytes"), [(40, 3_100_000), (1, 124_000_000)])
def test_f52_the_cut_lets_four_workers_be_two_and_a_half_times_as_fast(
    seed: int | None, num_files: int, file_bytes: int
) -> None:
    indexes = [index_of(number, 40_000 // num_files, file_bytes) for number in range(num_files)]
    found = partitions.cut(indexes, shuffle_seed=seed, max_tokens=8192)
    rows = [partition.stop - partition.start for partition in found]
    assert sum(rows) == 40_000
    # Partitions are handed out in order, each to whoever is free first.
    busy = [0] * 4
    for count in rows:
        heapq.heapreplace(busy, busy[0] + count)
    assert sum(rows) >= 2.5 * max(busy)
    assert len(found) <= 24  # each end costs half a pack


def test_partitions_of_long_packs_are_larger() -> None:
    index = index_of(0, 40_000, 124_000_000)
    short, long = (partitions.cut([index], shuffle_seed=0, max_tokens=n) for n in (2048, 32768))
    assert len(long) < len(short)
    largest = max(partition.stop - partition.start for partition in long) / 40_000 * 124_000_000
    assert largest >= 256 * 32768 * 4


@pytest.mark.slow
def test_f52_workers_pack_at_once_and_give_the_same_dataset(
    tmp_path: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(
        write_files(tmp_path / "files"), write_tokenizer(tmp_path / "tokenizer"), packing={"max_tokens": 2048}
    )
    one, four = (packed_on(n, spec, tmp_path / f"store-{n}", short_tmp) for n in (1, 4))
    assert (one["workers"], four["workers"]) == (1, 4)
    assert one["dataset"] == four["dataset"]
    digests = []
    for num_workers in (1, 4):
        manifest = Manifest(LocalStore(tmp_path / f"store-{num_workers}"), one["dataset"])
        manifest.refresh()
        assert manifest.num_commits >= 8
        digests.append([shard.sha256 for shard in manifest.shards])
    assert digests[0] == digests[1]
    assert one["report"] == four["report"]
    assert one["report"]["rows_packed"] == NUM_FILES * ROWS_A_FILE
    assert one["report"]["tokens_packed"] == NUM_FILES * ROWS_A_FILE * (WORDS_A_ROW + 1)  # and EOS
    # Without Ray, in one process: the same bytes again.
    cutting = {"first_bytes": FIRST_BYTES, "max_bytes": MAX_BYTES}
    monkeypatch.setattr(partitions.cut, "__kwdefaults__", {**partitions.cut.__kwdefaults__, **cutting})
    assert pack_document(tmp_path / "inline", spec).digests == digests[0]
