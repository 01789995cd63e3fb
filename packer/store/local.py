"""A store in a folder. Files are born by rename, so what exists is complete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from packer.store.base import not_read, not_written, parts_of

_TEMPORARY = ".tmp-"
_BUFFER_BYTES = 1 << 20
# At removing a folder: an entry went or came meanwhile, or is open on NFS, which keeps it under another name.
_MEANWHILE = frozenset({errno.ENOENT, errno.ENOTEMPTY, errno.EBUSY})


class LocalStore:
    """A store in a folder of this machine (or a shared file system)."""

    has_copies = False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    def __repr__(self) -> str:
        return f"LocalStore({str(self.root)!r})"

    @property
    def url(self) -> str:
        return str(self.root)

    def where(self, key: str) -> str:
        return str(self.path(key))

    def path(self, key: str) -> Path:
        """The file of `key`."""
        return self.root.joinpath(*parts_of(key))

    def is_there(self) -> bool:
        return self.root.is_dir()

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object; it is complete and durable, or not there at all."""
        path = self.path(key)
        with LocalStaged(self, path.parent, path.name) as staged:
            staged.write(data)
            staged.publish(key)

    def stage(self, prefix: str) -> LocalStaged:
        return LocalStaged(self, self.path(prefix))

    def get(self, key: str) -> bytes:
        """The bytes of an object. Raises FileNotFoundError where there is none."""
        path = self.path(key)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise  # as it is: one that is its own cause would keep all that called
        except OSError as error:
            raise not_read(error, path, self.root) from error

    def open(self, key: str, *, sha256: str | None = None) -> BinaryIO:
        path = self.path(key)
        try:
            return open(path, "rb", buffering=0)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise not_read(error, path, self.root) from error

    def open_part(self, key: str) -> BinaryIO:
        return self.open(key)

    def map(self, key: str, *, sha256: str | None = None) -> memoryview:
        """The bytes of an object, memory-mapped read-only; unmapped when the last view is gone."""
        with self.open(key) as file:
            return mapped(file)

    def drop_copy(self, key: str, *, sha256: str | None = None) -> bool:
        return False  # what is read is the object itself

    def exists(self, key: str) -> bool:
        path = self.path(key)
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise not_read(error, path, self.root) from error
        return True

    def list(self, prefix: str) -> list[str]:
        """Names directly under `prefix`, sorted, without temporary ones."""
        path = self.path(prefix)
        try:
            names = os.listdir(path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise not_read(error, path, self.root) from error
        return sorted(name for name in names if not name.startswith(_TEMPORARY))

    def delete(self, key: str) -> None:
        """Remove an object or all under a prefix; it need not exist."""
        path = self.path(key)
        try:
            if path.is_dir() and not path.is_symlink():
                _remove_folder(path)
            else:
                path.unlink(missing_ok=True)
        except NotADirectoryError:  # a file where its folder would be: it is not there
            pass
        except OSError as error:
            raise not_written(error, path, self.root) from error

    def sweep(self, prefix: str, *, older_than_s: float = 0.0) -> int:
        """Remove what killed writers left under `prefix`. Returns how many files that were."""
        before_s = time.time() - older_than_s
        left = [
            path
            for path in self.path(prefix).rglob(f"{_TEMPORARY}*")
            if path.is_file() and (not older_than_s or path.stat().st_mtime < before_s)
        ]
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
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            opened = open(path, "ab")  # noqa: SIM115  # closed below
        except OSError as error:
            raise not_written(error, path, self.root) from error
        until = time.monotonic() + wait_s
        with opened as file:
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

    def check_lock(self, key: str) -> None:
        """A lock of the kernel is never lost."""

    def is_locked(self, key: str) -> bool:
        """Whether some process holds `key` now."""
        try:
            with open(path := self.path(key), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            raise not_read(error, path, self.root) from error
        return False

    def probe(self) -> None:
        path = self.root / f"{_TEMPORARY}ready-{uuid.uuid4().hex}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            path.unlink()
        except OSError as error:
            raise not_written(error, path, self.root) from error

    def space(self) -> tuple[int, int]:
        return space_of(self.root)


class LocalStaged:
    """A temporary file beside its place. Errors are those of the store, told apart from a source's."""

    def __init__(self, store: LocalStore, folder: Path, name: str = "a work file") -> None:
        self._store, self._name = store, name
        self.path = folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "wb", buffering=_BUFFER_BYTES)  # noqa: SIM115  # see close
        except OSError as error:
            raise self._not_written(error) from error

    def write(self, data: bytes | memoryview, /) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._not_written(error) from error

    def flush(self) -> None:
        """All that was written can be read at `path`."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._not_written(error) from error

    def publish(self, key: str, *, durable: bool = True) -> None:
        path = self._store.path(key)
        try:
            self._file.flush()
            if durable:
                os.fsync(self._file.fileno())
            self._file.close()
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.path, path)
            if durable:
                _sync_folder(path.parent)
        except OSError as error:
            raise not_written(error, path, self._store.root) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, again
            self._file.close()
        with contextlib.suppress(OSError):  # after the rename there is nothing of that name
            self.path.unlink(missing_ok=True)

    def _not_written(self, error: OSError) -> OSError:
        return not_written(error, self.path.parent / self._name, self._store.root)

    def __enter__(self) -> LocalStaged:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_folder(folder: Path) -> None:
    """Remove a folder and all in it, beside others who do so or write there. Raises OSError if it may not."""
    for place, folders, files in os.walk(folder, topdown=False, onerror=_raise_unless_gone):
        paths = [Path(place, name) for name in (*files, *folders)]
        for path in paths:
            _remove(path, is_folder=path.is_dir() and not path.is_symlink())
    _remove(folder, is_folder=True)


def _remove(path: Path, *, is_folder: bool) -> None:
    try:
        path.rmdir() if is_folder else os.unlink(path)
    except OSError as error:
        _raise_unless_gone(error)


def _raise_unless_gone(error: OSError) -> None:
    if error.errno not in _MEANWHILE:
        raise error


def mapped(file: BinaryIO) -> memoryview:
    """A file's bytes, memory-mapped read-only."""
    if os.fstat(file.fileno()).st_size == 0:
        return memoryview(b"")  # which mmap refuses
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def space_of(folder: Path) -> tuple[int, int]:
    """Bytes free (for this user) and in all of a file system."""
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
