"""What is committed of each dataset, read once for all requests, and the wait for more.

A Feed holds one dataset's manifest. Requests take immutable snapshots of it; while any of them waits,
one task a dataset looks for new commits. Nothing here blocks the event loop: the store is read in
threads, one read a dataset at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.manifest import Manifest, ManifestError, Shard, cancelled_key, is_known, list_datasets
from packer.store import Store, StoreError
from packer.view import damaged_view, dataset_state, dataset_view
from service import problems

log = logging.getLogger("padfree.service")

_DATASET = re.compile(r"[0-9a-f]{32}")
_POLL_FIRST_S, _POLL_GROWTH, _POLL_LAST_S = 0.05, 1.3, 1.0
_READY_S = 60.0  # a dataset that is ready stays so until it is removed
_MAX_IDLE_FEEDS = 64  # a million packs' row index is 44 MB


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A dataset at one moment. Arrays and shards only ever grow, so it stays true of its part.

    rows: (num_packs,) of manifest.ROWS. trained_ends: (num_packs + 1,) int64, trained tokens before
    each pack. step_sizes: of a "step" dataset, the packs of each optimiser step in commit order. shards
    may have grown since: index it, do not iterate it. `stopped`: why no more packs come although the
    dataset is not finished, as failed.json or cancelled.json tell it.
    """

    rows: np.ndarray
    trained_ends: NDArray[np.int64]
    shards: list[Shard]
    num_shards: int
    finished: bool
    step_sizes: NDArray[np.int64] | None = None
    cancelled: bool = False
    removed: bool = False
    stopped: dict[str, Any] | None = None

    @property
    def num_packs(self) -> int:
        return len(self.rows)

    def raise_if_stopped(self, dataset: str) -> None:
        """Raise the Problem of a dataset that cannot be served."""
        if self.removed:
            raise problems.dataset_removed(dataset)
        if self.cancelled:
            raise problems.dataset_cancelled(dataset)
        if self.stopped is not None:
            raise problems.dataset_failed(dataset, str(self.stopped.get("detail")), self.stopped.get("field"))


