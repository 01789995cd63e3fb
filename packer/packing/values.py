"""What the parts of the packing engine hand to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


class PackingError(ValueError):
    """Lengths that cannot be packed as asked, or options that contradict each other."""


class Layout(NamedTuple):
    """What an engine answers: which pieces stand in which pack.

    order: (num_pieces,) int64, a permutation of the pieces, pack after pack. offsets: (num_packs + 1,)
    int64, where each pack begins in `order`.
    """

    order: Int64
    offsets: Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How much a pack holds once padding is counted.

    A segment of `length` tokens takes `length` rounded up to segment_multiple; a pack is rounded up to
    pack_multiple and stays within max_tokens.
    """

    max_tokens: int
    segment_multiple: int = 1
    pack_multiple: int = 1

    @property
    def pack(self) -> int:
        """Tokens of segments, their padding counted, that a pack can hold."""
        return self.max_tokens // self.pack_multiple * self.pack_multiple

    @property
    def segment(self) -> int:
        """The longest segment that can stand in a pack, in real tokens."""
        return self.pack // self.segment_multiple * self.segment_multiple

    def padded(self, lengths: Int64) -> Int64:
        """What segments of `lengths` tokens take in a pack."""
        multiple = self.segment_multiple
        return lengths if multiple == 1 else -(-lengths // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """What is left of the examples after `overlong`, in stream order. No piece is empty.

    example, start, length: (num_pieces,) int64. truncated, dropped: ids of examples that lost tokens.
    """

    example: Int64
    start: Int64
    length: Int64
    truncated: Int64
    dropped: Int64
