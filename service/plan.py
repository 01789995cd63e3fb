"""From a stream request to the bytes of its steps. Pure but for reading shard files.

A stream is a sequence of messages. Where a message is one pack (batches="pack", or one pack a step) it
is a byte range of a shard whose header is stamped; where a step of several packs is one message it is
decoded and encoded again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from packer import order, shard
from packer.shard import Stamp
from service.epochs import BlockCache, EpochOrder, StepsCache
from service.feeds import Snapshot
from service.files import ShardFiles, WouldBlock

_WINDOW = 1024  # messages planned at once
_FILLER = order.FILLER


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """What one rank asks for. Checked where it is parsed. Steps are loop steps: in a "step" dataset the
    micro-batches of its optimiser steps."""

    dataset: str
    rank: int = 0
    world_size: int = 1
    packs_per_step: int = 1
    epoch: int = 0
    start: int = 0
    shuffle_seed: int | None = None
    max_steps: int | None = None
    stride: int = 1
    offset: int = 0
    tail: Literal["drop", "pad"] = "drop"
    batches: Literal["step", "pack"] = "step"
    balance: Literal["none", "attention"] = "none"

    @property
    def packs_a_step(self) -> int:
        """Of all ranks together."""
        return self.world_size * self.packs_per_step

    @property
    def is_merged(self) -> bool:
        return self.batches == "step" and self.packs_per_step > 1

    def of(self, snapshot: Snapshot) -> StreamRequest:
        """The same for what is known of the dataset: a "step" dataset has its own number of packs a step."""
        if snapshot.step_sizes is None or self.packs_per_step == 1:
            return self
        return replace(self, packs_per_step=1)

    def num_sent(self, steps: int) -> int:
        """How many of the steps below `steps` are sent: every stride-th from `start` on."""
        count = max(0, -(-(steps - self.start) // self.stride))
        return count if self.max_steps is None else min(count, self.max_steps)


def epoch_order(
    request: StreamRequest, snapshot: Snapshot, blocks: BlockCache, steps: StepsCache
) -> EpochOrder:
    """The order of the request's epoch, as far as it is known."""
    of_steps = None
    if snapshot.step_sizes is not None:
        of_steps = steps.get(
            request.dataset,
            snapshot,
            epoch=request.epoch,
            shuffle_seed=request.shuffle_seed,
            balanced=request.balance == "attention",
        )
    return EpochOrder(
        dataset=request.dataset,
        snapshot=snapshot,
        epoch=request.epoch,
        shuffle_seed=request.shuffle_seed,
        blocks=blocks,
        steps=of_steps,
    )


