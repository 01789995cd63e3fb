"""Memory for the chunks of streams, used again and again.

Fresh memory costs a page fault for every four kilobytes, more than copying a shard's bytes into it. Nobody
gives a buffer back: it is free once the last view of it is gone, which the connection may hold long after the
chunk was written.
"""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

Block = NDArray[np.uint8]

_SMALL_BYTES = 64 << 10  # what malloc keeps at hand itself


class Buffers:
    """Blocks of one size; the one that was freed last is used first, for it lies in a core's cache.

    max_kept_bytes: of blocks that are free. Safe for threads.
    """

    def __init__(self, block_bytes: int, *, max_kept_bytes: int = 32 << 20) -> None:
        self._block_bytes = block_bytes
        self._max_kept = max(1, max_kept_bytes // max(1, block_bytes))
        self._free: list[Block] = []

    def take(self, size: int) -> memoryview:
        """`size` bytes to write to, of unknown content."""
        if not _SMALL_BYTES < size <= self._block_bytes:
            return np.empty(size, np.uint8).data
        try:
            block = self._free.pop()
        except IndexError:
            block = np.empty(self._block_bytes, np.uint8)
        view = block[:size]
        # Called when the view is gone, and so every memory view of it.
        weakref.finalize(view, self._take_back, block).atexit = False
        return view.data

    def _take_back(self, block: Block) -> None:
        if len(self._free) < self._max_kept:
            self._free.append(block)
