"""One partition: read, render, tokenize, pack, write its shards. A pure function of (job, partition).

Runs on a worker; what it writes is invisible until the coordinator commits it, so running it twice,
or half, harms nothing: the same bytes go under the same keys.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer import sources
from packer.gather import gather
from packer.manifest import ROWS, Commit, Shard, shard_key, shard_rows
from packer.order import derive_seed, permute
from packer.packing import PackingError, PackPlan, plan
from packer.packing.values import Capacity
from packer.render import Renderer
from packer.report import MAX_LISTED, PADDED_BATCH, Counters
from packer.shard import PADDING_ID, encode_packs
from packer.spec import Job, Spec, canonical_json, parse_spec
from packer.store import Store, open_store
from packer.tokenization import Bundle, Tokenizer

SHARD_TOKENS = 4 << 20  # a shard ends with the pack that reaches this: about 8 MB


class BadRow(ValueError):
    """A row cannot be used and the spec says to stop there. Permanent."""


@dataclasses.dataclass(slots=True)
class _Rows:
    """The rows of a partition, flat: row i has tokens offsets[i] to offsets[i + 1], none if left out."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    example_ids: NDArray[np.int64]
    locations: list[Sequence[sources.Location]]  # of the readable rows, batch by batch
    readable: NDArray[np.bool_] | None = None  # which rows could be read; None: all

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


def pack_partition(job: Job, number: int, partition: sources.Partition, store: Store) -> Commit:
    """Pack one partition, write its shards and return what the coordinator is to commit.

    Raises BadRow, and the errors of sources, rendering, packing and the store.
    """
    counters, rejected, rows, faults = _read_checked(job, partition, store)
    if rejected and job.spec.source.on_bad_row == "fail":
        first = min(rejected, key=lambda row: row.example_id)
        raise BadRow(
            f"{first.location}: {first.reason}. "
            'Correct the row, or set source.on_bad_row to "skip" to leave such rows out and list them.'
        )
    try:
        planned = _plan(job, number, rows, counters)
    except PackingError as error:
        raise BadRow(_placed(job, partition, rows, error)) from error
    shards, index = _write(job, number, rows, planned, counters, store)
    if planned.pack_step is not None and job.spec.packing.step_size is not None:
        index["step"] = planned.pack_step + partition.start // job.spec.packing.step_size
    counters.num_shards = len(shards)
    counters.check()
    lists = {
        "rejected": [_about(row) for row in sorted(rejected, key=lambda row: row.example_id)[:MAX_LISTED]],
        "overlong": [_about_overlong(rows, row) for row in planned.dropped[:MAX_LISTED].tolist()],
        "fallbacks": [{"partition": number, "reason": reason} for reason in faults],
        "capacities": _capacities(planned),
    }
    return Commit(
        partition=number,
        shards=tuple(shards),
        rows=index,
        counters={**dataclasses.asdict(counters), **lists},
    )


@functools.lru_cache(maxsize=2)
def _cached_renderer(store_url: str, spec_json: bytes, tokenizer_digest: str, whole: bool) -> Renderer:
    """One renderer a worker process and dataset: loading a tokenizer takes longer than a small task."""
    tokenizer = _load(open_store(store_url), tokenizer_digest)
    return make_renderer(parse_spec(json.loads(spec_json)), tokenizer, whole=whole)


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
        first_tokens=_capacity(spec).segment + 1 if truncates and not whole else None,
    )


def _capacity(spec: Spec) -> Capacity:
    """Of the largest pack that there may be."""
    return Capacity(
        max_tokens=spec.packing.capacities[-1],
        segment_multiple=spec.packing.segment_multiple,
        pack_multiple=spec.packing.pack_multiple,
    )


# ------------------------------------------------------------------ rows


def _read_checked(
    job: Job, partition: sources.Partition, store: Store
) -> tuple[Counters, list[sources.RowError], _Rows, tuple[str, ...]]:
    """Read the partition; again where the fast encoder was found wrong on the way, then by the reference.

    Returns counters, rejected rows, rows, and why the fast encoder was given up, if it was.
    """
    if sources.is_packed(job.inputs):
        return (*_read_packed(partition, store), ())
    tokenizer = renderer_of(job, store).tokenizer
    known = len(tokenizer.encoder_faults) if tokenizer is not None else 0
    counters, rejected, rows = _read(job, partition, store)
    faults = tokenizer.encoder_faults[known:] if tokenizer is not None else ()
    if faults:
        counters, rejected, rows = _read(job, partition, store)
        counters.num_fallbacks = 1
    return counters, rejected, rows, faults


