"""How long a job takes in one process, roughly, and whether Ray's start pays: what `padfree pack` goes by."""

from __future__ import annotations

import importlib.util
import os

from packer import sources
from packer.spec import Job
from packer.store import Store
from packer.tokenization import Bundle
from packer.tokenization.fast import SWITCH

# Bytes of input a CPU second, measured (docs/operations.md, Sizing): one process, 8k vocabulary.
_TEXTS, _CHATS, _REFERENCE, _IDS = 24e6, 9e6, 2.6e6, 80e6
_UNPACKED = 3  # bytes of text in one of a compressed file or a table, about
# Ray takes some 6 s to start and to stop, and its workers have to load what this process has loaded.
_START_S = 10.0


def ray_pays(job: Job, store: Store, *, num_cpus: int | None = None) -> bool:
    """Whether `num_cpus` (all that this process may use) workers of Ray are done before one process is.

    Work of W seconds takes W here and about START + W / num_cpus there.
    """
    cpus = num_cpus or len(os.sched_getaffinity(0))
    return cpus > 1 and work_seconds(job, store) * (1 - 1 / cpus) > _START_S


def work_seconds(job: Job, store: Store) -> float:
    """CPU seconds of one process for a job, within a factor of two or so."""
    num_bytes = sum(
        one.num_bytes * (_UNPACKED if one.compression or one.reader in ("parquet", "arrow") else 1)
        for one in job.inputs
    )
    return num_bytes / _rate(job, store)


def _rate(job: Job, store: Store) -> float:
    if sources.is_packed(job.inputs) or job.spec.source.format == "tokens":
        return _IDS
    if not _is_fast(Bundle.load(store, job.tokenizer_digest)):
        return _REFERENCE
    return _CHATS if job.spec.source.format == "messages" else _TEXTS


def _is_fast(bundle: Bundle) -> bool:
    """Whether `fastokens` is likely to encode: it is there, and the tokenizer is of byte-pair encoding."""
    model = bundle.document("tokenizer.json").get("model", {})
    is_there = importlib.util.find_spec("fastokens") is not None and os.environ.get(SWITCH) != "0"
    return is_there and model.get("type") == "BPE"
