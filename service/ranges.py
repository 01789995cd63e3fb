"""Conditional requests and byte ranges, as RFC 9110 has them. Pure functions of header texts."""

from __future__ import annotations

import re

_RANGE = re.compile(r"bytes=\s*([0-9]*)-([0-9]*)\s*", re.IGNORECASE)
_MAX_DIGITS = 18


class Unsatisfiable(ValueError):
    """The range is well formed and selects no byte of the file: status 416."""


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The half-open byte range that a Range header selects of a file of `size` bytes.

    None: send the whole file, because there is no range, it is not well formed (RFC 9110, 14.2: such a
    header is ignored), or there are several (a server need not serve those). Raises Unsatisfiable.
    """
    found = _RANGE.fullmatch(header.strip()) if header else None
    if found is None or not any(found.groups()) or max(map(len, found.groups())) > _MAX_DIGITS:
        return None
    first, last = found.groups()
    if not first:  # the last so many bytes
        start, stop = max(0, size - int(last)), size
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < int(first):
            return None
    if start >= stop:
        raise Unsatisfiable(f"bytes {header} of {size}")
    return start, stop


def is_unchanged(if_none_match: str | None, etag: str) -> bool:
    """Whether If-None-Match names `etag` (compared weakly, RFC 9110, 13.1.2): status 304."""
    if if_none_match is None:
        return False
    names = [name.strip().removeprefix("W/") for name in if_none_match.split(",")]
    return "*" in names or etag in names


def may_send_range(if_range: str | None, etag: str) -> bool:
    """Whether If-Range lets a range be sent: absent, or `etag` itself (compared strongly, 13.1.5).

    A date never matches: shards tell no date.
    """
    return if_range is None or if_range.strip() == etag
