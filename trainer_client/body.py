"""The body of a response, received into one buffer and looked at where it lies.

http.client takes the chunks of a body apart, but makes an object of every read: new memory for each quarter
of a megabyte costs more than the receiving. So the chunks are taken apart here.
"""

from __future__ import annotations

import http.client
import sys

_BUFFER_BYTES = 512 << 10  # larger ones are no faster
_MOST_AHEAD = 8 << 10  # what http.client's file object reads on its own behind the end of a line
_MAX_LINE_BYTES = 1 << 10


class Body:
    """The body of an open response. Broken off where fewer bytes come than are asked for."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response, self._file = response, response.fp
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0  # of what is here and not taken
        self._is_chunked = bool(response.chunked)
        self._left = 0 if self._is_chunked else _known_length(response)  # of the chunk, or of the whole body
        self._is_over = False
        self._is_ahead = True  # the file object may have read more than it was asked for

    @property
    def num_ready(self) -> int:
        """Bytes that are here and not taken."""
        return self._end - self._start

    def here(self) -> memoryview:
        """All that is here and not taken: good until the next call of `ahead`."""
        return self._buffer[self._start : self._end]

    def ahead(self, size: int) -> memoryview:
        """The next `size` bytes, without taking them; fewer where the body ends. Never waits for more than
        these. Good until the next call. Raises OSError, http.client.HTTPException."""
        while self.num_ready < size:
            self._make_room(size)
            count = self._receive(self._buffer[self._end :])
            if not count:
                break
            self._end += count
        return self._buffer[self._start : min(self._end, self._start + size)]

    def take(self, size: int) -> None:
        """Take what was looked at."""
        self._start += size

    def finish(self) -> None:
        """Read to the end of the body, so that the connection can be used again."""
        while self._receive(self._buffer):
            pass
        self._response.close()

    def _make_room(self, size: int) -> None:
        if len(self._buffer) - self._end > max(_MOST_AHEAD, self._start + size - self._end):
            return
        if size + _MOST_AHEAD > len(self._buffer):
            larger = memoryview(bytearray(2 * size + _MOST_AHEAD))
        else:
            larger = self._buffer
        count = self.num_ready
        larger[:count] = self._buffer[self._start : self._end]
        self._buffer, self._start, self._end = larger, 0, count

    def _receive(self, into: memoryview) -> int:
        """Put what comes next into `into`, at least a byte; 0 at the end. One read of the socket, at most."""
        if self._is_chunked and not self._left:
            self._next_chunk()
        if not self._left:
            return 0
        into = into[: self._left]
        if self._is_ahead:
            count = len(self._file.peek())
            self._is_ahead = count > len(into)
            into = into[:count]
        # Of a file object that holds nothing, a read of more than it holds at once goes past it.
        count = self._file.readinto1(into)
        self._left -= count
        return count

    def _next_chunk(self) -> None:
        """Read the line before a chunk, which says its size: 0 at the end of the body."""
        if self._is_over:
            return
        line = self._file.readline(_MAX_LINE_BYTES)
        if line == b"\r\n":  # the end of the chunk before
            line = self._file.readline(_MAX_LINE_BYTES)
        try:
            self._left = int(line.partition(b";")[0] or b"0", 16)
        except ValueError:
            raise http.client.HTTPException(f"a chunk's size was due, found {line[:40]!r}") from None
        self._is_ahead, self._is_over = True, not self._left
        while self._is_over and line and line not in (b"\r\n", b"\n"):  # what may follow the last chunk
            line = self._file.readline(_MAX_LINE_BYTES)


def _known_length(response: http.client.HTTPResponse) -> int:
    return sys.maxsize if response.length is None else response.length
