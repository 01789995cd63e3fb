"""Packs from a store folder: no server needed, also while the dataset is still being packed."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from packer import order
from packer.manifest import Manifest, ManifestError
from packer.shard import Stamp, padding_pack
from packer.store import LocalStore
from trainer_client.errors import DataDamaged, DatasetFailed, Lost, StreamTimeout, UnknownDataset
from trainer_client.transport import Received, Request, decode

_MAX_OPEN_SHARDS = 32  # a map holds a file descriptor; a permuted epoch touches shards in any order
_POLL_S = 0.1


class FolderTransport:
    """Reads commits and shards of one dataset from a store."""

    def __init__(self, root: str | os.PathLike[str], dataset: str, *, timeout_s: float) -> None:
        self.dataset = dataset
        self._root = Path(root)
        self._store = LocalStore(root)
        self._manifest = Manifest(self._store, dataset)
        self._timeout_s = timeout_s
        self._maps: OrderedDict[int, memoryview] = OrderedDict()
        self._closed = threading.Event()
        self._lock = threading.Lock()  # the training thread may ask for num_packs beside the reader
        self._known = False

    def num_packs(self) -> int | None:
        self._require_known()
        self._refresh()
        return self._manifest.num_packs if self._manifest.finished is not None else None

    def still_packing(self) -> bool:
        return self._manifest.finished is None

    def fresh(self) -> FolderTransport:
        other = FolderTransport(self._root, self.dataset, timeout_s=self._timeout_s)
        other._manifest, other._lock, other._known = self._manifest, self._lock, self._known
        return other

    def close(self) -> None:
        self._closed.set()

    def packs(self, request: Request) -> Generator[Received, None, None]:
        step = request.start
        end = None if request.max_steps is None else step + request.max_steps
        while (end is None or step < end) and self._wait_for_step(request, step):
            yield from self._step(request, step)
            step += 1

    def _require_known(self) -> None:
        if self._known:
            return
        if not self._root.is_dir():
            raise UnknownDataset(f"there is no store folder {self._root}: give the --store of `padfree pack`")
        if self._manifest.spec() is None:
            raise UnknownDataset(
                f"there is no dataset {self.dataset} in the store {self._root}; `padfree datasets` lists them"
            )
        self._known = True

    def _refresh(self) -> bool:
        try:
            with self._lock:
                return self._manifest.refresh()
        except ManifestError as error:
            raise DataDamaged(f"dataset {self.dataset}: {error}") from error
        except OSError as error:
            raise Lost(f"the store cannot be read: {error}") from error

    def _wait_for_step(self, request: Request, step: int) -> bool:
        """Wait until all packs of `step` are committed; False where the epoch has no such step."""
        self._require_known()
        split, manifest = request.split, self._manifest
        last = request.offset + (step + 1) * split.packs_of_step
        deadline = time.monotonic() + self._timeout_s
        while manifest.finished is None and (manifest.num_packs < last or request.epoch > 0):
            if self._refresh():
                deadline = time.monotonic() + self._timeout_s
                continue
            if failed := manifest.failed():
                raise DatasetFailed(self.dataset, _reason(failed))
            if manifest.spec() is None:
                raise UnknownDataset(f"dataset {self.dataset} was removed from the store {self._root}")
            if time.monotonic() > deadline:
                raise StreamTimeout(
                    f"dataset {self.dataset} in {self._root} has {manifest.num_packs} packs, is unfinished, "
                    f"and none was added for {self._timeout_s:g} s (step {step} needs {last}); is it still "
                    "being packed? `padfree pack` goes on where it stopped; or give a longer timeout_s"
                )
            if self._closed.wait(_POLL_S):
                raise Lost("closed")
        if manifest.finished is None:
            return True
        return step < split.num_steps(manifest.num_packs, offset=request.offset)

    def _step(self, request: Request, step: int) -> Iterator[Received]:
        split, manifest = request.split, self._manifest
        num_packs = manifest.num_packs
        first = request.offset + step * split.packs_of_step
        whole = np.arange(first, min(first + split.packs_of_step, num_packs), dtype=np.int64)
        of_step = order.pack_at(
            whole, num_packs=num_packs, epoch=request.epoch, shuffle_seed=split.shuffle_seed
        )
        num_items = int(manifest.rows["num_trained"][of_step].sum(dtype=np.int64))
        start, end = split.positions(step, offset=request.offset)
        for position in range(start, end):
            filler = position >= num_packs
            stamp = Stamp(epoch=request.epoch, step=step, num_items=num_items, step_done=True, padding=filler)
            if filler:
                yield Received(pack=padding_pack(), stamp=stamp, num_bytes=0)
            else:
                yield self._read(int(of_step[position - first]), stamp)

    def _read(self, number: int, stamp: Stamp) -> Received:
        row = self._manifest.rows[number]
        header_bytes = int(row["header_bytes"])
        start, size = int(row["offset"]), header_bytes + int(row["body_bytes"])
        message = self._map(int(row["shard"]))[start : start + size]
        try:
            # Copies the message: a batch that is kept never keeps a map and its file open.
            _, pack = decode(message, header_bytes)
        except Lost as error:
            name = self._manifest.shards[int(row["shard"])].key
            raise DataDamaged(
                f"pack {number} of dataset {self.dataset} ({name}, byte {start}): {error}; "
                "run `padfree verify`"
            ) from error
        return Received(pack=pack, stamp=stamp, num_bytes=size)

    def _map(self, index: int) -> memoryview:
        if index in self._maps:
            self._maps.move_to_end(index)
            return self._maps[index]
        key = self._manifest.shards[index].key
        try:
            view = self._store.map(key)
        except (FileNotFoundError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise DataDamaged(
                f"shard {key} of dataset {self.dataset} is not in the store {self._root} any more ({error}); "
                "pack the dataset again"
            ) from error
        except OSError as error:
            raise Lost(f"shard {key} cannot be read: {error}") from error
        self._maps[index] = view
        if len(self._maps) > _MAX_OPEN_SHARDS:
            self._maps.popitem(last=False)
        return view


def _reason(failed: dict[str, Any]) -> str:
    return str(failed.get("detail") or failed.get("error") or failed)
