"""The store in an object store: the same as a folder, with a cache that is never stale and leases."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from s3 import Objects, s3_server, use
from serving import wait_for

from packer.store import LocalStore, LockLost, NoSpaceLeft, Store, StoreError, leases, objects, open_store
from packer.store.cache import Cache
from packer.store.objects import ObjectStore


class Remote:
    """The server's side of a test."""

    def __init__(self) -> None:
        self.objects: Objects = {"bucket/": b""}
        self.calls: list[str] = []
        self.refused: set[str] = set()


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    monkeypatch.setenv("PADFREE_CACHE_DIR", str(tmp_path / "cache"))
    one = Remote()
    with s3_server(one.objects, calls=one.calls, refused=one.refused) as url, use(url, monkeypatch):
        yield one


@pytest.fixture
def store(remote: Remote) -> ObjectStore:
    found = open_store("s3://bucket/some/prefix")
    assert isinstance(found, ObjectStore)
    return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that run out in a second."""
    for name, value in (("LEASE_S", 1.0), ("_RENEW_S", 0.1), ("_HOLD_S", 0.7), ("_SETTLE_S", 0.1)):
        monkeypatch.setattr(leases, name, value)
    monkeypatch.setattr(leases, "_LOOK_S", 0.05)


def other(store: ObjectStore, cache: Path) -> ObjectStore:
    """The same store, as another machine has it."""
    return ObjectStore(store.url, Cache(cache, 1 << 30))


# ------------------------------------------------------------------ the verbs

_names = st.sampled_from(["a", "b c", "ü&'\"<", "%41.x"])
_keys = st.tuples(_names, _names, _names).map("/".join)  # in our layout no object lies where a folder is
_verbs = st.sampled_from(["put", "stage", "abandon", "delete", "delete all"])
_steps = st.lists(st.tuples(_verbs, _keys, st.binary(max_size=40)), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_steps)
def test_an_object_store_does_what_a_folder_does(
    steps: list[tuple[str, str, bytes]],
    remote: Remote,
    store: ObjectStore,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    remote.objects.clear()
    remote.objects["bucket/"] = b""
    folder = LocalStore(tmp_path_factory.mktemp("folder"))
    for verb, key, data in steps:
        _do(folder, verb, key, data)
        _do(store, verb, key, data)
        assert folder.exists(key) == store.exists(key)
    for key in {key for _, key, _ in steps}:
        assert _read(folder, key) == _read(store, key)
        for prefix in (key.rpartition("/")[0], key.partition("/")[0]):
            # A folder may outlive what was in it.
            assert _holding(folder, prefix, folder.list(prefix)) == _holding(
                folder, prefix, store.list(prefix)
            )


def _holding(folder: LocalStore, prefix: str, names: list[str]) -> list[str]:
    return [name for name in names if _holds_an_object(folder, f"{prefix}/{name}")]


def _holds_an_object(folder: LocalStore, key: str) -> bool:
    path = folder.path(key)
    return path.is_file() or any(one.is_file() for one in path.rglob("*"))


def _do(store: Store, verb: str, key: str, data: bytes) -> None:
    if verb == "put":
        store.put(key, data)
    elif verb == "delete":
        store.delete(key)
    elif verb == "delete all":
        store.delete(key.rpartition("/")[0])
    else:
        with store.stage(key.split("/")[0]) as staged:
            staged.write(data[:7])
            staged.write(memoryview(data[7:]))
            if verb == "stage":
                staged.publish(key)


def _read(store: Store, key: str) -> Any:
    try:
        data = store.get(key)
        with store.open(key) as file, store.open_part(key) as part:
            part.seek(len(data) // 2)
            assert part.read(3) == data[len(data) // 2 :][:3]
            part.seek(0)
            assert file.read() == part.read() == data
        assert bytes(store.map(key)) == data
        return data
    except FileNotFoundError:
        return None


def test_many_names_are_listed_whole(store: ObjectStore) -> None:
    names = [f"{number:06d}.arrow" for number in range(250)]  # more than a page of the server
    for name in names:
        store.put(f"datasets/d/commits/{name}", b"x")
    store.put("datasets/d/spec.json", b"{}")
    assert store.list("datasets/d/commits") == names
    assert store.list("datasets/d") == ["commits", "spec.json"]
    store.delete("datasets/d")
    assert store.list("datasets") == []


def test_large_objects_come_back_whole(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_UPLOAD_BYTES", 6 << 20)
    monkeypatch.setattr(objects, "_PIECE_BYTES", 1 << 20)
    data = np.random.default_rng(0).bytes((20 << 20) + 17)
    store.put("datasets/d/shards/0", data)
    with store.stage("datasets/d/work") as staged:
        staged.write(data)
        staged.publish("datasets/d/work/0")
    for key in ("datasets/d/shards/0", "datasets/d/work/0"):
        assert store.get(key) == data
        assert bytes(store.map(key)) == data


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd"])
def test_a_key_cannot_leave_the_prefix(store: ObjectStore, remote: Remote, key: str) -> None:
    with pytest.raises(StoreError, match="leads out"):
        store.put(key, b"x")
    assert list(remote.objects) == ["bucket/"]


def test_it_pickles_to_the_same_store_and_opens_by_its_url(store: ObjectStore) -> None:
    assert pickle.loads(pickle.dumps(store)) is store
    assert open_store(store.url) is store
    assert open_store("s3://bucket/some/prefix/").url == store.url


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "s3://bad bucket/x", "s3://bucket/a//b"])
def test_a_url_that_names_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="BUCKET/PREFIX"):
        open_store(url)


# ------------------------------------------------------------------ errors


def test_a_missing_bucket_is_named(remote: Remote) -> None:
    store = open_store("s3://nowhere/x")
    assert not store.is_there()
    with pytest.raises(StoreError, match=r"s3://nowhere/x/a/b .*no such bucket"):
        store.put("a/b", b"x")
    assert open_store("s3://bucket/not/yet").is_there()


def test_refused_credentials_are_named(store: ObjectStore, remote: Remote) -> None:
    remote.refused |= {"PUT", "GET", "HEAD"}
    with pytest.raises(
        StoreError, match=r"cannot write s3://bucket/some/prefix/a/b .*refuses these credentials"
    ):
        store.put("a/b", b"x")
    with pytest.raises(StoreError, match=r"cannot read .*credentials"):
        store.get("a/b")
    with pytest.raises(StoreError, match="credentials"):
        store.probe()


def test_an_endpoint_that_is_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with use("http://127.0.0.1:9", monkeypatch), pytest.raises(StoreError, match="AWS_ENDPOINT_URL"):
        open_store("s3://bucket/x").get("a/b")


def test_a_cache_folder_that_cannot_be_made_is_named(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PADFREE_CACHE_DIR", str(tmp_path / "file/cache"))
    with pytest.raises(StoreError, match="PADFREE_CACHE_DIR"):
        open_store("s3://bucket/x").stage("work")
    monkeypatch.setenv("PADFREE_CACHE_BYTES", "16G")
    with pytest.raises(StoreError, match="'16G'"):
        open_store("s3://bucket/x")


# ------------------------------------------------------------------ the cache


def test_what_has_a_digest_is_asked_for_once(store: ObjectStore, remote: Remote) -> None:
    data = b"0123456789" * 100
    store.put("d/shards/0", data)
    digest = hashlib.sha256(data).hexdigest()
    assert bytes(store.map("d/shards/0", sha256=digest)) == data
    remote.calls.clear()
    for _ in range(5):
        with store.open("d/shards/0", sha256=digest) as file:
            assert file.read() == data
    assert remote.calls == []


def test_another_content_under_the_same_key_is_seen(store: ObjectStore, tmp_path: Path) -> None:
    store.put("d/work/0", b"old")
    assert bytes(store.map("d/work/0")) == b"old"
    other(store, tmp_path / "other").put("d/work/0", b"new")
    assert bytes(store.map("d/work/0")) == b"new"


def test_a_shard_with_another_digest_is_refused(store: ObjectStore) -> None:
    store.put("d/shards/0", b"damaged")
    with pytest.raises(StoreError, match=r"shards/0: sha256 0000.* is required, found .*padfree verify"):
        store.open("d/shards/0", sha256="0" * 64)


def test_the_least_recently_used_copies_go_and_open_ones_stay_readable(
    remote: Remote, tmp_path: Path
) -> None:
    store = ObjectStore("s3://bucket/x", Cache(tmp_path / "small", 1000))
    for number in range(12):
        store.put(f"d/shards/{number}", bytes([number]) * 200)
    first = store.open("d/shards/0")
    for number in range(1, 4):
        store.open(f"d/shards/{number}").close()
    store.open("d/shards/1").close()  # used again
    for entry, age_s in zip(sorted((tmp_path / "small").iterdir(), key=_used), (40, 30, 20, 10), strict=True):
        os.utime(entry, (time.time() - age_s,) * 2)
    store.open("d/shards/4").close()
    store.open("d/shards/5").close()
    left = [path.read_bytes()[0] for path in (tmp_path / "small").iterdir()]
    assert sum(path.stat().st_size for path in (tmp_path / "small").iterdir()) <= 1000
    assert 0 not in left
    assert {1, 4, 5} <= set(left)
    with first:
        assert first.read() == bytes(200)
    large = bytes(5000)  # over the limit by itself: it is kept as long as nothing comes after it
    store.put("d/shards/large", large)
    assert bytes(store.map("d/shards/large")) == large


def _used(path: Path) -> int:
    return path.stat().st_mtime_ns


def test_threads_fetch_an_object_once(store: ObjectStore, remote: Remote) -> None:
    data = os.urandom(1 << 20)
    store.put("d/shards/0", data)
    digest = hashlib.sha256(data).hexdigest()
    remote.calls.clear()
    found: list[bytes] = []

    def read() -> None:
        found.append(bytes(store.map("d/shards/0", sha256=digest)))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [data] * 8
    assert remote.calls.count("GET bucket/some/prefix/d/shards/0") == 1


def test_a_full_disk_makes_room_and_then_is_named(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1 << 40)  # the disk is smaller
    for number in range(3):
        cache.open(cache.entry(str(number)), lambda file: file.write(bytes(300)) and None).close()
    tries: list[int] = []

    def fetch(file: Any) -> None:
        tries.append(len(list(tmp_path.iterdir())))
        file.write(b"half")
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(b" and half")

    with cache.open(cache.entry("new"), fetch) as file:
        assert file.read() == b"half and half"
    assert tries[1] < tries[0]

    def full(file: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(NoSpaceLeft, match="PADFREE_CACHE_DIR"):
        cache.open(cache.entry("more"), full)
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_fetch_that_breaks_off_leaves_nothing(store: ObjectStore, remote: Remote, tmp_path: Path) -> None:
    store.put("d/shards/0", b"x" * 100)
    with pytest.raises(StoreError):
        store.open("d/shards/0", sha256="0" * 64)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("whole", [True, False])
def test_a_cache_that_is_cleaned_while_it_fetches_costs_no_more_than_the_copy(
    tmp_path: Path, whole: bool
) -> None:
    folder = tmp_path / "cache"
    cache = Cache(folder, 1 << 30)

    def fetch(file: Any) -> None:
        file.write(b"shard")
        if whole:
            shutil.rmtree(folder)
        else:
            for path in folder.iterdir():
                path.unlink()

    with cache.open(cache.entry("a"), fetch) as file:
        assert file.read() == b"shard"
    with cache.open(cache.entry("a"), lambda file: file.write(b"again") and None) as file:
        assert file.read() == b"again"
    assert [path.read_bytes() for path in folder.iterdir()] == [b"again"]


def test_an_object_that_is_gone_is_not_taken_for_a_cleaned_cache(store: ObjectStore) -> None:
    with pytest.raises(FileNotFoundError):
        store.open("d/shards/0", sha256="0" * 64)


def test_a_cache_folder_that_does_not_stay_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache", 1 << 30)
    made = cache.temporary

    def gone_again() -> Path:
        path = made()
        path.parent.rmdir()
        return path

    monkeypatch.setattr(cache, "temporary", gone_again)
    with pytest.raises(StoreError, match=f"the cache folder {tmp_path}/cache is removed"):
        cache.open("a" * 40, lambda file: None)


def test_a_staged_file_that_is_cleaned_away_is_named(store: ObjectStore, tmp_path: Path) -> None:
    with store.stage("work") as staged:
        staged.write(b"x")
        shutil.rmtree(tmp_path / "cache")
        with pytest.raises(StoreError, match=f"was removed before .* leave {tmp_path}/cache alone"):
            staged.publish("work/0")


# ------------------------------------------------------------------ leases

PUT_LOCK = "PUT bucket/some/prefix/locks/d"


@pytest.mark.usefixtures("quick")
def test_a_lease_is_held_by_one_and_given_back(
    store: ObjectStore, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long that no machine stands still for it.
    monkeypatch.setattr(leases, "LEASE_S", 2.0)
    monkeypatch.setattr(leases, "_HOLD_S", 1.9)
    elsewhere = other(store, tmp_path / "other")
    assert not elsewhere.is_locked("locks/d")
    with store.lock("locks/d") as mine:
        assert mine
        store.check_lock("locks/d")
        for one in (store, elsewhere):
            assert one.is_locked("locks/d")
            with one.lock("locks/d") as too:
                assert not too
        renewals = remote.calls.count(PUT_LOCK)
        # For longer than a lease, a tenth of a second between two: it is renewed.
        wait_for(lambda: remote.calls.count(PUT_LOCK) > renewals + 21)
        store.check_lock("locks/d")
        with elsewhere.lock("locks/d") as too:
            assert not too
    assert not elsewhere.is_locked("locks/d")
    with pytest.raises(LockLost):
        store.check_lock("locks/d")
    with elsewhere.lock("locks/d") as too:
        assert too


@pytest.mark.usefixtures("quick")
def test_a_lease_of_a_dead_process_runs_out(store: ObjectStore) -> None:
    store.put("locks/d", json.dumps({"owner": "gone", "beat": 7}).encode())
    assert store.is_locked("locks/d")
    with store.lock("locks/d") as mine:  # waits for it
        assert mine
        assert b"gone" not in store.get("locks/d")


def until_lost(store: ObjectStore, taken: bytes | None = None) -> None:
    """Wait for LockLost; `taken` is put there by another meanwhile."""

    def is_lost() -> bool:
        if taken is not None:
            store.put("locks/d", taken)
        try:
            store.check_lock("locks/d")
        except LockLost:
            return True
        return False

    wait_for(is_lost)


@pytest.mark.usefixtures("quick")
def test_who_cannot_renew_has_lost_it(store: ObjectStore, remote: Remote) -> None:
    with store.lock("locks/d") as mine:
        assert mine
        remote.refused.add("PUT")
        until_lost(store)
    remote.refused.clear()


@pytest.mark.usefixtures("quick")
def test_who_finds_another_has_lost_it_and_leaves_it_alone(store: ObjectStore) -> None:
    taken = json.dumps({"owner": "other", "beat": 1}).encode()
    with store.lock("locks/d") as mine:
        assert mine
        until_lost(store, taken)
    assert store.get("locks/d") == taken


@pytest.mark.usefixtures("quick")
def test_of_many_that_want_a_free_lock_one_gets_it(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than any takes to write its name, on a slow machine too; and a lease outlasts that.
    monkeypatch.setattr(leases, "_SETTLE_S", 1.0)
    monkeypatch.setattr(leases, "LEASE_S", 60.0)
    monkeypatch.setattr(leases, "_HOLD_S", 60.0)
    start, got, refused = threading.Barrier(6), [], []

    def take(one: ObjectStore) -> None:
        start.wait()
        with one.lock("locks/d") as mine:
            (got if mine else refused).append(one)
            if mine:
                wait_for(lambda: len(got) + len(refused) == 6)

    machines = [other(store, tmp_path / str(number)) for number in range(6)]
    threads = [threading.Thread(target=take, args=(one,)) for one in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 5)
