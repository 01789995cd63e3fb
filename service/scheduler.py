"""Packs the datasets of the store, a few at a time, in the order they came.

The store says what is to be done: a dataset with a spec that is neither finished, failed nor cancelled.
So the scheduler goes on after a restart, and several replicas may run on one store: a dataset belongs
to whoever holds its lock, and is taken over when that process is gone.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable

from packer import logs, traces
from packer.manifest import (
    Manifest,
    ManifestError,
    cancelled_key,
    dataset_key,
    lock_key,
    read_origin,
    repair,
)
from packer.report import of_capacities
from packer.runners import ClusterLost, Joins, Runner
from packer.spec import Job, SpecError, job_from_document
from packer.store import Store, StoreError
from service.metrics import Metrics
from service.tasks import CountedRunner

log = logging.getLogger("padfree.service")

_SCAN_S = 2.0  # between two looks for work of other processes
_RUNNER_RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0)


class Scheduler:
    """Threads that pack. `start`, then `submit` at will, then `stop`.

    `runner` is one, or makes one: that is done in a thread, and tried again when it fails or when its
    cluster is lost, so that what is packed is served while Ray is not there, and packing goes on with the
    next cluster. `on_commit(dataset)` is called from those threads.
    """

    def __init__(
        self,
        store: Store,
        runner: Runner | Callable[[], Runner],
        *,
        max_jobs: int,
        metrics: Metrics,
        on_commit: Callable[[str], None],
    ) -> None:
        self._store, self._max_jobs, self._metrics, self._on_commit = store, max_jobs, metrics, on_commit
        self._make_runner = runner if callable(runner) else None
        self._runner: Runner | None = None if callable(runner) else runner
        self._runner_state = "ok" if self._runner is not None else "starting"
        self.num_workers = 0  # as it was a moment ago: asking may take a while
        self._change = threading.Condition()
        self._queue: list[str] = []
        self._asked_by: dict[str, dict[str, str]] = {}  # dataset: ids of the request that submitted it here
        self._running: dict[str, threading.Event] = {}  # dataset: its cancel
        self._settled: set[str] = set()  # datasets that need no work
        self._told: dict[str, str] = {}  # dataset: why it could not be read
        self._stopping = False
        self._threads: list[threading.Thread] = []
        metrics.jobs.labels("queued").set_function(lambda: len(self._queue))
        metrics.jobs.labels("packing").set_function(lambda: len(self._running))
        metrics.runner_ready.set_function(lambda: float(self._runner is not None))

    @property
    def runner_state(self) -> str:
        """ "ok", or why nothing can be packed now."""
        state = self._runner_state
        why = self._make_runner.waits_for if isinstance(self._make_runner, Joins) else ""
        return f"{state}: {why}" if why and state == "starting" else why or state

    def start(self) -> None:
        """Start the threads; go on with what the store has unfinished."""
        names = ["runner and scan", *(f"pack {n}" for n in range(self._max_jobs))]
        targets = [self._watch, *[self._work] * self._max_jobs]
        for name, target in zip(names, targets, strict=True):
            # Daemons: a task of the inline runner cannot be stopped, and need not be waited for.
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, dataset: str) -> None:
        """Pack a dataset whose spec is in the store, when its turn comes."""
        with self._change:
            self._settled.discard(dataset)
            ids = logs.ids()
            if "request_id" in ids:
                self._asked_by[dataset] = {
                    key: ids[key] for key in ("request_id", "traceparent") if key in ids
                }
            if dataset not in self._queue and dataset not in self._running:
                self._queue.append(dataset)
                self._change.notify_all()

    def cancel(self, dataset: str) -> None:
        """Stop packing a dataset here, soon; not to be taken up again unless submitted."""
        with self._change:
            if dataset in self._queue:
                self._queue.remove(dataset)
                self._asked_by.pop(dataset, None)
            if dataset in self._running:
                self._running[dataset].set()

    def stop_soon(self) -> None:
        """Stop packing, without waiting; what is committed stays, and the next start goes on."""
        with self._change:
            self._stopping = True
            for cancel in self._running.values():
                cancel.set()
            self._change.notify_all()
        if isinstance(self._make_runner, Joins):
            self._make_runner.cancel()

    def stop(self, timeout_s: float) -> None:
        """Stop packing, wait up to `timeout_s` for it, and close the runner that was made here."""
        self.stop_soon()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._make_runner is not None and self._runner is not None:
            self._runner.close()

    # ------------------------------------------------------------------ threads

    def _watch(self) -> None:
        """Make the runner; then look for work now and then."""
        tries = 0
        while not self._stopping:
            if self._runner is None:
                if self._start_runner():
                    tries = 0
                    continue
                wait_s = _RUNNER_RETRY_S[min(tries, len(_RUNNER_RETRY_S) - 1)]
                tries += 1
            else:
                self._count_workers()
                self._scan()
                wait_s = _SCAN_S
            with self._change:
                self._change.wait_for(lambda: self._stopping, wait_s)

    def _start_runner(self) -> bool:
        assert self._make_runner is not None
        try:
            runner = self._make_runner()
        except Exception as error:  # whatever Ray raises: it is tried again
            if self._stopping:
                return False
            self._runner_state = f"cannot start: {error}"
            log.error("packing cannot start, it is tried again: %s", error)
            return False
        with self._change:
            self._runner, self._runner_state = runner, "ok"
            self._change.notify_all()
        if self._stopping:  # while it started: nobody may wait to close it
            runner.close()
        log.info("packing with %s", runner.name)
        return True

    def _count_workers(self) -> None:
        assert self._runner is not None
        try:
            found = self._runner.num_workers
        except ClusterLost as error:
            self._lose_runner(error)
            return
        except Exception as error:  # whatever Ray raises where its head is away
            log.debug("the workers cannot be counted now: %s", error)
            return
        if found != self.num_workers:
            log.info("%d workers, %d before", found, self.num_workers)
            self.num_workers = found
            self._metrics.workers.set(found)

    def _lose_runner(self, error: ClusterLost) -> None:
        """The runner's cluster is gone: what it ran ends with ClusterLost, and another runner is made."""
        if self._make_runner is None:
            return
        log.warning("packing waits for a cluster: %s", error)
        with self._change:
            runner, self._runner = self._runner, None
            self._runner_state, self.num_workers = f"lost: {error}", 0
        self._metrics.workers.set(0)
        if runner is not None:
            runner.close()

    def _scan(self) -> None:
        try:
            datasets = self._store.list("datasets")  # not asked of each that is settled: there may be many
            self._settled &= set(datasets)
            self._told = {name: why for name, why in self._told.items() if name in datasets}
        except OSError as error:
            log.warning("the store cannot be read now: %s", error)
            return
        for dataset in datasets:
            if dataset in self._settled:
                continue
            try:
                self._look_at(dataset)
            except OSError as error:  # of this one alone, it may be
                self._set_aside(dataset, error)

    def _look_at(self, dataset: str) -> None:
        with self._change:
            cancel = self._running.get(dataset)
        if cancel is not None:
            if self._store.exists(cancelled_key(dataset)):  # by another replica
                cancel.set()
        elif self._is_open(dataset) and not self._store.is_locked(lock_key(dataset)):
            self.submit(dataset)

    def _set_aside(self, dataset: str, error: OSError) -> None:
        """The next scan takes the dataset up again. Told once, while it is the same error."""
        if self._told.get(dataset) != str(error):
            self._told[dataset] = str(error)
            log.warning("dataset %s cannot be read now: %s", dataset, error)

    def _is_open(self, dataset: str) -> bool:
        """Whether there is work to do. Finished datasets are remembered: they stay so."""
        if not self._store.exists(dataset_key(dataset, "spec.json")):
            return False  # being removed
        if self._store.exists(dataset_key(dataset, "finished.json")):
            self._settled.add(dataset)
            return False
        stopped = (dataset_key(dataset, "failed.json"), cancelled_key(dataset))
        return not any(self._store.exists(key) for key in stopped)

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._stopping or (self._queue and self._runner is not None))
                if self._stopping:
                    return
                dataset = self._queue.pop(0)
                cancel = self._running[dataset] = threading.Event()
                asked_by = self._asked_by.pop(dataset, None)
            about = {"dataset": dataset, "job": uuid.uuid4().hex[:12]}
            try:
                about |= self._asker(dataset, asked_by)
                with logs.using(about), traces.span("pack dataset", dataset=dataset, job=about["job"]):
                    self._pack(dataset, cancel)
            except OSError as error:
                self._set_aside(dataset, error)
            finally:
                with self._change:
                    del self._running[dataset]
                self._on_commit(dataset)

    def _asker(self, dataset: str, asked_by: dict[str, str] | None) -> dict[str, str]:
        """The ids of the request that this work is for: also after a restart, and on another replica."""
        if asked_by is not None:
            return asked_by
        name = read_origin(self._store, dataset).get("request_id")
        return {"request_id": name} if name else {}

    def _pack(self, dataset: str, cancel: threading.Event) -> None:
        # Imported here: a replica that only serves loads neither tokenizers nor sources.
        from packer.coordinator import Busy, Cancelled, PackingFailed, pack

        job, chosen = self._job(dataset), self._runner
        if job is None or chosen is None:
            return
        log.info("packing %s (%s)", dataset, job.spec.name)
        since = time.monotonic()
        max_tokens = job.spec.packing.capacities[-1]
        counted = _Counted(self._metrics, self._num_commits(dataset), max_tokens=max_tokens)
        runner = CountedRunner(chosen, self._metrics)

        def on_progress(manifest: Manifest, num_partitions: int) -> None:
            counted.add(manifest)
            self._on_commit(dataset)

        try:
            pack(job, self._store, runner, cancel=cancel, on_progress=on_progress)
            how = "ready"
        except PackingFailed as error:
            how = "failed"
            log.error("packing %s failed: %s", dataset, error)
        except (Busy, Cancelled) as error:
            how = type(error).__name__.lower()
        except ClusterLost:  # told where the runner is made anew
            how = "cluster_lost"
        except Exception as error:  # the thread lives on; the dataset is tried again by the next scan
            how = "error"
            log.exception("packing %s stopped: %s", dataset, error)
        self._metrics.jobs_ended.labels(how).inc()
        if how == "cancelled" and self._stopping:  # not the dataset's state of that name
            how = "the service stops; it goes on with the next start, or another replica"
        log.info("packing %s ended after %.1f s: %s", dataset, time.monotonic() - since, how)

    def _num_commits(self, dataset: str) -> int:
        try:
            return len(self._store.list(dataset_key(dataset, "commits")))
        except StoreError as error:
            if not error.is_lasting:
                raise
            return 0  # told where it is packed

    def _job(self, dataset: str) -> Job | None:
        """The job as the store has it; None where it was removed or cancelled meanwhile."""
        try:
            if not self._is_open(dataset):
                return None
            document = Manifest(self._store, dataset).spec()
            return None if document is None else job_from_document(document)
        except (SpecError, KeyError, TypeError, ValueError) as error:  # damaged, or of another release
            log.error("the spec of dataset %s cannot be read: %s", dataset, error)
            detail = f"its stored spec cannot be read: {error}; {repair(dataset)}"
            if isinstance(error, ManifestError):  # which says so itself
                detail = error.shown
            document = {"title": type(error).__name__, "detail": detail, "field": None}
            self._store.put(dataset_key(dataset, "failed.json"), json.dumps(document).encode())
            return None


