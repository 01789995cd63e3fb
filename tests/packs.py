"""Datasets for tests, laid into a store without sources, tokenizer or packing.

    dataset = build_dataset(tmp_path, numbered_packs(12), packs_per_shard=5)

writes spec.json, shards, commits and finished.json the way the coordinator does. A dataset that is
still being packed: `start_dataset`, then `commit_partition` at will, then `finish_dataset` (or
`fail_dataset`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packer.manifest import ROWS, Commit, Shard, dataset_key, shard_key, shard_rows, write_commit
from packer.report import Counters
from packer.shard import Pack, encode_shard
from packer.spec import (
    Job,
    PackingSpec,
    SourceSpec,
    Spec,
    TokenizerSpec,
    canonical_json,
    dataset_id,
    job_to_document,
)
from packer.store import LocalStore


def pack_of(segments: Sequence[Sequence[int]], example_ids: Sequence[int]) -> Pack:
    """A pack of the given segments (token ids); all but each segment's first token is trained."""
    lengths = [len(segment) for segment in segments]
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    loss_mask = np.ones(cu_seqlens[-1], np.bool_)
    loss_mask[cu_seqlens[:-1]] = False
    return Pack(
        input_ids=np.concatenate([np.asarray(segment, np.int32) for segment in segments]),
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
        example_ids=np.asarray(example_ids, np.int64),
    )


def numbered_packs(num_packs: int, *, length: int = 4) -> list[Pack]:
    """Pack i holds one segment: example i, of `length` tokens, the first of which is i."""
    return [pack_of([[i, *range(1, length)]], [i]) for i in range(num_packs)]


def taken(batches: Iterable[Any]) -> list[int]:
    """Which numbered packs these batches hold, in order."""
    return [number for batch in batches for number in batch.example_ids.tolist()]


