"""The walk over epochs and steps: opens the stream, groups packs to batches, goes on after a fault.

A fault never loses or doubles a step: a batch is made only of verified packs that carry the wanted
epoch and step, and after a fault the stream is opened again at the first step without a batch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from trainer_client import specs
from trainer_client.batch import PackedBatch, flatten
from trainer_client.course import Course, Layout, Skip, normal, num_left_over, require_place, require_steps
from trainer_client.cursor import Cursor, Place, Split, Term, to_state
from trainer_client.errors import ClientError, DataDamaged, Lost, Silent, StreamRefused, StreamTimeout
from trainer_client.multiples import with_multiple
from trainer_client.prefetch import Meter
from trainer_client.transport import Received, Request, Transport

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
_MAX_DAMAGED = 5
_ASK_AGAIN_S = 0.2
_MEASURED_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Which steps of an iteration are read here: every `count`-th, from `index` on, less the first `skip`.

    One of a torch DataLoader's workers reads one lane; without workers there is one lane of all steps.
    """

    index: int = 0
    count: int = 1
    skip: int = 0

    def first(self, done: int) -> int:
        """The first step of this lane in an epoch that begins after `done` steps of the iteration."""
        begin = max(done, self.index + self.skip * self.count)
        return begin + (self.index - begin) % self.count - done


@dataclass(slots=True, kw_only=True)
class Retry:
    """Back-off after faults: doubling, without jitter, until `timeout_s` have passed without progress."""

    what: str
    timeout_s: float
    cancelled: threading.Event
    meter: Meter
    since: float | None = None
    tries: int = 0
    damaged: int = 0
    delay_s: float = _FIRST_DELAY_S

    def progress(self) -> None:
        """A step came: all is well again."""
        if self.since is None:
            return
        log.warning(
            "%s goes on after %d tries in %.1f s", self.what, self.tries, time.monotonic() - self.since
        )
        self.since, self.tries, self.damaged, self.delay_s = None, 0, 0, _FIRST_DELAY_S

    def failed(self, error: Lost, step: str) -> None:
        """Wait before the next try; raise where there shall be none."""
        now = time.monotonic()
        if self.since is None:
            self.since = now
            log.warning("%s: %s; trying again for up to %g s", self.what, error, self.timeout_s)
        self.tries += 1
        self.damaged += error.damaged
        self.meter.num_retries += 1
        if self.damaged >= _MAX_DAMAGED:
            raise DataDamaged(f"{self.what}, {step}: {error} ({self.damaged} times in a row)") from error
        left = self.since + self.timeout_s - now
        if left <= 0:
            raise StreamTimeout(
                f"{self.what}, {step}: nothing came for {self.timeout_s:g} s (timeout_s), tried "
                f"{self.tries} times with up to {self.delay_s:g} s between; the last fault: {error}"
            ) from error
        self.cancelled.wait(min(left, max(self.delay_s, error.wait_s)))
        self.delay_s = min(2 * self.delay_s, _LONGEST_DELAY_S)


def ask_layout(transport: Transport, *, timeout_s: float, meter: Meter) -> Layout:
    """What is known of a dataset's size, asked for until `timeout_s` have passed. Raises as reading does."""
    retry = Retry(what=transport.label, timeout_s=timeout_s, cancelled=threading.Event(), meter=meter)
    while True:
        try:
            layout = transport.layout()
        except Lost as error:
            retry.failed(error, "asking for its state")
        else:
            retry.progress()
            return layout


