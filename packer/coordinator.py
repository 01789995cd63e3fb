"""Packs a dataset: hands out partitions in a bounded window, commits them in order, resumes.

`Window` is the pure state machine: it knows no clock, no runner and no store. `pack` drives it.
Errors: PackingFailed (told in failed.json too), Busy, Cancelled.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from packer import logs, sources, traces
from packer.manifest import (
    Commit,
    Manifest,
    ManifestError,
    dataset_key,
    lock_key,
    read_origin,
    write_commit,
    write_origin,
)
from packer.packing import partition_multiple
from packer.pipeline import pack_partition
from packer.report import report, total
from packer.runners import ClusterLost, Done, Runner, Tasks, WorkerDied
from packer.spec import Job, canonical_json, job_to_document
from packer.store import LockLost, NoSpaceLeft, Store, StoreError

log = logging.getLogger("padfree.packer")

MAX_TRIES = 3  # of one partition, when its worker dies or the store stumbles


class PackingFailed(RuntimeError):
    """Packing stopped for good; the message says why and what to do."""


class Busy(RuntimeError):
    """Another process packs this dataset."""


class Cancelled(RuntimeError):
    """Packing was asked to stop. What is committed stays."""


@dataclass(slots=True)
class Window:
    """Which partitions run, wait for their turn, or failed.

    At most `size` partitions are out or waiting at any time, so a slow one holds back the rest: that
    is the back-pressure. A failure counts only when all before it are committed, so that the same
    input always fails for the same reason.
    """

    total: int
    size: int
    committed: int = 0  # partitions 0 .. committed-1 are in the manifest
    _handed_out: int = field(default=-1)
    _results: dict[int, Any] = field(default_factory=dict)
    _failures: dict[int, BaseException] = field(default_factory=dict)
    _tries: dict[int, int] = field(default_factory=dict)
    _again: list[int] = field(default_factory=list)
    retries: int = 0

    def __post_init__(self) -> None:
        self._handed_out = self.committed

    @property
    def done(self) -> bool:
        return self.committed == self.total

    def to_start(self) -> list[int]:
        """Partitions to hand out now."""
        again, self._again = self._again, []
        if self._failures:  # what comes after the first failure would be thrown away
            return [p for p in again if p < min(self._failures)]
        end = min(self.total, self.committed + self.size)
        fresh = list(range(self._handed_out, end))
        self._handed_out = max(self._handed_out, end)
        return again + fresh

    def succeeded(self, partition: int, result: Any) -> None:
        self._results[partition] = result

    def stumbled(self, partition: int, error: BaseException) -> bool:
        """A transient failure. Returns whether the partition gets another try."""
        self._tries[partition] = self._tries.get(partition, 0) + 1
        if self._tries[partition] >= MAX_TRIES:
            self.failed(partition, error)
            return False
        self.retries += 1
        self._again.append(partition)
        return True

    def failed(self, partition: int, error: BaseException) -> None:
        self._failures[partition] = error

    def failure(self) -> BaseException | None:
        """The error that ends the job, once every partition before it is committed."""
        return self._failures.get(self.committed)

    def to_commit(self) -> list[tuple[int, Any]]:
        """Results whose turn has come, in order. They count as committed from here on."""
        ready = []
        while self.committed in self._results:
            ready.append((self.committed, self._results.pop(self.committed)))
            self.committed += 1
        return ready


def pack(
    job: Job,
    store: Store,
    runner: Runner,
    *,
    cancel: threading.Event | None = None,
    on_progress: Callable[[Manifest, int], None] | None = None,
) -> dict[str, Any]:
    """Pack a dataset, or what is left of it, and return its report. Blocks.

    `on_progress(manifest, num_partitions)` is called after each commit. Raises PackingFailed, Busy,
    Cancelled, or ClusterLost of the runner.
    """
    key, started = dataset_key(job.dataset), time.monotonic()
    with store.lock(lock_key(job.dataset)) as mine:
        if not mine:
            raise Busy(f"dataset {job.dataset} is being packed by another process on this store")
        manifest = Manifest(store, job.dataset)
        try:
            manifest.refresh()
        except ManifestError as error:
            raise _fail(job, store, error) from error
        if manifest.finished is not None:
            return manifest.finished["report"]
        store.put(f"{key}/spec.json", canonical_json(job_to_document(job)))
        if not read_origin(store, job.dataset):
            write_origin(store, job.dataset)
        store.delete(f"{key}/failed.json")
        store.sweep(key)
        try:
            with runner.open() as tasks:
                partitions = _partitions(job, store, tasks, cancel)
                _require_same_cut(job, manifest, len(partitions))
                plan = {
                    "num_partitions": len(partitions),
                    "num_examples": sources.num_examples(partitions),
                }
                store.put(f"{key}/plan.json", canonical_json(plan))
                window = Window(
                    total=len(partitions), size=_window_size(runner), committed=manifest.num_commits
                )
                _run(
                    job,
                    store,
                    runner,
                    tasks,
                    window,
                    partitions,
                    cancel,
                    lambda: _tell(manifest, window, on_progress),
                )
        except (Cancelled, Busy, ClusterLost, KeyboardInterrupt):
            raise
        except Exception as error:
            _require_lock(job, store)
            raise _fail(job, store, error) from error
        _require_lock(job, store)
        return _finish(job, store, manifest, time.monotonic() - started, window.retries)


def _require_same_cut(job: Job, manifest: Manifest, num_partitions: int) -> None:
    """Raise PackingFailed where what is committed is of other partitions: rows would be lost or doubled."""
    begun = (manifest.read_json("plan.json") or {}).get("num_partitions", num_partitions)
    if manifest.num_commits and begun != num_partitions:
        raise PackingFailed(
            f"dataset {job.dataset} was begun by another release, which cut its source into {begun} "
            f"partitions, this one into {num_partitions}: delete it and post its spec again"
        )


def _partitions(
    job: Job, store: Store, tasks: Tasks, cancel: threading.Event | None
) -> list[sources.Partition]:
    """Index every input (one task each) and cut them into partitions."""
    work_key = dataset_key(job.dataset, "work")
    shuffled = job.spec.shuffle_seed is not None
    numbers = {
        tasks.submit(
            _index, one, store, f"{work_key}/{number}", shuffled, dict(job.spec.source.fields)
        ): number
        for number, one in enumerate(job.inputs)
    }
    indexes: dict[int, sources.FileIndex] = {}
    while len(indexes) < len(numbers):
        _stop_if(cancel)
        for done in tasks.wait(1.0):
            if done.error is not None:
                raise done.error
            indexes[numbers[done.task]] = done.value
    ordered = [indexes[number] for number in range(len(job.inputs))]
    return sources.cut(
        ordered,
        shuffle_seed=job.spec.shuffle_seed,
        multiple=partition_multiple(job.spec.packing),
        max_tokens=job.spec.packing.capacities[-1],
    )


def _index(one: Any, store: Store, work_key: str, random_access: bool, fields: dict[str, str]) -> Any:
    return sources.index_input(
        one, store=store, work_key=work_key, random_access=random_access, fields=fields
    )


def _window_size(runner: Runner) -> int:
    """Twice the workers, so that none waits for a commit; results that wait are small."""
    return 2 * runner.num_workers + 2


def _run(
    job: Job,
    store: Store,
    runner: Runner,
    tasks: Tasks,
    window: Window,
    partitions: list[sources.Partition],
    cancel: threading.Event | None,
    tell: Callable[[], None],
) -> None:
    running: dict[int, int] = {}  # task: partition
    done_by: dict[int, Done] = {}  # of partitions that wait for their turn
    while not window.done:
        _stop_if(cancel)
        window.size = _window_size(runner)  # a cluster may have grown or shrunk
        for number in window.to_start():
            with logs.using({"partition": number}):
                task = tasks.submit(_pack_one, job, number, partitions[number], store)
                log.debug("partition %d is handed out", number)
            running[task] = number
        for done in tasks.wait(0.5):
            number = running.pop(done.task)
            done_by[number] = done
            with logs.using({"partition": number}):
                _take(window, partitions[number], done)
        _require_lock(job, store)
        if ready := window.to_commit():
            for number, commit in ready:
                write_commit(store, job.dataset, commit)
                with logs.using({"partition": number}):
                    _log_commit(commit, done_by.pop(number))
            tell()
        if (failure := window.failure()) is not None:
            raise failure


def _pack_one(job: Job, number: int, partition: sources.Partition, store: Store) -> Commit:
    """pack_partition, told in the worker's log."""
    start, stop = partition.start, partition.stop
    with traces.span("pack partition", dataset=job.dataset, partition=number, examples=stop - start):
        log.info("partition %d begins: examples %d to %d in stream order", number, start, stop - 1)
        commit = pack_partition(job, number, partition, store)
        log.info("partition %d is packed, to be committed: %d shards", number, len(commit.shards))
        return commit


