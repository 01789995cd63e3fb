"""Pack a small dataset as `padfree pack` does, for tests: rows to a store, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toy

from packer.coordinator import pack
from packer.manifest import Manifest
from packer.resolve import resolve
from packer.runners import InlineRunner, Runner
from packer.shard import Pack, read_packs
from packer.spec import Job, parse_spec
from packer.store import Store, open_store
from packer.tokenization import Bundle
from packer.verify import verify_store


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """Rows as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def write_tokenizer(folder: Path, bundle: Bundle | None = None) -> Path:
    """The files of a tokenizer (the toy one) as a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (bundle or toy.bundle()).files.items():
        (folder / name).write_bytes(data)
    return folder


def spec_of(paths: Path | list[str], tokenizer: Path | None, **more: Any) -> dict[str, Any]:
    """A spec document. Keyword arguments are fields of it; `source` and `tokenizer` are merged in."""
    paths = paths if isinstance(paths, list) else [str(paths)]
    document: dict[str, Any] = {"source": {"paths": paths, **more.pop("source", {})}}
    if tokenizer is not None:
        document["tokenizer"] = {"path": str(tokenizer), **more.pop("tokenizer_options", {})}
    return {"shuffle_seed": None, **document, **more}


@dataclass(frozen=True)
class Packed:
    """A packed dataset, read back."""

    job: Job
    report: dict[str, Any]
    packs: list[Pack]
    digests: list[str]

    @property
    def segments(self) -> dict[int, list[tuple[list[int], list[bool]]]]:
        """(ids, trained) of every segment by example id, in stored order."""
        found: dict[int, list[tuple[list[int], list[bool]]]] = {}
        for one in self.packs:
            for segment, example in enumerate(one.example_ids.tolist()):
                part = slice(one.cu_seqlens[segment], one.cu_seqlens[segment + 1])
                found.setdefault(example, []).append(
                    (one.input_ids[part].tolist(), one.loss_mask[part].tolist())
                )
        return found


# Every strategy, and every way of best fit, for cases that are to hold under each.
STRATEGIES = (
    "best_fit", "best_fit global", "best_fit balanced", "best_fit of several capacities",
    "sequential", "wrapped", "minibatch", "step", "padded",
)  # fmt: skip


def packing_of(strategy: str, max_tokens: int, *, group: int, **more: Any) -> dict[str, Any]:
    """The packing of a spec by one of STRATEGIES. group: examples of a mini-batch, or of a step."""
    options: dict[str, Any] = {
        "best_fit global": {"scope": "global"},
        "best_fit balanced": {"balance": "attention"},
        "best_fit of several capacities": {"max_tokens": [1, max_tokens]},
        "minibatch": {"minibatch_size": group},
        "step": {"step_size": group},
    }.get(strategy, {})
    return {"strategy": strategy.split()[0], "max_tokens": max_tokens, **options, **more}


def pack_document(place: Path | str, document: dict[str, Any], runner: Runner | None = None) -> Packed:
    """Resolve and pack into the store at `place`; checks the store afterwards."""
    store = open_store(place)
    job = resolve(parse_spec(document), store=store)
    report = pack(job, store, runner or InlineRunner())
    assert verify_store(store, dataset=job.dataset).faults == []
    return read_back(store, job, report)


def read_back(store: Store, job: Job, report: dict[str, Any]) -> Packed:
    manifest = Manifest(store, job.dataset)
    manifest.refresh()
    return Packed(
        job=job,
        report=report,
        packs=[one for shard in manifest.shards for one in read_packs(store.get(shard.key))],
        digests=[shard.sha256 for shard in manifest.shards],
    )
