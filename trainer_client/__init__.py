"""The trainer's side of padfree: packed batches of a dataset, streamed, exact and resumable.

    from trainer_client import PackedStream

    for batch in PackedStream("http://localhost:8000", dataset="…"):
        loss = model(**batch.for_transformers()).loss

Needs numpy and pyarrow. torch is imported by what gives tensors (batch.for_…, PackedDataset,
trainer_client.attention) and by nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer_client.batch import PackedBatch
from trainer_client.errors import (
    ClientError,
    DataDamaged,
    DatasetFailed,
    DatasetTooSmall,
    StateMismatch,
    StreamRefused,
    StreamTimeout,
    UnknownDataset,
)
from trainer_client.mixing import MixedStream
from trainer_client.multiples import parallel_multiple
from trainer_client.prefetch import StreamStats
from trainer_client.stream import PackedStream

if TYPE_CHECKING:
    from trainer_client.dataset import PackedDataset

__all__ = [
    "ClientError",
    "DataDamaged",
    "DatasetFailed",
    "DatasetTooSmall",
    "MixedStream",
    "PackedBatch",
    "PackedDataset",
    "PackedStream",
    "StateMismatch",
    "StreamRefused",
    "StreamStats",
    "StreamTimeout",
    "UnknownDataset",
    "parallel_multiple",
]


def __getattr__(name: str) -> Any:
    if name == "PackedDataset":  # its import brings torch
        from trainer_client.dataset import PackedDataset

        return PackedDataset
    raise AttributeError(f"module 'trainer_client' has no attribute {name!r}")