def _log_commit(commit: Commit, done: Done) -> None:
    log.info(
        "partition %d is committed: %d of %d rows in %d packs, %d tokens, %.2f s on %s",
        commit.partition,
        commit.counters["rows_packed"],
        commit.counters["rows_in"],
        commit.counters["num_packs"],
        commit.counters["tokens_packed"],
        done.seconds,
        done.worker,
        extra={"worker": done.worker},
    )


def _require_lock(job: Job, store: Store) -> None:
    """Raise Busy where another process may pack this dataset by now: nothing is to be changed then."""
    try:
        store.check_lock(lock_key(job.dataset))
    except LockLost as error:
        raise Busy(f"dataset {job.dataset}: {error}") from error


def _take(window: Window, partition: sources.Partition, done: Done) -> None:
    number, error = partition.index, done.error
    if error is None:
        window.succeeded(number, done.value)
    elif isinstance(error, WorkerDied):
        if window.stumbled(number, _killed(partition, error)):
            log.warning("partition %d is tried again: %s", number, error)
    elif isinstance(error, StoreError) and not isinstance(error, NoSpaceLeft):
        if window.stumbled(number, error):
            log.warning("partition %d is tried again: %s", number, error)
    else:
        log.info("partition %d failed: %s", number, error)  # an error once all before it are committed
        window.failed(number, error)


