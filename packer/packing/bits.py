"""Sets of lengths as Python integers: bit l of `forward` says that length l is there.

`backward` holds the same set mirrored at the longest length (bit longest - l), so that shifting it by the
difference of longest and room lines length a up with length room - a: one shift and one AND tell all pairs
that fill `room` exactly. This is the bit-set form of subset sum for two items (Pisinger 2003), O(longest /
64) words a question.
"""

from __future__ import annotations

import numpy as np

from packer.packing.values import Int64


def bit_sets(lengths: Int64, longest: int) -> tuple[int, int]:
    """(forward, backward) of a set of lengths in [1, longest]."""
    there = np.zeros(longest + 1, np.uint8)
    there[lengths] = 1
    forward = int.from_bytes(np.packbits(there, bitorder="little").tobytes(), "little")
    backward = int.from_bytes(np.packbits(there[::-1], bitorder="little").tobytes(), "little")
    return forward, backward


def exact_pairs(forward: int, backward: int, *, room: int, longest: int) -> int:
    """Bit i is set where a = i + (room + 1) // 2 and b = room - a <= a are both in the set."""
    shift = longest - room
    aligned = backward >> shift if shift >= 0 else backward << -shift
    return (forward & aligned) >> ((room + 1) // 2)
