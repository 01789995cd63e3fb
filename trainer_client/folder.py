"""Packs from a store itself: no server needed, also while the dataset is still being packed."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from packer import order
from packer.manifest import Manifest, ManifestError, lock_key, repair, step_sizes_of
from packer.shard import Stamp, padding_pack
from packer.store import open_store
from trainer_client.course import Layout
from trainer_client.cursor import Split
from trainer_client.errors import DataDamaged, DatasetFailed, Lost, StreamTimeout, UnknownDataset
from trainer_client.transport import Received, Request, capacities_of, decode

_MAX_OPEN_SHARDS = 32  # a map holds a file descriptor; a permuted epoch touches shards in any order
_POLL_S = 0.1
_WINDOW = 256  # steps planned at once, and up to four times as many where they have few packs
_WINDOW_PACKS = 4096


class FolderTransport:
    """Reads commits and shards of one dataset from a store."""

    hears_reports = False

    def __init__(self, root: str | os.PathLike[str], dataset: str, *, timeout_s: float) -> None:
        self.dataset, self.label = dataset, f"dataset {dataset}"
        self._root = str(root)
        self._store = open_store(root)
        self._manifest = Manifest(self._store, dataset)
        self._timeout_s = timeout_s
        self._maps: OrderedDict[int, memoryview] = OrderedDict()
        self._dropped: set[int] = set()  # shards whose copy was damaged; of each once
        self._closed = threading.Event()
        self._reading = _Reading()
        self._known = False
        self._spec: dict[str, Any] | None = None
        self._layout: Layout | None = None

    def layout(self) -> Layout:
        if self._layout is None or self._layout.num_packs is None:
            self._require_known()
            self._refresh()
            finished = self._manifest.finished is not None
            self._layout = Layout(
                num_packs=self._manifest.num_packs if finished else None,
                capacities=capacities_of(self.spec()),
                step_sizes=self._step_sizes(),
                spec=self.spec(),
            )
        return self._layout

    def known(self) -> Layout:
        return self._layout or Layout()

    def spec(self) -> dict[str, Any]:
        if self._spec is None:
            self._require_known()
            self._spec = (self._manifest.spec() or {}).get("spec", {})
        return self._spec

    def idle_shares(self, split: Split, epoch: int, max_steps: int) -> dict[str, float]:
        self._refresh()
        shares: dict[str, float] = {}
        balances: tuple[Literal["none", "attention"], ...] = ("none", "attention")
        for balance in balances:
            one = self._epoch(Request(split=replace(split, balance=balance), epoch=epoch))
            shares[balance] = order.idle_share(order.rank_costs(one.deal, one.costs, max_steps=max_steps))
        return shares

    def still_packing(self) -> bool:
        return self._manifest.finished is None and self._store.is_locked(lock_key(self.dataset))

    def report(self, figures: dict[str, Any]) -> bool:
        return False  # nobody is there

    def fresh(self) -> FolderTransport:
        other = FolderTransport(self._root, self.dataset, timeout_s=self._timeout_s)
        other._manifest, other._reading, other._known = self._manifest, self._reading, self._known
        other._spec, other._layout = self._spec, self._layout
        return other

    def close(self) -> None:
        self._closed.set()

    def packs(self, request: Request) -> Generator[Received, None, None]:
        step, left = request.start, request.max_steps
        epoch = None
        while left is None or left > 0:
            if epoch is None or step >= epoch.num_steps:
                epoch = self._wait_for_step(request, step)
                if epoch is None:
                    return
            window = min(max(_WINDOW, _WINDOW_PACKS // request.split.packs_of_step), 4 * _WINDOW)
            stop = min(epoch.num_steps, step + window * request.stride)
            steps = np.arange(step, stop, request.stride)[:left]
            yield from self._steps(epoch, steps)
            step += len(steps) * request.stride
            left = None if left is None else left - len(steps)

    def _require_known(self) -> None:
        if self._known:
            return
        if not self._store.is_there():
            raise UnknownDataset(f"there is no store {self._root}: give the --store of `padfree pack`")
        try:
            spec = self._manifest.spec()
        except ManifestError as error:
            raise DataDamaged(f"dataset {self.dataset}: {error}") from error
        if spec is None:
            raise UnknownDataset(
                f"there is no dataset {self.dataset} in the store {self._root}; `padfree datasets` lists them"
            )
        self._known = True

    def _require_there(self) -> None:
        """Raise where the dataset was removed, so that what is missing is no damage."""
        if self._manifest.is_removed():
            raise UnknownDataset(
                f"dataset {self.dataset} was removed from the store {self._root}; pack it again: the same "
                "spec gives the same packs"
            )

    def _refresh(self) -> None:
        """Read on what was committed since. It may be another thread that has read it."""
        try:
            with self._reading as is_mine:
                if is_mine:
                    self._manifest.refresh()
        except ManifestError as error:
            self._require_there()
            raise DataDamaged(f"dataset {self.dataset}: {error}") from error
        except OSError as error:
            raise Lost(f"the store cannot be read: {error}") from error

    def _progress(self) -> tuple[int, bool]:
        """Commits that were read, and whether these are all."""
        return self._manifest.num_commits, self._manifest.finished is not None

    def _step_sizes(self) -> NDArray[np.int64] | None:
        sizes = self._manifest.step_sizes()
        if sizes is None and self.spec().get("packing", {}).get("strategy") == "step":
            return np.empty(0, np.int64)  # nothing is committed yet
        return sizes

    def _epoch(self, request: Request) -> Epoch:
        """The request's epoch as far as it was read."""
        # Looked at before the rows: another thread may read on meanwhile, and all are there once it is set.
        finished = self._manifest.finished is not None
        rows = self._manifest.rows
        sizes = step_sizes_of(rows, self.dataset)
        return Epoch(request=request, rows=rows, step_sizes=sizes, finished=finished)

    def _wait_for_step(self, request: Request, step: int) -> Epoch | None:
        """Wait until all packs of `step` are committed; None where the epoch has no such step."""
        self._require_known()
        deadline = time.monotonic() + self._timeout_s
        while True:
            # What has changed is told by what is known, not by who saw it: the training thread reads on too.
            seen = self._progress()
            epoch = self._epoch(request)
            if step < epoch.num_steps:
                return epoch
            if seen[1]:
                return None
            self._refresh()
            while self._progress() == seen:
                if self.still_packing():  # slow, but alive
                    deadline = time.monotonic() + self._timeout_s
                self._require_future(step, deadline)
                if self._closed.wait(_POLL_S):
                    raise Lost("closed")
                self._refresh()
            deadline = time.monotonic() + self._timeout_s

    def _require_future(self, step: int, deadline: float) -> None:
        """Raise where no more packs will come, or where none came until the deadline."""
        manifest = self._manifest
        if failed := manifest.failed():
            raise DatasetFailed(self.dataset, _reason(failed))
        self._require_there()
        if time.monotonic() > deadline:
            raise StreamTimeout(
                f"dataset {self.dataset} in {self._root} has {manifest.num_packs} packs, is unfinished, "
                f"nobody packs it, and none was added for {self._timeout_s:g} s (step {step} needs more); "
                "`padfree pack` goes on where it stopped; or give a longer timeout_s"
            )

    def _steps(self, epoch: Epoch, steps: NDArray[np.int64]) -> Iterator[Received]:
        """This rank's packs of some steps."""
        messages = list(epoch.messages(steps))
        rows = self._manifest.rows[[number for number, *_ in messages if number != order.FILLER]]
        # Lists: one element of a structured array costs as much as checking a pack.
        names = ("shard", "offset", "header_bytes", "body_bytes")
        places = zip(*(rows[name].tolist() for name in names), strict=True)
        for number, step, num_items, done in messages:
            stamp = Stamp(
                epoch=epoch.request.epoch,
                step=step,
                num_items=num_items,
                step_done=done,
                padding=number == order.FILLER,
            )
            if stamp.padding:
                yield Received(pack=padding_pack(), stamp=stamp, num_bytes=0)
            else:
                yield self._read(number, stamp, *next(places))

    def _read(
        self, number: int, stamp: Stamp, shard: int, offset: int, header_bytes: int, body_bytes: int
    ) -> Received:
        size = header_bytes + body_bytes
        message = self._map(shard)[offset : offset + size]
        try:
            # Decompressed out of the map: a batch that is kept never keeps a map and its file open.
            pack = decode(message, header_bytes)
        except Lost as error:
            if self._drop_copy(shard):
                return self._read(number, stamp, shard, offset, header_bytes, body_bytes)
            name = self._manifest.shards[shard].key
            raise DataDamaged(
                f"pack {number} of dataset {self.dataset} ({name}, byte {offset}): {error}; "
                f"{repair(self.dataset)}"
            ) from error
        return Received(pack=pack, stamp=stamp, num_bytes=size)

    def _drop_copy(self, index: int) -> bool:
        """Let go of a shard that is not as it was written. Whether it was a copy; the next one is fetched."""
        if index in self._dropped:
            return False
        self._dropped.add(index)
        self._maps.pop(index, None)
        shard = self._manifest.shards[index]
        return self._store.drop_copy(shard.key, sha256=shard.sha256)

    def _map(self, index: int) -> memoryview:
        if index in self._maps:
            self._maps.move_to_end(index)
            return self._maps[index]
        key = self._manifest.shards[index].key
        try:
            view = self._store.map(key, sha256=self._manifest.shards[index].sha256)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            is_gone = isinstance(error, FileNotFoundError | ValueError) or error.errno == errno.EISDIR
            if not is_gone:
                raise Lost(f"shard {key} cannot be read: {error}") from error
            if self._drop_copy(index):
                return self._map(index)
            self._require_there()
            raise DataDamaged(
                f"shard {key} of dataset {self.dataset} is not in the store {self._root} any more ({error}); "
                f"{repair(self.dataset)}"
            ) from error
        self._maps[index] = view
        if len(self._maps) > _MAX_OPEN_SHARDS:
            self._maps.popitem(last=False)
        return view


