"""Where datasets lie: complete objects under keys, born by rename.

A store is a folder (an object store gets the same verbs). An object that can be read is complete:
`put` writes to a temporary name, makes the bytes durable, then renames. Keys are relative paths with
"/" between the parts.

    datasets/<id>/spec.json                 the resolved spec (packer.spec)
    datasets/<id>/origin.json               when it was asked for, and by which request
    datasets/<id>/commits/000000.arrow      one a committed partition, in order (packer.manifest)
    datasets/<id>/finished.json             the report; last of all
    datasets/<id>/failed.json               why packing stopped; gone when it goes on
    datasets/<id>/shards/00000-000.arrow    the packs
    datasets/<id>/work/                     indexes and unpacked sources; gone when finished

Errors: StoreError (an OSError); NoSpaceLeft where the disk is full.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_TEMPORARY = ".tmp-"


class StoreError(OSError):
    """The store could not be read or written."""


class NoSpaceLeft(StoreError):
    """The file system of the store is full. Permanent until someone makes room."""


class LocalStore:
    """A store in a folder of this machine (or a shared file system)."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    def __repr__(self) -> str:
        return f"LocalStore({str(self.root)!r})"

    def path(self, key: str) -> Path:
        """The file of `key`. Keys are made by padfree, never taken from a request as they are."""
        parts = key.split("/")
        if not all(part.strip(".") for part in parts) or "\0" in key or "\\" in key:
            raise StoreError(f"key {key!r} leads out of the store")
        return self.root.joinpath(*parts)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object; it is complete and durable, or not there at all."""
        path = self.path(key)
        temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise _translated(error, path) from error

    def get(self, key: str) -> bytes:
        """The bytes of an object. Raises FileNotFoundError where there is none."""
        return self.path(key).read_bytes()

    def map(self, key: str) -> memoryview:
        """The bytes of an object, memory-mapped read-only; unmapped when the last view is gone."""
        with open(self.path(key), "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(b"")  # which mmap refuses
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def exists(self, key: str) -> bool:
        return self.path(key).is_file()

    def list(self, prefix: str) -> list[str]:
        """Names directly under `prefix`, sorted, without temporary ones."""
        try:
            names = os.listdir(self.path(prefix))
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not name.startswith(_TEMPORARY))

    def delete(self, key: str) -> None:
        """Remove an object or all under a prefix; it need not exist."""
        path = self.path(key)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def sweep(self, prefix: str) -> int:
        """Remove what killed writers left under `prefix`. Returns how many files that were."""
        left = [path for path in self.path(prefix).rglob(f"{_TEMPORARY}*") if path.is_file()]
        for path in left:
            path.unlink(missing_ok=True)
        return len(left)

    @contextlib.contextmanager
    def lock(self, key: str, *, wait_s: float = 0.5) -> Iterator[bool]:
        """Hold `key` alone while the block runs; yields False where another process holds it.

        The kernel lets go of it when the holder dies, however it dies. The short wait is for
        `is_locked`, which holds it for an instant.
        """
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + wait_s
        with open(path, "ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        yield False
                        return
                    time.sleep(0.02)
            yield True

    def is_locked(self, key: str) -> bool:
        """Whether some process holds `key` now."""
        try:
            with open(self.path(key), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _translated(error: OSError, path: Path) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceLeft(
            error.errno,
            f"no space left to write {path.name} in {path.parent}: make room, then post the dataset again",
        )
    return StoreError(error.errno, f"cannot write {path}: {error.strerror}")