def _read(
    job: Job, partition: sources.Partition, store: Store
) -> tuple[Counters, list[sources.RowError], _Rows]:
    """Read and render the partition; count and leave out empty, untrained and bad rows."""
    counters, rejected = Counters(), list[sources.RowError]()
    renderer = renderer_of(job, store)
    ids, masks, lengths, examples = [], [], [], []
    locations: list[Sequence[sources.Location]] = []
    for records in sources.read_partition(partition, store=store, fields=dict(job.spec.source.fields)):
        counters.rows_in += len(records.example_ids) + len(records.errors)
        rejected.extend(records.errors)
        rendered = renderer.render(records.rows)
        wrong = dict(rendered.errors)
        rejected.extend(_row_error(records, row, reason) for row, reason in wrong.items())
        trained = _any_per_row(rendered.loss_mask, rendered.lengths)
        empty = rendered.lengths == 0
        counters.rows_empty += int(np.count_nonzero(empty)) - len(wrong)
        counters.rows_untrained += int(np.count_nonzero(~empty & ~trained))
        counters.tokens_in += len(rendered.input_ids)
        counters.bytes_cut += rendered.bytes_cut
        counters.add({f"rows_{part}_unprinted": count for part, count in rendered.unprinted.items()})
        counters.tokens_dropped += int(rendered.lengths[~trained].sum())
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
    rows = _Rows(
        input_ids=_concat(ids, np.int32),
        loss_mask=_concat(masks, np.bool_),
        offsets=np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int64),
        example_ids=example_ids,
        locations=locations,
        readable=readable,
    )
    return counters, rejected, rows


