"""The rows of a partition, read, rendered and tokenized, flat; and the renderer of a job that makes them.

Rows that are left out (empty, untrained, bad) keep their place, with no tokens: mini-batches and steps are
counted by place.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer import sources
from packer.order import permute
from packer.packing.values import Capacity
from packer.render import Renderer
from packer.report import Counters
from packer.spec import Job, Spec, canonical_json, stored_spec
from packer.store import Store, open_store
from packer.tokenization import Bundle, Tokenizer


@dataclasses.dataclass(slots=True)
class Rows:
    """The rows of a partition, flat: row i has tokens offsets[i] to offsets[i + 1], none if left out."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    example_ids: NDArray[np.int64]
    locations: list[Sequence[sources.Location]]  # of the readable rows, batch by batch
    readable: NDArray[np.bool_] | None = None  # which rows could be read; None: all
    # Turns that train nothing though their role looks like the assistant's, by role.
    unlearned: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def location(self, row: int) -> sources.Location:
        """Where row `row` of the partition, a readable one, stands in its source."""
        if self.readable is not None:
            row = int(np.count_nonzero(self.readable[:row]))
        for batch in self.locations:
            if row < len(batch):
                return batch[row]
            row -= len(batch)
        raise IndexError(row)


# ------------------------------------------------------------------ read


def read_rows(
    job: Job, partition: sources.Partition, store: Store, *, whole: bool = False
) -> tuple[Counters, list[sources.RowError], Rows, tuple[str, ...]]:
    """Read the partition; again where the fast encoder was found wrong on the way, then by the reference.

    Returns counters, rejected rows, rows, and why the fast encoder was given up, if it was. whole: as in
    make_renderer.
    """
    if sources.is_packed(job.inputs):
        return (*_read_packed(partition, store), ())
    tokenizer = renderer_of(job, store, whole=whole).tokenizer
    known = len(tokenizer.encoder_faults) if tokenizer is not None else 0
    counters, rejected, rows = _read(job, partition, store, whole)
    faults = tokenizer.encoder_faults[known:] if tokenizer is not None else ()
    if faults:
        counters, rejected, rows = _read(job, partition, store, whole)
        counters.num_fallbacks = 1
    return counters, rejected, rows, faults


def _read(
    job: Job, partition: sources.Partition, store: Store, whole: bool
) -> tuple[Counters, list[sources.RowError], Rows]:
    """Read and render the partition; count and leave out empty, untrained and bad rows."""
    counters, rejected = Counters(), list[sources.RowError]()
    renderer = renderer_of(job, store, whole=whole)
    ids, masks, lengths, examples = [], [], [], []
    locations: list[Sequence[sources.Location]] = []
    unlearned = Counter[str]()
    fields = dict(job.spec.source.fields)
    for records in sources.read_partition(partition, store=store, fields=fields, watch=job.watch):
        counters.rows_in += len(records.example_ids) + len(records.errors)
        rejected.extend(records.errors)
        rendered = renderer.render(records.rows)
        wrong = dict(rendered.errors)
        rejected.extend(row_error(records, row, reason) for row, reason in wrong.items())
        trained = trains(rendered.loss_mask, rendered.lengths)
        empty = rendered.lengths == 0
        counters.rows_empty += int(np.count_nonzero(empty)) - len(wrong)
        counters.rows_untrained += int(np.count_nonzero(~empty & ~trained))
        counters.tokens_in += len(rendered.input_ids)
        counters.bytes_cut += rendered.bytes_cut
        counters.add({f"rows_{part}_unprinted": count for part, count in rendered.unprinted.items()})
        counters.tokens_dropped += int(rendered.lengths[~trained].sum())
        unlearned.update(rendered.unlearned)
        # Rows that are left out keep their place, with no tokens.
        keep = slice(None) if (trained | empty).all() else np.repeat(trained, rendered.lengths)
        ids.append(rendered.input_ids[keep])
        masks.append(rendered.loss_mask[keep])
        lengths.append(np.where(trained, rendered.lengths, 0))
        examples.append(records.example_ids)
        locations.append(records.locations)
    counters.rows_rejected = len(rejected)
    num_tokens, example_ids = _concat(lengths, np.int64), _concat(examples, np.int64)
    readable = None
    if len(example_ids) < counters.rows_in:
        # Unreadable rows keep their place too: mini-batches and steps are counted by place.
        stream_ids = _stream_ids(partition)
        readable = np.isin(stream_ids, example_ids)
        placed = np.zeros(len(stream_ids), np.int64)
        placed[readable] = num_tokens
        num_tokens, example_ids = placed, stream_ids
    rows = Rows(
        input_ids=_concat(ids, np.int32),
        loss_mask=_concat(masks, np.bool_),
        offsets=np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int64),
        example_ids=example_ids,
        locations=locations,
        readable=readable,
        unlearned=unlearned,
    )
    return counters, rejected, rows


