"""The order of packs and who gets them: pure functions shared by service and client.

An epoch is an order of packs (`pack_at`; of a "step" dataset `step_order`), and a Deal says which of them
each rank gets in each loop step, from any pack on and for any number of ranks:

    EvenDeal   every loop step takes world_size x packs_per_step packs
    StepDeal   loop steps are micro-batches of the optimiser steps that the dataset marks

Everything here is a function of its arguments: no state, no clock, no generator whose stream could
change with a library's version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FILLER = -1  # the position of a pack that only fills up a step

_ROUNDS = 6
_MASK64 = (1 << 64) - 1


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), elementwise."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derive_seed(*parts: int) -> int:
    """One 64-bit seed from several numbers, for example (shuffle_seed, epoch)."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = _mix(state ^ np.uint64(part & _MASK64))
    return int(state[0])


def permute(index: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """Where each of `index` stands in a seeded permutation of range(n). (k,) int64 to (k,) int64.

    A bijection of [0, n) computed elementwise, so any part of a permutation of any size costs O(part)
    time and memory and no table: a Feistel network (Luby and Rackoff 1988) over the next power of
    four, cycle-walked into range (Black and Rogaway 2002).
    """
    if n < 0 or (len(index) and (index.min() < 0 or index.max() >= n)):
        raise ValueError(f"indices must lie in [0, {n})")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = [np.uint64(derive_seed(seed, round_)) for round_ in range(_ROUNDS)]
    out = index.astype(np.uint64)
    todo = np.arange(len(index))
    while len(todo):
        x = out[todo]
        left, right = x >> shift, x & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        x = (left << shift) | right
        out[todo] = x
        todo = todo[x >= np.uint64(n)]
    return out.astype(np.int64)


def pack_at(
    positions: NDArray[np.int64], *, num_packs: int, epoch: int, shuffle_seed: int | None
) -> NDArray[np.int64]:
    """Which packs stand at `positions` of an epoch.

    Epoch 0 is commit order, so that it can be streamed while packing runs; later epochs are a
    permutation by (shuffle_seed, epoch); without a seed every epoch is commit order.
    """
    if epoch == 0 or shuffle_seed is None:
        return positions
    return permute(positions, num_packs, derive_seed(shuffle_seed, epoch))


def rank_positions(
    step: int, *, rank: int, world_size: int, packs_per_step: int, offset: int = 0
) -> tuple[int, int]:
    """The half-open range of positions that `rank` takes in `step`, counted from pack `offset`."""
    start = offset + (step * world_size + rank) * packs_per_step
    return start, start + packs_per_step


def num_steps(num_packs: int, *, world_size: int, packs_per_step: int, tail: str, offset: int = 0) -> int:
    """Steps that every rank takes from pack `offset` to the end of an epoch.

    tail="drop" leaves out a last step that not every rank can fill; "pad" fills it up.
    """
    left, step = max(0, num_packs - offset), world_size * packs_per_step
    return -(-left // step) if tail == "pad" else left // step


# ------------------------------------------------------------------ what a pack costs

# Of a transformer's work in a layer, what grows with tokens is 12 x hidden size times what grows with the
# square of a segment's length (24 h^2 a token against 2 h a squared token, causal); here for h = 2,048.
LINEAR_COST = 12 * 2048


def attention_cost(sum_squares: NDArray[np.int64], num_tokens: NDArray[np.integer]) -> NDArray[np.int64]:
    """About what packs cost to train, in some unit: squared segment lengths plus a term linear in tokens."""
    return sum_squares.astype(np.int64) + LINEAR_COST * num_tokens.astype(np.int64)


def idle_share(costs: NDArray[np.int64]) -> float:
    """(steps, ranks) costs: the share of all ranks' time that goes by waiting for the step's slowest."""
    slowest = int(costs.max(axis=1, initial=0).sum()) * costs.shape[1]
    return 1 - int(costs.sum()) / slowest if slowest else 0.0


# ------------------------------------------------------------------ optimiser steps of the dataset


def step_sizes(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Packs of each optimiser step of a "step" dataset, in commit order. (num_packs,) to (n,) int64.

    `steps` is the column of that name in the row index. Raises ValueError where it falls.
    """
    if len(steps) == 0:
        return np.empty(0, np.int64)
    rises = np.diff(steps)
    if steps[0] < 0 or np.any(rises < 0):
        raise ValueError(
            "the row index must hold the packs of each optimiser step side by side, steps rising"
        )
    return np.diff(np.concatenate([[0], np.flatnonzero(rises) + 1, [len(steps)]]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOrder:
    """An epoch of a "step" dataset.

    packs: (num_packs,) int64, which pack stands at each position. bounds: (num_steps + 1,) int64; the
    epoch's optimiser step i holds positions [bounds[i], bounds[i + 1]).
    """

    packs: NDArray[np.int64]
    bounds: NDArray[np.int64]


def step_order(
    sizes: NDArray[np.int64],
    *,
    epoch: int,
    shuffle_seed: int | None,
    costs: NDArray[np.int64] | None = None,
) -> StepOrder:
    """The order of an epoch whose optimiser steps have `sizes` packs, in commit order.

    Optimiser steps are permuted as packs are in `pack_at`; the packs of one stay together, in commit
    order, or with `costs` (num_packs,) the dearest first: then packs that are trained side by side cost
    about the same. Their order within the step changes no gradient.
    """
    ids = np.arange(len(sizes), dtype=np.int64)
    which = pack_at(ids, num_packs=len(ids), epoch=epoch, shuffle_seed=shuffle_seed)
    sizes = np.asarray(sizes, np.int64)
    first = np.cumsum(sizes) - sizes
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[which])])
    packs = np.arange(bounds[-1]) + np.repeat(first[which] - bounds[:-1], sizes[which])
    if costs is not None:
        packs = packs[np.lexsort((packs, -costs[packs], np.repeat(ids, sizes[which])))]
    return StepOrder(packs=packs, bounds=bounds)


# ------------------------------------------------------------------ dealing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dealt:
    """What one rank gets in k loop steps.

    position: (k, packs_per_step) int64, places in the epoch, -1 for a filler. All others (k,): begin and
    stop int64, the positions of the whole optimiser step, all ranks together; optimizer_step int64, its
    number, counted in the epoch of a "step" dataset, else from the offset; after int64, packs of the epoch
    that all ranks have consumed once the loop step is done; done bool, whether the optimiser step is.
    """

    position: NDArray[np.int64]
    begin: NDArray[np.int64]
    stop: NDArray[np.int64]
    optimizer_step: NDArray[np.int64]
    after: NDArray[np.int64]
    done: NDArray[np.bool_]


class Deal(Protocol):
    """How the packs of an epoch, from pack `offset` on, go to loop steps and ranks."""

    @property
    def num_steps(self) -> int:
        """Loop steps to the end of what is known of the epoch; every rank takes them all."""
        ...

    def take(self, steps: NDArray[np.int64], rank: int) -> Dealt:
        """What `rank` gets in loop steps `steps` (k,) int64, counted from the offset, below num_steps."""
        ...

    def all_positions(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """What all ranks get, (k, world_size, packs_per_step) int64."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvenDeal:
    """Every step takes world_size x packs_per_step packs and is an optimiser step.

    costs: of the packs at positions, (k,) to (k,). With it the packs of a step go to ranks so that the
    ranks' costs are about even: dearest first, in rounds of one pack a rank, in each round the dearest to
    the rank that has least so far (restricted LPT: Coffman, Frederickson, Lueker 1984). A rank has them in
    the order of rounds, so that packs of about the same cost are side by side in micro-batches too.
    """

    num_packs: int
    offset: int = 0
    world_size: int = 1
    packs_per_step: int = 1
    tail: str = "drop"
    costs: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None

    @property
    def num_steps(self) -> int:
        return num_steps(
            self.num_packs,
            world_size=self.world_size,
            packs_per_step=self.packs_per_step,
            tail=self.tail,
            offset=self.offset,
        )

    def take(self, steps: NDArray[np.int64], rank: int) -> Dealt:
        begin = self.offset + steps * (self.world_size * self.packs_per_step)
        stop = np.minimum(begin + self.world_size * self.packs_per_step, self.num_packs)
        if self._moves:
            position = self._balanced(begin)[:, rank]
        else:
            position = begin[:, None] + (rank * self.packs_per_step + np.arange(self.packs_per_step))
        return Dealt(
            position=np.where(position < self.num_packs, position, FILLER),
            begin=begin,
            stop=stop,
            optimizer_step=steps,
            after=stop,
            done=np.ones(len(steps), np.bool_),
        )

    def all_positions(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        begin = self.offset + steps * (self.world_size * self.packs_per_step)
        if self._moves:
            position = self._balanced(begin)
        else:
            each = np.arange(self.world_size * self.packs_per_step)
            position = (begin[:, None] + each).reshape(len(begin), self.world_size, self.packs_per_step)
        return np.where(position < self.num_packs, position, FILLER)

    @property
    def _moves(self) -> bool:
        return self.costs is not None and self.packs_per_step > 1 and self.world_size > 1

    def _balanced(self, begin: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions (k, world_size, packs_per_step), dearest first, beyond num_packs for fillers."""
        assert self.costs is not None
        world, rounds = self.world_size, self.packs_per_step
        position = begin[:, None] + np.arange(world * rounds)
        cost = np.zeros(position.shape, np.int64)
        is_real = position < self.num_packs
        cost[is_real] = self.costs(position[is_real])
        dearest = np.argsort(-cost, axis=1, kind="stable")
        cost = np.take_along_axis(cost, dearest, axis=1)
        place = np.empty((len(begin), world, rounds), np.int64)
        load = np.zeros((len(begin), world), np.int64)
        for number in range(rounds):
            these = slice(number * world, (number + 1) * world)
            ranks = np.argsort(load, axis=1, kind="stable")  # the k-th dearest of the round goes to ranks[k]
            np.put_along_axis(place[:, :, number], ranks, dearest[:, these], axis=1)
            np.put_along_axis(load, ranks, np.take_along_axis(load, ranks, axis=1) + cost[:, these], axis=1)
        return begin[:, None, None] + place


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepDeal:
    """An optimiser step of P packs takes ceil(P / world_size) loop steps; in the j-th, rank r gets its pack
    j * world_size + r, or a filler where there is none.

    An offset within an optimiser step deals out the rest of it. balanced: the order is by cost, and every
    other loop step of an optimiser step deals backwards, so that no rank always gets the dearest.
    micro_step: loop steps of the optimiser step at `offset` that were taken before it; which of the others
    go backwards hangs on it.
    """

    order: StepOrder
    offset: int = 0
    world_size: int = 1
    balanced: bool = False
    micro_step: int = 0
    _first: int = field(init=False)  # the optimiser step that the offset lies in
    _starts: NDArray[np.int64] = field(init=False)  # (n,) position where each one's first loop step begins
    _loops: NDArray[np.int64] = field(init=False)  # (n + 1,) loop steps before each

    def __post_init__(self) -> None:
        bounds = self.order.bounds
        first = int(np.searchsorted(bounds, self.offset, side="right")) - 1
        starts = np.maximum(bounds[first:-1], self.offset)
        counts = -(-(bounds[first + 1 :] - starts) // self.world_size)
        object.__setattr__(self, "_first", first)
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_loops", np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))

    @property
    def num_steps(self) -> int:
        return int(self._loops[-1])

    @property
    def first_step(self) -> int:
        """The optimiser step of the epoch that the offset lies in."""
        return self._first

    def loops_of(self, optimizer_step: int) -> tuple[int, int]:
        """The half-open range of loop steps of an optimiser step of the epoch; empty before the offset.

        Both ends are num_steps for one that is not known.
        """
        ends = np.array([optimizer_step, optimizer_step + 1]) - self._first
        at = np.clip(ends, 0, len(self._loops) - 1)
        return int(self._loops[at[0]]), int(self._loops[at[1]])

    def take(self, steps: NDArray[np.int64], rank: int) -> Dealt:
        which = np.searchsorted(self._loops, steps, side="right") - 1
        number = steps - self._loops[which]  # of the loop step within its optimiser step
        start = self._starts[which] + number * self.world_size
        stop = self.order.bounds[self._first + which + 1]
        place = self._place(number + self._before(which), np.int64(rank))
        position = start + place
        return Dealt(
            position=np.where(position < stop, position, FILLER)[:, None],
            begin=self.order.bounds[self._first + which],
            stop=stop,
            optimizer_step=self._first + which,
            after=np.minimum(start + self.world_size, stop),
            done=start + self.world_size >= stop,
        )

    def all_positions(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        which = np.searchsorted(self._loops, steps, side="right") - 1
        number = steps - self._loops[which]
        place = self._place((number + self._before(which))[:, None], np.arange(self.world_size))
        position = (self._starts[which] + number * self.world_size)[:, None] + place
        stop = self.order.bounds[self._first + which + 1]
        return np.where(position < stop[:, None], position, FILLER)[:, :, None]

    def _before(self, which: NDArray[np.int64]) -> NDArray[np.int64]:
        """Loop steps that were taken before the offset, of the `which`-th optimiser steps from it on."""
        return np.where(which == 0, self.micro_step, 0)

    def _place(self, number: NDArray[np.int64], rank: NDArray[np.int64] | np.int64) -> NDArray[np.int64]:
        """Which of a loop step's packs a rank gets, for the `number`-th of its optimiser step."""
        backwards = self.balanced & (number % 2 == 1)
        return np.where(backwards, self.world_size - 1 - rank, rank)


def rank_costs(
    deal: Deal,
    costs: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    *,
    max_steps: int = 1 << 62,
    block: int = 1 << 12,
) -> NDArray[np.int64]:
    """What each rank's packs cost in each loop step, (steps, world_size), of at most the first `max_steps`.

    costs: as in EvenDeal.
    """
    parts = [np.zeros((0, 1), np.int64)]
    num_steps = min(deal.num_steps, max_steps)
    for first in range(0, num_steps, block):
        position = deal.all_positions(np.arange(first, min(first + block, num_steps)))
        cost = np.zeros(position.shape, np.int64)
        is_real = position != FILLER
        cost[is_real] = costs(position[is_real])
        parts.append(cost.sum(axis=2))
    return np.concatenate(parts[1:] or parts)
