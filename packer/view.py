"""What the outside sees of a dataset, read from the store alone: any replica gives the same answer."""

from __future__ import annotations

from typing import Any

from packer.manifest import Manifest, dataset_key, lock_key, read_origin
from packer.report import total
from packer.store import Store

_SHOWN = ("rows_in", "rows_packed", "tokens_packed", "num_packs", "num_shards")


def dataset_state(store: Store, dataset: str) -> str | None:
    """The `state` alone, with few questions to the store; None where it has none of that id."""
    if store.exists(dataset_key(dataset, "finished.json")):
        return "ready"
    if not store.exists(dataset_key(dataset, "spec.json")):
        return None
    if store.exists(dataset_key(dataset, "failed.json")):
        return "failed"
    return "packing" if store.is_locked(lock_key(dataset)) else "queued"


def dataset_view(store: Store, dataset: str, manifest: Manifest | None = None) -> dict[str, Any] | None:
    """The contract's view of a dataset (`id, name, state, progress, report, error`), `spec`, `warnings`, and
    `created` and `request_id` of who asked for it; None where the store has none of that id.

    state: "ready" (all committed), "failed", "packing" (some process holds its lock), else "queued".
    A manifest that was read before is refreshed and spares reading its commits again.
    """
    manifest = manifest or Manifest(store, dataset)
    document = manifest.spec()
    if document is None:
        return None
    manifest.refresh()
    failed = manifest.failed()
    if manifest.finished is not None:
        state = "ready"
    elif failed is not None:
        state = "failed"
    else:
        state = "packing" if store.is_locked(lock_key(dataset)) else "queued"
    plan = manifest.read_json("plan.json") or {"num_partitions": None}
    counters = total(manifest.counters)
    progress = {name: getattr(counters, name) for name in _SHOWN}
    progress["num_bytes"] = sum(shard.num_bytes for shard in manifest.shards)
    origin = read_origin(store, dataset)
    return {
        "id": dataset,
        "name": document["spec"]["name"],
        "state": state,
        "progress": {
            "partitions_committed": manifest.num_commits,
            "num_partitions": plan["num_partitions"],
            **progress,
            **{name: (manifest.finished or {}).get(name) for name in ("seconds", "retries")},
        },
        "report": manifest.finished["report"] if manifest.finished else None,
        "error": failed,
        "created": origin.get("created"),
        "request_id": origin.get("request_id"),
        "warnings": document.get("warnings", []),
        "spec": document["spec"],
    }
