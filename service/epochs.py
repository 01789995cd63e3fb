"""Which pack stands where in an epoch, and how many trained tokens a step has, for many ranks at once.

Every rank needs the trained tokens of whole steps, so ranks share the work: a shuffled epoch is
computed in blocks of positions, and each block is kept for whoever comes next.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packer import order
from service.feeds import Snapshot

BLOCK = 1 << 14  # positions: a few milliseconds to compute, 256 kB to keep


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    packs: NDArray[np.int64]  # (k,)
    trained_ends: NDArray[np.int64]  # (k + 1,) trained tokens before each position, from 0


class BlockCache:
    """The blocks used last, of all datasets and epochs. Safe for threads."""

    def __init__(self, max_blocks: int = 256) -> None:
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, int, int, int, int], _Block] = OrderedDict()

    def get(self, dataset: str, snapshot: Snapshot, epoch: int, seed: int, number: int) -> _Block:
        key = (dataset, snapshot.num_packs, epoch, seed, number)
        with self._lock:
            if (block := self._blocks.get(key)) is not None:
                self._blocks.move_to_end(key)
                return block
        block = _make(snapshot, epoch, seed, number)  # two threads may both do so: it is the same block
        with self._lock:
            self._blocks[key] = block
            while len(self._blocks) > self._max_blocks:
                self._blocks.popitem(last=False)
        return block


def _make(snapshot: Snapshot, epoch: int, seed: int, number: int) -> _Block:
    first = number * BLOCK
    positions = np.arange(first, min(first + BLOCK, snapshot.num_packs), dtype=np.int64)
    packs = order.pack_at(positions, num_packs=snapshot.num_packs, epoch=epoch, shuffle_seed=seed)
    trained = snapshot.rows["num_trained"][packs]
    return _Block(packs=packs, trained_ends=np.concatenate([[0], np.cumsum(trained, dtype=np.int64)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSteps:
    """An epoch of a "step" dataset."""

    order: order.StepOrder
    trained_ends: NDArray[np.int64]  # (num_packs + 1,) trained tokens before each position


class StepsCache:
    """The epochs of "step" datasets used last. Safe for threads."""

    def __init__(self, max_epochs: int = 8) -> None:
        self._max_epochs = max_epochs
        self._lock = threading.Lock()
        self._epochs: OrderedDict[tuple[object, ...], EpochSteps] = OrderedDict()

    def get(
        self, dataset: str, snapshot: Snapshot, *, epoch: int, shuffle_seed: int | None, balanced: bool
    ) -> EpochSteps:
        key = (dataset, snapshot.num_packs, epoch, shuffle_seed, balanced)
        with self._lock:  # held while one is made: many ranks ask for the same at once
            if (found := self._epochs.get(key)) is None:
                found = self._epochs[key] = _steps(snapshot, epoch, shuffle_seed, balanced)
            self._epochs.move_to_end(key)
            while len(self._epochs) > self._max_epochs:
                self._epochs.popitem(last=False)
            return found


def _steps(snapshot: Snapshot, epoch: int, shuffle_seed: int | None, balanced: bool) -> EpochSteps:
    assert snapshot.step_sizes is not None
    costs = _costs(snapshot.rows) if balanced else None
    made = order.step_order(snapshot.step_sizes, epoch=epoch, shuffle_seed=shuffle_seed, costs=costs)
    trained = snapshot.rows["num_trained"][made.packs]
    return EpochSteps(order=made, trained_ends=np.concatenate([[0], np.cumsum(trained, dtype=np.int64)]))


def _costs(rows: np.ndarray) -> NDArray[np.int64]:
    return order.attention_cost(rows["sum_squares"], rows["num_tokens"])


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOrder:
    """The order of one epoch over the packs of a snapshot. Positions run from 0 to num_packs."""

    dataset: str
    snapshot: Snapshot
    epoch: int
    shuffle_seed: int | None
    blocks: BlockCache
    steps: EpochSteps | None = None  # of a "step" dataset

    @property
    def is_commit_order(self) -> bool:
        return self.steps is None and (self.epoch == 0 or self.shuffle_seed is None)

    def packs(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The packs that stand at `positions`, (k,) int64 each."""
        if self.steps is not None:
            return self.steps.order.packs[positions]
        if self.is_commit_order:
            return positions
        number, within = np.divmod(positions, BLOCK)
        out = np.empty_like(positions)
        for one in np.unique(number):
            here = number == one
            out[here] = self._block(int(one)).packs[within[here]]
        return out

    def costs(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """What the packs at `positions` cost to train, (k,) int64 each."""
        return _costs(self.snapshot.rows[self.packs(positions)])

    def num_trained(self, begin: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
        """Trained tokens at the positions from `begin` to `stop`, (k,) int64 each, both rising."""
        bounds = np.concatenate([begin, stop])
        rank = np.argsort(bounds, kind="stable")
        before = np.empty_like(bounds)
        before[rank] = self._trained_before(bounds[rank])
        return before[len(begin) :] - before[: len(begin)]

    def _trained_before(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Trained tokens before each position, counted from the block of the first."""
        if self.steps is not None:
            return self.steps.trained_ends[positions]
        if self.is_commit_order:
            return self.snapshot.trained_ends[positions]
        number, within = np.divmod(positions, BLOCK)
        out = np.empty_like(positions)
        before = 0
        for one in range(int(number[0]), int(number[-1]) + 1):
            if one * BLOCK >= self.snapshot.num_packs:  # the very end, on a block's border
                out[number == one] = before
                break
            ends = self._block(one).trained_ends
            here = number == one
            out[here] = before + ends[within[here]]
            before += int(ends[-1])
        return out

    def _block(self, number: int) -> _Block:
        assert self.shuffle_seed is not None
        return self.blocks.get(self.dataset, self.snapshot, self.epoch, self.shuffle_seed, number)
