"""Where a stream stands, and which part of the dataset is this rank's. Pure values.

The cursor counts what *all* ranks together have consumed, so a state saved on four ranks goes on
exactly on two or eight: the packs that are left are dealt out anew from pack `packs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packer import order
from trainer_client.errors import DatasetTooSmall, StateMismatch

STATE_VERSION = 1
Tail = Literal["drop", "pad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """After how much of which epoch. `step` counts the steps taken in this epoch, on any world size."""

    epoch: int = 0
    packs: int = 0  # of this epoch, consumed by all ranks together
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How an epoch is dealt to ranks and steps, and which rank this is."""

    rank: int = 0
    world_size: int = 1
    packs_per_step: int = 1
    shuffle_seed: int | None = 0
    tail: Tail = "drop"

    def __post_init__(self) -> None:
        for name in ("world_size", "packs_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: 1 or more is required, found {getattr(self, name)}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank: 0 to {self.world_size - 1} is required (world_size is {self.world_size}), "
                f"found {self.rank}"
            )
        if self.tail not in ("drop", "pad"):
            raise ValueError(f'tail: "drop" or "pad" is required, found {self.tail!r}')

    @property
    def packs_of_step(self) -> int:
        """Packs that all ranks together take in one step."""
        return self.world_size * self.packs_per_step

    def positions(self, step: int, *, offset: int) -> tuple[int, int]:
        """This rank's half-open range of positions in step `step` counted from pack `offset`."""
        return order.rank_positions(
            step,
            rank=self.rank,
            world_size=self.world_size,
            packs_per_step=self.packs_per_step,
            offset=offset,
        )

    def num_steps(self, num_packs: int, *, offset: int = 0) -> int:
        """Steps that every rank takes from pack `offset` to the end of an epoch."""
        return order.num_steps(
            num_packs,
            world_size=self.world_size,
            packs_per_step=self.packs_per_step,
            tail=self.tail,
            offset=offset,
        )

    def num_left_over(self, num_packs: int) -> int:
        """Packs of an epoch that tail="drop" leaves out."""
        return max(0, num_packs - self.num_steps(num_packs) * self.packs_of_step)

    def require_steps(self, num_packs: int, dataset: str) -> None:
        """Raise DatasetTooSmall where an epoch has no step."""
        if self.num_steps(num_packs) == 0:
            raise DatasetTooSmall(dataset, num_packs=num_packs, packs_needed=self.packs_of_step)

    def after(self, cursor: Cursor, num_steps: int = 1) -> Cursor:
        """The cursor `num_steps` further in the same epoch."""
        return Cursor(
            epoch=cursor.epoch,
            packs=cursor.packs + num_steps * self.packs_of_step,
            step=cursor.step + num_steps,
        )

    def normal(self, cursor: Cursor, num_packs: int | None) -> Cursor:
        """The same place said in one way: the end of an epoch is the start of the next one.

        While packing runs (num_packs is None) the end is not known and the cursor stays as it is; it
        means the same place then as later.
        """
        if cursor.packs and num_packs is not None and not self.num_steps(num_packs, offset=cursor.packs):
            return Cursor(epoch=cursor.epoch + 1)
        return cursor


def to_state(cursor: Cursor, split: Split, dataset: str) -> dict[str, Any]:
    """A small JSON document that says all that is needed to go on."""
    return {
        "version": STATE_VERSION,
        "dataset": dataset,
        "epoch": cursor.epoch,
        "packs": cursor.packs,
        "step": cursor.step,
        "shuffle_seed": split.shuffle_seed,
        "world_size": split.world_size,
        "packs_per_step": split.packs_per_step,
        "tail": split.tail,
    }


def from_state(state: Mapping[str, Any], split: Split, dataset: str) -> Cursor:
    """The cursor in `state`. Raises StateMismatch where it is of another dataset or order.

    world_size, packs_per_step and tail may differ: what is left is dealt out by the stream's own.
    """
    missing = {"version", "dataset", "epoch", "packs", "shuffle_seed"} - set(state)
    if missing or state["version"] != STATE_VERSION:
        raise ValueError(
            f"a state of version {STATE_VERSION} is required, as state_dict() gives it; found "
            f"version {state.get('version')} without {', '.join(sorted(missing)) or 'gaps'}"
        )
    if "lane" in state:
        raise ValueError(
            "this is the state of one DataLoader worker, which only a worker of a PackedDataset can load; "
            "save `batch.state` of the last batch taken instead"
        )
    if state["dataset"] != dataset:
        raise StateMismatch(
            "dataset",
            wanted=dataset,
            found=state["dataset"],
            hint="its position means nothing here: open the dataset of the state, or start anew",
        )
    if state["shuffle_seed"] != split.shuffle_seed:
        raise StateMismatch(
            "shuffle_seed",
            wanted=split.shuffle_seed,
            found=state["shuffle_seed"],
            hint="packs would be lost or doubled: open the stream with the seed of the state",
        )
    cursor = Cursor(epoch=int(state["epoch"]), packs=int(state["packs"]), step=int(state.get("step", 0)))
    if min(cursor.epoch, cursor.packs, cursor.step) < 0:
        raise ValueError(f"epoch, packs and step must not be negative, found {cursor}")
    return cursor