def _read_packed(
    partition: sources.Partition, store: Store
) -> tuple[Counters, list[sources.RowError], _Rows]:
    """The segments of a dataset that is packed anew: all of them rows, trained or not.

    An example that was left out there is no row, but keeps its place, with no tokens.
    """
    found = sources.read_segments(partition, store=store)
    counters = Counters(rows_in=int(np.count_nonzero(found.lengths)), tokens_in=len(found.input_ids))
    rows = _Rows(
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


def _row_error(records: sources.Records, row: int, reason: str) -> sources.RowError:
    return sources.RowError.of(records.locations[row], int(records.example_ids[row]), reason)


def _concat(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


def _any_per_row(mask: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether any value of each row's stretch of `mask` is true."""
    full = lengths > 0
    if mask.all():
        return full
    found = np.zeros(len(lengths), np.bool_)
    if full.any():
        found[full] = np.logical_or.reduceat(mask, (np.cumsum(lengths) - lengths)[full])
    return found


# ------------------------------------------------------------------ packs


def _plan(job: Job, number: int, rows: _Rows, counters: Counters) -> PackPlan:
    """Plan the packs of partition `number` and count what becomes of the rows."""
    packing, shuffle_seed = job.spec.packing, job.spec.shuffle_seed
    _check_overlong(job, rows)
    lengths = rows.lengths.copy()
    while True:
        planned = plan(
            lengths,
            packing.max_tokens,
            strategy=packing.strategy,
            # Of its own for each partition, or packs of equal place would be shuffled alike in all.
            seed=None if shuffle_seed is None else derive_seed(shuffle_seed, number),
            minibatch_size=packing.minibatch_size,
            step_size=packing.step_size,
            scope=packing.scope,
            balance=packing.balance,
            overlong=packing.overlong,
            truncate_side=packing.truncate_side,
            min_piece=packing.min_piece,
            segment_multiple=packing.segment_multiple,
            pack_multiple=packing.pack_multiple,
        )
        # A row may lose all that it trains to truncation. It is left out and the rest planned again;
        # its place stays (length 0), since mini-batches and steps are counted by place.
        lost = _untrained(rows, planned)
        if not len(lost):
            break
        counters.rows_untrained += len(lost)
        counters.tokens_dropped += int(lengths[lost].sum())
        lengths[lost] = 0
    _count(packing.minibatch_size or PADDED_BATCH, packing.capacities[-1], lengths, planned, counters)
    return planned


def _untrained(rows: _Rows, planned: PackPlan) -> NDArray[np.int64]:
    """Truncated rows of which nothing that is kept is trained."""
    segments = np.flatnonzero(np.isin(planned.example, planned.truncated))
    starts = rows.offsets[planned.example[segments]] + planned.start[segments]
    ends = starts + planned.length[segments]
    kept = [rows.loss_mask[a:b].any() for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    return planned.example[segments][~np.array(kept, np.bool_)]


def _check_overlong(job: Job, rows: _Rows) -> None:
    packing = job.spec.packing
    limit = _capacity(job.spec).segment
    over = np.flatnonzero(rows.lengths > limit)
    if packing.overlong == "error" and len(over):
        raise BadRow(
            f"{rows.location(int(over[0]))}: {rows.lengths[over[0]]} tokens, a pack takes at most {limit}. "
            'Raise packing.max_tokens, or set packing.overlong to "truncate", "split" or "drop".'
        )


def _count(
    minibatch_size: int, max_tokens: int, lengths: NDArray[np.int64], planned: PackPlan, counters: Counters
) -> None:
    counters.rows_overlong = len(planned.dropped)
    counters.rows_packed = int(np.count_nonzero(lengths)) - len(planned.dropped)
    counters.rows_truncated = len(planned.truncated)
    counters.rows_split = len(planned.split)
    counters.tokens_packed = planned.num_tokens
    counters.tokens_dropped += planned.tokens_dropped
    counters.num_packs = planned.num_packs
    # What a padding loader would compute: the longest of each mini-batch, times its rows.
    padded = np.minimum(lengths[lengths > 0], max_tokens)
    if len(padded):
        starts = np.arange(0, len(padded), minibatch_size)
        sizes = np.diff(np.append(starts, len(padded)))
        counters.padded_tokens = int((np.maximum.reduceat(padded, starts) * sizes).sum())
        counters.padded_real = int(padded.sum())


def _capacities(planned: PackPlan) -> list[dict[str, int]]:
    """Of each max_tokens that a pack was made for: the packs, and the real tokens in them."""
    of_segment = np.repeat(planned.pack_capacity, np.diff(planned.pack_offsets))
    return [
        {
            "max_tokens": max_tokens,
            "num_packs": int(np.count_nonzero(planned.pack_capacity == max_tokens)),
            "num_tokens": int(planned.length[of_segment == max_tokens].sum()),
        }
        for max_tokens in np.unique(planned.pack_capacity).tolist()
    ]


def _placed(job: Job, partition: sources.Partition, rows: _Rows, error: PackingError) -> str:
    """The text of an error with the mini-batch that is to blame as the user's files have it."""
    if error.examples is None or error.minibatch is None:
        return f"examples {partition.start} to {partition.stop - 1} in stream order: {error}"
    first, last = error.examples
    size = job.spec.packing.minibatch_size or 1
    return error.at(
        f"mini-batch {partition.start // size + error.minibatch} (examples {partition.start + first} to "
        f"{partition.start + last} in stream order, from {rows.location(first)} to {rows.location(last)})"
    )


# ------------------------------------------------------------------ shards


def _write(
    job: Job, number: int, rows: _Rows, planned: PackPlan, counters: Counters, store: Store
) -> tuple[list[Shard], np.ndarray]:
    """Gather, encode and store the shards of a plan; counts padding and trained tokens as they go by."""
    shards: list[Shard] = []
    indexes = [np.empty(0, ROWS)]
    groups = gather(
        rows.input_ids,
        rows.loss_mask,
        rows.offsets,
        rows.example_ids,
        planned,
        segment_multiple=job.spec.packing.segment_multiple,
        pack_multiple=job.spec.packing.pack_multiple,
        shard_tokens=SHARD_TOKENS,
    )
    for packs in groups:
        padding = int(packs.lengths[packs.example_ids == PADDING_ID].sum())
        counters.tokens_padding += padding
        counters.tokens_packed += padding
        data, index = encode_packs(packs, job.dataset)
        counters.tokens_trained += int(index["num_trained"].sum())
        counters.packs_untrained += int(np.count_nonzero(index["num_trained"] == 0))
        key = shard_key(job.dataset, number, len(shards))
        store.put(key, data)
        indexes.append(shard_rows(len(shards), index))
        shards.append(
            Shard(
                index=len(shards),
                key=key,
                num_packs=len(packs),
                num_tokens=len(packs.input_ids),
                num_bytes=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
            )
        )
    return shards, np.concatenate(indexes)


def _about(row: sources.RowError) -> dict[str, Any]:
    return {"file": row.file, "line": row.line, "unit": row.unit, "reason": row.reason}


def _about_overlong(rows: _Rows, row: int) -> dict[str, Any]:
    at = rows.location(row)
    return {
        "file": at.file,
        "line": at.number,
        "unit": at.unit,
        "example": int(rows.example_ids[row]),
        "num_tokens": int(rows.lengths[row]),
    }
