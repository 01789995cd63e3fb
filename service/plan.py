"""From a stream request to the bytes of its steps. Pure but for reading shard files.

A stream is a sequence of messages. Where a message is one pack (batches="pack", or one pack a step) it
is a byte range of a shard whose header is stamped; where a step of several packs is one message it is
decoded and encoded again.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from packer import order, shard
from packer.manifest import Shard
from packer.shard import Stamp
from service.buffers import Buffers
from service.epochs import BlockCache, EpochOrder, StepsCache
from service.feeds import Snapshot
from service.files import Piece, ShardFiles, ShardMissing, WouldBlock

_FIRST_WINDOW, _WINDOW = 64, 1024  # messages planned at once; few at first, so that they leave at once
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
    micro_step: int = 0
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
            micro_step=request.micro_step,
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
class _Window:
    """Messages to send, in order, one pack each; (k,) but for `bounds`, which has one more. Lists where they
    are gone through one by one, for one element of an array costs as much as a small read.

    step, num_items, step_done: int64, int64, bool. is_filler: of a pack that only fills up a step. shard,
    offset: where the message lies. joined: up to which message they lie end to end in one shard. bounds:
    bytes from the first message to where each begins, and to the end of the last. text: what the stamp is
    to say.
    """

    step: NDArray[np.int64]
    num_items: NDArray[np.int64]
    step_done: NDArray[np.bool_]
    is_filler: list[bool]
    shard: list[Shard]
    offset: list[int]
    joined: list[int]
    bounds: list[int]
    text: list[bytes]

    def __len__(self) -> int:
        return len(self.step)


def _plan(request: StreamRequest, epoch: EpochOrder, dealt_by: order.Deal, sent: range) -> _Window:
    """The messages of the `sent`-th steps that are sent."""
    steps = request.start + request.stride * np.arange(sent.start, sent.stop, dtype=np.int64)
    dealt = dealt_by.take(steps, request.rank)
    size = request.packs_per_step
    position = dealt.position.reshape(-1)
    is_real = position != _FILLER
    pack = np.full(len(position), _FILLER, np.int64)
    pack[is_real] = epoch.packs(position[is_real])
    is_last = np.tile(np.arange(size) == size - 1, len(steps))
    step = np.repeat(steps, size)
    num_items = np.repeat(epoch.num_trained(dealt.begin, dealt.stop), size)
    step_done = np.repeat(dealt.done, size) & is_last
    rows = epoch.snapshot.rows[pack]  # a filler's is anyone's
    sizes = np.where(
        is_real, rows["header_bytes"].astype(np.int64) + rows["body_bytes"], len(filler_message())
    )
    shards = epoch.snapshot.shards
    return _Window(
        step=step,
        num_items=num_items,
        step_done=step_done,
        is_filler=(~is_real).tolist(),
        shard=[shards[index] for index in rows["shard"].tolist()],
        offset=rows["offset"].tolist(),
        joined=_joined(rows, sizes, is_real).tolist(),
        bounds=[0, *np.cumsum(sizes).tolist()],
        text=shard.stamp_texts(epoch=request.epoch, step=step, num_items=num_items, step_done=step_done),
    )


def _joined(rows: np.ndarray, sizes: NDArray[np.int64], is_real: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each message, where the stretch ends that lies end to end in one shard; fillers stand alone."""
    follows = (rows["shard"][1:] == rows["shard"][:-1]) & (
        rows["offset"][1:] == rows["offset"][:-1] + sizes[:-1]
    )
    ends = np.append(np.flatnonzero(~(follows & is_real[1:] & is_real[:-1])) + 1, len(rows))
    return ends[np.searchsorted(ends, np.arange(len(rows)), side="right")]


@functools.cache
def filler_message() -> bytes:
    """The message of a pack that only fills up a step, at rest."""
    return shard.encode_message([shard.padding_pack()], stamp=Stamp(padding=True))


