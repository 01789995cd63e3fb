"""Byte ranges of shard files, read straight into buffers, with few files open.

`pread` and not a memory map: it costs one copy either way (a stream's headers are stamped), lets other
threads run, and a file that was cut off under us is an error here, where a map would kill the process.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections import OrderedDict
from typing import BinaryIO

from packer.store import Store, StoreError


class ShardMissing(OSError):
    """A shard that the manifest lists is not there, or shorter than the manifest says."""


class WouldBlock(Exception):
    """The bytes are not in memory; read them in a thread."""


Piece = tuple[str, str | None, int, memoryview]  # key, the shard's sha256, offset, buffer

_BLOCK_BYTES = 1 << 20

# Linux's way to read only what is in memory. Where there is none, every read goes to a thread.
_NOWAIT = getattr(os, "RWF_NOWAIT", None)


class ShardFiles:
    """Open shard files, the ones used last. Safe for threads."""

    def __init__(self, store: Store, *, max_open: int = 256) -> None:
        self._store, self._max_open = store, max_open
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Handle] = OrderedDict()
        self._whole: set[str] = set()  # copies that were found to be as the manifest has them

    def read_into(
        self, key: str, offset: int, buffer: memoryview, *, wait: bool = True, sha256: str | None = None
    ) -> None:
        """Fill `buffer` from byte `offset` of the shard. Raises ShardMissing.

        wait=False: never waits for a disk, and raises WouldBlock instead. sha256: the shard's, which spares
        an object store a question.
        """
        self.read_all([(key, sha256, offset, buffer)], wait=wait)

    def read_all(self, pieces: list[Piece], *, wait: bool = True) -> None:
        """`read_into` for many pieces."""
        if not wait and _NOWAIT is None:
            raise WouldBlock
        flags = 0 if wait else _NOWAIT or 0
        handle, of, descriptor, read = None, "", -1, os.preadv
        try:
            for key, sha256, offset, buffer in pieces:
                if key != of:
                    if handle is not None:
                        self._give_back(handle)
                        handle = None
                    handle, of = self._take(key, wait, sha256), key
                    descriptor = handle.descriptor
                count = read(descriptor, (buffer,), offset, flags)
                if count < len(buffer):
                    _fill(descriptor, key, offset, buffer, count, flags)
        except OSError as error:
            # EOPNOTSUPP: not on this file system.
            if flags and error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise WouldBlock from error
            raise
        finally:
            if handle is not None:
                self._give_back(handle)

    def num_bytes(self, key: str, sha256: str | None = None) -> int:
        """Length of the shard file. Raises ShardMissing."""
        handle = self._take(key, wait=True, sha256=sha256)
        try:
            return os.fstat(handle.descriptor).st_size
        finally:
            self._give_back(handle)

    def require_whole(self, key: str, sha256: str) -> None:
        """Compare this machine's copy of a shard, if it is one, with its digest: once, for it is read whole.
        One that is damaged is fetched anew. Raises ShardMissing.

        For those who hand out whole files: a stream's messages have checksums of their own.
        """
        if key in self._whole or not self._store.has_copies:
            return
        for _ in range(2):  # a disk may damage the next one too
            if self._digest(key, sha256) == sha256:
                self._whole.add(key)
                return
            if not self.drop_copy(key, sha256):
                break
        raise ShardMissing(f"this machine's copy of {key} is not what the manifest says, nor is another")

    def _digest(self, key: str, sha256: str) -> str:
        handle, digest, at = self._take(key, wait=True, sha256=sha256), hashlib.sha256(), 0
        try:
            while block := os.pread(handle.descriptor, _BLOCK_BYTES, at):
                digest.update(block)
                at += len(block)
        finally:
            self._give_back(handle)
        return digest.hexdigest()

    def drop_copy(self, key: str, sha256: str | None) -> bool:
        """Let go of a shard whose bytes are wrong. Whether it was a copy: then reading fetches another."""
        self.forget(key)
        return self._store.drop_copy(key, sha256=sha256)

    def forget(self, prefix: str) -> None:
        """Close the files under a prefix, for a dataset that was deleted."""
        with self._lock:
            for key in [key for key in self._open if key.startswith(prefix)]:
                self._open.pop(key).let_go()
            self._whole = {key for key in self._whole if not key.startswith(prefix)}

    def close(self) -> None:
        self.forget("")

    def _take(self, key: str, wait: bool, sha256: str | None = None) -> _Handle:
        """The open file of `key`, kept open until it is given back."""
        with self._lock:
            if key in self._open:
                return self._used(key)
        if not wait:  # opening may wait, for a disk or for a network
            raise WouldBlock
        file = self._opened(key, sha256)  # not under the lock: it may have to be fetched
        with self._lock:
            if key in self._open:  # by another thread meanwhile
                file.close()
            else:
                self._open[key] = _Handle(file)
            return self._used(key)

    def _used(self, key: str) -> _Handle:
        handle = self._open[key]
        handle.num_users += 1
        self._open.move_to_end(key)
        while len(self._open) > self._max_open:
            self._open.popitem(last=False)[1].let_go()
        return handle

    def _give_back(self, handle: _Handle) -> None:
        with self._lock:
            handle.num_users -= 1
            handle.close_if_unused()

    def _opened(self, key: str, sha256: str | None) -> BinaryIO:
        try:
            return self._store.open(key, sha256=sha256)
        except FileNotFoundError as error:
            raise ShardMissing(f"{key} is listed in the manifest and not there") from error
        except StoreError as error:
            if not error.is_lasting:
                raise
            raise ShardMissing(f"{key}: {error.shown}") from error


def _fill(descriptor: int, key: str, offset: int, buffer: memoryview, filled: int, flags: int) -> None:
    """Read what is left of `buffer`, whose first `filled` bytes were read."""
    while filled < len(buffer):
        count = os.preadv(descriptor, (buffer[filled:],), offset + filled, flags)
        if count == 0:
            raise ShardMissing(
                f"{key} ends at byte {offset + filled}, {len(buffer) - filled} more are needed"
            )
        filled += count


class _Handle:
    """A file that closes when it is let go of and nobody reads from it. Used under the lock."""

    __slots__ = ("_file", "descriptor", "is_kept", "num_users")

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.descriptor = file, file.fileno()
        self.num_users, self.is_kept = 0, True

    def let_go(self) -> None:
        self.is_kept = False
        self.close_if_unused()

    def close_if_unused(self) -> None:
        if not self.is_kept and self.num_users == 0 and self.descriptor >= 0:
            self._file.close()
            self.descriptor = -1
