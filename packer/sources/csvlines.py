"""CSV to JSON Lines: a header row, then a record a row; all values are text."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator

import orjson

from packer.sources.lines import BOM, TooLong, read_lines
from packer.sources.parse import RowFault, fault_line
from packer.sources.streams import Stream
from packer.sources.values import MIB, SourceError
from packer.sources.watch import Watch

# The csv module holds a field as 4 bytes a character, and again when it grows.
_MAX_FIELD_CHARS = 64 * MIB
_NOTHING = Watch({})


def csv_lines(
    stream: Stream,
    path: str,
    *,
    max_bytes: int,
    names: frozenset[str] | None = None,
    watch: Watch = _NOTHING,
) -> Iterator[bytes]:
    """Each record as a line of JSON, at the line number where it begins in the file.

    Lines of the file where no record begins (the header, blank lines, the rest of a value over several
    lines) come as blank lines before a record, so that numbers stay true. `names`: the columns in use;
    None takes all. `watch`: what no record may hold in others. Raises SourceError for a header that does not
    tell its columns apart, and for a quote that is not closed: behind it no record can be told from another.
    """
    csv.field_size_limit(
        _MAX_FIELD_CHARS
    )  # the module's default is 128 KiB; it knows no limit of a reader's own
    texts = _Texts(stream, path, max_bytes)
    # strict: a quote that is not doubled (or has a backslash before it) would garble its value without a word
    reader = csv.reader(texts, strict=True)
    try:
        header = next(filter(None, reader), None)  # the first row that is not blank
    except csv.Error as error:
        what = "has a quote that is not closed" if texts.ended else f"is not CSV ({error})"
        raise SourceError(f"{path}: the header row {what}; correct it") from None
    if header is None:
        return
    columns = [(at, name) for at, name in enumerate(header) if names is None or name in names]
    watched = [(at, name) for at, name in enumerate(header) if watch.may_matter(name)]
    twice = [name for name, count in Counter(name for _, name in columns).items() if count > 1 and name]
    if twice:
        raise SourceError(f"{path}: the header row names column {twice[0]!r} twice; rename one of them")
    written = 0
    while True:
        begins = reader.line_num + 1
        line = b""
        try:
            row = next(reader, None)
            if row is None:
                return
            if texts.ended:
                raise _unclosed(path, begins)
            if row:
                line = _record(row, columns, len(header), watch, watched)
        except csv.Error as error:
            if "limit" in str(error):
                raise SourceError(
                    f"{path}, line {begins}: a value has more than {_MAX_FIELD_CHARS} characters; "
                    "close its quote, or split it"
                ) from None
            if texts.ended:
                raise _unclosed(path, begins) from None
            line = fault_line(RowFault(f"not CSV ({error}); a quote within a value is to be doubled"))
        except RowFault as fault:
            line = fault_line(fault)
        if line:
            yield b"\n" * (begins - 1 - written) + line
            written = begins


def _unclosed(path: str, line: int) -> SourceError:
    return SourceError(f"{path}, line {line}: a quote is not closed; correct it")


class _Texts:
    """The lines of a file as texts.

    `ended` tells that one more was asked for than there are. A row that is whole asks for none behind
    its own last line, so in a row after which it is set a quote was never closed.
    """

    def __init__(self, stream: Stream, path: str, max_bytes: int) -> None:
        self.ended = False
        self._texts = self._read(stream, path, max_bytes)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._texts)

    def _read(self, stream: Stream, path: str, max_bytes: int) -> Iterator[str]:
        number = 0
        for lines in read_lines(stream, max_bytes=max_bytes):
            for raw in lines:
                number += 1
                if isinstance(raw, TooLong):
                    found = f"{raw.num_bytes} bytes, more than the limit of {max_bytes}"
                    raise SourceError(f"{path}, line {number}: {found}; split it")
                text = raw.removeprefix(BOM) if number == 1 else raw
                yield text.decode("utf-8", "surrogateescape") + "\n"
        self.ended = True


def _record(
    row: list[str],
    columns: list[tuple[int, str]],
    num_columns: int,
    watch: Watch,
    watched: list[tuple[int, str]],
) -> bytes:
    if len(row) != num_columns:
        raise RowFault(f"{len(row)} values for {num_columns} columns")
    record = {name: row[at] for at, name in columns}
    if watched:
        watch.check(record | {name: row[at] for at, name in watched})
    try:
        return orjson.dumps(record)
    except TypeError:
        raise RowFault("not UTF-8") from None