class _Counted:
    """Adds what was committed to the metrics, each commit once."""

    _REASONS = ("empty", "overlong", "rejected", "untrained")

    def __init__(self, metrics: Metrics, num_commits: int, *, max_tokens: int) -> None:
        self._metrics, self._max_tokens = metrics, max_tokens
        self._num_commits = num_commits  # counted already, by this run or one before
        self._num_shards: int | None = None  # of these

    def add(self, manifest: Manifest) -> None:
        packed, left_out = self._metrics.packed, self._metrics.rows_left_out
        if self._num_shards is None:
            self._num_shards = sum(one.get("num_shards", 0) for one in manifest.counters[: self._num_commits])
        for one in manifest.counters[self._num_commits :]:
            packed["rows"].inc(one.get("rows_packed", 0))
            packed["tokens"].inc(one.get("tokens_packed", 0))
            packed["packs"].inc(one.get("num_packs", 0))
            room = [c["num_packs"] * c["max_tokens"] for c in of_capacities(one, self._max_tokens)]
            packed["capacity_tokens"].inc(sum(room))
            packed["shards"].inc(one.get("num_shards", 0))
            first, self._num_shards = self._num_shards, self._num_shards + one.get("num_shards", 0)
            packed["bytes"].inc(sum(shard.num_bytes for shard in manifest.shards[first : self._num_shards]))
            packed["partitions"].inc()
            for reason in self._REASONS:
                left_out.labels(reason).inc(one.get(f"rows_{reason}", 0))
        self._num_commits = manifest.num_commits