def deal(request: StreamRequest, epoch: EpochOrder) -> order.Deal:
    """Which packs each rank gets, of those that are known and can be dealt already."""
    is_balanced = request.balance == "attention"
    if epoch.steps is not None:
        return order.StepDeal(
            order=epoch.steps.order,
            offset=request.offset,
            world_size=request.world_size,
            balanced=is_balanced,
        )
    return order.EvenDeal(
        num_packs=epoch.snapshot.num_packs,
        offset=request.offset,
        world_size=request.world_size,
        packs_per_step=request.packs_per_step,
        # While packing, a step that is not full will be.
        tail=request.tail if epoch.snapshot.finished else "drop",
        costs=epoch.costs if is_balanced else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Messages:
    """Messages to send, in order, one pack each: (k,) each. pack is -1 for a filler."""

    pack: NDArray[np.int64]
    step: NDArray[np.int64]
    num_items: NDArray[np.int64]
    step_done: NDArray[np.bool_]


def _messages(request: StreamRequest, epoch: EpochOrder, dealt_by: order.Deal, sent: range) -> _Messages:
    """The messages of the `sent`-th steps that are sent."""
    steps = request.start + request.stride * np.arange(sent.start, sent.stop, dtype=np.int64)
    dealt = dealt_by.take(steps, request.rank)
    size = request.packs_per_step
    position = dealt.position.reshape(-1)
    is_real = position != order.FILLER
    pack = np.full(len(position), order.FILLER, np.int64)
    pack[is_real] = epoch.packs(position[is_real])
    is_last = np.tile(np.arange(size) == size - 1, len(steps))
    return _Messages(
        pack=pack,
        step=np.repeat(steps, size),
        num_items=np.repeat(epoch.num_trained(dealt.begin, dealt.stop), size),
        step_done=np.repeat(dealt.done, size) & is_last,
    )


class ChunkReader:
    """Reads the bytes of the first-th to stop-th steps that a stream sends, in chunks of about the size
    asked for."""

    def __init__(
        self, request: StreamRequest, epoch: EpochOrder, files: ShardFiles, *, first: int, stop: int
    ) -> None:
        self._request, self._epoch, self._files = request, epoch, files
        self._deal = deal(request, epoch)
        self._next, self._stop = first, stop
        self._window: _Messages | None = None
        self._at = 0  # within the window

    @property
    def num_sent(self) -> int:
        """How many of the stream's steps were read whole."""
        planned = 0 if self._window is None else len(self._window.pack) - self._at
        return self._next - -(-planned // self._request.packs_per_step)

    def read(self, max_bytes: int, *, wait: bool = True) -> memoryview | None:
        """The next chunk: at least one message, else at most `max_bytes`. None at the end.

        wait=False: what would take long raises WouldBlock, and can then be had with wait=True.
        Raises ShardMissing or shard.ShardError for files that are not what the manifest says.
        """
        if self._window is None or self._at == len(self._window.pack):
            if self._next >= self._stop:
                return None
            simple = self._epoch.is_commit_order and self._request.balance == "none"
            if not wait and (self._request.is_merged or not simple):
                raise WouldBlock
            end = min(self._next + max(1, _WINDOW // self._request.packs_per_step), self._stop)
            self._window = _messages(self._request, self._epoch, self._deal, range(self._next, end))
            self._next, self._at = end, 0
        window = self._window
        if self._request.is_merged:
            if not wait:
                raise WouldBlock
            stop = self._at + self._request.packs_per_step
            data = memoryview(self._merged(window, self._at, stop))
        else:
            stop = self._fitting(window, max_bytes)
            data = self._single(window, self._at, stop, wait)
        self._at = stop
        return data

    def _fitting(self, window: _Messages, max_bytes: int) -> int:
        rows = self._epoch.snapshot.rows
        packs = window.pack[self._at :]
        sizes = rows["header_bytes"][packs].astype(np.int64) + rows["body_bytes"][packs]
        count = int(np.searchsorted(np.cumsum(sizes), max_bytes, side="right"))
        return self._at + max(1, count)

    def _single(self, window: _Messages, first: int, stop: int, wait: bool) -> memoryview:
        """Messages of one pack each; those of fillers are made."""
        packs = window.pack[first:stop]
        real = packs != _FILLER
        data, starts, headers = self._read(packs[real], wait)
        hint = 0
        stamps = (a[first:stop][real].tolist() for a in (window.step, window.num_items, window.step_done))
        for at, size, step, items, done in zip(starts, headers, *stamps, strict=True):
            hint = shard.stamp_in_place(
                data[at : at + size],
                hint=hint,
                epoch=self._request.epoch,
                step=step,
                num_items=items,
                step_done=done,
            )
        if len(starts) == stop - first:
            return data
        ends = iter(zip(starts, [*starts[1:], len(data)][: len(starts)], strict=True))
        parts = (
            data[slice(*next(ends))] if is_real else self._filler(window, index)
            for index, is_real in zip(range(first, stop), real.tolist(), strict=True)
        )
        return memoryview(b"".join(parts))

    def _filler(self, window: _Messages, index: int) -> bytes:
        return shard.encode_message([shard.padding_pack()], stamp=self._stamp(window, index, padding=True))

    def _merged(self, window: _Messages, first: int, stop: int) -> bytes:
        """One step of several packs as one message."""
        packs = window.pack[first:stop]
        real = packs[packs != _FILLER]
        data, starts, _ = self._read(real, wait=True)
        ends = [*starts[1:], len(data)][: len(starts)]  # none where all are fillers
        merged = [
            pack
            for start, end in zip(starts, ends, strict=True)
            for pack in shard.decode_message(data[start:end])
        ]
        merged += [shard.padding_pack()] * (len(packs) - len(real))
        stamp = self._stamp(window, stop - 1, padding=len(real) == 0)
        return shard.encode_message(merged, stamp=stamp)

    def _stamp(self, window: _Messages, index: int, *, padding: bool) -> Stamp:
        return Stamp(
            epoch=self._request.epoch,
            step=int(window.step[index]),
            num_items=int(window.num_items[index]),
            step_done=bool(window.step_done[index]),
            padding=padding,
        )

    def _read(self, packs: NDArray[np.int64], wait: bool) -> tuple[memoryview, list[int], list[int]]:
        """The messages of `packs`, end to end; where each starts; how long its header is."""
        rows = self._epoch.snapshot.rows[packs]
        sizes = rows["header_bytes"].astype(np.int64) + rows["body_bytes"]
        ends = np.cumsum(sizes)
        data = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8).data
        # Lists: one element of a structured array costs more than a small read.
        starts, shards, offsets = (ends - sizes).tolist(), rows["shard"].tolist(), rows["offset"].tolist()
        for first, stop in _runs(rows, sizes):
            one = self._epoch.snapshot.shards[shards[first]]
            part = data[starts[first] : starts[stop - 1] + int(sizes[stop - 1])]
            self._files.read_into(one.key, offsets[first], part, wait=wait, sha256=one.sha256)
        return data, starts, rows["header_bytes"].tolist()


def _runs(rows: np.ndarray, sizes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Stretches of packs that lie end to end in one shard: one read each."""
    if len(rows) == 0:
        return
    ends = rows["offset"] + sizes
    breaks = (rows["shard"][1:] != rows["shard"][:-1]) | (rows["offset"][1:] != ends[:-1])
    borders = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(rows)]
    yield from itertools.pairwise(borders)
