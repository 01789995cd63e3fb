"""Other forms to a spool of JSON Lines, streamed: afterwards all are read alike.

A record that cannot be said in JSON becomes a line that begins with "!" and says why, so that it is
rejected where it stands.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from packer.sources import tabular
from packer.sources.lines import LineIndexer
from packer.sources.parse import RowFault, fault_line
from packer.sources.streams import Spool, blocks, open_input, open_stream
from packer.sources.values import MIB
from packer.sources.watch import Watch
from packer.spec import InputFile
from packer.store import Store


class LineSpool:
    """Writes lines to a spool and indexes them as it goes, a block at a time."""

    def __init__(self, file: Spool, offsets: Spool | None) -> None:
        self._file = file
        self._indexer = LineIndexer(offsets)
        self._lines: list[bytes] = []
        self._held = 0

    @property
    def num_records(self) -> int:
        return self._indexer.num_records

    @property
    def num_bytes(self) -> int:
        return self._indexer.num_bytes

    def write(self, line: bytes) -> None:
        self._lines.append(line)
        self._held += len(line) + 1
        if self._held >= MIB:
            self._flush()

    def _flush(self) -> None:
        if self._lines:
            block = b"\n".join((*self._lines, b""))
            self._lines, self._held = [], 0
            self._indexer.feed(block)
            self._file.write(block)

    def finish(self) -> np.ndarray:
        """Write out what is held; the marks."""
        self._flush()
        return self._indexer.finish()


def table_lines(batches: Iterable[tabular.Rows], watch: Watch) -> Iterator[bytes]:
    """Rows of a table as lines, without what was read to be watched alone."""
    for row in chain.from_iterable(batches):
        try:
            yield fault_line(row) if isinstance(row, RowFault) else tabular.dump(watch.checked(row))
        except RowFault as fault:
            yield fault_line(fault)


@contextlib.contextmanager
def open_raw(
    input: InputFile, store: Store, key: str | None, max_unpacked_bytes: int
) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A table's file for random access, and a function that lets go of the memory it holds.

    It is the input itself, or where `key` is given a copy on this machine, which is gone afterwards.
    """
    if key is None:
        with open_path(input.path, input.reader) as opened:
            yield opened
        return
    with store.stage(key) as copy:
        with open_stream(input, max_unpacked_bytes=max_unpacked_bytes) as stream:
            for block in blocks(stream):
                copy.write(block)
        copy.flush()
        with open_path(str(copy.path), input.reader) as opened:
            yield opened


@contextlib.contextmanager
def open_path(path: str, reader: str) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A table's file on this machine, as `open_raw` gives it."""
    with open_input(path) as file:  # a clear error where it is gone
        if reader != "arrow":
            with pa.OSFile(path) as table:
                yield table, lambda: None
            return
        # Arrow bodies are used where they lie, however large a record batch is; pages that were read are
        # given back, else the whole file would count as this process's memory in the end.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        yield pa.BufferReader(pa.py_buffer(mapped)), lambda: mapped.madvise(mmap.MADV_DONTNEED)
