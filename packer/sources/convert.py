"""Other forms to a spool of JSON Lines, streamed: afterwards all are read alike.

A record that cannot be said in JSON becomes a line that begins with "!" and says why, so that it is
rejected where it stands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from packer.sources import tabular
from packer.sources.lines import LineIndexer
from packer.sources.parse import RowFault, fault_line
from packer.sources.streams import Spool, blocks, open_input, open_stream, spool
from packer.sources.values import MIB
from packer.spec import InputFile
from packer.store import LocalStore


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


def table_lines(batches: Iterable[tabular.Rows]) -> Iterator[bytes]:
    """Rows of a table as lines."""
    for row in chain.from_iterable(batches):
        try:
            yield fault_line(row) if isinstance(row, RowFault) else tabular.dump(row)
        except RowFault as fault:
            yield fault_line(fault)


@contextlib.contextmanager
def open_raw(input: InputFile, store: LocalStore, key: str | None, max_unpacked_bytes: int) -> Iterator[Any]:
    """A table's file for random access: the input, or a copy under `key`, which is gone afterwards."""
    if key is None:
        with open_input(input.path):  # a clear error where it is gone
            pass
        # Arrow bodies are used where they lie; Parquet pages are read, so that they do not stay mapped.
        with pa.memory_map(input.path) if input.reader == "arrow" else pa.OSFile(input.path) as file:
            yield file
        return
    try:
        with (
            open_stream(input, max_unpacked_bytes=max_unpacked_bytes) as stream,
            spool(store, key) as unpacked,
        ):
            for block in blocks(stream):
                unpacked.write(block)
        with pa.OSFile(str(store.path(key))) as file:
            yield file
    finally:
        store.delete(key)
