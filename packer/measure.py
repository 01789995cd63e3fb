"""How long examples are, in tokens, without packing them: what an estimate needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from packer import sources
from packer.report import MAX_LISTED
from packer.rows import renderer_of, row_error
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


def token_lengths(job: Job, store: Store, rejected: Rejected | None = None) -> Iterator[NDArray[np.int64]]:
    """Tokens of every readable row in source order, batch by batch: (k,) int64 each; 0 for empty rows and
    those that cannot be rendered.

    Of a packed dataset those of its segments: no token is read. rejected: filled with the rows that cannot
    be used, whatever the spec's on_bad_row says of them.

    Works in this process; what it unpacks lies in the store until the caller removes it. Raises what
    reading and rendering raise.
    """
    if sources.is_packed(job.inputs):
        yield sources.segment_lengths(job.inputs[0], store=store)
        return
    fields = dict(job.spec.source.fields)
    indexes = [
        sources.index_input(one, store=store, work_key=f"work/{number}", random_access=False, fields=fields)
        for number, one in enumerate(job.inputs)
    ]
    renderer = renderer_of(job, store, whole=True)
    for partition in sources.cut(indexes, shuffle_seed=None):
        for records in sources.read_partition(partition, store=store, fields=fields):
            rendered = renderer.render(records.rows)
            if rejected is not None:
                wrong = [row_error(records, row, reason) for row, reason in dict(rendered.errors).items()]
                rejected.add([*records.errors, *wrong])
            yield rendered.lengths
