"""Finished indexes in the store's work folder: a job that goes on after a crash does not index again.

An index is bound to what it is of by its key (the input's content and how it is read) and to its work files
by their sizes. It is written once these are durable; what does not fit is as if it were not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json

import numpy as np

from packer.sources.streams import size_of
from packer.sources.values import MARK, FileIndex, RecordFile
from packer.spec import InputFile
from packer.store import Store

INDEX_VERSION = "2"  # raise it when the same input comes to have other records or places
_DIGEST_BYTES = 32


def save_index(store: Store, key: str, index: FileIndex) -> None:
    """Keep an index under `key`: a digest, a line of JSON, the marks. Raises StoreError."""
    file = dataclasses.asdict(index.file)
    del file["input"], file["mtime_ns"]  # known to whoever asks
    sizes = {name: _size(store, name) for name in (index.file.spool, index.file.offsets) if name is not None}
    body = json.dumps({"file": file, "sizes": sizes}).encode() + b"\n" + index.marks.tobytes()
    store.put(key, hashlib.sha256(body).digest() + body)


def load_index(store: Store, key: str, input: InputFile, mtime_ns: int) -> FileIndex | None:
    """The index kept under `key`, if it and all its work files are whole; else None.

    mtime_ns: of `input`, whose content is known to be what was resolved.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        data = store.get(key)
        body = data[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != data[:_DIGEST_BYTES]:
            return None
        head, _, marks = body.partition(b"\n")
        about = json.loads(head)
        if any(_size(store, name) != size for name, size in about["sizes"].items()):
            return None
        groups = about["file"]["row_groups"]
        about["file"]["row_groups"] = None if groups is None else tuple(groups)
        file = RecordFile(input=input, mtime_ns=mtime_ns, **about["file"])
        return FileIndex(file=file, marks=np.frombuffer(marks, MARK))
    return None


def _size(store: Store, name: str) -> int:
    with store.open_part(name) as file:
        return size_of(file)
