"""Memory of chunks: used again once nobody holds it, never before."""

import resource
from pathlib import Path

import numpy as np

from service.buffers import Buffers
from service.settings import Settings
from service.state import Service


def address(data):
    return np.frombuffer(data, np.uint8).ctypes.data


def test_memory_is_used_again_once_nobody_holds_it():
    buffers = Buffers(100_000)
    first = buffers.take(100_000)
    at = address(first)
    second = buffers.take(90_000)
    assert (len(second), address(second) != at) == (90_000, True)
    held = first[10:20]  # as a connection holds what it could not send yet
    held[:] = b"still here"
    del first
    third = buffers.take(100_000)
    third[:] = bytes(100_000)
    assert (bytes(held), address(third) != at) == (b"still here", True)
    del held
    assert address(buffers.take(80_000)) == at


def test_what_is_free_is_bounded():
    buffers = Buffers(100_000, max_kept_bytes=300_000)
    taken = [buffers.take(100_000) for _ in range(5)]
    taken.clear()
    assert buffers.num_kept_bytes == 2 * (128 << 10)


def test_a_small_chunk_does_not_hold_a_large_block():
    buffers = Buffers(1 << 20)
    large = [buffers.take(1 << 20)]
    large.clear()
    small = buffers.take(70_000)
    assert buffers.num_kept_bytes == 1 << 20
    del small
    assert buffers.num_kept_bytes == (1 << 20) + (128 << 10)


def test_small_and_very_large_pieces_are_not_kept():
    buffers = Buffers(100_000)
    for size in (0, 1, 64 << 10, 100_001):
        assert len(buffers.take(size)) == size
    assert buffers.num_kept_bytes == 0
    assert len(Buffers(4096).take(70_000)) == 70_000


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_memory_of_many_readers_goes_back_when_they_are_gone():
    """malloc would keep it, from the second time on: small objects that live on lie between the blocks."""
    buffers, live_on = Buffers(1 << 20, max_kept_bytes=0), []
    before = resident_bytes()
    for size in (1 << 20, 1_500_000):  # of a chunk; of a message that is larger than one
        for _ in range(3):
            taken = []
            for _ in range(100):
                taken.append(buffers.take(size))
                taken[-1][:] = bytes(size)
                live_on += [bytearray(1000) for _ in range(10)]
            assert resident_bytes() - before > 90 << 20
            taken.clear()
    assert resident_bytes() - before < 50 << 20


def test_chunks_of_all_streams_keep_to_their_memory(tmp_path):
    service = Service(Settings.from_environment({}, store=tmp_path, max_chunk_bytes=1_000_000))
    for num_streams in (1, 100, 300, 1000, 2000):
        service.num_streams = num_streams
        size = service.chunk_bytes()
        block = service.buffers.take(size).obj.base
        lent = size if block is None else len(block)
        assert lent == size <= 1_000_000
        assert 2 * num_streams * lent <= service.settings.max_buffer_bytes
