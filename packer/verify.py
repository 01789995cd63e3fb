"""Check a store: every checksum, every rule of the format, and that the numbers agree."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from packer.manifest import Manifest, ManifestError, Shard, list_datasets
from packer.shard import ShardError, iter_messages, read_packs, validate
from packer.store import LocalStore


@dataclass(slots=True)
class Findings:
    """What was looked at, and one line a fault: which file, which rule."""

    num_datasets: int = 0
    num_shards: int = 0
    num_packs: int = 0
    faults: list[str] = field(default_factory=list)


def verify_store(store: LocalStore, *, dataset: str | None = None) -> Findings:
    """Check all datasets of a store, or one. Reads every byte of their shards."""
    found = Findings()
    names = list_datasets(store)
    if dataset is not None and dataset not in names:
        found.faults.append(f"there is no dataset {dataset} in {store.root}")
        return found
    for name in [dataset] if dataset is not None else names:
        found.num_datasets += 1
        _verify_dataset(store, name, found)
    return found


def _verify_dataset(store: LocalStore, dataset: str, found: Findings) -> None:
    manifest = Manifest(store, dataset)
    try:
        spec = manifest.spec() or {}
        for name in ("plan.json", "failed.json"):
            manifest.read_json(name)
        manifest.refresh()
    except ManifestError as error:
        found.faults.append(f"{dataset}: {error}")
        return
    max_tokens = spec.get("spec", {}).get("packing", {}).get("max_tokens")
    for shard in manifest.shards:
        found.num_shards += 1
        rows = manifest.rows[manifest.rows["shard"] == shard.index]
        try:
            found.num_packs += _verify_shard(store, dataset, shard, rows, max_tokens)
        except FileNotFoundError:
            found.faults.append(f"{shard.key}: the manifest lists it, but it is not there")
        except (ShardError, OSError) as error:
            found.faults.append(f"{shard.key}: {error}")
    if manifest.finished is not None and manifest.finished["report"]["num_packs"] != manifest.num_packs:
        found.faults.append(
            f"{dataset}: the report counts {manifest.finished['report']['num_packs']} packs, "
            f"the manifest {manifest.num_packs}"
        )


def _verify_shard(
    store: LocalStore, dataset: str, shard: Shard, rows: np.ndarray, max_tokens: int | None
) -> int:
    data = store.map(shard.key)
    if len(data) != shard.num_bytes:
        raise ShardError(f"{len(data)} bytes, the manifest says {shard.num_bytes}: cut off or changed")
    digest = hashlib.sha256(data).hexdigest()
    if digest != shard.sha256:
        raise ShardError(f"sha256 is {digest}, the manifest says {shard.sha256}: the file has changed")
    num_packs = validate(data, dataset=dataset, max_tokens=max_tokens)
    if num_packs != shard.num_packs or num_packs != len(rows):
        raise ShardError(f"{num_packs} packs, the manifest says {shard.num_packs} and indexes {len(rows)}")
    for row, (at, header_bytes, body_bytes), pack in zip(
        rows, iter_messages(data), read_packs(data), strict=True
    ):
        if (row["offset"], row["header_bytes"], row["body_bytes"]) != (at, header_bytes, body_bytes):
            raise ShardError(f"the row index does not point at the pack at byte {at}")
        lengths = np.diff(pack.cu_seqlens).astype(np.int64)
        said = tuple(int(row[name]) for name in ("num_tokens", "num_trained", "num_segments", "sum_squares"))
        if said != (pack.num_tokens, pack.num_trained, pack.num_segments, int(lengths @ lengths)):
            raise ShardError(f"the row index says other numbers of the pack at byte {at} than it has")
    if int(rows["num_tokens"].sum()) != shard.num_tokens:
        raise ShardError(
            f"the row index counts {rows['num_tokens'].sum()} tokens, the shard {shard.num_tokens}"
        )
    return num_packs
