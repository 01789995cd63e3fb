"""How long rows are, in tokens, and what they train, without packing them: what an estimate needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from packer import sources
from packer.order import derive_seed, permute
from packer.packing import Trained
from packer.report import MAX_LISTED, Counters
from packer.rows import largest_capacity, read_rows
from packer.spec import Job
from packer.store import Store


@dataclass(slots=True, kw_only=True)
class Rejected:
    """Rows that could not be read or rendered: how many, and the first of them in source order."""

    num_rows: int = 0
    first: list[sources.RowError] = field(default_factory=list)  # MAX_LISTED at most

    def add(self, rows: list[sources.RowError]) -> None:
        """Count the rows of a batch."""
        self.num_rows += len(rows)
        if len(self.first) < MAX_LISTED:
            ordered = sorted(rows, key=lambda row: row.example_id)
            self.first += ordered[: MAX_LISTED - len(self.first)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """The rows of a source in the order in which packing takes them.

    lengths: (n,) int64, 0 for rows that are left out before any cut (empty, untrained, bad): they keep their
    place. begins: (n,) int64, the number of each row's first token in `trained`; None where that was not
    read. counters: what was left out, as the report of a dataset counts it. rejected: the bad rows.
    unlearned: turns that train nothing though their role looks like the assistant's, by role.
    """

    lengths: NDArray[np.int64]
    begins: NDArray[np.int64] | None
    trained: Trained | None
    counters: Counters
    rejected: Rejected
    unlearned: Mapping[str, int]
    _indexes: Sequence[sources.FileIndex]
    _job: Job

    def bounds(self, multiple: int) -> list[int]:
        """Where the partitions begin, each of a multiple of `multiple` rows, and where the last ends."""
        partitions = sources.cut(
            self._indexes,
            shuffle_seed=self._job.spec.shuffle_seed,
            multiple=multiple,
            max_tokens=self._job.spec.packing.capacities[-1],
        )
        return [0, *(partition.stop for partition in partitions)]


def measure(job: Job, store: Store) -> Measured:
    """Render every row of a job whole, whatever packing will keep of it, and keep what an estimate needs.

    Bad rows are listed, whatever the spec's on_bad_row says of them. Of a packed dataset it takes the
    segments, and reads what they train only where some may be cut.

    Works in this process; what it unpacks lies in the store until the caller removes it. Raises what
    reading and rendering raise.
    """
    if sources.is_packed(job.inputs):
        return _packed(job, store)
    indexes = [
        sources.index_input(
            one,
            store=store,
            work_key=f"work/{number}",
            random_access=False,
            fields=dict(job.spec.source.fields),
            watch=job.watch,
        )
        for number, one in enumerate(job.inputs)
    ]
    counters, rejected, unlearned = Counters(), Rejected(), Counter[str]()
    lengths, trained, num_tokens = [np.zeros(0, np.int64)], [], 0
    for partition in sources.cut(indexes, shuffle_seed=None):
        found, wrong, rows, _ = read_rows(job, partition, store, whole=True)
        counters.add({name: getattr(found, name) for name in Counters.__dataclass_fields__})
        rejected.add(wrong)
        unlearned.update(rows.unlearned)
        lengths.append(rows.lengths)
        trained.append(Trained.of(rows.loss_mask, num_tokens))
        num_tokens += len(rows.loss_mask)
    every = np.concatenate(lengths)
    return _ordered(
        job, indexes, every, np.cumsum(every) - every, Trained.joined(trained), counters, rejected, unlearned
    )


def _packed(job: Job, store: Store) -> Measured:
    (one,) = job.inputs
    index, table = sources.segment_table(one, store=store)
    lengths = table["length"].astype(np.int64)
    counters = Counters(rows_in=int(np.count_nonzero(lengths)), tokens_in=int(lengths.sum()))
    begins, trained, num_tokens = np.zeros(len(lengths), np.int64), list[Trained](), 0
    packing = job.spec.packing
    may_cut = lengths.max(initial=0) > largest_capacity(job.spec).segment
    if not may_cut and packing.strategy not in ("wrapped", "minibatch"):
        return _ordered(job, [index], lengths, None, None, counters, Rejected())
    for positions, first, mask in sources.segment_masks(one, table, store=store):
        begins[positions] = num_tokens + first
        trained.append(Trained.of(mask, num_tokens))
        num_tokens += len(mask)
    return _ordered(job, [index], lengths, begins, Trained.joined(trained), counters, Rejected())


def _ordered(
    job: Job,
    indexes: Sequence[sources.FileIndex],
    lengths: NDArray[np.int64],
    begins: NDArray[np.int64] | None,
    trained: Trained | None,
    counters: Counters,
    rejected: Rejected,
    unlearned: Mapping[str, int] = MappingProxyType({}),
) -> Measured:
    """Rows in source order, put into the order of the stream."""
    if job.spec.shuffle_seed is not None:
        order = permute(np.arange(len(lengths)), len(lengths), derive_seed(job.spec.shuffle_seed))
        lengths, begins = lengths[order], None if begins is None else begins[order]
    return Measured(
        lengths=lengths,
        begins=begins,
        trained=trained,
        counters=counters,
        rejected=rejected,
        unlearned=unlearned,
        _indexes=indexes,
        _job=job,
    )
