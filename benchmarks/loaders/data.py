"""The dataset that everyone reads: real packs, repeated, laid into a store as padfree packs it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from packer import coordinator
from packer.manifest import Commit, Manifest, Shard, dataset_key, shard_key, shard_rows, write_commit
from packer.report import Counters
from packer.resolve import resolve
from packer.runners import InlineRunner
from packer.shard import Pack, encode_shard, read_packs
from packer.spec import (
    Job,
    PackingSpec,
    SourceSpec,
    Spec,
    TokenizerSpec,
    canonical_json,
    job_to_document,
    parse_spec,
)
from packer.store import LocalStore

MAX_TOKENS = 8192
PACKS_PER_SHARD = 512
EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def real_packs(max_tokens: int) -> list[Pack]:
    """The examples that come with padfree, packed as padfree packs them; the last pack left out."""
    document = {
        "source": {"paths": [str(EXAMPLES / "data")]},
        "tokenizer": {"path": str(EXAMPLES / "tokenizer")},
        "packing": {"max_tokens": max_tokens},
    }
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(folder)
        job = resolve(parse_spec(document), store=store)
        coordinator.pack(job, store, InlineRunner())
        manifest = Manifest(store, job.dataset)
        manifest.refresh()
        return [pack for shard in manifest.shards for pack in read_packs(store.get(shard.key))][:-1]


def build(root: Path, num_packs: int) -> tuple[str, int, int]:
    """A finished dataset of `num_packs` full packs: the real ones, again and again. Returns its id, the bytes
    of its shards and its tokens."""
    store, dataset = LocalStore(root), _start(root, f"{num_packs} full packs")
    real = real_packs(MAX_TOKENS)
    numbers, num_tokens = range(0, num_packs, PACKS_PER_SHARD), 0
    for partition, first in enumerate(numbers):
        part = [real[index % len(real)] for index in range(first, min(first + PACKS_PER_SHARD, num_packs))]
        num_tokens += sum(pack.num_tokens for pack in part)
        _commit(store, dataset, partition, part, key=shard_key(dataset, partition, 0))
    _finish(store, dataset, len(numbers), num_packs)
    shards = (root / dataset_key(dataset, "shards")).iterdir()
    return dataset, sum(path.stat().st_size for path in shards), num_tokens


def build_many(root: Path, num_packs: int) -> str:
    """A finished dataset of very many small packs: one shard, listed again and again."""
    store, dataset = LocalStore(root), _start(root, f"{num_packs} small packs")
    real = real_packs(512)
    part = [real[index % len(real)] for index in range(1000)]
    commits = num_packs // 1000
    for partition in range(commits):
        _commit(store, dataset, partition, part, key=shard_key(dataset, 0, 0))
    _finish(store, dataset, commits, num_packs)
    return dataset


def _start(root: Path, what: str) -> str:
    dataset = hashlib.sha256(what.encode()).hexdigest()[:32]
    spec = Spec(
        name=what,
        source=SourceSpec(paths=("made-up",), format="tokens"),
        tokenizer=TokenizerSpec(path="none"),
        packing=PackingSpec(max_tokens=MAX_TOKENS),
    )
    job = Job(dataset=dataset, spec=spec, inputs=(), tokenizer_digest="")
    LocalStore(root).put(dataset_key(dataset, "spec.json"), canonical_json(job_to_document(job)))
    return dataset


def _commit(store: LocalStore, dataset: str, partition: int, part: list[Pack], *, key: str) -> None:
    data, index = _encoded(dataset, part)
    if not store.exists(key):
        store.put(key, data)
    shard = Shard(
        index=0,
        key=key,
        num_packs=len(part),
        num_tokens=int(index["num_tokens"].sum()),
        num_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    rows = shard_rows(0, index)
    counters = {**_counters(len(part)), "rejected": []}
    write_commit(store, dataset, Commit(partition=partition, shards=(shard,), rows=rows, counters=counters))


_latest: dict[int, tuple[memoryview, np.ndarray]] = {}


def _encoded(dataset: str, part: list[Pack]) -> tuple[memoryview, np.ndarray]:
    if id(part) not in _latest:  # the same packs are committed again and again
        _latest.clear()
        _latest[id(part)] = encode_shard(part, dataset)
    return _latest[id(part)]


def _finish(store: LocalStore, dataset: str, num_partitions: int, num_packs: int) -> None:
    document = {"num_partitions": num_partitions, "report": _counters(num_packs)}
    store.put(dataset_key(dataset, "finished.json"), json.dumps(document).encode())


def _counters(num_packs: int) -> dict[str, Any]:
    return dataclasses.asdict(Counters(num_packs=num_packs))