class Feed:
    """One dataset's manifest, shared by all requests of this process."""

    def __init__(self, store: Store, dataset: str, executor: Executor, damaged: set[str]) -> None:
        """damaged: all datasets that could not be read; whether this one is of them is kept here."""
        self.dataset, self._all_damaged = dataset, damaged
        self._store, self._executor = store, executor
        self._manifest = Manifest(store, dataset)
        self._reading = asyncio.Lock()
        self._changed = asyncio.Event()
        self._nudged = asyncio.Event()
        self._num_waiting = 0
        self._poller: asyncio.Task[None] | None = None
        self._snapshot: Snapshot | None = None
        self._closed = False
        self._told = ""  # of the damage

    @property
    def is_idle(self) -> bool:
        return self._num_waiting == 0 and not self._reading.locked()

    async def fresh(self) -> Snapshot:
        """The dataset as the store has it now."""
        if self._snapshot is not None and self._snapshot.finished:
            return self._snapshot
        return await self._in_thread(self._read)

    async def view(self) -> dict[str, Any] | None:
        """The contract's view of the dataset; None where the store does not have it."""
        return await self._in_thread(self._read_view)

    async def damage(self, what: str) -> problems.Problem:
        """What to answer where a file is not what the manifest says. What was removed is not damaged."""
        removed = await self._in_thread(self._manifest.is_removed)
        return problems.dataset_removed(self.dataset) if removed else problems.damaged(self.dataset, what)

    async def after(self, seen: Snapshot) -> Snapshot:
        """Wait until the dataset is not as `seen` any more. Raises the Problem unknown-dataset."""
        self._num_waiting += 1
        try:
            if self._poller is None or self._poller.done():
                self._poller = asyncio.create_task(self._poll(), name=f"poll {self.dataset}")
            while not self._closed:
                if self._snapshot is not None and self._snapshot is not seen:
                    return self._snapshot
                await self._changed.wait()
                if self._closed or not self._poller.done() or self._poller.cancelled():
                    continue
                if (error := self._poller.exception()) is not None:
                    raise error  # who waits for a look that nobody takes any more would wait for ever
            raise problems.unknown_dataset(self.dataset)
        finally:
            self._num_waiting -= 1

    def nudge(self) -> None:
        """Something was committed by this process: do not wait for the next look."""
        self._nudged.set()

    def close(self) -> None:
        """End every wait."""
        self._closed = True
        self._changed.set()
        if self._poller is not None:
            self._poller.cancel()

    async def _in_thread(self, read: Callable[[], Any]) -> Any:
        async with self._reading:
            return await asyncio.get_running_loop().run_in_executor(self._executor, read)

    async def _poll(self) -> None:
        try:
            await self._look_again()
        finally:
            self._tell()

    def _tell(self) -> None:
        """Wake all who wait."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _look_again(self) -> None:
        """Look for changes while anybody waits for one."""
        pause_s = _POLL_FIRST_S
        while self._num_waiting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nudged.wait(), pause_s)
            self._nudged.clear()
            before = self._snapshot
            try:
                await self.fresh()
            except OSError as error:  # a store that stumbles is asked again
                log.warning("dataset %s cannot be read now: %s", self.dataset, error)
            changed = self._snapshot is not before
            pause_s = _POLL_FIRST_S if changed else min(pause_s * _POLL_GROWTH, _POLL_LAST_S)
            if changed:
                self._tell()

    # In a thread, one at a time.

    def _read(self) -> Snapshot:
        stopped, removed, step_sizes = None, False, None
        try:
            self._manifest.refresh()
            step_sizes = self._manifest.step_sizes()
            if self._manifest.finished is None and not (removed := self._manifest.is_removed()):
                stopped = self._manifest.failed()
            self._all_damaged.discard(self.dataset)
        except ManifestError as error:
            if not (removed := self._manifest.is_removed()):
                stopped = self._damaged(error)["error"]
        try:
            cancelled = self._store.exists(cancelled_key(self.dataset))
        except StoreError as error:
            if not error.is_lasting:
                raise
            cancelled, stopped = False, self._damaged(error)["error"]
        stopped = {"detail": "it was removed"} if removed else stopped
        finished = self._manifest.finished is not None and stopped is None
        old, rows = self._snapshot, self._manifest.rows
        same = old is not None and (
            (old.num_packs, old.finished) == (len(rows), finished)
            and (old.stopped, old.cancelled, old.removed) == (stopped, cancelled, removed)
        )
        if old is not None and same:
            return old
        self._snapshot = Snapshot(
            rows=rows,
            trained_ends=self._manifest.trained_ends,
            shards=self._manifest.shards,
            num_shards=len(self._manifest.shards),
            finished=finished,
            step_sizes=step_sizes,
            cancelled=cancelled,
            removed=removed,
            stopped=stopped,
        )
        return self._snapshot

    def _read_view(self) -> dict[str, Any] | None:
        try:
            is_cancelled = self._store.exists(cancelled_key(self.dataset))
            try:
                view = dataset_view(self._store, self.dataset, self._manifest)
                self._all_damaged.discard(self.dataset)
            except ManifestError as error:  # one dataset that is damaged must not hide the others
                view = self._damaged(error)
        except StoreError as error:
            if not error.is_lasting:
                raise
            return self._damaged(error)
        if view is not None and is_cancelled:
            view["state"] = "cancelled"
        return view

    def _damaged(self, error: ManifestError | StoreError) -> dict[str, Any]:
        """The view of a dataset that cannot be read; told in the log once, for pages ask every second."""
        self._all_damaged.add(self.dataset)
        if str(error) != self._told:
            self._told = str(error)
            log.error("dataset %s: %s", self.dataset, error)
        return damaged_view(self.dataset, error)


class Feeds:
    """The feeds of the datasets that were asked for lately."""

    def __init__(self, store: Store, executor: Executor) -> None:
        self._store, self._executor = store, executor
        self._feeds: OrderedDict[str, Feed] = OrderedDict()
        self._asking: dict[str, asyncio.Future[bool]] = {}  # whether a dataset is there
        self._ready_s: dict[str, float] = {}  # dataset: time.monotonic when it was seen to be ready
        self._damaged: set[str] = set()  # as views and streams found them

    async def get(self, dataset: str) -> Feed:
        """The feed of a dataset that the store has. Raises the Problem unknown-dataset."""
        if not _DATASET.fullmatch(dataset):
            raise problems.unknown_name(dataset)
        if not await self._is_there(dataset):
            self.drop(dataset)
            raise problems.unknown_dataset(dataset)
        feed = self._feeds.get(dataset)
        if feed is None:
            feed = self._feeds[dataset] = Feed(self._store, dataset, self._executor, self._damaged)
            self._shrink()
        self._feeds.move_to_end(dataset)
        return feed

    async def _is_there(self, dataset: str) -> bool:
        """Ranks that come at the same time ask the store once."""
        if (asking := self._asking.get(dataset)) is None:
            loop = asyncio.get_running_loop()
            asking = self._asking[dataset] = loop.run_in_executor(
                self._executor, is_known, self._store, dataset
            )
            asking.add_done_callback(lambda _: self._asking.pop(dataset))
        return await asyncio.shield(asking)

    async def states(self) -> list[str]:
        """The state of each dataset. What is ready is asked for again only now and then.

        Commits are not read for this, there may be many: a damage there counts from when a request found it.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._read_states)

    def _read_states(self) -> list[str]:
        now_s = time.monotonic()
        there = [name for name in self._store.list("datasets") if _DATASET.fullmatch(name)]
        cancelled = {name.removesuffix(".json") for name in self._store.list("cancelled")}
        self._ready_s = {name: since for name, since in self._ready_s.items() if name in there}
        self._damaged.intersection_update(there)
        states = []
        for dataset in there:
            if dataset in self._damaged:
                state: str | None = "failed"
            elif now_s - self._ready_s.get(dataset, -_READY_S) < _READY_S:
                state = "ready"
            else:
                state = self._state(dataset)
                if state == "ready":
                    self._ready_s[dataset] = now_s
            if state is not None:
                states.append("cancelled" if dataset in cancelled else state)
        return states

    def _state(self, dataset: str) -> str | None:
        try:
            return dataset_state(self._store, dataset)
        except StoreError as error:
            if not error.is_lasting:
                raise
            return "failed"

    async def all_ids(self) -> list[str]:
        loop = asyncio.get_running_loop()
        names = await loop.run_in_executor(self._executor, list_datasets, self._store)
        return [name for name in names if _DATASET.fullmatch(name)]

    def drop(self, dataset: str) -> None:
        """Forget what was read: the dataset is gone, or its files are not what they were."""
        self._ready_s.pop(dataset, None)
        feed = self._feeds.pop(dataset, None)
        if feed is not None:
            feed.close()

    def nudge(self, dataset: str) -> None:
        if (feed := self._feeds.get(dataset)) is not None:
            feed.nudge()

    def close(self) -> None:
        for feed in self._feeds.values():
            feed.close()
        self._feeds.clear()

    def _shrink(self) -> None:
        for dataset in list(self._idle()):
            if len(self._feeds) <= _MAX_IDLE_FEEDS:
                return
            self.drop(dataset)

    def _idle(self) -> Iterator[str]:
        newest = next(reversed(self._feeds), None)
        return (name for name, feed in self._feeds.items() if feed.is_idle and name != newest)
