"""Bytes in and work files out: unpacking with a limit, atomic spools, and whether a file changed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import BinaryIO, Protocol

import pyarrow as pa

from packer.sources.remote import is_remote, open_remote
from packer.sources.values import MIB, SourceError
from packer.spec import InputFile
from packer.store import Staged, Store

BLOCK_BYTES = 4 * MIB

_SUFFIX_OF = {"gzip": ".gz", "zstd": ".zst"}


class Stream(Protocol):
    """What can be read block by block. An empty block is the end."""

    def read(self, num_bytes: int) -> bytes: ...


class Sink(Protocol):
    """What can be written block by block."""

    def write(self, data: bytes, /) -> object: ...


class _Unpacked:
    """Unpacked bytes of a compressed file, counted as they come (the header's word counts nothing)."""

    def __init__(self, stream: pa.NativeFile, input: InputFile, limit: int) -> None:
        self._stream, self._input, self._limit = stream, input, limit
        self._num_bytes = 0

    def read(self, num_bytes: int) -> bytes:
        try:
            block = self._stream.read(min(num_bytes, self._limit - self._num_bytes + 1))
        except OSError as error:
            suffix = _SUFFIX_OF[self._input.compression or ""]
            raise SourceError(
                f"{self._input.path}: a whole {self._input.compression} file is required by its name "
                f"({suffix}), found one that cannot be unpacked ({error}); it may be cut off: fetch it again"
            ) from error
        self._num_bytes += len(block)
        if self._num_bytes > self._limit:
            raise SourceError(
                f"{self._input.path}: unpacked size is over the limit of {self._limit} bytes (the file has "
                f"{self._input.num_bytes}); if that is meant, unpack it yourself and give the plain file"
            )
        return block


@contextlib.contextmanager
def open_stream(input: InputFile, *, max_unpacked_bytes: int) -> Iterator[Stream]:
    """The content of an input, unpacked where it is compressed. Raises SourceError."""
    with open_input(input.path) as file:
        if input.compression is None:
            yield file
            return
        # Arrow's stream rather than Python's: it unpacks members and frames in turn, a bounded block at
        # a time, and it alone reports a zstd file that is cut off.
        with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), input.compression) as stream:
            yield _Unpacked(stream, input, max_unpacked_bytes)


def open_input(path: str) -> BinaryIO:
    """Open a source file or object. Raises SourceError where it is gone or may not be read."""
    if is_remote(path):
        return open_remote(path)
    try:
        return open(path, "rb")
    except OSError as error:
        raise SourceError(
            f"{path}: cannot be read: {error.strerror}; is it still there, and readable?"
        ) from error


def size_of(file: BinaryIO) -> int:
    """Bytes of an open file or object, which is left where it stands.

    Objects are asked: Google's client cannot stand at an object's end.
    """
    size = getattr(file, "size", None)
    if callable(size):
        return int(size())
    at = file.tell()
    end = file.seek(0, os.SEEK_END)
    file.seek(at)
    return end


def blocks(stream: Stream, num_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """The rest of a stream, block by block."""
    while block := stream.read(num_bytes):
        yield block


def check_unchanged(file: BinaryIO, input: InputFile, mtime_ns: int) -> None:
    """Raise SourceError where an open input is not the file that was indexed."""
    now = os.fstat(file.fileno())
    if now.st_size != input.num_bytes or now.st_mtime_ns != mtime_ns:
        raise changed(input, f"{input.num_bytes} bytes then, {now.st_size} now")


def changed(input: InputFile, how: str) -> SourceError:
    return SourceError(
        f"{input.path}: the file changed while it was packed ({how}); "
        "leave inputs alone and post the dataset again"
    )


def spool_key(work_key: str, input: InputFile, *what: str) -> str:
    """The key of a work file: by content and use, so that a repeated task writes the same name."""
    about = "\0".join((input.digest, str(input.num_bytes), input.reader, str(input.compression), *what))
    return f"{work_key}/{hashlib.sha256(about.encode()).hexdigest()[:32]}"


# A work file that is being written.
Spool = Staged


@contextlib.contextmanager
def spool(store: Store, key: str) -> Iterator[Spool]:
    """A work file that is there under `key` only if the block ends well; durable, as its index will be.

    Raises NoSpaceLeft or StoreError where it cannot be written.
    """
    with store.stage(key.rpartition("/")[0]) as staged:
        yield staged
        staged.publish(key)
