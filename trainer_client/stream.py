"""PackedStream: this rank's batches of a dataset, from a service or from a store, exactly resumable."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, cast

from packer import traces
from trainer_client import notices, specs
from trainer_client.batch import PackedBatch, bytes_here
from trainer_client.course import (
    Course,
    Layout,
    Skip,
    Standing,
    normal,
    num_left_over,
    over_epochs,
    require_place,
    require_steps,
    standing_in,
)
from trainer_client.cursor import (
    Balance,
    Cursor,
    Place,
    Split,
    Tail,
    Term,
    place_in,
    to_state,
)
from trainer_client.errors import ClientError, Lost, StateMismatch
from trainer_client.multiples import require_multiple
from trainer_client.options import rank_and_size, seconds, seconds_or_none, whole, whole_or_none
from trainer_client.prefetch import Meter, Prefetcher, StreamStats
from trainer_client.reader import Lane, Reader, ask_layout
from trainer_client.reports import Reporter
from trainer_client.transport import RequestIds, Transport, find_dataset, open_transport


class PackedStream:
    """An iterable of PackedBatch: exactly this rank's part of the dataset, in the one order there is.

    source: the url of a padfree service, or a store: a folder or s3:// (no server needed). While the
        dataset is still being packed, the stream follows it.
    dataset: its id; or the beginning of the id (4 digits or more) or its name, where that is of one alone.
    rank, world_size, packs_per_step: a step takes world_size x packs_per_step packs; this rank gets its
        packs_per_step of them as one batch. All ranks take the same number of steps. Rank 0 of 1 where they
        are not given, with a warning where RANK and WORLD_SIZE (torchrun) say otherwise.
    micro_batches: batches that make an optimiser step (gradient accumulation): the step takes
        world_size x micro_batches x packs_per_step packs, `batch.step_done` is true on its last batch, and
        num_items_in_batch and balance are of the whole step.
    epochs: how many there are in all, counted from the dataset's first. With epochs=3 the stream ends
        behind epoch 2, however often the run is broken off and resumed; a run that came to its end and is
        resumed gives nothing more. Iterating once more over a stream that came to its end here goes on
        for as many epochs again, so with epochs=1 each `for` is an epoch, in its own order. None: no end.
    shuffle_seed: order of epochs 1, 2, …; epoch 0 is the order of packing. None: every epoch is.
    tail: "drop" leaves out the last packs that fill no step, "pad" adds packs that train nothing.
    balance: "attention" gives each rank of a step packs of about the same cost for attention and the rest
        of the model, the same packs a step as "none" does.
    segment_multiple: pads every segment to a multiple with tokens that train nothing, for context parallelism
        and the like (trainer_client.parallel_multiple), as a dataset packed with it has them: a batch grows
        by less than that many tokens a segment. No part of the state.
    prefetch_steps, prefetch_bytes: how far a thread reads ahead, in batches and in bytes of their arrays (on
        the device if there is one); a step at least. Of a MixedStream each stream, of a loader each worker.
    device: where batches shall be when they are taken; on CUDA they travel beside the training. "cuda" is the
        current one of the thread that iterates.
    token: one of a service's PADFREE_TOKENS; None: PADFREE_TOKEN of the environment, where that is set.
    timeout_s: without a step so long it is an error.
    report_s: how often a service is told how long the loop waited for data, for its /metrics; None: never.

    A dataset of strategy "step" says itself how many packs an optimiser step has; packs_per_step,
    micro_batches and tail are not used: each batch is a micro-batch of one pack, `batch.step_done` is true on
    the last one of an optimiser step, and a rank that has none left gets one that trains nothing. No step is
    dropped.

    Every pack is seen once an epoch over all ranks, save what tail="drop" leaves out (num_left_over).
    `state_dict` counts what the loop has taken, not what was read ahead, so it is exact after any step;
    load it on any world size. Breaking off and iterating again goes on behind the last batch taken.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        dataset: str,
        rank: int | None = None,
        world_size: int | None = None,
        packs_per_step: int = 1,
        micro_batches: int = 1,
        epochs: int | None = 1,
        shuffle_seed: int | None = 0,
        tail: Tail = "drop",
        balance: Balance = "none",
        segment_multiple: int = 1,
        prefetch_steps: int = 4,
        prefetch_bytes: int = 64 << 20,
        device: Any = None,
        token: str | None = None,
        timeout_s: float = 600.0,
        report_s: float | None = 30.0,
    ) -> None:
        micro_batches, epochs = whole("micro_batches", micro_batches), whole_or_none("epochs", epochs)
        rank, world_size = rank_and_size(rank, world_size, dataset)
        timeout_s, report_s = seconds("timeout_s", timeout_s), seconds_or_none("report_s", report_s)
        self._prefetch_steps = whole("prefetch_steps", prefetch_steps, least=1)
        self._ahead_bytes = bytes_here(whole("prefetch_bytes", prefetch_bytes), on_device=device is not None)
        self.dataset = find_dataset(source, dataset, token=token, timeout_s=timeout_s)
        self._segment_multiple = require_multiple(segment_multiple)
        self._split = Split(
            rank=rank,
            world_size=world_size,
            packs_per_step=whole("packs_per_step", packs_per_step, least=1) * max(1, micro_batches),
            micro_batches=micro_batches,
            shuffle_seed=whole_or_none("shuffle_seed", shuffle_seed),
            tail=tail,
            balance=balance,
        )
        self._term = Term(epochs=epochs, until=epochs)
        self._ended = False  # whether an iteration came to its end since the last state was loaded
        self._device, self._report_s = device, report_s
        self._source, self._token, self._timeout_s = source, token, timeout_s
        self._cursor = Cursor()
        self._skips: tuple[Skip, ...] = ()
        self._num_fillers = self._split.num_fillers  # that the cursor may count as packs
        self._lane = Lane()
        self._told_spec: dict[str, Any] = {}  # by the copy that `_follow` follows, as specs.of_state
        self._start()

    def _start(self) -> None:
        """What is made anew in each process."""
        self._ids = RequestIds()
        self._transport: Transport = open_transport(
            self._source, self.dataset, token=self._token, timeout_s=self._timeout_s, ids=self._ids
        )
        self._meter = Meter()
        self._reporter = Reporter(self._meter, rank=self._split.rank, every_s=self._report_s)
        self._iteration = 0  # the running one; an older one must not go on
        self._prefetcher: weakref.ref[Prefetcher[PackedBatch]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        own = ("_transport", "_ids", "_meter", "_reporter", "_iteration", "_prefetcher")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # -------------------------------------------------------------- iterate

    def __iter__(self) -> Iterator[PackedBatch]:
        self._iteration += 1
        iteration = self._iteration
        self._close_prefetcher()
        self._go_on()
        self._transport = self._transport.fresh()
        reader = Reader(
            transport=self._transport,
            split=self._split,
            term=self._term,
            timeout_s=self._timeout_s,
            meter=self._meter,
            device=self._device,
            lane=self._lane,
            skips=self._skips,
            num_fillers=self._num_fillers,
            segment_multiple=self._segment_multiple,
        )
        cursor = self._cursor
        self._ids.traceparent = traces.ambient()
        wait_for_report = self._reporter.start(self._transport, reader.cancelled)

        def cancel() -> None:
            reader.cancel()
            wait_for_report()

        prefetcher = Prefetcher(
            lambda: reader.batches(cursor),
            size=lambda batch: batch.num_bytes,
            cancel=cancel,
            max_items=self._prefetch_steps,
            max_bytes=self._ahead_bytes,
            meter=self._meter,
        )
        self._prefetcher = weakref.ref(prefetcher)
        return self._taken(prefetcher, reader, iteration)

    def __getitem__(self, index: object) -> NoReturn:
        # A DataLoader asks for it where it is given a stream; without this, Python's answer helps nobody.
        raise TypeError(
            f"a PackedStream has no item {index!r}, it is iterated: `for batch in stream`; for a DataLoader "
            "use trainer_client.PackedDataset, which takes what PackedStream takes, and its loader()"
        )

    def _go_on(self) -> None:
        """Where the last iteration came to the end, the next one is for as many epochs again."""
        if self._ended:
            before, epoch = self._term, self._cursor.epoch
            self._term = before.with_epoch(epoch)
            if self._lane.count == 1:
                notices.goes_on(self.dataset, epoch=epoch, before=before, after=self._term)
        self._ended = False

    def _taken(
        self, prefetcher: Prefetcher[PackedBatch], reader: Reader, iteration: int
    ) -> Iterator[PackedBatch]:
        meter, is_empty = self._meter, True
        try:
            for batch in prefetcher:
                is_empty = False
                self._require_current(iteration)
                # Before the loop's body runs: a state saved in it counts this batch as taken.
                self._cursor = cast(Place, batch.place).cursor
                meter.num_batches += 1
                meter.num_tokens += len(batch.input_ids)
                yield batch
                self._require_current(iteration)
            self._require_current(iteration)
            if reader.end is not None:  # behind the steps of other lanes too
                self._cursor, self._ended = reader.end, True
                if is_empty and self._lane.count == 1:
                    notices.nothing_is_left(self.dataset, epoch=self._cursor.epoch, term=self._term)
        finally:
            prefetcher.close()

    def _follow(self, state: Mapping[str, Any]) -> None:
        """Stand where another process's copy of this stream does."""
        self._cursor, self._told_spec = place_in(state), {"spec": state["spec"]} if "spec" in state else {}

    def _came_to_the_end(self) -> None:
        """The copy's iteration did."""
        if self._term.until is not None:
            self._cursor, self._ended = Cursor(epoch=self._term.until), True

    def _require_current(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise RuntimeError(
                "this iteration of the stream is over: it was iterated anew, closed, or a state was loaded; "
                "iterate over the stream again"
            )

    @property
    def rank(self) -> int:
        return self._split.rank

    @property
    def world_size(self) -> int:
        return self._split.world_size

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of."""
        return self._normal().epoch

    def set_epoch(self, epoch: int) -> None:
        """Go on to the start of `epoch`, unless the stream stands in or behind it: never back. It is not
        the end then: iterating gives the epoch also where `epochs` are over."""
        if self.epoch < (epoch := whole("epoch", epoch, least=0)):
            self._cursor = Cursor(epoch=epoch)
            self.close()
        self._term = self._term.with_epoch(epoch)

    def __len__(self) -> int:
        """Batches of a whole iteration, those before the present one counted: steps of its epochs, less
        those to be left out. TypeError where that is not known.

        After a change of world_size or packs_per_step within an epoch that epoch counts the steps that were
        taken and those that are left; epochs before it count as if they had been dealt as now.
        """
        return self._sum(lambda course: course.num_batches)

    @property
    def num_optimizer_steps(self) -> int:
        """Optimiser steps of a whole iteration: for `max_steps` and schedules of the learning rate. It is
        len(), save where that counts micro-batches."""
        return self._sum(lambda course: course.num_optimizer_steps)

    def _sum(self, count: Callable[[Course], int]) -> int:
        """A count over the epochs of a whole iteration, of the present one from where the stream stands."""
        layout = self._layout()
        epochs = self._term.iteration
        if layout.num_packs is None or epochs is None:
            why = "it has no end (epochs=None)" if epochs is None else "the dataset is still being packed"
            raise TypeError(f"this stream has no length: {why}")
        require_steps(layout, self._split, self.dataset)
        return over_epochs(count, epochs, self._course(self._normal(), layout))

    def __bool__(self) -> bool:
        return True  # else `if stream` would ask for the length

    def num_left_over(self) -> int:
        """Packs that tail="drop" leaves out of the present epoch. TypeError while the dataset is packed."""
        layout = self._layout()
        if layout.num_packs is None:
            raise TypeError("not known: the dataset is still being packed")
        return num_left_over(layout, self._split, offset=self._normal().packs)

    # -------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """A small JSON document: where the training loop stands. Exact after any step."""
        self._cursor = self._normal()
        skips = [skip.to_document() for skip in self._skips]
        state = to_state(self._cursor, self._split, self.dataset, self._term, skips)
        if self._cursor == Cursor():  # nothing was taken, nor perhaps asked for
            return state
        return state | (specs.of_state(self._transport.known().spec) or self._told_spec)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, on any world size; what it leaves out is left out here. Raises
        StateMismatch for a state of another dataset or shuffle_seed, or from beyond its end, ValueError for
        what is no state; the stream stands where it stood then."""
        self._stand(self._place_in(state))

    def _place_in(self, state: Mapping[str, Any]) -> Standing:
        """What `state` says, checked; raises as load_state_dict does."""
        layout = Layout()
        # Where the size cannot be told now, reading tells why.
        with contextlib.suppress(Lost, ClientError):
            layout = self._transport.layout()
        try:
            return standing_in(state, self._split, self.dataset, epochs=self._term.epochs, layout=layout)
        except StateMismatch as error:
            if error.what == "dataset":
                more: dict[str, Any] = {"token": self._token, "timeout_s": self._timeout_s}
                other = open_transport(self._source, str(error.found), **more)
                raise error.because(specs.differences(state, self._transport, other)) from None
            raise

    def _stand(self, at: Standing) -> None:
        self._cursor, self._skips, self._term, num_fillers = at
        self._num_fillers, self._ended = max(num_fillers, self._split.num_fillers), False
        self.close()

    def skip(self, steps: Iterable[int], *, epoch: int | None = None) -> None:
        """Leave out optimiser steps of `epoch` (default: the one that the stream stands in), by
        `batch.optimizer_step`: for example those that a loss spike came from.

        Their packs are not trained in that epoch; all other steps keep their number and content. Part of
        the state; call it on every rank. Of an ordinary dataset what is left out are the packs of those
        steps, so that it holds on another world size too, where it may take neighbours of the same step
        along. Raises ValueError for steps that were taken already.
        """
        layout = ask_layout(self._transport, timeout_s=self._timeout_s, meter=self._meter)
        at = self._normal()
        epoch = at.epoch if epoch is None else whole("epoch", epoch, least=0)
        start = at if epoch == at.epoch else Cursor(epoch=epoch)
        self._skips += self._course(start, layout).skips_of(steps, at=at)
        self.close()

    def _course(self, start: Cursor, layout: Layout) -> Course:
        return Course(split=self._split, layout=layout, start=start, skips=self._skips)

    def _normal(self) -> Cursor:
        if not self._cursor.packs:
            return self._cursor
        try:
            layout = self._transport.layout()
            require_place(self._cursor.packs, self._num_fillers, layout, self.dataset)
            return normal(self._cursor, self._split, layout)
        except (Lost, ClientError):
            return self._cursor  # the same place, said in the other way

    def _layout(self) -> Layout:
        try:
            return self._transport.layout()
        except Lost as error:  # a TypeError, so that list(stream) goes on without the length
            raise TypeError(f"the length is not known: {error}") from error

    # -------------------------------------------------------------- the rest

    @property
    def request_id(self) -> str:
        """The id of this stream in this process. Errors and log lines name it; the service logs each
        request under it and a number: `3f2a….1`, `3f2a….2`, …"""
        return self._ids.stream

    def stats(self) -> StreamStats:
        """What was read and how long anyone waited, over all iterations."""
        return self._meter.stats()

    def close(self) -> None:
        """End the running iteration and its thread. The stream can be iterated again."""
        self._iteration += 1
        self._close_prefetcher()

    def _close_prefetcher(self) -> None:
        if self._prefetcher is not None and (prefetcher := self._prefetcher()) is not None:
            prefetcher.close()
        self._prefetcher = None

    def __enter__(self) -> PackedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
