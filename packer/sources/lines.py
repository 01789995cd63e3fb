"""JSON Lines as bytes: where each record begins, and reading a run of lines in blocks.

A line ends at \\n and nowhere else. A line of ASCII white space alone is no record. Both functions
hold this one rule, so that an ordinal means the same record to each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from packer.sources.streams import BLOCK_BYTES, Sink, Stream
from packer.sources.values import MARK, MARK_BYTES, OFFSET

BOM = b"\xef\xbb\xbf"
_NEWLINE = 10
_HEAD_BYTES = 64
_LONG_LINE = 1024  # bytes
_SAMPLE_BYTES = 64 << 10  # of a block, by which its lines are called long


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLong:
    """Stands for a line over the limit; its bytes were not kept. Like bytes where lines are sorted out."""

    num_bytes: int
    head: bytes  # its first bytes

    def __len__(self) -> int:
        return 0  # bytes held

    def __bool__(self) -> bool:
        return True

    def isspace(self) -> bool:
        return False


class LineIndexer:
    """Finds records and marks in a file fed block by block; memory does not grow with a line's length."""

    def __init__(self, offsets: Sink | None = None) -> None:
        self.num_records = 0
        self.num_bytes = 0  # fed so far
        self._offsets = offsets
        self._line = 1  # of the line that is open
        self._open: int | None = 0  # where the open line begins, while it has held white space alone
        self._bucket = -1
        self._marks: list[np.ndarray] = []

    def feed(self, block: bytes) -> None:
        base, size = self.num_bytes, len(block)
        if base == 0 and block.startswith(BOM):
            self._open = len(BOM)
        data = np.frombuffer(block, np.uint8)
        newlines = np.flatnonzero(data == _NEWLINE)
        begins = newlines + 1
        lines = self._line + 1 + np.arange(len(newlines))
        starts = begins + base
        if self._open is not None:  # undecided so far: looked at again, from where this block goes on
            begins = np.concatenate([[max(0, self._open - base)], begins])
            starts = np.concatenate([[self._open], starts])
            lines = np.concatenate([[self._line], lines])
        self._line += len(newlines)
        self.num_bytes = base + size
        if not len(begins):
            return
        first = data[np.minimum(begins, size - 1)]
        keep = (first != 32) & ((first < 9) | (first > 13)) & (begins < size)
        ends = np.append(newlines, size)[-len(begins) :]
        for i in np.flatnonzero(~keep):  # few: lines that begin with white space
            keep[i] = not (block[begins[i] : ends[i]].isspace() or begins[i] == ends[i])
        self._open = None if keep[-1] else int(starts[-1])  # the last line has not ended yet
        self._add(starts[keep], lines[keep])

    def _add(self, starts: np.ndarray, lines: np.ndarray) -> None:
        if not len(starts):
            return
        buckets = np.concatenate([[self._bucket], starts // MARK_BYTES])
        new = np.flatnonzero(buckets[1:] != buckets[:-1])
        marks = np.empty(len(new), MARK)
        marks["ordinal"] = marks["begin"] = self.num_records + new
        marks["offset"], marks["line"] = starts[new], lines[new]
        marks["num_bytes"] = starts[new]
        self._marks.append(marks)
        self._bucket = int(buckets[-1])
        self.num_records += len(starts)
        self._write(starts, lines)

    def _write(self, starts: np.ndarray, lines: np.ndarray) -> None:
        if self._offsets is not None:
            rows = np.empty(len(starts), OFFSET)
            rows["offset"], rows["line"] = starts, lines
            self._offsets.write(rows.tobytes())

    def finish(self) -> np.ndarray:
        """The marks; the end of the file is written as the last offset."""
        self._write(np.array([self.num_bytes]), np.array([self._line]))
        return np.concatenate(self._marks) if self._marks else np.empty(0, MARK)


def read_lines(
    stream: Stream, *, max_bytes: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[list[bytes | TooLong]]:
    """All lines from where the stream stands, without their \\n, a list for each block read.

    Blank lines are given too, so that lines can be counted; an empty end behind the last \\n is not.
    """
    parts: list[bytes] = []  # of the line that is open; its head alone once it is too long
    held = 0
    block_bytes = min(block_bytes, max_bytes)  # so that only a line over a block's end can be too long
    while block := stream.read(block_bytes):
        lines = _split(block)
        rest = lines.pop()
        assert isinstance(rest, bytes)
        if lines:
            if held:
                first = lines[0]
                assert isinstance(first, bytes)
                lines[0] = _line([*parts, first], held + len(first), max_bytes)
            parts, held = [], 0
            yield lines
        held += len(rest)
        if held > max_bytes:
            parts = parts[:1] or [rest[:_HEAD_BYTES]]
            parts[0] = parts[0][:_HEAD_BYTES]
        elif rest:
            parts.append(rest)
    if held:
        yield [_line(parts, held, max_bytes)]


def _split(block: bytes) -> list[bytes | TooLong]:
    """block.split(b"\\n"), which looks at each byte by itself: where lines are long `find` is faster."""
    if block.count(b"\n", 0, _SAMPLE_BYTES) * _LONG_LINE > _SAMPLE_BYTES:
        return list(block.split(b"\n"))
    lines: list[bytes | TooLong] = []
    start = 0
    while (end := block.find(b"\n", start)) >= 0:
        lines.append(block[start:end])
        start = end + 1
    lines.append(block[start:])
    return lines


def _line(parts: list[bytes], num_bytes: int, max_bytes: int) -> bytes | TooLong:
    if num_bytes > max_bytes:
        return TooLong(num_bytes=num_bytes, head=parts[0][:_HEAD_BYTES])
    return b"".join(parts)
