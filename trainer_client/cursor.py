"""Where a stream stands, and which part of the dataset is this rank's. Pure values.

The cursor counts what *all* ranks together have consumed, so a state saved on four ranks goes on
exactly on two or eight: the packs that are left are dealt out anew from pack `packs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from packer import order
from trainer_client.errors import StateMismatch
from trainer_client.options import whole

STATE_VERSION = 1
_MOST = 1 << 62  # no state counts as far
Tail = Literal["drop", "pad"]
Balance = Literal["none", "attention"]


class Cursor(NamedTuple):
    """After how much of which epoch. `step` counts the steps of this epoch, on any world size: those that
    Split deals, in a "step" dataset loop steps.

    micro_step: micro-batches taken of an optimiser step that is not done. In a "step" dataset `packs` counts
    them; elsewhere not, since how they are dealt depends on the split.
    """

    epoch: int = 0
    packs: int = 0  # of this epoch, consumed by all ranks together; fillers are none
    step: int = 0
    micro_step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How an epoch is dealt to ranks and steps, and which rank this is.

    packs_per_step: that a rank takes in an optimiser step, in micro_batches batches of as many each.
    Of a "step" dataset these and tail are not used: an optimiser step is dealt whole, one pack a rank and
    loop step.
    """

    rank: int = 0
    world_size: int = 1
    packs_per_step: int = 1
    micro_batches: int = 1
    shuffle_seed: int | None = 0
    tail: Tail = "drop"
    balance: Balance = "none"

    def __post_init__(self) -> None:
        for name in ("world_size", "packs_per_step", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: 1 or more is required, found {getattr(self, name)}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank: 0 to {self.world_size - 1} is required (world_size is {self.world_size}), "
                f"found {self.rank}"
            )
        if self.tail not in ("drop", "pad"):
            raise ValueError(f'tail: "drop" or "pad" is required, found {self.tail!r}')
        if self.balance not in ("none", "attention"):
            raise ValueError(f'balance: "none" or "attention" is required, found {self.balance!r}')

    @property
    def packs_of_step(self) -> int:
        """Packs that all ranks together take in one step."""
        return self.world_size * self.packs_per_step

    @property
    def num_fillers(self) -> int:
        """Fillers that a last step may have, at most."""
        return self.packs_of_step - 1 if self.tail == "pad" else 0

    @property
    def factors(self) -> dict[str, int]:
        """What packs_of_step is the product of, as the stream was asked for it: packs_per_step of a batch."""
        return {
            "world_size": self.world_size,
            "packs_per_step": self.packs_per_step // self.micro_batches,
            "micro_batches": self.micro_batches,
        }

    def num_steps(self, num_packs: int, *, offset: int = 0) -> int:
        """Steps that every rank takes from pack `offset` to the end of an epoch."""
        return order.num_steps(
            num_packs,
            world_size=self.world_size,
            packs_per_step=self.packs_per_step,
            tail=self.tail,
            offset=offset,
        )

    def num_left_over(self, num_packs: int, *, offset: int = 0) -> int:
        """Packs that tail="drop" leaves out from pack `offset` to the end of an epoch."""
        left = max(0, num_packs - offset)
        return max(0, left - self.num_steps(num_packs, offset=offset) * self.packs_of_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """How long a stream goes on: `epochs` in all, from the dataset's first, None for no end.

    until: the epoch that is not begun. More than `epochs` where the stream was iterated again at its end.
    """

    epochs: int | None = 1
    until: int | None = 1

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs: 1 or more is required (or None for no end), found {self.epochs}")

    @property
    def iteration(self) -> range | None:
        """The epochs of the present iteration; None where it has no end."""
        if self.epochs is None or self.until is None:
            return None
        return range(self.until - self.epochs, self.until)

    def with_epoch(self, epoch: int) -> Term:
        """The same, going on for whole iterations until `epoch` is done."""
        if self.epochs is None or self.until is None:
            return self
        return Term(epochs=self.epochs, until=max(self.until, (epoch // self.epochs + 1) * self.epochs))


def term_from(state: Mapping[str, Any], epochs: int | None) -> Term:
    """The term of a stream of `epochs` that goes on from a state.

    What the state says of iterations counts where it is of as many epochs; else `epochs` alone does.
    """
    until = state.get("until_epoch")
    if epochs is None or until is None or state.get("epochs") != epochs:
        return Term(epochs=epochs, until=epochs)
    return Term(epochs=epochs, until=max(epochs, count_in(state, "until_epoch")))


def to_state(
    cursor: Cursor,
    split: Split,
    dataset: str,
    term: Term,
    skip: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """A small JSON document that says all that is needed to go on."""
    return {
        "version": STATE_VERSION,
        "dataset": dataset,
        "epoch": cursor.epoch,
        "packs": cursor.packs,
        "step": cursor.step,
        "micro_step": cursor.micro_step,
        "shuffle_seed": split.shuffle_seed,
        "world_size": split.world_size,
        "packs_per_step": split.packs_per_step,
        "micro_batches": split.micro_batches,
        "tail": split.tail,
        "balance": split.balance,
        "epochs": term.epochs,
        "until_epoch": term.until,
        "skip": list(skip),
    }


class Place(NamedTuple):
    """Where a stream stands once a batch was taken, as little of it as must be known for each one."""

    cursor: Cursor
    of_stream: Mapping[str, Any]  # its state at the start of the iteration

    def document(self) -> dict[str, Any]:
        """The state that `to_state` gives of a stream that stands here; nobody else's."""
        cursor = self.cursor
        return {
            **self.of_stream,
            "epoch": cursor.epoch,
            "packs": cursor.packs,
            "step": cursor.step,
            "micro_step": cursor.micro_step,
            "skip": [dict(one) for one in self.of_stream["skip"]],
        }


def place_in(state: Mapping[str, Any]) -> Cursor:
    """Where a stream stands that gave this state itself."""
    return Cursor(
        epoch=state["epoch"], packs=state["packs"], step=state["step"], micro_step=state["micro_step"]
    )


def from_state(state: Mapping[str, Any], split: Split, dataset: str, *, marks_steps: bool = False) -> Cursor:
    """The cursor in `state`. Raises StateMismatch where it is of another dataset or order.

    marks_steps: whether it is a "step" dataset. world_size, packs_per_step and tail may differ: what is left
    is dealt out by the stream's own. balance may, save within an optimiser step, whose packs it reorders.
    micro_batches may not within one, nor then all that deals a step; in a "step" dataset they mean nothing.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"a state as state_dict() gives it is required, found {type(state).__name__}")
    if "mixed" in state:
        raise ValueError(
            f"a state of one stream is required, found that of a MixedStream of {state['mixed']}; load it "
            "into such a MixedStream"
        )
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
    if not isinstance(spec := state.get("spec") or {}, Mapping):
        raise ValueError(f"spec of the state must be an object, or left out, found {spec!r:.80}")
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
    cursor = Cursor(**{name: count_in(state, name) for name in Cursor._fields})
    factors = _factors_in(state, split)
    if cursor.micro_step and state.get("balance", "none") != split.balance:
        raise StateMismatch(
            "balance",
            wanted=split.balance,
            found=state.get("balance", "none"),
            hint="it was saved within an optimiser step, whose packs have another order then: open the "
            "stream with the balance of the state",
        )
    if cursor.micro_step and not marks_steps and max(split.micro_batches, factors["micro_batches"]) > 1:
        _require_same_step({**split.factors, "tail": split.tail}, factors)
    return cursor


def _factors_in(state: Mapping[str, Any], split: Split) -> dict[str, Any]:
    """Of a state, what Split.factors is of a split, and the tail; the split's own where it does not say."""
    names = ("world_size", "packs_per_step", "micro_batches")
    found = {name: count_in(state, name, getattr(split, name), least=1) for name in names}
    found["packs_per_step"] //= found["micro_batches"]
    return {**found, "tail": state.get("tail", split.tail)}


def _require_same_step(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    if wanted != found:
        raise StateMismatch(
            ", ".join(wanted),
            wanted=tuple(wanted.values()),
            found=tuple(found.values()),
            hint="it was saved between two micro-batches of an optimiser step, which is dealt otherwise "
            "here: load a state of a whole step (batch.step_done), or open the stream as it was",
        )


def fillers_in(state: Mapping[str, Any]) -> int:
    """How many of a state's packs may be fillers: those of one step."""
    if state.get("tail") != "pad":
        return 0
    sizes = (count_in(state, name, 1) for name in ("world_size", "packs_per_step"))
    return math.prod(sizes) - 1


def count_in(state: Mapping[str, Any], name: str, default: int = 0, *, least: int = 0) -> int:
    """A whole number of a state, the default where it is left out. Raises ValueError."""
    return count_of(f"{name} of the state", state.get(name, default), least=least)


def count_of(what: str, value: Any, *, least: int = 0) -> int:
    """`value` as such a number. Raises ValueError that names `what`."""
    found = whole(what, value, least=least)
    if found > _MOST:
        raise ValueError(f"{what}: at most {_MOST} is required, found {found}")
    return found
