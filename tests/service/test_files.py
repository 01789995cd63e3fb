"""Shard files: few open, short ones found out."""

import contextlib
import os
import threading
from pathlib import Path

import pytest

from packer.store import LocalStore
from service.files import ShardFiles, ShardMissing


def num_open(store: LocalStore) -> int:
    """Of the store's files: others of this process come and go with other tests' threads."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += link.readlink().is_relative_to(store.root)
    return found


@pytest.fixture
def store(tmp_path):
    store = LocalStore(tmp_path)
    for index in range(40):
        store.put(f"shards/{index}", bytes([index]) * 100)
    return store


def read(files, key, offset, count):
    buffer = bytearray(count)
    files.read_into(key, offset, memoryview(buffer))
    return bytes(buffer)


def test_f36_the_number_of_open_shards_is_bounded(store):
    files = ShardFiles(store, max_open=4)
    for _ in range(2):
        for index in range(40):
            assert read(files, f"shards/{index}", 10, 5) == bytes([index]) * 5
            assert 1 <= num_open(store) <= 4
    files.close()
    assert num_open(store) == 0


def test_a_file_that_is_read_stays_open_until_it_was_read(store):
    files = ShardFiles(store, max_open=1)
    handle = files._take("shards/0", wait=True)
    descriptor = handle.descriptor
    read(files, "shards/1", 0, 1)  # puts shard 0 out
    assert os.pread(descriptor, 1, 0) == b"\0"
    files._give_back(handle)
    with pytest.raises(OSError):
        os.fstat(descriptor)
    files.close()


def test_a_short_or_missing_shard_is_named(store):
    files = ShardFiles(store)
    with pytest.raises(ShardMissing, match="shards/0 ends at byte 100, 1 more"):
        read(files, "shards/0", 95, 6)
    with pytest.raises(ShardMissing, match="shards/99"):
        read(files, "shards/99", 0, 1)
    files.close()


def test_many_threads_read_what_is_there(store):
    files = ShardFiles(store, max_open=2)
    wrong = []

    def work(seed):
        for step in range(200):
            index = (seed * 7 + step * 13) % 40
            if read(files, f"shards/{index}", 0, 3) != bytes([index]) * 3:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    files.close()