class _Reading:
    """Who reads on: one thread at a time. Entered once more by the same thread, as a signal's handler does
    that asks for a state, it gives False: what is being read is not whole yet."""

    def __init__(self) -> None:
        self._lock, self._depth = threading.RLock(), 0

    def __enter__(self) -> bool:
        self._lock.acquire()
        self._depth += 1
        return self._depth == 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()


class Epoch:
    """The order of an epoch over the packs that are committed, and what one rank gets of it.

    num_steps: loop steps from the request's offset on whose packs are all committed.
    """

    def __init__(
        self, *, request: Request, rows: np.ndarray, step_sizes: NDArray[np.int64] | None, finished: bool
    ) -> None:
        self.request, self._rows = request, rows
        split = request.split
        self._of_steps: order.StepOrder | None = None
        is_balanced = split.balance == "attention"
        self.deal: order.Deal
        if step_sizes is not None:
            costs = order.attention_cost(rows["sum_squares"], rows["num_tokens"]) if is_balanced else None
            self._of_steps = order.step_order(
                step_sizes, epoch=request.epoch, shuffle_seed=split.shuffle_seed, costs=costs
            )
            self.deal = order.StepDeal(
                order=self._of_steps,
                offset=request.offset,
                world_size=split.world_size,
                balanced=is_balanced,
                micro_step=request.micro_step,
            )
        else:
            self.deal = order.EvenDeal(
                num_packs=len(rows),
                offset=request.offset,
                world_size=split.world_size,
                packs_per_step=split.packs_per_step,
                tail=split.tail if finished else "drop",  # while packing, a step that is not full will be
                costs=self.costs if is_balanced else None,
            )
        # The order of a later epoch needs the number of packs.
        self.num_steps = self.deal.num_steps if finished or request.epoch == 0 else 0

    def packs(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The packs that stand at `positions`, (k,) int64 each."""
        if self._of_steps is not None:
            return self._of_steps.packs[positions]
        return order.pack_at(
            positions,
            num_packs=len(self._rows),
            epoch=self.request.epoch,
            shuffle_seed=self.request.split.shuffle_seed,
        )

    def costs(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        rows = self._rows[self.packs(positions)]
        return order.attention_cost(rows["sum_squares"], rows["num_tokens"])

    def messages(self, steps: NDArray[np.int64]) -> Iterator[tuple[int, int, int, bool]]:
        """(pack or order.FILLER, step, trained tokens of the optimiser step, whether it is done) of each
        of this rank's packs."""
        dealt = self.deal.take(steps, self.request.split.rank)
        position = dealt.position
        packs = np.full(position.shape, order.FILLER, np.int64)
        packs[position != order.FILLER] = self.packs(position[position != order.FILLER])
        sizes = dealt.stop - dealt.begin
        first = np.cumsum(sizes) - sizes
        whole = np.repeat(dealt.begin - first, sizes) + np.arange(sizes.sum())
        trained = self._rows["num_trained"][self.packs(whole)].astype(np.int64)
        items = np.add.reduceat(trained, first) if len(trained) else sizes
        columns: tuple[Any, ...] = (packs, steps, items, dealt.done)
        for numbers, step, num_items, done in zip(*(column.tolist() for column in columns), strict=True):
            for place, number in enumerate(numbers, start=1):
                yield number, step, num_items, done and place == len(numbers)


def _reason(failed: dict[str, Any]) -> str:
    return str(failed.get("detail") or failed.get("error") or failed)
