"""What a trainer takes of each batch, of every loader alike: four finished arrays, copied into one buffer.

That is what a copy to a GPU begins with (the buffer is pinned there), and nothing that a loader leaves to be
done later, or to be read from a file later, is left out of what is measured.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ARRAYS = ("input_ids", "labels", "position_ids", "cu_seqlens")
_NUMBERS = 1 << 16  # more than four arrays of a pack of 8,192 tokens need


class Taker:
    """Copies arrays of int32 into one buffer, end to end; counts tokens."""

    def __init__(self) -> None:
        self._buffer = np.empty(_NUMBERS, np.int32)
        self.num_tokens = 0

    def take(self, input_ids: Any, labels: Any, position_ids: Any, cu_seqlens: Any) -> None:
        at, buffer = 0, self._buffer
        for one in (input_ids, labels, position_ids, cu_seqlens):
            end = at + len(one)
            buffer[at:end] = one
            at = end
        self.num_tokens += len(input_ids)
