"""One line of JSON to one row under padfree's names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

_EXCERPT = 40
_FAULT_MARK = b"!"  # no JSON value begins with it
_MISSING = object()
JOIN = "+"  # "instruction+input": both texts, a blank line between them


# orjson reads whole numbers of more than 64 bits as floats. Tool calls print their numbers, so there
# they must stay as they are.
LONG_NUMBER = re.compile(rb"[0-9]{19}")


class RowFault(ValueError):
    """Why a record cannot be read. Its text is a RowError's reason."""


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of one line. Raises RowFault.

    NaN and Infinity, which Python writes, are accepted: they matter only in a field that is used.
    """
    try:
        value = _parse_slowly(raw) if LONG_NUMBER.search(raw) else orjson.loads(raw)
    except orjson.JSONDecodeError:
        value = _parse_slowly(raw)
    if not isinstance(value, dict):
        raise RowFault(f"not an object but {kind(value)}")
    return value


def parse_value(text: str) -> Any:
    """A JSON value, whole numbers as they are. Raises ValueError."""
    return json.loads(text) if LONG_NUMBER.search(text.encode("utf-8", "replace")) else orjson.loads(text)


def _parse_slowly(raw: bytes) -> Any:
    """What orjson refuses and JSON as Python writes it allows; else the reason."""
    raw = raw.rstrip()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowFault(f"not UTF-8 (byte {error.start + 1} of the line)") from None
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise RowFault(
            f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno}): {excerpt(text)}"
        ) from None
    except RecursionError:
        raise RowFault("JSON nested too deeply (more than 1000 levels)") from None
    except UnicodeEncodeError:
        raise RowFault(
            "not a Unicode text: half of a surrogate pair (\\ud800 to \\udfff) stands alone"
        ) from None
    except ValueError as error:  # a number of thousands of digits
        raise RowFault(f"not JSON that can be read ({error})") from None
    return value


def fault_line(fault: RowFault) -> bytes:
    """The line that stands for a record that could not be converted to JSON."""
    return _FAULT_MARK + str(fault).replace("\n", " ").encode("utf-8", "replace")


def parse_converted(raw: bytes) -> dict[str, Any]:
    """The object of one line of a spool that was made from another form. Raises RowFault."""
    if raw.startswith(_FAULT_MARK):
        raise RowFault(raw[len(_FAULT_MARK) :].rstrip().decode("utf-8", "replace"))
    return parse_object(raw)


def parse_document(raw: bytes) -> dict[str, Any]:
    """A whole file as the field `text`. Raises RowFault."""
    try:
        return {"text": raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8")}
    except UnicodeDecodeError as error:
        raise RowFault(f"not UTF-8 (byte {error.start + 1} of the file)") from None


def excerpt(text: str) -> str:
    """The beginning of a text, for a message."""
    return repr(text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…")


def kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {
        list: "a list",
        np.ndarray: "a list",
        str: "a text",
        type(None): "null",
        bool: "true or false",
        dict: "an object",
    }
    return names.get(type(value), "a number")


class FieldPicker:
    """Takes the fields in use out of an object that was looked at, under padfree's names.

    A source name is a key, else a dotted path (`r.b`), else several of these joined by "+" (texts with
    a blank line between them; empty and missing ones are left out). A field that is not there is
    left out of the row. Raises RowFault where what is to be joined is no text, and what `check` raises.
    """

    def __init__(self, fields: Mapping[str, str], check: Callable[[Mapping[str, Any]], None]) -> None:
        self._check = check
        self._plain = [(ours, theirs) for ours, theirs in fields.items() if not _is_path(theirs)]
        self._paths = [(ours, theirs) for ours, theirs in fields.items() if _is_path(theirs)]

    def __call__(self, record: Mapping[str, Any]) -> dict[str, Any]:
        self._check(record)
        row = {ours: record[theirs] for ours, theirs in self._plain if theirs in record}
        for ours, theirs in self._paths:
            value = find(record, theirs)
            if value is not _MISSING:
                row[ours] = value
        return row


def _is_path(name: str) -> bool:
    return "." in name or JOIN in name


def find(record: Mapping[str, Any], name: str) -> Any:
    """The value of a source name in a record; `is_missing` tells whether there was one. Raises RowFault."""
    if name in record:
        return record[name]
    if JOIN in name:
        return _joined(name, [(part, find(record, part)) for part in name.split(JOIN)])
    value: Any = record
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return _MISSING
        value = value[key]
    return value


def is_missing(value: Any) -> bool:
    return value is _MISSING


def _joined(name: str, parts: Sequence[tuple[str, Any]]) -> Any:
    """The texts of several fields as one. Raises RowFault where one is no text: the others would be lost."""
    if is_missing(parts[0][1]):
        return _MISSING
    found = [(part, value) for part, value in parts if not is_missing(value) and value is not None]
    for part, value in found:
        if not isinstance(value, str):
            raise RowFault(
                f"texts are required to be joined as {name!r}, found {kind(value)} in {part!r}; "
                "name one field"
            )
    return "\n\n".join(value for _, value in found if value) if found else None


def roots(fields: Mapping[str, str]) -> frozenset[str]:
    """Every name that a column in use could have: whole names, and first keys of paths."""
    names: set[str] = set()
    for theirs in fields.values():
        for part in (theirs, *theirs.split(JOIN)):
            names |= {part, part.split(".")[0]}
    return frozenset(names)
