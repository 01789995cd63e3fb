"""A packed dataset as a source: its segments are the rows, ready to be packed anew without tokenizing.

    resolve_packed   dataset://ID (or the beginning of an id, or a name) to an input, once it is finished

How they are found and read: packer.sources.segments. Errors: SourceError, also where the dataset is removed
while it is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packer.manifest import Manifest, ManifestError, dataset_key
from packer.names import find_dataset, is_id
from packer.report import Counters, total
from packer.shard import ShardError
from packer.sources.values import SourceError
from packer.spec import InputFile, Job, SpecError, job_from_document
from packer.store import Store

SCHEME = "dataset://"
READER = "dataset"  # InputFile.reader


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSource:
    """A finished dataset to be packed anew. `job`: what made it. `warnings`: what it has not any more."""

    input: InputFile
    job: Job
    warnings: tuple[str, ...]


def names_dataset(paths: Sequence[str]) -> bool:
    """Whether a source is a packed dataset."""
    return any(path.startswith(SCHEME) for path in paths)


def is_packed(inputs: Sequence[InputFile]) -> bool:
    """Whether inputs are a packed dataset: then nothing is rendered or tokenized."""
    return any(one.reader == READER for one in inputs)


# ------------------------------------------------------------------ resolve


def resolve_packed(paths: Sequence[str], store: Store) -> PackedSource:
    """The dataset that `paths` name, which must be one alone and finished: its id decides what is made of it,
    however it was called. Raises SourceError."""
    if len(paths) != 1:
        raise SourceError(
            f"{SCHEME}ID is required alone (examples keep their ids, which those of other sources would "
            f"meet), found {len(paths)} paths; pack each by itself and mix the streams"
        )
    dataset = paths[0].removeprefix(SCHEME)
    if not is_id(dataset):
        try:
            dataset = find_dataset(store, dataset)
        except LookupError as error:
            raise SourceError(f"{paths[0][:80]}: {error}") from None
    manifest = finished(dataset, store)
    try:
        job = job_from_document(manifest.spec() or {})
    except (KeyError, TypeError, SpecError) as error:
        raise SourceError(
            f"{SCHEME}{dataset}: its stored spec cannot be read ({error}); remove it and pack it again"
        ) from error
    counters = total(manifest.counters)
    if not manifest.num_packs:
        raise SourceError(f"{SCHEME}{dataset}: a dataset with packs is required, found one without any")
    source = InputFile(
        path=f"{SCHEME}{dataset}",
        num_bytes=sum(shard.num_bytes for shard in manifest.shards),
        digest=dataset,  # which is a digest of all that decides its bytes
        reader=READER,
    )
    return PackedSource(input=source, job=job, warnings=_warnings(dataset, job, counters))


def finished(dataset: str, store: Store) -> Manifest:
    manifest = Manifest(store, dataset)
    try:
        manifest.refresh()
        if manifest.finished is not None:
            return manifest
        there, failed, plan = manifest.spec(), manifest.failed(), manifest.read_json("plan.json") or {}
    except ManifestError as error:
        raise SourceError(f"{SCHEME}{dataset}: {error}") from error
    if there is None:
        raise SourceError(
            f"{SCHEME}{dataset}: a finished dataset of this store is required, found none of that id; "
            "see `padfree datasets`"
        )
    if failed is not None:
        raise SourceError(
            f"{SCHEME}{dataset}: a finished dataset is required, found one that failed "
            f"({failed['detail']}); post its own spec again first"
        )
    raise SourceError(
        f"{SCHEME}{dataset}: a finished dataset is required, found one that is not packed yet "
        f"({manifest.num_commits} of {plan.get('num_partitions', 'its')} partitions); wait until it is ready"
    )


def _warnings(dataset: str, job: Job, counters: Counters) -> tuple[str, ...]:
    """What is not in the dataset any more, and so not in what is made of it."""
    longest = job.spec.packing.capacities[-1]
    said = {
        "rows_truncated": f"were cut to its max_tokens={longest}, and stay so",
        "rows_overlong": f"were longer than its max_tokens={longest} and are not in it",
        "rows_untrained": "had nothing to train and are not in it",
        "rows_rejected": "could not be used and are not in it",
        "rows_split": "were split, and each piece stays an example of its own",
    }
    if job.spec.packing.strategy == "wrapped":
        said["rows_split"] = "were cut where a pack ended, and each piece stays an example of its own"
    return tuple(
        f"repacked from dataset {dataset}: {count:,} of its {counters.rows_in:,} rows {text}"
        for name, text in said.items()
        if (count := getattr(counters, name))
    )


# ------------------------------------------------------------------ faults


@contextlib.contextmanager
def reading(input: InputFile, key: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise gone(input, key) from error
    except ShardError as error:
        raise damaged(input, key, str(error)) from error


def gone(input: InputFile, key: str) -> SourceError:
    name = key.removeprefix(dataset_key(input.digest, "")).lstrip("/")
    return SourceError(
        f"{input.path}: {name} is gone: the dataset was removed while it was repacked; pack it again (the "
        "same spec gives the same id), then post this one again"
    )


def damaged(input: InputFile, key: str, what: str) -> SourceError:
    return SourceError(
        f"{input.path}: {key} is damaged ({what}); run `padfree verify`, remove the dataset and pack it again"
    )
