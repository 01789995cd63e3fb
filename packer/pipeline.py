"""One partition: read, render, tokenize, pack, write its shards. A pure function of (job, partition).

Runs on a worker; what it writes is invisible until the coordinator commits it, so running it twice,
or half, harms nothing: the same bytes go under the same keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer import sources
from packer.gather import gather
from packer.manifest import ROWS, Commit, Shard, shard_key, shard_rows
from packer.order import derive_seed
from packer.packing import PackingError, PackPlan, Trained, plan_trained, tokens_of_minibatches
from packer.report import MAX_LISTED, PADDED_BATCH, Counters
from packer.rows import Rows, largest_capacity, read_rows
from packer.shard import PADDING_ID, encode_packs
from packer.spec import Job
from packer.store import Store

SHARD_TOKENS = 4 << 20  # a shard ends with the pack that reaches this: about 8 MB


class BadRow(ValueError):
    """A row cannot be used and the spec says to stop there. Permanent."""


def pack_partition(job: Job, number: int, partition: sources.Partition, store: Store) -> Commit:
    """Pack one partition, write its shards and return what the coordinator is to commit.

    Raises BadRow, and the errors of sources, rendering, packing and the store.
    """
    counters, rejected, rows, faults = read_rows(job, partition, store)
    if rejected and job.spec.source.on_bad_row == "fail":
        first = min(rejected, key=lambda row: row.example_id)
        raise BadRow(
            f"{first.location}: {first.reason}{'' if first.reason.endswith('?') else '.'} "
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
    packing = job.spec.packing
    largest = {}
    if packing.strategy == "minibatch":
        sizes = tokens_of_minibatches(
            rows.lengths, largest_capacity(job.spec), packing.minibatch_size or PADDED_BATCH
        )
        largest = {"largest_minibatch": int(sizes.max(initial=0))}
    counters.check()
    lists: dict[str, Any] = {
        "rejected": [_about(row) for row in sorted(rejected, key=lambda row: row.example_id)[:MAX_LISTED]],
        "overlong": [_about_overlong(rows, row) for row in planned.dropped[:MAX_LISTED].tolist()],
        "fallbacks": [{"partition": number, "reason": reason} for reason in faults],
        "capacities": _capacities(planned),
    }
    if rows.unlearned:
        lists["unlearned"] = dict(rows.unlearned)
    if job.model_max_length is not None:
        lists["beyond_model"] = int(np.count_nonzero(planned.length > job.model_max_length))
    return Commit(
        partition=number,
        shards=tuple(shards),
        rows=index,
        counters={**dataclasses.asdict(counters), **lists, **largest},
    )


# ------------------------------------------------------------------ packs


def _plan(job: Job, number: int, rows: Rows, counters: Counters) -> PackPlan:
    """Plan the packs of partition `number` and count what becomes of the rows."""
    packing, shuffle_seed = job.spec.packing, job.spec.shuffle_seed
    _check_overlong(job, rows)
    lengths = rows.lengths
    found = plan_trained(
        lengths,
        rows.offsets[:-1],
        lambda: Trained.of(rows.loss_mask),
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
    counters.rows_untrained_by_cut = len(found.left_out) + len(found.kept)
    counters.rows_untrained += counters.rows_untrained_by_cut
    counters.tokens_dropped += int(lengths[found.left_out].sum())
    size = packing.minibatch_size or PADDED_BATCH
    _count(size, packing.capacities[-1], found.lengths, found.plan, counters)
    counters.rows_packed -= len(found.kept)  # those that stay where they are: in pieces, trained in none
    counters.rows_split -= len(found.kept)
    return found.plan


def _check_overlong(job: Job, rows: Rows) -> None:
    packing = job.spec.packing
    limit = largest_capacity(job.spec).segment
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


def _placed(job: Job, partition: sources.Partition, rows: Rows, error: PackingError) -> str:
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
    job: Job, number: int, rows: Rows, planned: PackPlan, counters: Counters, store: Store
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


def _about_overlong(rows: Rows, row: int) -> dict[str, Any]:
    at = rows.location(row)
    return {
        "file": at.file,
        "line": at.number,
        "unit": at.unit,
        "example": int(rows.example_ids[row]),
        "num_tokens": int(rows.lengths[row]),
    }