class ChunkReader:
    """Reads the bytes of the first-th to stop-th steps that a stream sends, in chunks of about the size
    asked for."""

    def __init__(
        self,
        request: StreamRequest,
        epoch: EpochOrder,
        files: ShardFiles,
        buffers: Buffers,
        *,
        first: int,
        stop: int,
    ) -> None:
        self._request, self._epoch, self._files, self._buffers = request, epoch, files, buffers
        self._deal = deal(request, epoch)
        self._next, self._stop = first, stop
        self._window: _Window | None = None
        self._at = 0  # within the window
        self._room = _FIRST_WINDOW
        # Who finds a damaged message asks anew for its step: only there it is looked for here too.
        self._unchecked = request.packs_per_step if first == 0 else 0

    @property
    def num_sent(self) -> int:
        """How many of the stream's steps were read whole."""
        planned = 0 if self._window is None else len(self._window) - self._at
        return self._next - -(-planned // self._request.packs_per_step)

    def read(self, max_bytes: int, *, wait: bool = True) -> memoryview | None:
        """The next chunk: at least one message, else at most `max_bytes`. None at the end.

        wait=False: what would take long raises WouldBlock, and can then be had with wait=True.
        Raises ShardMissing or shard.ShardError for files that are not what the manifest says: those of the
        stream's first step, and of merged ones; what else is damaged, its reader finds.
        """
        if self._window is None or self._at == len(self._window):
            if self._next >= self._stop:
                return None
            simple = self._epoch.is_commit_order and self._request.balance == "none"
            if not wait and (self._request.is_merged or not simple):
                raise WouldBlock
            end = min(self._next + max(1, self._room // self._request.packs_per_step), self._stop)
            self._room = _WINDOW
            self._window = _plan(self._request, self._epoch, self._deal, range(self._next, end))
            self._next, self._at = end, 0
        window, first = self._window, self._at
        if self._request.is_merged:
            if not wait:
                raise WouldBlock
            stop = first + self._request.packs_per_step
        else:
            fits = bisect.bisect_right(window.bounds, window.bounds[first] + max_bytes) - 1
            stop = max(first + 1, fits)
        try:
            data = self._chunk(window, first, stop, wait)
        except (ShardMissing, shard.ShardError):
            if not wait:
                raise WouldBlock from None
            if not self._drop_copies(window, first, stop):
                raise
            data = self._chunk(window, first, stop, wait)
        self._at = stop
        self._unchecked -= stop - first
        return data

    def _chunk(self, window: _Window, first: int, stop: int, wait: bool) -> memoryview:
        """Messages as they go out."""
        if self._request.is_merged:
            return memoryview(self._merged(window, first, stop))
        data, starts = self._read(window, first, stop, wait)
        shard.stamp_all(data, starts, window.text[first:stop])
        ends = [*starts[1:], len(data)]
        for number in range(min(self._unchecked, len(starts))):
            _verify(data[starts[number] : ends[number]], window.shard[first + number])
        return data

    def _drop_copies(self, window: _Window, first: int, stop: int) -> bool:
        """Let go of the shards that messages are in. Whether any was a copy."""
        files = {window.shard[at].key: window.shard[at].sha256 for at in range(first, stop)}
        return sum(self._files.drop_copy(key, sha256) for key, sha256 in files.items()) > 0

    def _read(self, window: _Window, first: int, stop: int, wait: bool) -> tuple[memoryview, list[int]]:
        """Messages as they are at rest, end to end, and where each starts."""
        before = window.bounds[first]
        starts = [bound - before for bound in window.bounds[first : stop + 1]]
        data = self._buffers.take(starts.pop())
        pieces: list[Piece] = []
        at = first
        while at < stop:
            end = min(window.joined[at], stop)
            place = data[starts[at - first] : window.bounds[end] - before]
            if window.is_filler[at]:
                place[:] = filler_message()
            else:
                one = window.shard[at]
                pieces.append((one.key, one.sha256, window.offset[at], place))
            at = end
        self._files.read_all(pieces, wait=wait)
        return data, starts

    def _merged(self, window: _Window, first: int, stop: int) -> bytes:
        """One step of several packs as one message, its fillers last."""
        data, starts = self._read(window, first, stop, wait=True)
        packs: list[shard.Pack] = []
        fillers: list[shard.Pack] = []
        ends = [*starts[1:], len(data)]
        for is_filler, start, end in zip(window.is_filler[first:stop], starts, ends, strict=True):
            message = data[start:end]
            decoded = shard.decode_pack(message, _verify(message, window.shard[first]))
            (fillers if is_filler else packs).append(decoded)
        stamp = Stamp(
            epoch=self._request.epoch,
            step=int(window.step[stop - 1]),
            num_items=int(window.num_items[stop - 1]),
            step_done=bool(window.step_done[stop - 1]),
            padding=not packs,
        )
        return shard.encode_message(packs + fillers, stamp=stamp)


def _verify(message: memoryview, one: Shard) -> int:
    """Check a message against its checksum. Returns the bytes of its header. Raises ShardError."""
    header_bytes = 8 + int.from_bytes(message[4:8], "little")
    try:
        shard.verify_message(message, header_bytes)
    except shard.ShardError as error:
        raise shard.ShardError(f"{one.key}: {error}") from error
    return header_bytes
