"""Finished indexes in the store's work folder: a job that goes on after a crash does not index again.

An index is bound to what it is of by its key (the input's content and how it is read) and to its work files
by their sizes. It is written once these are durable; what does not fit is as if it were not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os

import numpy as np

from packer.sources.values import MARK, FileIndex, RecordFile
from packer.spec import InputFile
from packer.store import LocalStore, StoreError

INDEX_VERSION = "1"  # raise it when the same input comes to have other records or places
_DIGEST_BYTES = 32


def save_index(store: LocalStore, key: str, index: FileIndex) -> None:
    """Keep an index under `key`: a digest, a line of JSON, the marks. Raises StoreError."""
    file = dataclasses.asdict(index.file)
    del file["input"], file["mtime_ns"]  # known to whoever asks
    sizes = {}
    for name in _work_files(index.file):
        path = store.path(name)
        try:
            with open(path, "rb") as work:
                os.fsync(work.fileno())
            sizes[name] = path.stat().st_size
        except OSError as error:
            raise StoreError(error.errno, f"work file {path} cannot be read: {error.strerror}") from error
    body = json.dumps({"file": file, "sizes": sizes}).encode() + b"\n" + index.marks.tobytes()
    store.put(key, hashlib.sha256(body).digest() + body)


def load_index(store: LocalStore, key: str, input: InputFile, mtime_ns: int) -> FileIndex | None:
    """The index kept under `key`, if it and all its work files are whole; else None.

    mtime_ns: of `input`, whose content is known to be what was resolved.
    """
    with contextlib.suppress(OSError, ValueError):
        data = store.get(key)
        body = data[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != data[:_DIGEST_BYTES]:
            return None
        head, _, marks = body.partition(b"\n")
        about = json.loads(head)
        if any(store.path(name).stat().st_size != size for name, size in about["sizes"].items()):
            return None
        file = RecordFile(input=input, mtime_ns=mtime_ns, **about["file"])
        return FileIndex(file=file, marks=np.frombuffer(marks, MARK))
    return None


def _work_files(file: RecordFile) -> list[str]:
    return [name for name in (file.spool, file.offsets) if name is not None]
