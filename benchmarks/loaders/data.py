"""The dataset that everyone reads: real packs, repeated, laid into a store as padfree packs it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from packer import coordinator
from packer.manifest import (
    Commit,
    Manifest,
    Shard,
    dataset_key,
    lock_key,
    shard_key,
    shard_rows,
    write_commit,
)
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


def build(root: Path, num_packs: int, *, times: int = 1) -> tuple[str, int, int]:
    """A finished dataset of `num_packs` full packs: the real ones, again and again. Its shards are listed
    `times` times. Returns its id, the bytes of its shards and its tokens, each as often as it is listed."""
    store, real = LocalStore(root), real_packs(MAX_TOKENS)
    firsts = range(0, num_packs, PACKS_PER_SHARD)
    stops = [min(first + PACKS_PER_SHARD, num_packs) for first in firsts]
    with _new(store, f"{num_packs} full packs, {times} times") as dataset:
        shards = [
            encode_shard([real[i % len(real)] for i in range(first, stop)], dataset)
            for first, stop in zip(firsts, stops, strict=True)
        ]
        for partition in range(times * len(shards)):
            number = partition % len(shards)
            _commit(store, dataset, partition, *shards[number], key=shard_key(dataset, number, 0))
        _finish(store, dataset, times * len(shards), times * num_packs)
    num_bytes = sum(len(data) for data, _ in shards)
    num_tokens = sum(int(index["num_tokens"].sum()) for _, index in shards)
    return dataset, times * num_bytes, times * num_tokens


def build_many(root: Path, num_packs: int) -> str:
    """A finished dataset of very many small packs: one shard, listed again and again."""
    store, real = LocalStore(root), real_packs(512)
    with _new(store, f"{num_packs} small packs") as dataset:
        encoded = encode_shard([real[index % len(real)] for index in range(1000)], dataset)
        commits = num_packs // 1000
        for partition in range(commits):
            _commit(store, dataset, partition, *encoded, key=shard_key(dataset, 0, 0))
        _finish(store, dataset, commits, num_packs)
    return dataset


@contextlib.contextmanager
def _new(store: LocalStore, what: str) -> Iterator[str]:
    """A dataset to be filled and finished; its lock is held meanwhile, or a service would pack it."""
    dataset = hashlib.sha256(what.encode()).hexdigest()[:32]
    spec = Spec(
        name=what,
        source=SourceSpec(paths=("made-up",), format="tokens"),
        tokenizer=TokenizerSpec(path="none"),
        packing=PackingSpec(max_tokens=MAX_TOKENS),
    )
    job = Job(dataset=dataset, spec=spec, inputs=(), tokenizer_digest="")
    with store.lock(lock_key(dataset)) as mine:
        if not mine:
            raise RuntimeError(f"dataset {dataset} is being made by another process")
        store.put(dataset_key(dataset, "spec.json"), canonical_json(job_to_document(job)))
        yield dataset


def _commit(
    store: LocalStore, dataset: str, partition: int, data: memoryview, index: np.ndarray, *, key: str
) -> None:
    if not store.exists(key):
        store.put(key, data)
    shard = Shard(
        index=0,
        key=key,
        num_packs=len(index),
        num_tokens=int(index["num_tokens"].sum()),
        num_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    rows = shard_rows(0, index)
    counters = {**_counters(len(index)), "rejected": []}
    write_commit(store, dataset, Commit(partition=partition, shards=(shard,), rows=rows, counters=counters))


def _finish(store: LocalStore, dataset: str, num_partitions: int, num_packs: int) -> None:
    document = {"num_partitions": num_partitions, "report": _counters(num_packs)}
    store.put(dataset_key(dataset, "finished.json"), json.dumps(document).encode())


def _counters(num_packs: int) -> dict[str, Any]:
    return dataclasses.asdict(Counters(num_packs=num_packs))