def random_packs(num_packs: int, *, max_tokens: int = 64, vocab_size: int = 500, seed: int = 0) -> list[Pack]:
    """Packs of 1 to 6 segments of random length, tokens and loss mask; example ids count on."""
    rng = np.random.default_rng(seed)
    packs, next_id = [], 0
    for _ in range(num_packs):
        num_segments = int(rng.integers(1, min(6, max_tokens) + 1))
        lengths = rng.integers(1, max_tokens // num_segments + 1, num_segments)
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        loss_mask = rng.random(cu_seqlens[-1]) < 0.7
        loss_mask[cu_seqlens[:-1]] = False
        packs.append(
            Pack(
                input_ids=rng.integers(0, vocab_size, cu_seqlens[-1], dtype=np.int32),
                loss_mask=loss_mask,
                cu_seqlens=cu_seqlens,
                example_ids=np.arange(next_id, next_id + num_segments, dtype=np.int64),
            )
        )
        next_id += num_segments
    return packs


def start_dataset(
    store_root: Path | str,
    *,
    identity: str,
    name: str | None = "test",
    packing: PackingSpec | None = None,
    shuffle_seed: int | None = 0,
) -> str:
    """Write spec.json of a dataset whose id follows from `identity`; returns the id."""
    spec = Spec(
        name=name,
        source=SourceSpec(paths=("rows.jsonl",), format="tokens"),
        tokenizer=TokenizerSpec(path="tokenizer"),
        packing=packing or PackingSpec(),
        shuffle_seed=shuffle_seed,
    )
    digest = hashlib.sha256(identity.encode()).hexdigest()
    dataset = dataset_id(spec, inputs=(), tokenizer_digest=digest)
    job = Job(dataset=dataset, spec=spec, inputs=(), tokenizer_digest=digest)
    LocalStore(store_root).put(dataset_key(dataset, "spec.json"), canonical_json(job_to_document(job)))
    return dataset


def commit_partition(
    store_root: Path | str,
    dataset: str,
    partition: int,
    packs: Sequence[Pack],
    *,
    packs_per_shard: int,
    steps: Sequence[int] | None = None,
) -> None:
    """Write the packs as shards of at most `packs_per_shard` and commit them as one partition.

    steps: the optimiser step of each pack, for strategy "step".
    """
    store = LocalStore(store_root)
    shards, rows = [], [np.empty(0, ROWS)]
    for number, first in enumerate(range(0, len(packs), packs_per_shard)):
        part = packs[first : first + packs_per_shard]
        data, index = encode_shard(part, dataset)
        key = shard_key(dataset, partition, number)
        store.put(key, data)
        shards.append(
            Shard(
                index=number,
                key=key,
                num_packs=len(part),
                num_tokens=int(index["num_tokens"].sum()),
                num_bytes=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
            )
        )
        of_part = None if steps is None else np.asarray(steps[first : first + packs_per_shard])
        rows.append(shard_rows(number, index, of_part))
    commit = Commit(
        partition=partition,
        shards=tuple(shards),
        rows=np.concatenate(rows),
        counters=_counters(packs),
    )
    write_commit(store, dataset, commit)


def finish_dataset(store_root: Path | str, dataset: str, num_partitions: int, packs: Sequence[Pack]) -> None:
    """Write finished.json: no more packs will come."""
    document = {"num_partitions": num_partitions, "report": _counters(packs)}
    LocalStore(store_root).put(dataset_key(dataset, "finished.json"), json.dumps(document).encode())


def fail_dataset(store_root: Path | str, dataset: str, **document: Any) -> None:
    """Write failed.json, for example `type="packing-failed", detail="rows.jsonl, line 3: …"`."""
    LocalStore(store_root).put(dataset_key(dataset, "failed.json"), json.dumps(document).encode())


def build_dataset(
    store_root: Path | str,
    packs: Sequence[Pack],
    *,
    packs_per_shard: int,
    shards_per_partition: int = 2,
    finished: bool = True,
    name: str | None = "test",
    packing: PackingSpec | None = None,
    shuffle_seed: int | None = 0,
) -> str:
    """Lay `packs` into a store as a dataset; returns its id. Equal packs and layout, equal id."""
    content = hashlib.sha256()
    for pack in packs:
        for array in (pack.input_ids, pack.loss_mask, pack.cu_seqlens, pack.example_ids):
            content.update(np.ascontiguousarray(array).tobytes())
    identity = f"{content.hexdigest()} {packs_per_shard} {shards_per_partition}"
    dataset = start_dataset(
        store_root, identity=identity, name=name, packing=packing, shuffle_seed=shuffle_seed
    )
    size = packs_per_shard * shards_per_partition
    starts = range(0, len(packs), size)
    for partition, first in enumerate(starts):
        commit_partition(
            store_root, dataset, partition, packs[first : first + size], packs_per_shard=packs_per_shard
        )
    if finished:
        finish_dataset(store_root, dataset, len(starts), packs)
    return dataset


def build_step_dataset(
    store_root: Path | str,
    packs: Sequence[Pack],
    sizes: Sequence[int],
    *,
    packs_per_shard: int = 3,
    steps_per_partition: int = 4,
    finished: bool = True,
) -> str:
    """Lay `packs` into a store as a dataset of strategy "step": optimiser step i takes sizes[i] packs."""
    packing = PackingSpec(strategy="step", step_size=8)
    identity = f"steps {list(sizes)} {[pack.input_ids.tolist() for pack in packs]}"
    dataset = start_dataset(store_root, identity=identity, packing=packing)
    bounds = np.cumsum([0, *sizes]).tolist()
    starts = range(0, len(sizes), steps_per_partition)
    for partition, first in enumerate(starts):
        last = min(first + steps_per_partition, len(sizes))
        steps = np.repeat(np.arange(first, last), sizes[first:last]).tolist()
        part = packs[bounds[first] : bounds[last]]
        commit_partition(store_root, dataset, partition, part, packs_per_shard=packs_per_shard, steps=steps)
    if finished:
        finish_dataset(store_root, dataset, len(starts), packs)
    return dataset


def _counters(packs: Sequence[Pack]) -> dict[str, Any]:
    rows = sum(pack.num_segments for pack in packs)
    tokens = sum(pack.num_tokens for pack in packs)
    counters = Counters(
        rows_in=rows,
        rows_packed=rows,
        tokens_in=tokens,
        tokens_packed=tokens,
        tokens_trained=sum(pack.num_trained for pack in packs),
        num_packs=len(packs),
    )
    return {**dataclasses.asdict(counters), "rejected": []}


def changed(pack: Pack, **arrays: Any) -> Pack:
    """The same pack with other arrays."""
    names = ("input_ids", "loss_mask", "cu_seqlens", "example_ids")
    return Pack(**{name: arrays.get(name, getattr(pack, name)) for name in names})
