"""The way through the rest of an epoch: which loop steps there are, which are left out, where each ends.

Pure. Steps are counted from the cursor that the way begins at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packer.order import StepDeal, step_order
from packer.shard import Pack
from trainer_client.cursor import Cursor, Split, Term, count_of, fillers_in, from_state, term_from
from trainer_client.errors import DatasetTooSmall, StateMismatch
from trainer_client.options import whole


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """What is known of a dataset's size.

    num_packs: None while it is being packed. capacities: max_tokens of its packs, rising, where the spec
    says. step_sizes: (n,) int64, packs of each optimiser step in commit order, as far as they are committed,
    of a "step" dataset; None for any other. spec: of the dataset, once it was read.
    """

    num_packs: int | None = None
    capacities: tuple[int, ...] | None = None
    step_sizes: NDArray[np.int64] | None = None
    spec: Mapping[str, Any] | None = None


def require_steps(layout: Layout, split: Split, dataset: str) -> None:
    """Raise DatasetTooSmall where an epoch of a finished dataset has no step."""
    if layout.num_packs is None:
        return
    if layout.step_sizes is None and not split.num_steps(layout.num_packs):
        needed = split.packs_of_step
        raise DatasetTooSmall(dataset, num_packs=layout.num_packs, packs_needed=needed, step=split.factors)
    if layout.step_sizes is not None and not layout.num_packs:
        raise DatasetTooSmall(dataset, num_packs=0, packs_needed=1)


def num_left_over(layout: Layout, split: Split, *, offset: int = 0) -> int:
    """Packs that tail="drop" leaves out from pack `offset` to the end of an epoch of a finished dataset."""
    assert layout.num_packs is not None
    return 0 if layout.step_sizes is not None else split.num_left_over(layout.num_packs, offset=offset)


def require_place(packs: int, num_fillers: int, layout: Layout, dataset: str) -> None:
    """Raise StateMismatch for a state from beyond the end of an epoch of a finished dataset.

    num_fillers: how many of the packs may have been fillers of a last step (tail="pad"), which count where
    a state was saved before the end was known.
    """
    if layout.num_packs is not None and packs > layout.num_packs + num_fillers:
        raise StateMismatch(
            "packs",
            wanted=layout.num_packs,
            found=packs,
            hint=f"an epoch of dataset {dataset} ends at pack {layout.num_packs}: the state was changed, or "
            "is of other data; load an earlier one",
        )


def normal(cursor: Cursor, split: Split, layout: Layout) -> Cursor:
    """The same place said in one way: the end of an epoch is the start of the next one.

    While packing runs the end is not known and the cursor stays as it is; it means the same place then
    as later.
    """
    if not cursor.packs or layout.num_packs is None:
        return cursor
    if layout.step_sizes is not None:
        is_end = cursor.packs >= layout.num_packs
    else:
        is_end = not split.num_steps(layout.num_packs, offset=cursor.packs)
    return Cursor(epoch=cursor.epoch + 1) if is_end else cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """What of an epoch is left out: packs [start, stop) by place in its order, or optimiser steps of a
    "step" dataset. Both mean the same on any world size."""

    epoch: int
    unit: str  # packs | optimizer_steps
    start: int
    stop: int

    def to_document(self) -> dict[str, Any]:
        return {"epoch": self.epoch, self.unit: [self.start, self.stop]}


def skips_from(documents: Any) -> tuple[Skip, ...]:
    """The inverse of `Skip.to_document`, for all of a state. Raises ValueError."""
    if not isinstance(documents, Sequence) or isinstance(documents, str):
        raise ValueError(f"skip of the state must be a list, empty where nothing is, found {documents!r:.80}")
    skips = []
    for document in documents:
        try:
            unit = "packs" if "packs" in document else "optimizer_steps"
            start, stop = (count_of(unit, end) for end in document[unit])
            epoch = count_of("epoch", document["epoch"])
            skips.append(Skip(epoch=epoch, unit=unit, start=start, stop=stop))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                'skip of the state: each as in {"epoch": 0, "packs": [0, 8]}, or with "optimizer_steps", is '
                f"required, found {document!r:.80}"
            ) from error
    return tuple(skips)


class Standing(NamedTuple):
    """What a state says of where a stream stands and how far it goes."""

    cursor: Cursor
    skips: tuple[Skip, ...]
    term: Term
    num_fillers: int  # that the state may count as packs


def standing_in(
    state: Mapping[str, Any], split: Split, dataset: str, *, epochs: int | None, layout: Layout
) -> Standing:
    """What `state` says to a stream of `epochs`, all of it checked. Raises ValueError, StateMismatch."""
    cursor = from_state(state, split, dataset, marks_steps=layout.step_sizes is not None)
    skips, term = skips_from(state.get("skip", ())), term_from(state, epochs)
    num_fillers = fillers_in(state)
    require_place(cursor.packs, num_fillers, layout, dataset)
    return Standing(cursor, skips, term, num_fillers)


@dataclass(slots=True, kw_only=True)
class Course:
    """The loop steps from `start` to the end of its epoch, as far as the layout tells."""

    split: Split
    layout: Layout
    start: Cursor
    skips: tuple[Skip, ...] = ()
    _deal: StepDeal | None = field(init=False, default=None)
    _gaps: list[tuple[int, int]] = field(init=False)  # loop steps left out, rising, apart
    # Loop steps to the end, those left out counted; None while the dataset is being packed.
    num_steps: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        sizes = self.layout.step_sizes
        if sizes is not None:
            made = step_order(sizes, epoch=self.start.epoch, shuffle_seed=self.split.shuffle_seed)
            self._deal = StepDeal(order=made, offset=self.start.packs, world_size=self.split.world_size)
        self._gaps = _merged(self._gap(skip) for skip in self.skips if skip.epoch == self.start.epoch)
        if self.layout.num_packs is not None:
            whole = self.split.num_steps(self.layout.num_packs, offset=self.start.packs)
            self.num_steps = whole if self._deal is None else self._deal.num_steps

    @property
    def num_kept(self) -> int | None:
        """Loop steps to the end that are not left out."""
        total = self.num_steps
        if total is None:
            return None
        return total - _num_within(self._gaps, total)

    @property
    def num_taken(self) -> int:
        """Loop steps of the epoch that were taken before `start`."""
        if not self.start.step:
            return 0
        whole = Course(
            split=self.split, layout=self.layout, start=Cursor(epoch=self.start.epoch), skips=self.skips
        )
        return self.start.step - _num_within(whole._gaps, self.start.step)

    @property
    def num_batches(self) -> int:
        """Batches of the epoch, those taken before `start` counted; of a finished dataset."""
        return (self.num_taken + (self.num_kept or 0)) * self.micro_batches

    @property
    def num_optimizer_steps(self) -> int:
        """Of the whole epoch, those left out not counted."""
        if self._deal is None:
            return self.num_taken + (self.num_kept or 0)
        left_out = _merged((skip.start, skip.stop) for skip in self.skips if skip.epoch == self.start.epoch)
        total = len(self._deal.order.bounds) - 1
        return total - _num_within(left_out, total)

    @property
    def packs_a_step(self) -> int:
        """That this rank gets in a step."""
        return self.split.packs_per_step if self._deal is None else 1

    @property
    def micro_batches(self) -> int:
        """Batches that make a step: one, or those that the stream was asked for."""
        return self.split.micro_batches if self._deal is None else 1

    def room_of(self, packs: Sequence[Pack]) -> int | None:
        """Tokens that a batch of these packs has room for: one of few numbers. None: not known.

        A pack is of the smallest capacity that holds it, since what stands in it fits into no smaller one.
        One pack a batch has its own capacity. Several have the sum of theirs, rounded up to a multiple of
        the largest among them, so that chance mixtures make no new number each.
        """
        capacities = self.layout.capacities
        if capacities is None or len(capacities) == 1:
            return None if capacities is None else capacities[0] * self.packs_a_step // self.micro_batches
        lengths = (pack.num_tokens for pack in packs)
        each = [min((c for c in capacities if c >= n), default=capacities[-1]) for n in lengths]
        return -(-sum(each) // max(each)) * max(each)

    def knows(self, step: int) -> bool:
        """Whether it is known where `step` ends, and whether it is left out."""
        return self._deal is None or self.layout.num_packs is not None or step < self._deal.num_steps

    def kept(self, number: int) -> int:
        """The `number`-th loop step that is not left out."""
        step = number
        for start, stop in self._gaps:
            if step < start:
                break
            step += stop - start
        return step

    def num_ahead(self, step: int, stride: int) -> int | None:
        """How many of `step`, step + stride, … come before the next gap or what may be one, and before the
        end of the epoch, where it is known: a service refuses to be asked for steps behind it.

        None: nothing of that is ahead.
        """
        ends = [start for start, _ in self._gaps if start > step]
        if self.num_steps is not None:
            ends.append(self.num_steps)
        if self._deal is not None and self.layout.num_packs is None and self._skips_later():
            ends.append(self._deal.num_steps)
        return -(-(min(ends) - step) // stride) if ends else None

    def after(self, step: int) -> Cursor:
        """The cursor once `step` was taken by all ranks."""
        start, number = self.start, step + 1
        if self._deal is None:
            if self.num_steps is not None and number >= self.num_steps:
                return Cursor(epoch=start.epoch + 1)  # as `normal` says it
            packs = start.packs + number * self.split.packs_of_step
            return Cursor(start.epoch, packs, start.step + number)
        dealt = self._deal.take(np.array([step]), 0)
        micro = 0 if dealt.done[0] else self._micro_step(step) + 1
        cursor = Cursor(
            epoch=start.epoch, packs=int(dealt.after[0]), step=start.step + number, micro_step=micro
        )
        return normal(cursor, self.split, self.layout)

    def within(self, step: int, micro_step: int) -> Cursor:
        """The cursor once the first `micro_step` micro-batches of `step` were taken, not all of them."""
        begin = self.after(step - 1) if step else self.start
        return begin._replace(micro_step=micro_step)

    def optimizer_step(self, step: int) -> int:
        """The number of the optimiser step that loop step `step` is of, within the epoch."""
        if self._deal is None:
            return self.start.step + step
        return int(self._deal.take(np.array([step]), 0).optimizer_step[0])

    @property
    def num_begun(self) -> int:
        """Loop steps taken of the optimiser step that the way begins in, where who gets the others hangs on
        that."""
        return self.start.micro_step if self._deal is not None and self.split.balance != "none" else 0

    @property
    def first_optimizer_step(self) -> int:
        """The first optimiser step that is not taken yet, nor begun."""
        if self._deal is None:
            return self.start.step
        return self._deal.first_step + bool(self.start.micro_step)

    def skips_of(self, steps: Iterable[int], *, at: Cursor) -> tuple[Skip, ...]:
        """What to add to `skips` to leave out optimiser steps, for a stream that stands at `at`.

        Raises ValueError for steps that were taken already.
        """
        numbers = sorted({whole("skip", step) for step in steps})  # of numpy's too, which are no JSON
        first, epoch = self.first_optimizer_step, self.start.epoch
        if epoch < at.epoch or (numbers and numbers[0] < first):
            raise ValueError(
                f"skip: steps from {first} of epoch {at.epoch} on are required, which are not taken yet, "
                f"found {numbers[:5]} of epoch {epoch}; load an earlier state first"
            )
        return tuple(self.skip_of(number) for number in numbers)

    def skip_of(self, optimizer_step: int) -> Skip:
        """How optimiser step `optimizer_step` of the epoch is left out."""
        if self._deal is not None:
            return Skip(
                epoch=self.start.epoch,
                unit="optimizer_steps",
                start=optimizer_step,
                stop=optimizer_step + 1,
            )
        size = self.split.packs_of_step
        first = self.start.packs + (optimizer_step - self.start.step) * size
        return Skip(epoch=self.start.epoch, unit="packs", start=first, stop=first + size)

    def _micro_step(self, step: int) -> int:
        """How many loop steps of its optimiser step were taken before `step`."""
        assert self._deal is not None
        number = self.optimizer_step(step)
        first = self._deal.loops_of(number)[0]
        return step - first + (self.start.micro_step if first == 0 else 0)

    def _gap(self, skip: Skip) -> tuple[int, int]:
        """The loop steps that hold any of what is to be left out."""
        if skip.unit == "optimizer_steps":
            if self._deal is None:
                return 0, 0
            return self._deal.loops_of(skip.start)[0], self._deal.loops_of(skip.stop)[0]
        size = self.split.packs_of_step
        start, stop = skip.start - self.start.packs, skip.stop - self.start.packs
        return max(0, start // size), max(0, -(-stop // size))

    def _skips_later(self) -> bool:
        """Whether something is to be left out that is not packed yet."""
        sizes = self.layout.step_sizes
        known = 0 if sizes is None else len(sizes)
        return any(skip.epoch == self.start.epoch and skip.stop > known for skip in self.skips)


def over_epochs(count: Callable[[Course], int], epochs: range, at: Course) -> int:
    """The sum of `count` over `epochs` of a finished dataset, of which `at` is the way from where the stream
    stands. O(skips), however many epochs there are: all are alike but that one and those with skips."""
    starts = {skip.epoch: Cursor(epoch=skip.epoch) for skip in at.skips} | {at.start.epoch: at.start}
    ways = [replace(at, start=start) for epoch, start in starts.items() if epoch in epochs]
    plain = Course(split=at.split, layout=at.layout, start=Cursor(epoch=epochs.start))
    return (len(epochs) - len(ways)) * count(plain) + sum(map(count, ways))


def _num_within(ranges: Iterable[tuple[int, int]], end: int) -> int:
    """How many numbers below `end` lie in half-open ranges that do not touch."""
    return sum(min(stop, end) - min(start, end) for start, stop in ranges)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Half-open ranges as rising ones that do not touch."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(one for one in ranges if one[0] < one[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
