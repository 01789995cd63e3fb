"""Places in rendered texts: characters, bytes and tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from packer.tokenization import Located


def num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def in_bytes(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending (start, stop) in characters as the same in bytes of the text's UTF-8."""
    if text.isascii():
        return list(spans)
    found, at, num_bytes = [], 0, 0
    for start, stop in spans:
        begin = num_bytes + len(text[at:start].encode())
        num_bytes = begin + len(text[start:stop].encode())
        at = stop
        found.append((begin, num_bytes))
    return found


def covered(located: Located, spans: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True for each token that overlaps one of the spans (m, 2), ascending, in bytes of the batch."""
    first = np.searchsorted(located.ends, spans[:, 0], side="right")
    last = np.searchsorted(located.starts, spans[:, 1], side="left")
    steps = np.zeros(len(located.ids) + 1, np.int64)
    full = first < last  # an empty span may lie inside a token
    np.add.at(steps, first[full], 1)
    np.add.at(steps, last[full], -1)
    return np.cumsum(steps[:-1]) > 0
