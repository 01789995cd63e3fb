"""What the outside sees of a dataset, read from the store alone: any replica gives the same answer."""

from __future__ import annotations

from typing import Any

from packer.manifest import Manifest, ManifestError, lock_key, read_origin, repair
from packer.report import total
from packer.store import Store, StoreError

_SHOWN = ("rows_in", "rows_packed", "tokens_packed", "num_packs", "num_shards")


def dataset_state(store: Store, dataset: str) -> str | None:
    """The `state` alone, with few questions to the store; None where it has none of that id.

    Commits are not looked at: one that is damaged shows in `dataset_view`.
    """
    manifest = Manifest(store, dataset)
    try:
        if manifest.spec() is None:
            return None
        if manifest.read_json("finished.json") is not None:
            return "ready"
        if manifest.failed() is not None:
            return "failed"
    except ManifestError:
        return "failed"
    return "packing" if store.is_locked(lock_key(dataset)) else "queued"


def dataset_view(store: Store, dataset: str, manifest: Manifest | None = None) -> dict[str, Any] | None:
    """The contract's view of a dataset (`id, name, state, progress, report, error`), `spec`, `warnings`, and
    `created` and `request_id` of who asked for it; None where the store has none of that id.

    state: "ready" (all committed), "failed", "packing" (some process holds its lock), else "queued".
    A manifest that was read before is refreshed and spares reading its commits again. Raises ManifestError.
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
        "name": document["spec"].get("name"),
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


def damaged_view(dataset: str, error: ManifestError | StoreError) -> dict[str, Any]:
    """The view of a dataset that cannot be read, so that it does not hide the others. Its state is "failed".

    Without a path of this machine.
    """
    if isinstance(error, ManifestError):
        detail = error.shown
    elif error.is_lasting:
        detail = (
            f"a file of it in the store cannot be read, named in the log ({error.shown}); {repair(dataset)}"
        )
    else:
        detail = "the store could not be read just now (the log says why); ask again"
    return {
        "id": dataset,
        "name": None,
        "state": "failed",
        "progress": {},
        "report": None,
        "error": {"title": type(error).__name__, "detail": detail, "field": None},
        "created": None,
        "request_id": None,
    }
