"""Packs a dataset: hands out partitions in a bounded window, commits them in order, resumes.

`Window` is the pure state machine: it knows no clock, no runner and no store. `pack` drives it.
Errors: PackingFailed (told in failed.json too), Busy, Cancelled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import traceback
from collections.abc import Callable
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
from packer.report import nothing_to_train, report, total, unlearned
from packer.runners import ClusterLost, Done, Runner, Tasks, WorkerDied
from packer.spec import Job, canonical_json, job_to_document
from packer.store import LockLost, NoSpaceLeft, Store, StoreError
from packer.window import MAX_TRIES, Window

log = logging.getLogger("padfree.packer")


class PackingFailed(RuntimeError):
    """Packing stopped for good; the message says why and what to do."""


class Busy(RuntimeError):
    """Another process packs this dataset."""


class Cancelled(RuntimeError):
    """Packing was asked to stop. What is committed stays."""


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
            if manifest.finished is not None:
                return manifest.finished["report"]
            _begin(job, store)
        except ManifestError as error:
            raise _fail(job, store, error) from error
        except StoreError as error:
            if not error.is_lasting:  # else trying again would never go better
                raise
            raise _fail(job, store, error) from error
        try:
            with runner.open() as tasks:
                indexing = Window(total=len(job.inputs), size=len(job.inputs))
                partitions = _partitions(job, store, tasks, indexing, cancel)
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
        retries = indexing.retries + window.retries
        return _finish(job, store, manifest, len(partitions), time.monotonic() - started, retries)


def _begin(job: Job, store: Store) -> None:
    """Write down what is to be done, and remove what tells of earlier tries."""
    key = dataset_key(job.dataset)
    store.put(f"{key}/spec.json", canonical_json(job_to_document(job)))
    if not read_origin(store, job.dataset):
        write_origin(store, job.dataset)
    store.delete(f"{key}/failed.json")
    store.sweep(key)


def _require_same_cut(job: Job, manifest: Manifest, num_partitions: int) -> None:
    """Raise PackingFailed where what is committed is of other partitions: rows would be lost or doubled."""
    plan, again = manifest.read_json("plan.json"), "delete it and post its spec again"
    if plan is None and manifest.num_commits:
        raise PackingFailed(
            f"dataset {job.dataset} has {manifest.num_commits} committed partitions, but no plan.json, which "
            f"is required to know how its source was cut: {again}"
        )
    if plan is not None and manifest.num_commits and plan["num_partitions"] != num_partitions:
        raise PackingFailed(
            f"dataset {job.dataset} was begun by another release, which cut its source into "
            f"{plan['num_partitions']} partitions, this one into {num_partitions}: {again}"
        )
    _require_no_more(job, manifest, num_partitions)


def _require_no_more(job: Job, manifest: Manifest, num_partitions: int) -> None:
    """Raise PackingFailed where more is committed than the source has: rows of something else, then."""
    if manifest.num_commits > num_partitions:
        raise PackingFailed(
            f"dataset {job.dataset} has {manifest.num_commits} committed partitions, and its source is cut "
            f"into {num_partitions}, so at most as many are required: what is too much was written by "
            "something else; delete it and post its spec again"
        )


def _require_work(running: dict[int, int], window: Window) -> None:
    """Raise RuntimeError where nothing runs before the window is done: it would be waited for without end."""
    if not running:
        raise RuntimeError(f"nothing runs, and {window.committed} of {window.total} are done")


def _partitions(
    job: Job, store: Store, tasks: Tasks, window: Window, cancel: threading.Event | None
) -> list[sources.Partition]:
    """Index every input (one task each) and cut them into partitions."""
    work_key = dataset_key(job.dataset, "work")
    options = {
        "random_access": job.spec.shuffle_seed is not None,
        "fields": dict(job.spec.source.fields),
        "watch": job.watch,
    }
    running: dict[int, int] = {}  # task: input
    indexes: list[sources.FileIndex] = []
    while not window.done:
        _stop_if(cancel)
        for number in window.to_start():
            one, key = job.inputs[number], f"{work_key}/{number}"
            running[tasks.submit(_index, one, store, key, options)] = number
        _require_work(running, window)
        for done in tasks.wait(1.0):
            number = running.pop(done.task)
            path = job.inputs[number].path
            _take(window, number, done, f"input {number}", f"that indexes {path}")
        indexes += [index for _, index in window.to_commit()]
        if (failure := window.failure()) is not None:
            raise failure
    return sources.cut(
        indexes,
        shuffle_seed=job.spec.shuffle_seed,
        multiple=partition_multiple(job.spec.packing),
        max_tokens=job.spec.packing.capacities[-1],
    )


def _index(one: Any, store: Store, work_key: str, options: dict[str, Any]) -> Any:
    return sources.index_input(one, store=store, work_key=work_key, **options)


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
        _require_work(running, window)
        for done in tasks.wait(0.5):
            number = running.pop(done.task)
            done_by[number] = done
            with logs.using({"partition": number}):
                _take(window, number, done, f"partition {number}", _whose(partitions[number]))
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


def _take(window: Window, number: int, done: Done, name: str, whose: str) -> None:
    """What came of a task. whose: as in "the worker …", for an error."""
    error = done.error
    if error is None:
        window.succeeded(number, done.value)
    elif isinstance(error, WorkerDied) or (
        isinstance(error, StoreError) and not isinstance(error, NoSpaceLeft)
    ):
        if window.stumbled(number, _killed(whose, error) if isinstance(error, WorkerDied) else error):
            log.warning("%s is tried again: %s", name, error)
    else:
        log.info("%s failed: %s", name, error)  # an error once all before it are done
        window.failed(number, error)


def _whose(partition: sources.Partition) -> str:
    files = ", ".join(sorted({span.file.input.path for span in partition.spans})[:3])
    return (
        f"of partition {partition.index} (examples {partition.start} to {partition.stop - 1} in stream "
        f"order, of {files})"
    )


def _killed(whose: str, error: WorkerDied) -> PackingFailed:
    return PackingFailed(
        f"the worker {whose} was killed {MAX_TRIES} times: {error}. Give workers more memory, or look "
        "for a row there that takes it all; what is packed already stays."
    )


def _tell(manifest: Manifest, window: Window, on_progress: Callable[[Manifest, int], None] | None) -> None:
    manifest.refresh()
    if on_progress is not None:
        on_progress(manifest, window.total)


def _stop_if(cancel: threading.Event | None) -> None:
    if cancel is not None and cancel.is_set():
        raise Cancelled("packing was asked to stop")


def _finish(
    job: Job, store: Store, manifest: Manifest, num_partitions: int, seconds: float, retries: int
) -> dict[str, Any]:
    manifest.refresh()
    try:
        _require_no_more(job, manifest, num_partitions)
    except PackingFailed as error:
        raise _fail(job, store, error) from error
    counters, packing = total(manifest.counters), job.spec.packing
    if not counters.num_packs and counters.rows_untrained and not counters.rows_overlong:
        raise _fail(
            job,
            store,
            PackingFailed(nothing_to_train(counters, packing.capacities[-1], unlearned(manifest.counters))),
        )
    final = report(
        manifest.counters,
        capacities=packing.capacities,
        ignored=list(job.ignored),
        warnings=job.warnings,
        minibatch_size=packing.minibatch_size if packing.strategy == "minibatch" else None,
        split=packing.strategy == "wrapped" or packing.overlong == "split",
        model_max_length=job.model_max_length,
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
    if isinstance(error, ManifestError):  # services tell it to whoever asks
        log.error("packing %s: %s", job.dataset, error)
        detail = error.shown
    if not told:
        log.error("packing %s: %s", job.dataset, "".join(traceback.format_exception(error)))
    with contextlib.suppress(StoreError):  # then they stay: of no use, and of no harm
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
