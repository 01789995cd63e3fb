"""A store in an object store (s3://, gs://), with copies of what does not change on this machine.

An object is written with one call, or in parts that become visible together, so what exists is
complete. What changes is always asked of the remote side; shards, work files, tokenizers and uploads
are read from the cache. Locks are leases. Files that are staged lie in the cache's folder.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, cast

from pyarrow import fs

from packer.store.base import StoreError, parts_of
from packer.store.cache import Cache
from packer.store.leases import Leases
from packer.store.local import mapped
from packer.store.remote import advice, content_tag, filesystem, is_refused

_DEFAULT_CACHE_BYTES = 16 << 30
_PIECE_BYTES = 8 << 20  # of an object, fetched with one call
_PIECES_AT_ONCE = 4  # a single call does not fill a network
_UPLOAD_BYTES = 64 << 20  # written at once: a part of its own, and there may be 10,000
_PROBE_EVERY_S = 30.0
_READ_BUFFER_BYTES = 1 << 20


def open_objects(url: str) -> ObjectStore:
    """The store of a url, with the cache that PADFREE_CACHE_DIR and PADFREE_CACHE_BYTES ask for."""
    folder = os.environ.get("PADFREE_CACHE_DIR") or os.path.expanduser("~/.cache/padfree")
    given = os.environ.get("PADFREE_CACHE_BYTES", "")
    if given and not given.isdigit():
        raise StoreError(f"PADFREE_CACHE_BYTES: a whole number of bytes is required, found {given!r}")
    return _shared(url, folder, int(given or _DEFAULT_CACHE_BYTES))


@functools.lru_cache(maxsize=16)
def _shared(url: str, cache_folder: str, cache_bytes: int) -> ObjectStore:
    """One a process, so that threads wait for each other's fetches and know what was seen of leases."""
    return ObjectStore(url, Cache(Path(cache_folder).absolute(), cache_bytes))