def _read_packed(partition: sources.Partition, store: Store) -> tuple[Counters, list[sources.RowError], Rows]:
    """The segments of a dataset that is packed anew: all of them rows, trained or not.

    An example that was left out there is no row, but keeps its place, with no tokens.
    """
    found = sources.read_segments(partition, store=store)
    counters = Counters(rows_in=int(np.count_nonzero(found.lengths)), tokens_in=len(found.input_ids))
    rows = Rows(
        input_ids=found.input_ids,
        loss_mask=found.loss_mask,
        offsets=np.concatenate([[0], np.cumsum(found.lengths)]).astype(np.int64),
        example_ids=found.example_ids,
        locations=[found.locations],
    )
    return counters, [], rows


def _stream_ids(partition: sources.Partition) -> NDArray[np.int64]:
    """Example ids of all records of a partition, readable or not, in stream order."""
    positions = np.arange(partition.start, partition.stop)
    return positions if partition.seed is None else permute(positions, partition.num_records, partition.seed)


def row_error(records: sources.Records, row: int, reason: str) -> sources.RowError:
    """The error of row `row` of a batch, with its place."""
    return sources.RowError.of(records.locations[row], int(records.example_ids[row]), reason)


def _concat(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


def trains(mask: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each segment, of `lengths` that follow each other in `mask`, has a token to train.

    The first token of a segment is none: nothing comes before it that it could be predicted from.
    """
    several = lengths > 1
    if mask.all():
        return several
    found = np.zeros(len(lengths), np.bool_)
    if several.any():
        starts = (np.cumsum(lengths) - lengths)[several]
        behind = mask.copy()
        behind[(np.cumsum(lengths) - lengths)[lengths > 0]] = False
        found[several] = np.logical_or.reduceat(behind, starts)
    return found


# ------------------------------------------------------------------ renderer


@functools.lru_cache(maxsize=2)
def _cached_renderer(store_url: str, spec_json: bytes, tokenizer_digest: str, whole: bool) -> Renderer:
    """One renderer a worker process and dataset: loading a tokenizer takes longer than a small task."""
    tokenizer = _load(open_store(store_url), tokenizer_digest)
    return make_renderer(stored_spec(json.loads(spec_json)), tokenizer, whole=whole)


def _load(store: Store, digest: str) -> Tokenizer | None:
    return Tokenizer(Bundle.load(store, digest)) if digest else None


def tokenizer_of(job: Job, store: Store) -> Tokenizer | None:
    """The tokenizer of a job, from the store; None of ready ids that brought none."""
    return _load(store, job.tokenizer_digest)


def renderer_of(job: Job, store: Store, *, whole: bool = False) -> Renderer:
    """The renderer of a job, from the store. whole: as in make_renderer."""
    return _cached_renderer(store.url, canonical_json(job.spec), job.tokenizer_digest, whole)


def make_renderer(spec: Spec, tokenizer: Tokenizer | None, *, whole: bool = False) -> Renderer:
    """The renderer of a resolved spec. Raises RenderError where template and loss do not fit.

    whole: render all of every row, not only what the spec's packing will keep of it.
    """
    packing = spec.packing
    truncates = (packing.overlong, packing.truncate_side) == ("truncate", "right")
    truncates = truncates and packing.strategy != "wrapped"  # which cuts, but throws nothing away
    return Renderer(
        tokenizer,
        format=spec.source.format,
        fields=spec.source.fields,
        loss=spec.loss,
        add_bos=spec.tokenizer.add_bos if spec.tokenizer else False,
        add_eos=spec.tokenizer.add_eos if spec.tokenizer else False,
        # One more than a pack takes: so it is seen that the row is cut.
        first_tokens=largest_capacity(spec).segment + 1 if truncates and not whole else None,
    )


def largest_capacity(spec: Spec) -> Capacity:
    """Of the largest pack that there may be."""
    return Capacity(
        max_tokens=spec.packing.capacities[-1],
        segment_multiple=spec.packing.segment_multiple,
        pack_multiple=spec.packing.pack_multiple,
    )


def beyond_model(lengths: NDArray[np.int64], job: Job) -> int:
    """How many of rows of so many tokens make segments that are longer than the model takes."""
    if job.model_max_length is None:
        return 0
    limit = largest_capacity(job.spec).segment
    if job.spec.packing.overlong in ("drop", "error"):
        lengths = lengths[lengths <= limit]
    return int(np.count_nonzero(np.minimum(lengths, limit) > job.model_max_length))
