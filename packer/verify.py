"""Check a store: every checksum, every rule of the format, and that the numbers agree."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packer.manifest import Manifest, ManifestError, Shard, list_datasets
from packer.packing.values import Capacity, Int64, capacities_of
from packer.shard import PADDING_ID, ShardError, iter_messages, read_packs, validate
from packer.store import Store


@dataclass(slots=True)
class Findings:
    """What was looked at, and one line a fault: which file, which rule."""

    num_datasets: int = 0
    num_shards: int = 0
    num_packs: int = 0
    faults: list[str] = field(default_factory=list)


def verify_store(store: Store, *, dataset: str | None = None) -> Findings:
    """Check all datasets of a store, or one. Reads every byte of their shards."""
    found = Findings()
    names = list_datasets(store)
    if dataset is not None and dataset not in names:
        found.faults.append(f"there is no dataset {dataset} in {store.url}")
        return found
    for name in [dataset] if dataset is not None else names:
        found.num_datasets += 1
        _verify_dataset(store, name, found)
    return found


def _verify_dataset(store: Store, dataset: str, found: Findings) -> None:
    manifest = Manifest(store, dataset)
    try:
        spec = manifest.spec() or {}
        for name in ("plan.json", "failed.json"):
            manifest.read_json(name)
        manifest.refresh()
    except ManifestError as error:
        found.faults.append(f"{dataset}: {error}")
        return
    capacities = _capacities(spec.get("spec", {}).get("packing", {}))
    for shard in manifest.shards:
        found.num_shards += 1
        rows = manifest.rows[manifest.rows["shard"] == shard.index]
        try:
            found.num_packs += _verify_shard(store, dataset, shard, rows, capacities)
        except FileNotFoundError:
            found.faults.append(f"{shard.key}: the manifest lists it, but it is not there")
        except (ShardError, OSError) as error:
            found.faults.append(f"{shard.key}: {error}")
    if manifest.finished is not None and manifest.finished["report"]["num_packs"] != manifest.num_packs:
        found.faults.append(
            f"{dataset}: the report counts {manifest.finished['report']['num_packs']} packs, "
            f"the manifest {manifest.num_packs}"
        )


def _capacities(packing: dict[str, Any]) -> tuple[Capacity, ...]:
    """The capacities that the packs of a spec may have; none where it says nothing."""
    if "max_tokens" not in packing:
        return ()
    multiples = {name: packing.get(name, 1) for name in ("segment_multiple", "pack_multiple")}
    return capacities_of(packing["max_tokens"], **multiples)


def _check_capacity(lengths: Int64, num_tokens: int, capacities: tuple[Capacity, ...], at: int) -> None:
    """Raise ShardError where a segment of the pack at byte `at` belongs into a smaller one.

    lengths: (n,) int64, of its real segments. Of one capacity there is nothing to check.
    """
    for smaller, larger in itertools.pairwise(capacities):
        if smaller.max_tokens < num_tokens <= larger.max_tokens and lengths.min() <= smaller.segment:
            raise ShardError(
                f"the pack at byte {at} is one of {larger.max_tokens} tokens and holds a segment of "
                f"{lengths.min()}, which belongs into one of {smaller.max_tokens}"
            )


def _verify_shard(
    store: Store, dataset: str, shard: Shard, rows: np.ndarray, capacities: tuple[Capacity, ...]
) -> int:
    data = store.get(shard.key)  # as it is there, not a copy
    if len(data) != shard.num_bytes:
        raise ShardError(f"{len(data)} bytes, the manifest says {shard.num_bytes}: cut off or changed")
    digest = hashlib.sha256(data).hexdigest()
    if digest != shard.sha256:
        raise ShardError(f"sha256 is {digest}, the manifest says {shard.sha256}: the file has changed")
    most = capacities[-1].max_tokens if capacities else None
    num_packs = validate(data, dataset=dataset, max_tokens=most)
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
        _check_capacity(lengths[pack.example_ids != PADDING_ID], pack.num_tokens, capacities, at)
    if int(rows["num_tokens"].sum()) != shard.num_tokens:
        raise ShardError(
            f"the row index counts {rows['num_tokens'].sum()} tokens, the shard {shard.num_tokens}"
        )
    return num_packs
