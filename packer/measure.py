"""How long examples are, in tokens, without packing them: what an estimate needs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from packer import sources
from packer.rows import renderer_of
from packer.spec import Job
from packer.store import Store


def token_lengths(job: Job, store: Store) -> Iterator[NDArray[np.int64]]:
    """Tokens of every readable row in source order, batch by batch: (k,) int64 each; 0 for empty rows.

    Of a packed dataset those of its segments: no token is read.

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
            yield renderer.render(records.rows).lengths