@dataclass(slots=True, kw_only=True)
class Reader:
    """Makes the batches of one iteration."""

    transport: Transport
    split: Split
    term: Term
    timeout_s: float
    meter: Meter
    device: Any = None
    lane: Lane = field(default_factory=Lane)
    skips: tuple[Skip, ...] = ()
    segment_multiple: int = 1
    num_fillers: int = 0  # that the cursor may count as packs
    cancelled: threading.Event = field(default_factory=threading.Event)
    layout: Layout | None = None
    end: Cursor | None = None  # where the iteration ended, once it has
    _state: dict[str, Any] = field(init=False)  # of the stream, at its start
    _upload: Any = field(init=False)  # puts a batch on the device; None without one

    def __post_init__(self) -> None:
        skips = [skip.to_document() for skip in self.skips]
        self._state = to_state(Cursor(), self.split, self.transport.dataset, self.term, skips)
        self._upload = self._uploader()  # here, in the loop's thread: devices are current to a thread

    def cancel(self) -> None:
        """End `batches` from another thread."""
        self.cancelled.set()
        self.transport.close()

    def batches(self, cursor: Cursor) -> Iterator[PackedBatch]:
        """Batches from the cursor to the end of the term (or without end)."""
        upload = self._upload
        self._learn_layout(self._retry())
        if self.cancelled.is_set():
            return
        assert self.layout is not None
        self._state |= specs.of_state(self.layout.spec)
        require_place(cursor.packs, self.num_fillers, self.layout, self.transport.dataset)
        cursor = normal(cursor, self.split, self.layout)
        stop = self.term.until
        done, is_measured = 0, self.split.balance == "none"
        while not self.cancelled.is_set() and (stop is None or cursor.epoch < stop):
            for batch in self._epoch(cursor, done):
                yield upload(batch) if upload is not None else batch
                if not is_measured and self.layout.num_packs is not None:
                    self._measure_balance(batch.epoch)
                    is_measured = True
            if self.cancelled.is_set():
                return
            course = self._course(cursor)
            cursor = Cursor(epoch=cursor.epoch + 1)
            assert course.num_kept is not None
            done += course.num_kept
        self.end = cursor

    def _measure_balance(self, epoch: int) -> None:
        with contextlib.suppress(Lost, ClientError):  # a figure is not worth a training run
            shares = self.transport.idle_shares(self.split, epoch, _MEASURED_STEPS)
            self.meter.idle_share_before = shares["none"]
            self.meter.idle_share_after = shares["attention"]

    def _uploader(self) -> Any:
        if self.device is None:
            return None
        from trainer_client.device import Uploader

        uploader = Uploader(self.device)
        return lambda batch: batch.with_upload(uploader.upload(batch))

    def _retry(self) -> Retry:
        return Retry(
            what=self.transport.label,
            timeout_s=self.timeout_s,
            cancelled=self.cancelled,
            meter=self.meter,
        )

    # -------------------------------------------------------------- the dataset

    def _learn_layout(self, retry: Retry) -> None:
        """Ask how large the dataset is, as long as it takes to be told. It may still grow."""
        while not self.cancelled.is_set():
            try:
                self._refresh()
            except Lost as error:
                retry.failed(error, "asking for its state")
            else:
                return

    def _refresh(self) -> Layout:
        """What is known now. Raises DatasetTooSmall where an epoch has no step."""
        if self.layout is None or self.layout.num_packs is None:
            self.layout = self.transport.layout()
            require_steps(self.layout, self.split, self.transport.dataset)
        return self.layout

    def _course(self, start: Cursor) -> Course:
        assert self.layout is not None
        require_place(start.packs, self.num_fillers, self.layout, self.transport.dataset)
        return Course(split=self.split, layout=self.layout, start=start, skips=self.skips)

    # -------------------------------------------------------------- an epoch

    def _epoch(self, start: Cursor, done: int) -> Iterator[PackedBatch]:
        """The lane's batches from `start` to the end of its epoch. Steps are counted from there."""
        number, retry = self.lane.first(done), self._retry()  # of the steps that are not left out
        course = self._course(start)
        while not self.cancelled.is_set():
            if course.layout is not self.layout:
                course = self._course(start)
            step = course.kept(number)
            if course.num_steps is not None and step >= course.num_steps:
                self._log_left_over(start)
                return
            try:
                if not course.knows(step) and self._waits_to_know(course, step):
                    continue
                max_steps = course.num_ahead(step, self.lane.count)
                request = Request(
                    split=self.split,
                    epoch=start.epoch,
                    offset=start.packs,
                    micro_step=course.num_begun,
                    start=step,
                    stride=self.lane.count,
                    max_steps=max_steps,
                )
                count = 0
                with contextlib.closing(self._steps(request, course)) as steps:
                    for batches in steps:
                        if retry.since is not None:
                            retry.progress()
                        yield from batches
                        number, count = number + self.lane.count, count + 1
                if max_steps is None or count < max_steps:
                    self._check_end(start, course.kept(number))
            except Silent as error:
                if self.transport.still_packing():
                    retry.progress()
                    continue
                self._failed(retry, error, start, step)
            except Lost as error:
                self._failed(retry, error, start, course.kept(number))
            except StreamRefused:
                # The dataset may have come to its end meanwhile, before the step that was asked for.
                if course.num_steps is not None:
                    raise
                self._learn_layout(retry)
                if self.layout is None or self.layout.num_packs is None:
                    raise

    def _waits_to_know(self, course: Course, step: int) -> bool:
        """Whether `step` may be one to be left out, which is not known yet; then waits a little."""
        if course.num_ahead(step, 1) is None:
            return False
        if self._refresh() is course.layout or not self._course(course.start).knows(step):
            self.cancelled.wait(_ASK_AGAIN_S)
        return True

    def _failed(self, retry: Retry, error: Lost, start: Cursor, step: int) -> None:
        if self.cancelled.is_set():
            return
        retry.failed(error, f"epoch {start.epoch}, step {start.step + step}")
        with contextlib.suppress(Lost):  # a dataset that failed or is too small says so here
            self._refresh()

    def _check_end(self, start: Cursor, step: int) -> None:
        """The stream says the epoch is over: hold it against the number of packs."""
        if self._refresh().num_packs is None:
            raise Lost(f"the stream ended at step {step}, but the dataset is still being packed")
        steps = self._course(start).num_steps
        if steps is not None and step < steps:
            raise Lost(f"the stream ended after {step} of {steps} steps")

    def _log_left_over(self, start: Cursor) -> None:
        assert self.layout is not None
        left_over = num_left_over(self.layout, self.split, offset=start.packs)
        if left_over:
            log.info(
                'epoch %d of %s is over; %d packs filled no step and were left out (tail="drop")',
                start.epoch,
                self.transport.label,
                left_over,
            )

    def _steps(self, request: Request, course: Course) -> Generator[list[PackedBatch], None, None]:
        """Packs grouped to steps: the batches of each."""
        group: list[Received] = []
        step, epoch, size = request.start, request.epoch, course.packs_a_step
        with contextlib.closing(self.transport.packs(request)) as packs:
            for received in packs:
                stamp = received.stamp
                if stamp.step != step or stamp.epoch != epoch:
                    raise Lost(
                        f"step {step} of epoch {epoch} was due, the stream sent step {stamp.step} of "
                        f"epoch {stamp.epoch}",
                        damaged=True,
                    )
                if not course.knows(step):
                    course = self._better_course(course, step)
                group.append(received)
                if len(group) == size:
                    yield self._batches(group, course, step)
                    group, step = [], step + request.stride
        if group:
            raise Lost(f"the stream ended within step {step}")

    def _better_course(self, course: Course, step: int) -> Course:
        """A course that knows `step`, of which a pack has come: more was packed since."""
        self._refresh()
        course = self._course(course.start)
        if not course.knows(step):
            raise Lost(f"step {step} came, but the dataset does not list its optimiser step yet")
        return course

    def _batches(self, group: list[Received], course: Course, step: int) -> list[PackedBatch]:
        """The batches of a step; at the start those that are not taken yet."""
        count = course.micro_batches
        if count == 1:
            return [self._batch(group, course, step, course.after(step))]
        size = len(group) // count
        taken = course.start.micro_step if step == 0 else 0
        return [
            self._batch(
                group[number * size : (number + 1) * size],
                course,
                step,
                course.within(step, number + 1) if number + 1 < count else course.after(step),
                number,
            )
            for number in range(taken, count)
        ]

    def _batch(
        self, group: list[Received], course: Course, step: int, after: Cursor, number: int = 0
    ) -> PackedBatch:
        """Micro-batch `number` of a step, after which the stream stands at `after`."""
        stamp, packs = group[-1].stamp, [received.pack for received in group]
        room = course.room_of(packs)
        if self.segment_multiple > 1:
            packs = [with_multiple(pack, self.segment_multiple) for pack in packs]
        return flatten(
            packs,
            padding=[received.stamp.padding for received in group],
            epoch=course.start.epoch,
            step=(course.start.step + step) * course.micro_batches + number,
            optimizer_step=course.optimizer_step(step),
            num_items=stamp.num_items,
            step_done=stamp.step_done,
            max_tokens=room,
            place=Place(after, self._state),
        )
