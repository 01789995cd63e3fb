"""What a stream was asked for: checked, and held against what a launcher says of the ranks."""

from __future__ import annotations

import contextlib
import logging
import numbers
import operator
import os
from typing import Any

log = logging.getLogger(__name__)

# Of torchrun and those that do as it does.
_VARIABLES = {"rank": "RANK", "world_size": "WORLD_SIZE"}


def whole(name: str, value: Any, *, least: int | None = None) -> int:
    """`value` as an int, also of numpy's. Raises ValueError where it is none (text, a float, a bool) or less
    than `least`."""
    found = None
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            found = operator.index(value)
    if found is None:
        hint = f'; int(os.environ["{_VARIABLES[name]}"])' if name in _VARIABLES else ""
        raise ValueError(f"{name}: an int is required, found {value!r} ({type(value).__name__}){hint}")
    if least is not None and found < least:
        raise ValueError(f"{name}: {least} or more is required, found {found}")
    return found


def whole_or_none(name: str, value: Any) -> int | None:
    """The same, or None."""
    return None if value is None else whole(name, value)


def seconds(name: str, value: Any) -> float:
    """`value` as seconds. Raises ValueError where it is none (text, None, a bool, nan) or less than 0."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    found = float(value) if is_number else -1.0
    if not found >= 0:
        raise ValueError(
            f"{name}: seconds, 0 or more, are required, found {value!r} ({type(value).__name__})"
        )
    return found


def seconds_or_none(name: str, value: Any) -> float | None:
    """The same, or None."""
    return None if value is None else seconds(name, value)


def token_of(token: str | None) -> str | None:
    """The bearer token to send: the one given, else PADFREE_TOKEN of the environment; "" sends none.

    Space around it, as the end of line that files and secrets have, is none of it. Raises ValueError, which
    does not show it, for one that no header can carry.
    """
    found = (token if token is not None else os.environ.get("PADFREE_TOKEN") or "").strip()
    for place, character in enumerate(found, start=1):
        if not "!" <= character <= "~":
            raise ValueError(
                "token: letters, digits and signs of ASCII are required, no space among them, found another "
                f"character at place {place} of {len(found)} (token=, or PADFREE_TOKEN)"
            )
    return found or None


def rank_and_size(rank: int | None, world_size: int | None, dataset: str) -> tuple[int, int]:
    """Rank and world size of a stream: 0 and 1 where they are not given.

    Where that is not what the launcher says, each rank would train on the packs of others too: a warning.
    Not an error, since one rank may read a whole dataset for itself.
    """
    wanted = (
        0 if rank is None else whole("rank", rank),
        1 if world_size is None else whole("world_size", world_size),
    )
    said = [_said(_VARIABLES["rank"], 0), _said(_VARIABLES["world_size"], 1)]
    missing = [name for name, value in (("rank", rank), ("world_size", world_size)) if value is None]
    is_other = [rank is None and said[0] != 0, world_size is None and said[1] != 1]
    if any(is_other) and said[1] > 1 and world_size != 1:
        log.warning(
            "dataset %s: the environment says RANK=%d, WORLD_SIZE=%d, but %s not given: this stream is rank "
            "%d of %d, so several ranks train on the same packs; give rank=%d, world_size=%d (those of data "
            "parallelism), or rank=0, world_size=1 where this process shall have the whole dataset",
            dataset,
            *said,
            " and ".join(missing) + (" were" if len(missing) > 1 else " was"),
            *wanted,
            *said,
        )
    return wanted


def _said(variable: str, default: int) -> int:
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        return default