def _killed(partition: sources.Partition, error: WorkerDied) -> PackingFailed:
    files = ", ".join(sorted({span.file.input.path for span in partition.spans})[:3])
    return PackingFailed(
        f"the worker of partition {partition.index} (examples {partition.start} to {partition.stop - 1} in "
        f"stream order, of {files}) was killed {MAX_TRIES} times: {error}. Give workers more memory, or look "
        "for a row there that takes it all; what is packed already stays."
    )


def _tell(manifest: Manifest, window: Window, on_progress: Callable[[Manifest, int], None] | None) -> None:
    manifest.refresh()
    if on_progress is not None:
        on_progress(manifest, window.total)


def _stop_if(cancel: threading.Event | None) -> None:
    if cancel is not None and cancel.is_set():
        raise Cancelled("packing was asked to stop")


def _finish(job: Job, store: Store, manifest: Manifest, seconds: float, retries: int) -> dict[str, Any]:
    manifest.refresh()
    counters = total(manifest.counters)
    if not counters.num_packs and counters.rows_untrained and not counters.rows_overlong:
        raise _fail(
            job,
            store,
            PackingFailed(
                f"nothing to train: of {counters.rows_in} rows {counters.rows_untrained} have no token to "
                f"train (in max_tokens={job.spec.packing.capacities[-1]} tokens, where they are cut); raise "
                "max_tokens, or look at `loss`, the labels and the chat template"
            ),
        )
    final = report(
        manifest.counters,
        capacities=job.spec.packing.capacities,
        ignored=list(job.ignored),
        warnings=job.warnings,
        minibatch_size=job.spec.packing.minibatch_size if job.spec.packing.strategy == "minibatch" else None,
    )
    store.put(
        dataset_key(job.dataset, "finished.json"),
        json.dumps(
            {
                "num_partitions": manifest.num_commits,
                "seconds": seconds,  # of the last run: it may have gone on from an earlier one
                "retries": retries,
                "report": final,
            }
        ).encode(),
    )
    store.delete(dataset_key(job.dataset, "work"))
    return final


def _fail(job: Job, store: Store, error: Exception) -> PackingFailed:
    """Write down why packing stopped, and give the error to raise."""
    told = isinstance(error, ValueError | OSError | WorkerDied | PackingFailed)
    detail = str(error) if told else f"unexpected {type(error).__name__}: {error}"
    if not told:
        log.error("packing %s: %s", job.dataset, "".join(traceback.format_exception(error)))
    _remove_uncommitted(job, store)  # first: on a full disk that makes the room to say so
    document = {"title": type(error).__name__, "detail": detail, "field": getattr(error, "field", None)}
    try:
        store.put(dataset_key(job.dataset, "failed.json"), json.dumps(document).encode())
    except StoreError as also:
        log.error("packing %s failed (%s), and that could not be written down: %s", job.dataset, detail, also)
    return PackingFailed(detail)


def _remove_uncommitted(job: Job, store: Store) -> None:
    """Remove shards that no commit lists."""
    manifest = Manifest(store, job.dataset)
    try:
        manifest.refresh()
    except ManifestError:  # which shards it lists cannot be known: all stay
        return
    listed = {shard.key for shard in manifest.shards}
    folder = dataset_key(job.dataset, "shards")
    for name in store.list(folder):
        if f"{folder}/{name}" not in listed:
            store.delete(f"{folder}/{name}")
    store.sweep(dataset_key(job.dataset))