class ObjectStore:
    """A store at SCHEME://BUCKET/PREFIX."""

    has_copies = True

    def __init__(self, url: str, cache: Cache) -> None:
        scheme, _, place = url.partition("://")
        self._bucket, _, prefix = place.rstrip("/").partition("/")
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self._bucket) or "//" in prefix:
            raise StoreError(f"a store's url {scheme}://BUCKET/PREFIX is required, found {url!r}")
        self.url = f"{scheme}://{self._bucket}/{prefix}".rstrip("/")
        self._scheme, self._root = scheme, f"{self._bucket}/{prefix}".rstrip("/")
        self.cache = cache
        self._leases = Leases(self)
        self._probed_s = -_PROBE_EVERY_S

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return open_objects, (self.url,)

    def where(self, key: str) -> str:
        return f"{self.url}/{'/'.join(parts_of(key))}"

    def is_there(self) -> bool:
        with self._told("read", self.url):
            return self._system.get_file_info(self._bucket).type != fs.FileType.NotFound

    # ------------------------------------------------------------------ writing

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object; it is complete and durable, or not there at all."""
        path = self._path(key)
        with self._told("write", self.where(key)), self._system.open_output_stream(path) as stream:
            stream.write(data)

    def stage(self, prefix: str) -> RemoteStaged:
        return RemoteStaged(self)

    def upload(self, path: Path, key: str) -> None:
        """Write an object from a file of this machine."""
        # Mapped: a stream is completed when it is closed, so nothing may fail between its parts but itself.
        try:
            with open(path, "rb") as file:
                data = mapped(file)
        except FileNotFoundError as error:
            raise StoreError(
                f"{path} was removed before it was written to {self.where(key)}; leave {path.parent} alone "
                "while padfree works, then try again"
            ) from error
        with self._told("write", self.where(key)), self._system.open_output_stream(self._path(key)) as stream:
            for start in range(0, len(data), _UPLOAD_BYTES):
                stream.write(data[start : start + _UPLOAD_BYTES])

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._told("delete", self.where(key)), contextlib.suppress(FileNotFoundError):
            kind = self._system.get_file_info(path).type
            if kind == fs.FileType.Directory:
                self._system.delete_dir(path)
            elif kind == fs.FileType.File:
                self._system.delete_file(path)

    def sweep(self, prefix: str, *, older_than_s: float = 0.0) -> int:
        """Nothing: what a killed writer had sent is no object. (Parts of uploads: docs/operations.md.)"""
        return 0

    # ------------------------------------------------------------------ reading

    def get(self, key: str) -> bytes:
        with self._told("read", self.where(key)), self._system.open_input_file(self._path(key)) as file:
            return file.readall()

    def exists(self, key: str) -> bool:
        try:
            with self._told("read", self.where(key)), self._system.open_input_file(self._path(key)):
                return True
        except FileNotFoundError:
            return False

    def list(self, prefix: str) -> list[str]:
        selector = fs.FileSelector(self._path(prefix), allow_not_found=True)
        with self._told("list", self.where(prefix)):
            return sorted(info.base_name for info in self._system.get_file_info(selector))

    def open(self, key: str, *, sha256: str | None = None) -> BinaryIO:
        """The object from the cache. With its sha256 nothing is asked once it is there."""
        where = self.where(key)
        if sha256 is not None:
            return self.cache.open(
                self.cache.entry(where, sha256), lambda file: self._fetch(key, file, sha256=sha256)
            )
        with self._told("read", where), self._system.open_input_file(self._path(key)) as remote:
            tag = self._tag(remote, where)
            return self.cache.open(
                self.cache.entry(where, tag), lambda file: self._fetch(key, file, remote=remote)
            )

    def open_part(self, key: str) -> BinaryIO:
        with self._told("read", self.where(key)):
            remote = self._system.open_input_file(self._path(key))
        return cast(BinaryIO, _Remote(self, key, remote))

    def map(self, key: str, *, sha256: str | None = None) -> memoryview:
        with self.open(key, sha256=sha256) as file:
            return mapped(file)

    def drop_copy(self, key: str, *, sha256: str | None = None) -> bool:
        where = self.where(key)
        if sha256 is not None:
            return self.cache.drop(self.cache.entry(where, sha256))
        with self._told("read", where), self._system.open_input_file(self._path(key)) as remote:
            return self.cache.drop(self.cache.entry(where, self._tag(remote, where)))

    def keep(self, path: Path, key: str) -> None:
        """Take a file that was uploaded as the cache's copy of it."""
        where = self.where(key)
        with self._told("read", where), self._system.open_input_file(self._path(key)) as remote:
            self.cache.add(path, self.cache.entry(where, self._tag(remote, where)))

    def _fetch(self, key: str, file: BinaryIO, *, remote: Any = None, sha256: str | None = None) -> None:
        """Write the object to `file`. Raises StoreError where it has another digest."""
        where = self.where(key)
        if remote is None:
            with self._told("read", where), self._system.open_input_file(self._path(key)) as opened:
                return self._fetch(key, file, remote=opened, sha256=sha256)
        digest = hashlib.sha256()
        for piece in self._pieces(remote, where):
            file.write(piece)
            if sha256 is not None:
                digest.update(piece)
        if sha256 is not None and digest.hexdigest() != sha256:
            raise StoreError(
                f"{where}: sha256 {sha256} is required, found {digest.hexdigest()}: the object has changed; "
                "run `padfree verify`, then remove the dataset and pack it again"
            )
        return None

    def _pieces(self, remote: Any, where: str) -> Iterator[bytes]:
        """The object in order; a few pieces are fetched at once."""

        def piece(start: int) -> bytes:
            with self._told("read", where):
                return remote.read_at(min(_PIECE_BYTES, size - start), start)

        size = remote.size()
        stride = _PIECE_BYTES * _PIECES_AT_ONCE
        with ThreadPoolExecutor(_PIECES_AT_ONCE, thread_name_prefix="fetch") as pool:
            for start in range(0, size, stride):
                yield from pool.map(piece, range(start, min(start + stride, size), _PIECE_BYTES))

    def _tag(self, remote: Any, where: str) -> str:
        tag = content_tag(remote)
        if tag is None:
            raise StoreError(f"{where}: the store tells no etag, so a change could not be seen; use another")
        return tag

    # ------------------------------------------------------------------ locks and health

    def lock(self, key: str, *, wait_s: float = 0.5) -> AbstractContextManager[bool]:
        """A lease. Taking it lasts half a second, and up to LEASE_S where its last holder died."""
        return self._leases.hold(key)

    def check_lock(self, key: str) -> None:
        self._leases.check(key)

    def is_locked(self, key: str) -> bool:
        return self._leases.is_held(key)

    def probe(self) -> None:
        """Asks the remote side at most twice a minute."""
        self.cache.temporary()
        if time.monotonic() - self._probed_s >= _PROBE_EVERY_S:
            self.put("locks/.ready", b"")
            self._probed_s = time.monotonic()

    def space(self) -> None:
        return None

    # ------------------------------------------------------------------ the remote side

    @property
    def _system(self) -> fs.FileSystem:
        try:
            return filesystem(self._scheme, self._bucket)
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.url}: cannot be opened ({error}); {advice(error)}") from error

    def _path(self, key: str) -> str:
        return "/".join((self._root, *parts_of(key)))

    @contextlib.contextmanager
    def _told(self, verb: str, where: str) -> Iterator[None]:
        """Errors of the remote side as the store's."""
        try:
            yield
        except (FileNotFoundError, StoreError):
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC:  # of the cache, which knows what to say
                raise
            number = errno.EACCES if is_refused(error) else None
            raise StoreError(number, f"cannot {verb} {where} ({error}); {advice(error)}") from error


class RemoteStaged:
    """A file in the cache's folder until it is uploaded. Errors are those of the store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.path = store.cache.temporary()
        try:
            self._file = open(self.path, "wb", buffering=_READ_BUFFER_BYTES)  # noqa: SIM115  # see close
        except OSError as error:
            raise self._store.cache.unusable(error) from error

    def write(self, data: bytes | memoryview, /) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._store.cache.unusable(error) from error

    def flush(self) -> None:
        """All that was written can be read at `path`."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._store.cache.unusable(error) from error

    def publish(self, key: str, *, durable: bool = True) -> None:
        self.flush()
        self._file.close()
        self._store.upload(self.path, key)
        self._store.keep(self.path, key)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> RemoteStaged:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Remote:
    """An object that is read where it lies, a call a read."""

    def __init__(self, store: ObjectStore, key: str, file: Any) -> None:
        self._store, self._key, self._file = store, key, file

    def read(self, size: int = -1) -> bytes:
        with self._store._told("read", self._store.where(self._key)):
            return self._file.readall() if size < 0 else self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def size(self) -> int:
        return self._file.size()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
