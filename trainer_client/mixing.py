"""MixedStream: several streams as one, by weights in trained tokens; deterministic and resumable.

    mixed = MixedStream({"chat": chat, "math": math}, weights=[0.7, 0.3], batches_per_step=8)

Whose turn it is follows from what was trained so far, by stride scheduling (Waldspurger and Weihl 1995):
each source has a pass, the one with the smallest is drawn from, and its pass grows by the trained tokens
of that step, over all ranks, divided by its weight. So the shares never stray from the weights by more
than a step, and all ranks choose alike without a word between them.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from trainer_client import mixture
from trainer_client.batch import PackedBatch, join
from trainer_client.course import Standing
from trainer_client.errors import StateMismatch
from trainer_client.options import whole
from trainer_client.prefetch import Meter, StreamStats
from trainer_client.stream import PackedStream

log = logging.getLogger(__name__)

Until = Literal["first_exhausted", "all_exhausted"]
Weights = Sequence[float] | Mapping[str, float]


# Of the streams' figures, those of which a mixture's is the sum, or the mean a batch.
_SUMMED = ("num_bytes", "put_wait_s", "num_retries")
_MEANS = ("mean_occupancy", "idle_share_before", "idle_share_after")


class _Saved(NamedTuple):
    """A place whose state is kept, for what it is made of changes."""

    state: dict[str, Any]

    def document(self) -> dict[str, Any]:
        return copy.deepcopy(self.state)


class MixedStream:
    """An iterable of PackedBatch drawn from several PackedStreams of one rank and world size.

    streams: by name, or in order (then the dataset is the name).
    weights: shares of the trained tokens, by name or in order; only their proportions count. 0: not drawn
        from.
    schedule: other weights from a step on, as {1000: [0.5, 0.5], 2000: …}; steps are this stream's
        optimiser steps. Part of the state.
    batches_per_step: how many batches, each of the source whose turn it is, make one batch: with several,
        a step mixes sources. 1 is required where a dataset is of strategy "step" (its micro-batches stay
        together).
    until: "first_exhausted" ends an iteration where the source whose turn it is has come to the end of its
        own; "all_exhausted" lets it go on with its next epoch, until each has come to its end once.

    Each batch says in num_items_by_source what the step trains of each source, and in source_ids which
    source each segment is of. As of a PackedStream, a mixture that came to its end and is resumed gives
    nothing more; iterating once more over one that came to its end here goes on: what was exhausted begins
    its next epochs, the others are where they were.
    """

    def __init__(
        self,
        streams: Mapping[str, PackedStream] | Sequence[PackedStream],
        *,
        weights: Weights,
        schedule: Mapping[int, Weights] | None = None,
        batches_per_step: int = 1,
        until: Until = "first_exhausted",
    ) -> None:
        _require_streams(streams)
        named = streams if isinstance(streams, Mapping) else {one.dataset: one for one in streams}
        self.names, self.streams = tuple(named), tuple(named.values())
        if len(self.streams) != len(streams) or not self.streams:
            raise ValueError("streams: at least one is required, each with a name of its own; use a mapping")
        if len({(one._split.rank, one._split.world_size) for one in self.streams}) > 1:
            found = sorted((one.rank, one.world_size) for one in self.streams)
            raise ValueError(f"streams: one rank and world_size for all is required, found {found}")
        if len(multiples := {one._segment_multiple for one in self.streams}) > 1:
            raise ValueError(f"streams: one segment_multiple for all is required, found {sorted(multiples)}")
        if until not in ("first_exhausted", "all_exhausted"):
            raise ValueError(f'until: "first_exhausted" or "all_exhausted" is required, found {until!r}')
        batches_per_step = whole("batches_per_step", batches_per_step, least=1)
        if batches_per_step > 1 and any(one._device is not None for one in self.streams):
            raise ValueError("batches_per_step: 1 is required with streams that have a device")
        self._batches_per_step, self._until = batches_per_step, until
        self._meter = Meter()
        self._start_over()
        self._weights = {0: self._checked(weights)}
        for step, changed in (schedule or {}).items():
            self.change_weights(changed, at_step=step)

    def _start_over(self) -> None:
        self._step = self._loop_step = 0  # optimiser steps and loop steps that were taken
        self._passes = [0.0] * len(self.streams)
        self._tokens = [0] * len(self.streams)
        self._turn: int | None = None  # the source of an optimiser step that is not done
        self._exhausted = [False] * len(self.streams)  # who came to its end in this iteration
        self._ended_by: int | None = None  # the source at whose end this iteration came to its own
        self._over = False  # whether an iteration came to its end since the last state was loaded
        self._states: list[dict[str, Any]] = []
        self._drawn_since: dict[str, Any] | None = None  # the state before the batch that is being drawn
        self._iteration = 0

    # -------------------------------------------------------------- weights

    def change_weights(self, weights: Weights, *, at_step: int | None = None) -> None:
        """Draw by other weights from optimiser step `at_step` on (default: the next one), up to the next
        change. On every rank alike. Raises ValueError for a step that was taken."""
        at = self._step if at_step is None else whole("at_step", at_step, least=self._step)
        self._weights[at] = self._checked(weights)

    def weights_at(self, step: int) -> dict[str, float]:
        """The weights by which optimiser step `step` is drawn."""
        at = max(first for first in self._weights if first <= step)
        return dict(zip(self.names, self._weights[at], strict=True))

    def _checked(self, weights: Weights) -> list[float]:
        if isinstance(weights, Mapping):
            if set(weights) != set(self.names):
                raise ValueError(f"weights: of {', '.join(self.names)} are required, found {sorted(weights)}")
            weights = [weights[name] for name in self.names]
        found = [float(weight) for weight in weights]
        if len(found) != len(self.names) or not all(0 <= w < float("inf") for w in found) or not sum(found):
            raise ValueError(
                f"weights: {len(self.names)} numbers of 0 or more, not all 0, are required, found {found}"
            )
        return [weight / sum(found) for weight in found]

    # -------------------------------------------------------------- iterate

    def __len__(self) -> NoReturn:
        # A DataLoader asks for it; without this, Python's answer helps nobody.
        raise TypeError(
            "a MixedStream has no length, its end depends on what it draws; iterate it: `for batch in "
            "mixed`, without a DataLoader, since its streams read ahead by themselves"
        )

    def __bool__(self) -> bool:
        return True  # else `if mixed` would ask for the length

    def __iter__(self) -> Iterator[PackedBatch]:
        self._iteration += 1
        self._states = [one.state_dict() for one in self.streams]
        if self._ended_by is not None and not self._is_over(self._ended_by):  # it was given more epochs
            self._ended_by = None
        if self._over:
            for source in range(len(self.streams)):
                if self._is_over(source):
                    self._go_on(source)
            self._exhausted, self._over, self._ended_by = [False] * len(self.streams), False, None
        return self._batches([iter(one) for one in self.streams], self._iteration)

    def _batches(self, iterators: list[Iterator[PackedBatch]], iteration: int) -> Iterator[PackedBatch]:
        self._meter.begin()
        is_empty = True
        while True:
            asked_at = time.monotonic()
            drawn = self._drawn(iterators)
            batch = self._mixed(drawn) if drawn else None
            self._drawn_since = None
            if batch is not None:
                self._meter.got(asked_at)
                self._meter.num_batches += 1
                self._meter.num_tokens += len(batch.input_ids)
                yield batch
            if iteration != self._iteration:
                raise RuntimeError("this iteration of the stream is over; iterate over the stream again")
            if not drawn and is_empty:
                log.warning("nothing is left of the mixture of %s: it is at its end", ", ".join(self.names))
            is_empty = False
            if len(drawn) < self._batches_per_step:  # the last one, or none
                self._over = True  # not while it was drawn: who breaks off at the last one is not at the end
                return

    def _drawn(self, iterators: list[Iterator[PackedBatch]]) -> list[tuple[int, PackedBatch]]:
        """The batches of a step, fewer where the iteration ends within it."""
        drawn: list[tuple[int, PackedBatch]] = []
        before = self._drawn_since = self._state()
        try:
            while len(drawn) < self._batches_per_step and (one := self._draw(iterators)) is not None:
                drawn.append(one)
        except BaseException:
            if drawn:  # in no batch yet: who goes on behind this error must get them
                self.load_state_dict(before)
            self._drawn_since = None
            raise
        return drawn

    def _draw(self, iterators: list[Iterator[PackedBatch]]) -> tuple[int, PackedBatch] | None:
        """The next batch, of the source whose turn it is; None at the end of the iteration."""
        while self._ended_by is None:
            source = self._whose_turn() if self._turn is None else self._turn
            batch = None if self._is_over(source) else next(iterators[source], None)
            if batch is not None:
                return source, self._counted(source, batch)
            self._exhausted[source] = True
            self._leave_at_its_end(source)
            if self._until == "first_exhausted" or all(self._ended()):
                self._ended_by = source
            else:
                self._go_on(source)
                iterators[source] = iter(self.streams[source])
        return None

    def _go_on(self, source: int) -> None:
        """Let a source that is at its end begin its next epochs."""
        stream = self.streams[source]
        stream.set_epoch(stream.epoch)
        self._states[source] = stream.state_dict()

    def _leave_at_its_end(self, source: int) -> None:
        """Whether it goes on, and when, `_go_on` says alone: it must not where it is iterated anew. While
        packing runs its last batch does not know of the end."""
        self.streams[source]._ended = False
        self._states[source] = self.streams[source].state_dict()

    def _is_over(self, source: int) -> bool:
        """Whether the source has come to its end, by its state: so a resumed run knows it too."""
        state = self._states[source]
        return state["until_epoch"] is not None and state["epoch"] >= state["until_epoch"]

    def _counted(self, source: int, batch: PackedBatch) -> PackedBatch:
        if not batch.step_done and self._batches_per_step > 1:
            raise ValueError(
                f'batches_per_step: 1 is required with a dataset of strategy "step" ({self.names[source]}), '
                f"found {self._batches_per_step}"
            )
        if self._turn is None:  # the first micro-batch says what the whole optimiser step trains
            self._passes[source] += batch.num_items_in_batch / self._weights_now()[source]
            self._tokens[source] += batch.num_items_in_batch
        self._states[source] = batch.state
        self._turn = None if batch.step_done else source
        return replace(batch, source_ids=np.full(batch.num_segments, source, np.int16))

    def _whose_turn(self) -> int:
        weights = self._weights_now()
        wanted = [index for index, weight in enumerate(weights) if weight > 0]
        first = min(wanted, key=lambda index: (self._passes[index], index))
        for index, weight in enumerate(weights):
            if not weight:  # once it is drawn from again, it has nothing to catch up with
                self._passes[index] = max(self._passes[index], self._passes[first])
        return first

    def _mixed(self, drawn: list[tuple[int, PackedBatch]]) -> PackedBatch:
        """The drawn batches as one, in this stream's own counting."""
        items = dict.fromkeys(self.names, 0)
        for source, batch in drawn:
            items[self.names[source]] += batch.num_items_in_batch
        number, step = self._loop_step, self._step
        self._loop_step += 1
        self._step += self._turn is None
        batches = [batch for _, batch in drawn]
        mine: dict[str, Any] = {
            "step": number,
            "optimizer_step": step,
            "num_items_by_source": items,
            "place": _Saved(self._state()),
        }
        return replace(batches[0], **mine) if len(batches) == 1 else join(batches, **mine)

    def _weights_now(self) -> list[float]:
        return list(self.weights_at(self._step).values())

    def _ended(self) -> list[bool]:
        """Of each source, whether it came to its end, or is not drawn from any more."""
        later = [self._weights_now(), *(w for first, w in self._weights.items() if first > self._step)]
        return [done or not any(w[i] for w in later) for i, done in enumerate(self._exhausted)]

    # -------------------------------------------------------------- what was read

    def stats(self) -> StreamStats:
        """As PackedStream's: batches, tokens and the loop's waits are the mixture's; bytes, retries and the
        readers' waits those of all its streams, occupancy and idle shares their mean a batch. Each one's own:
        `streams[0].stats()`."""
        each = [one.stats() for one in self.streams]
        drawn = max(1, sum(one.num_batches for one in each))
        sums = {name: sum(getattr(one, name) for one in each) for name in _SUMMED}
        means = {name: sum(getattr(one, name) * one.num_batches for one in each) / drawn for name in _MEANS}
        return replace(self._meter.stats(), **sums, **means)

    def num_items(self) -> dict[str, int]:
        """Trained tokens of each source so far, over all ranks."""
        return dict(zip(self.names, self._tokens, strict=True))

    # -------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """A small JSON document: where the training loop stands, in all sources. Exact after any step, and
        where a signal's handler asks while the loop waits for the next one."""
        if self._drawn_since is not None:
            return {**copy.deepcopy(self._drawn_since), "weights": self._state()["weights"]}
        self._states = [one.state_dict() for one in self.streams]
        return self._state()

    def _state(self) -> dict[str, Any]:
        return {
            "version": mixture.STATE_VERSION,
            **self._settings(),
            "step": self._step,
            "loop_step": self._loop_step,
            "turn": self._turn,
            "passes": list(self._passes),
            "tokens": list(self._tokens),
            "exhausted": list(self._exhausted),
            "ended_by": self._ended_by,
            "weights": {str(first): list(weights) for first, weights in sorted(self._weights.items())},
            "sources": list(self._states),
        }

    def _settings(self) -> dict[str, Any]:
        """What a state must have been saved with."""
        return {
            "mixed": list(self.names),
            "batches_per_step": self._batches_per_step,
            "until": self._until,
        }

    @staticmethod
    def _place_in(name: str, stream: PackedStream, state: Mapping[str, Any]) -> Standing:
        """Where a source stands by its part of a state. Raises as load_state_dict does, and names it."""
        try:
            return stream._place_in(state)
        except StateMismatch as error:
            raise error.of_source(name) from error
        except ValueError as error:
            raise ValueError(f"source {name!r} of the state: {error}") from error

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, by its weights and schedule, on any world size.

        Raises StateMismatch for a state of other sources or of another way to end, and as PackedStream does,
        with the source's name; the mixture stands where it stood then.
        """
        weights = mixture.require_state(state, self._settings(), self._checked)
        places = list(map(self._place_in, self.names, self.streams, state["sources"]))
        for one, place in zip(self.streams, places, strict=True):
            one._stand(place)
        if weights != self._weights:
            log.warning("weights and schedule are those of the state, not those the stream was made with")
        self._weights = weights
        self._step, self._loop_step, self._turn = state["step"], state["loop_step"], state["turn"]
        self._passes, self._tokens = list(state["passes"]), list(state["tokens"])
        self._exhausted, self._over = list(state["exhausted"]), False
        self._ended_by = state["ended_by"]
        self._states, self._drawn_since = list(state["sources"]), None
        self._iteration += 1

    def close(self) -> None:
        """End the running iteration and its threads. The stream can be iterated again."""
        self._iteration += 1
        for one in self.streams:
            one.close()

    def __enter__(self) -> MixedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_streams(streams: Mapping[str, PackedStream] | Sequence[PackedStream]) -> None:
    """Raise ValueError unless these are PackedStreams, each another one."""
    items = list(streams.items() if isinstance(streams, Mapping) else enumerate(streams))
    for index, (name, one) in enumerate(items):
        if not isinstance(one, PackedStream):
            kind = type(one).__name__
            hint = "its `.stream`" if kind == "PackedDataset" else "PackedStream(source, dataset=…)"
            raise ValueError(f"streams: PackedStreams are required, found {kind} at {name!r}; give {hint}")
        for other, earlier in items[:index]:
            if one is earlier:
                raise ValueError(
                    f"streams: each must be a stream of its own, found one for both {other!r} and {name!r}; "
                    "open the dataset once for each"
                )
