"""What a store is."""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

_REFUSED = frozenset({errno.EACCES, errno.EPERM})
_LASTING = _REFUSED | {errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP}


class StoreError(OSError):
    """The store could not be read or written."""

    def __str__(self) -> str:
        """The text alone: it says in words what the number of the error does."""
        return self.strerror or super().__str__()

    @property
    def is_lasting(self) -> bool:
        """Whether it stays so until someone changes the store's folder or its rights."""
        return self.errno in _LASTING

    @property
    def shown(self) -> str:
        """A lasting one at reading a file, as whoever asks for it is told: without the place."""
        advice = "; where that is all, let it be read" if self.errno in _REFUSED else ""
        return f"a file that this user may read is required, found: {os.strerror(self.errno or 0)}{advice}"


class NoSpaceLeft(StoreError):
    """A disk that the store writes to is full. Permanent until someone makes room."""


class LockLost(StoreError):
    """A lock that this process had is no longer surely its own: it must stop what the lock allowed."""


class Staged(Protocol):
    """A file on its way into a store: nobody sees it before it is published."""

    @property
    def path(self) -> Path:
        """Where it lies on this machine until then."""
        ...

    def write(self, data: bytes | memoryview, /) -> object: ...

    def flush(self) -> None:
        """All that was written can be read at `path`."""
        ...

    def publish(self, key: str, *, durable: bool = True) -> None:
        """Put it under `key`, complete. durable: it outlives a power cut from here on."""
        ...

    def close(self) -> None:
        """Let go of it; it is gone unless it was published. May be called again."""
        ...

    def __enter__(self) -> Staged: ...

    def __exit__(self, *_: object) -> None: ...


class Store(Protocol):
    """Objects under keys. Safe for threads; pickles to the same store.

    Reading raises FileNotFoundError where there is no such object, else StoreError. An object of
    `shards`, `work`, `tokenizers` or `uploads` always has the same bytes under the same key as long as
    it is there, so it may be read from a copy on this machine (`open`, `map`). All others change, and
    are read with `get`.
    """

    @property
    def url(self) -> str:
        """The place, as `open_store` takes it, also in another process."""
        ...

    @property
    def has_copies(self) -> bool:
        """Whether `open` and `map` read copies on this machine, damaged perhaps while the object is well."""
        ...

    def where(self, key: str) -> str:
        """The path or url of an object: for messages, and for a source that lies in the store."""
        ...

    def is_there(self) -> bool:
        """Whether the folder or the bucket exists."""
        ...

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object; it is complete and durable, or not there at all."""
        ...

    def stage(self, prefix: str) -> Staged:
        """A new file that is to be published, under `prefix`."""
        ...

    def get(self, key: str) -> bytes:
        """The bytes of an object, as they are now."""
        ...

    def open(self, key: str, *, sha256: str | None = None) -> BinaryIO:
        """A file of this machine, unbuffered, with the bytes of an object that does not change.

        It stays readable when the object is deleted. sha256: the content's, where it is known; it spares
        asking an object store which content it has.
        """
        ...

    def open_part(self, key: str) -> BinaryIO:
        """As `open`, to read and seek in, where only a part of a large object is wanted."""
        ...

    def map(self, key: str, *, sha256: str | None = None) -> memoryview:
        """`open`, memory-mapped read-only; unmapped when the last view is gone."""
        ...

    def drop_copy(self, key: str, *, sha256: str | None = None) -> bool:
        """Remove this machine's copy of an object, whose bytes turned out to be wrong. Whether there was one,
        so that reading again fetches another."""
        ...

    def exists(self, key: str) -> bool:
        """Whether something is there, whatever it is: it need not be what can be read."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Names directly under `prefix`, sorted, without temporary ones."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object or all under a prefix; it need not exist."""
        ...

    def sweep(self, prefix: str, *, older_than_s: float = 0.0) -> int:
        """Remove what killed writers left under `prefix`. Returns how many files that were."""
        ...

    def lock(self, key: str, *, wait_s: float = 0.5) -> AbstractContextManager[bool]:
        """Hold `key` alone while the block runs; gives False where another holds it.

        A holder that dies loses it, sooner or later: at once in a folder.
        """
        ...

    def check_lock(self, key: str) -> None:
        """Raise LockLost where a lock that this store gave may have passed to another."""
        ...

    def is_locked(self, key: str) -> bool:
        """Whether some process holds `key` now."""
        ...

    def probe(self) -> None:
        """Raise StoreError where the store cannot be written now."""
        ...

    def space(self) -> tuple[int, int] | None:
        """Bytes free and in all of the store's file system; None where there is no limit to know."""
        ...


def parts_of(key: str) -> list[str]:
    """The parts of a key. Keys are made by padfree, never taken from a request as they are."""
    parts = key.split("/")
    if not all(part.strip(".") for part in parts) or "\0" in key or "\\" in key:
        raise StoreError(f"key {key!r} leads out of the store")
    return parts


def not_written(error: OSError, path: Path, store: Path | None = None) -> StoreError:
    """The error of the operating system at writing `path`, as the store's. `store`: its folder, if any."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceLeft(
            error.errno,
            f"no space left to write {path.name} in {path.parent}: make room, then post the dataset again",
        )
    advice = "" if store is None else _advice(store, "write")
    return StoreError(error.errno, f"cannot write {path}: {error.strerror}{advice}")


def not_read(error: OSError, path: Path, store: Path) -> OSError:
    """The error of the operating system at reading `path`, as the store's. One of what is not there is to be
    left as it is."""
    return StoreError(error.errno, f"cannot read {path}: {error.strerror}{_advice(store, 'read')}")


def _advice(store: Path, verb: str) -> str:
    return (
        f"; the store {store} must be a folder that this user may {verb}, and padfree alone changes: make it "
        "so, or choose another (--store, PADFREE_STORE)"
    )
