"""JSON files that are no JSON Lines: one array of records, or values one after another, streamed."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator

from packer.sources.lines import BOM, TooLong, read_lines
from packer.sources.parse import RowFault, parse_object
from packer.sources.streams import Stream
from packer.sources.values import MIB, SourceError

_WHITE = re.compile(r"[ \t\n\r]*")
_BLOCK_BYTES = MIB
_FIRST_LINE_BYTES = 32 * MIB
_FIRST_LINES = 10
# Numbers are only passed over here: float takes one of any length.
_DECODER = json.JSONDecoder(parse_int=float)


def is_json_lines(stream: Stream) -> bool:
    """Whether a .json file is JSON Lines by another name: one of its first lines is a whole object.

    A line that is indented is part of a larger value, and does not count.
    """
    num_lines = 0
    first = True
    for lines in read_lines(stream, max_bytes=_FIRST_LINE_BYTES, block_bytes=_BLOCK_BYTES):
        for raw in lines:
            text = raw.head if isinstance(raw, TooLong) else raw
            text = text.removeprefix(BOM) if first else text
            if not text or text.isspace():
                continue
            if first and text.lstrip().startswith(b"["):
                return False
            first = False
            if isinstance(raw, TooLong):
                return text.startswith(b"{")
            if text.startswith(b"{"):
                try:
                    parse_object(text)
                    return True
                except RowFault:
                    pass
            num_lines += 1
            if num_lines == _FIRST_LINES:
                return False
    return False


class _Buffer:
    """A window of the file's text that grows at its end and is cut off at its start."""

    def __init__(self, stream: Stream, path: str) -> None:
        # What is not UTF-8 passes through and is found in its own record.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._stream, self._path = stream, path
        self._lines = 1  # before the window
        self.text, self.at, self.ended = "", 0, False
        self.grow()
        self.text = self.text.removeprefix("\ufeff")

    def grow(self) -> None:
        """Read on: as much again as is held, so that a long value is looked at a few times only."""
        self._lines += self.text.count("\n", 0, self.at)
        block = self._stream.read(max(_BLOCK_BYTES, len(self.text) - self.at))
        self.ended = not block
        self.text = self.text[self.at :] + self._decoder.decode(block, self.ended)
        self.at = 0

    def peek(self) -> str:
        """The next character that is not white space, or "" at the end."""
        while True:
            match = _WHITE.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.grow()

    def wrong(self, what: str, at: int | None = None) -> SourceError:
        line = self._lines + self.text.count("\n", 0, self.at if at is None else at)
        return SourceError(
            f"{self._path}, line {line}: {what}; a .json file is required to be one array of objects, or one "
            "object a line; correct it, or write .jsonl, where a bad line costs that line alone"
        )


def value_lines(stream: Stream, path: str, *, max_bytes: int) -> Iterator[bytes]:
    """Each element of the file's array (or each value of a file without one) as a line of JSON.

    Raises SourceError where the text is not JSON: behind that place no record can be told from another.
    """
    buffer = _Buffer(stream, path)
    in_array = buffer.peek() == "["
    if in_array:
        buffer.at += 1
    more = not (in_array and buffer.peek() == "]")
    while more and (in_array or buffer.peek()):
        yield _value(buffer, max_bytes)
        if in_array:
            mark = buffer.peek()
            if mark not in (",", "]") or not mark:
                raise buffer.wrong("the array is cut off" if not mark else "a comma or ] is missing")
            more = mark == ","
            buffer.at += more
    if in_array:
        buffer.at += 1
        if buffer.peek():
            raise buffer.wrong("there is more behind the array")


def _value(buffer: _Buffer, max_bytes: int) -> bytes:
    buffer.peek()
    while True:
        try:
            _, end = _DECODER.raw_decode(buffer.text, buffer.at)
            # A number may go on behind the window.
            if buffer.ended or end < len(buffer.text):
                break
        except json.JSONDecodeError as error:
            cut_off = error.msg.startswith("Unterminated string") or error.pos >= len(buffer.text) - 8
            if buffer.ended or not cut_off:
                raise buffer.wrong(f"not JSON ({error.msg.removesuffix(' at')})", error.pos) from None
        except RecursionError:
            raise buffer.wrong("JSON nested too deeply (more than 1000 levels)") from None
        if len(buffer.text) - buffer.at > max_bytes:
            raise buffer.wrong(f"a record has more than the limit of {max_bytes} bytes")
        buffer.grow()
    text = buffer.text[buffer.at : end]
    buffer.at = end
    # Within a string these cannot stand unescaped, so they are space between values.
    return text.replace("\n", " ").replace("\r", " ").encode("utf-8", "surrogateescape")
