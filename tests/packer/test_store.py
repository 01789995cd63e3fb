"""The store: objects are complete or not there; locks die with their holder."""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packer.store import LocalStore, NoSpaceLeft, StoreError


def test_put_get_map_list_delete(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b/one", b"1")
    store.put("a/b/two", memoryview(b"22"))
    store.put("a/b/one", b"111")
    assert store.get("a/b/one") == b"111"
    assert bytes(store.map("a/b/two")) == b"22"
    assert store.list("a/b") == ["one", "two"]
    assert store.list("nowhere") == []
    store.delete("a/b/one")
    assert not store.exists("a/b/one")
    store.delete("a")
    store.delete("a")
    with pytest.raises(FileNotFoundError):
        store.get("a/b/two")


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd"])
def test_a_key_cannot_leave_the_store(tmp_path: Path, key: str) -> None:
    with pytest.raises(StoreError):
        LocalStore(tmp_path / "store").put(key, b"x")
    assert [path.name for path in tmp_path.rglob("*")] in ([], ["store"])


def test_f40_a_writer_killed_in_mid_write_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    # Dies by SIGKILL between writing and renaming, the instant that could leave half a file.
    code = """
import os, signal, sys
from packer import store
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
store.LocalStore(sys.argv[1]).put("d/shard", b"x" * 1000)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    store = LocalStore(tmp_path)
    assert not store.exists("d/shard")
    assert store.list("d") == []
    assert store.sweep("d") == 1
    assert list((tmp_path / "d").iterdir()) == []


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpaceLeft, match="no space left to write shard in"):
        LocalStore(tmp_path).put("d/shard", b"x")
    assert list((tmp_path / "d").iterdir()) == []


def test_what_may_not_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a dataset would be said to be gone whose shards are, and whose commits are not."""
    store = LocalStore(tmp_path)
    for name in "abc":
        store.put(f"x/{name}", b"1")
    store.put("x/more/c", b"1")
    store.put("y/kept", b"1")
    (tmp_path / "x/link").symlink_to(tmp_path / "y")
    unlink = os.unlink

    def guarded(path: Any, *args: Any, number: int = errno.EACCES, **options: Any) -> None:
        if str(path).endswith("b"):
            raise OSError(number, os.strerror(number), path)
        unlink(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", guarded)
        with pytest.raises(
            StoreError, match=r"cannot write .*Permission denied; the store .* must be a folder"
        ):
            store.delete("x")
        patch.setattr(os, "unlink", functools.partial(guarded, number=errno.ENOENT))
        store.delete("x")  # another removes it too
    assert store.list("x") == ["b"]
    store.delete("x")
    assert not store.exists("x")
    assert store.exists("y/kept")


def test_a_lock_is_held_by_one_and_freed_by_death(tmp_path: Path) -> None:
    code = """
import sys, time
from packer.store import LocalStore
with LocalStore(sys.argv[1]).lock("locks/d") as mine:
    print(mine, flush=True)
    time.sleep(600)
"""
    store = LocalStore(tmp_path)
    assert not store.is_locked("locks/d")
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "True"
        assert store.is_locked("locks/d")
        with store.lock("locks/d", wait_s=0.05) as mine:
            assert not mine
    finally:
        holder.kill()
        holder.wait()
    assert not store.is_locked("locks/d")
    with store.lock("locks/d") as mine:
        assert mine
