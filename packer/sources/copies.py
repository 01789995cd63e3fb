"""Shards of a packed dataset read from copies that may have been damaged since they were fetched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from packer.store import Store

T = TypeVar("T")


def read_well(
    store: Store,
    key: str,
    read: Callable[[memoryview], T],
    *,
    data: memoryview | None = None,
    sha256: str | None = None,
) -> tuple[memoryview, T]:
    """(a shard's bytes, what `read` makes of them); where they are a damaged copy, of another copy.

    data: the bytes, where they are open already. Raises as `read` does.
    """
    try:
        found = store.map(key, sha256=sha256) if data is None else data
        return found, read(found)
    except ValueError:  # ShardError is one; so is that an empty file cannot be mapped
        if not store.drop_copy(key, sha256=sha256):
            raise
    found = store.map(key, sha256=sha256)
    return found, read(found)
