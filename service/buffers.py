"""Memory for the chunks of streams, used again and again.

Fresh memory costs a page fault for every four kilobytes, more than copying a shard's bytes into it. Nobody
gives a buffer back: it is free once the last view of it is gone, which the connection may hold long after the
chunk was written.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

Block = NDArray[np.uint8]

_SMALL_BYTES = 64 << 10  # what malloc keeps at hand itself


def _fresh(size: int) -> Block:
    """Memory that goes back to the system as soon as it is let go of.

    malloc keeps blocks of this size in its heap after a while: a service that once had many slow readers at
    the same time stayed that large.
    """
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


class Buffers:
    """Blocks of some sizes, each twice the one before; what was freed last is used first, for it lies in a
    core's cache.

    largest_bytes: of what is kept for another time; max_kept_bytes: of all that is free. Safe for threads.
    """

    def __init__(self, largest_bytes: int, *, max_kept_bytes: int = 32 << 20) -> None:
        self._largest_bytes, self._max_kept_bytes = largest_bytes, max_kept_bytes
        self._free: defaultdict[int, list[Block]] = defaultdict(list)  # by size

    @property
    def num_kept_bytes(self) -> int:
        return sum(size * len(blocks) for size, blocks in list(self._free.items()))

    def take(self, size: int) -> memoryview:
        """`size` bytes to write to, of unknown content."""
        if size <= _SMALL_BYTES:
            return np.empty(size, np.uint8).data
        if size > self._largest_bytes:
            return _fresh(size).data
        block_bytes = 1 << (size - 1).bit_length()  # at most twice what is asked for
        try:
            block = self._free[block_bytes].pop()
        except IndexError:
            block = _fresh(block_bytes)
        view = block[:size]
        # Called when the view is gone, and so every memory view of it.
        weakref.finalize(view, self._take_back, block).atexit = False
        return view.data

    def _take_back(self, block: Block) -> None:
        if self.num_kept_bytes + len(block) <= self._max_kept_bytes:
            self._free[len(block)].append(block)
