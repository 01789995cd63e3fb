"""A store at s3://: packed, served, streamed and resumed, with the same bytes as in a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packing_job import Packed, pack_document, spec_of, write_rows, write_tokenizer
from s3 import Objects, _Handler, environment, s3_server, use
from serving import messages, running, spawned, wait_for

from packer.coordinator import Busy, pack
from packer.manifest import dataset_key, lock_key
from packer.runners import InlineRunner
from packer.store import LockLost, open_store
from service.main import check_store
from service.settings import Settings, SettingsError
from trainer_client import PackedStream, StreamTimeout

STORE = "s3://bucket/store"
WORDS = ["a", "b", "c", "d", "hello", "world"]


@dataclasses.dataclass
class Remote:
    url: str
    objects: Objects
    calls: list[str]
    refused: set[str]


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    monkeypatch.setenv("PADFREE_CACHE_DIR", str(tmp_path / "cache"))
    objects, calls, refused = {"bucket/": b""}, list[str](), set[str]()
    with s3_server(objects, calls=calls, refused=refused) as url, use(url, monkeypatch):
        yield Remote(url, objects, calls, refused)


def rows(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [{"text": " ".join(rng.choice(WORDS, rng.integers(1, 30)))} for _ in range(count)]


def document(tmp_path: Path, suffix: str, **more: Any) -> dict[str, Any]:
    """A spec over 500 rows in one form."""
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet.gz":
        table = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows(500)), table)
        path.write_bytes(gzip.compress(table.read_bytes(), mtime=0))
    else:
        text = write_rows(tmp_path / "plain.jsonl", rows(500)).read_bytes()
        path.write_bytes(gzip.compress(text, mtime=0) if suffix.endswith(".gz") else text)
    return spec_of(path, write_tokenizer(tmp_path / "tokenizer"), packing={"max_tokens": 64}, **more)


@functools.cache
def packed_once(seed: int | None) -> tuple[Packed, Objects]:
    """These rows packed into an empty object store, and all that lies there then."""
    objects: Objects = {"bucket/": b""}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PADFREE_CACHE_DIR", f"{folder}/cache")
        with s3_server(objects) as url, use(url, patch):
            packed = pack_document(STORE, document(Path(folder), ".jsonl", shuffle_seed=seed))
    return packed, objects


def packed_into(remote: Remote, seed: int | None = None) -> Packed:
    packed, objects = packed_once(seed)
    remote.objects.update(objects)
    return packed


class OtherMachines(InlineRunner):
    """Every task has what a worker on another machine has: pickled arguments and a cache of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch, self._count = folder, monkeypatch, 0

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        with super().open() as tasks:
            submit = tasks.submit
            monkeypatched: Any = tasks
            monkeypatched.submit = lambda *task: submit(self._run, pickle.dumps(task))
            yield tasks

    def _run(self, task: bytes) -> Any:
        self._count += 1
        with self._monkeypatch.context() as patch:
            patch.setenv("PADFREE_CACHE_DIR", str(self._folder / str(self._count)))
            function, *arguments = pickle.loads(task)
            return function(*arguments)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet.gz"])
def test_workers_elsewhere_write_the_same_bytes_as_into_a_folder(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, seed: int | None
) -> None:
    spec = document(tmp_path, suffix, shuffle_seed=seed)
    here = pack_document(tmp_path / "folder", spec)
    there = pack_document(STORE, spec, OtherMachines(tmp_path / "machines", monkeypatch))
    assert there.job.dataset == here.job.dataset
    assert there.digests == here.digests
    assert there.report == here.report
    left = {
        name.removeprefix("bucket/store/").rpartition("/")[0] for name in remote.objects if name[-1] != "/"
    }
    key = dataset_key(here.job.dataset)
    about = {key, f"{key}/commits", f"{key}/shards"}
    assert {one for one in left if not one.startswith("tokenizers")} == about


def test_it_is_served_from_the_cache_and_read_without_a_service(remote: Remote, tmp_path: Path) -> None:
    packed = packed_into(remote)
    with running(STORE, runner=None) as server:
        first = server.stream(packed.job.dataset).body
        remote.calls.clear()
        assert server.stream(packed.job.dataset).body == first
        assert not [call for call in remote.calls if "/shards/" in call]
        assert _ids(messages(first)) == [one.input_ids.tolist() for one in packed.packs]
        shard = server.get(f"/v1/datasets/{packed.job.dataset}/shards/0", Range="bytes=8-15")
        assert (
            shard.body
            == open_store(STORE).get(f"{dataset_key(packed.job.dataset)}/shards/000000-000.arrow")[8:16]
        )
        assert server.get("/readyz").status == 200
        assert "padfree_store_free_bytes" in server.get("/metrics").body.decode()
    assert trained(STORE, packed.job.dataset) == [one.input_ids.tolist() for one in packed.packs]


def flip(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :]


def first_message(at: int) -> Callable[[bytes], bytes]:
    """Writes a byte over one of the first pack's, `at` bytes behind the start of its stamp."""

    def damage(data: bytes) -> bytes:
        place = data.find(b"padfree1 crc32=") + at
        return data[:place] + b"\xf1" + data[place + 1 :]

    return damage


DAMAGES = {"flipped": flip, "zeroed": lambda data: bytes(len(data)), "cut": lambda data: data[:5000],
           "emptied": lambda data: b"", "mark": first_message(3), "crc": first_message(17),
           "body": first_message(31), "room": first_message(45), "header": first_message(-20),
           "columns": first_message(900)}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("batches", ["folder", "pack", "step"])
def test_a_copy_that_was_damaged_after_it_was_fetched_is_fetched_again(
    remote: Remote, tmp_path: Path, damage: str, batches: str
) -> None:
    """As a power cut leaves it, or a failing disk. The dataset itself is well."""
    packed = packed_into(remote)
    dataset, wanted = packed.job.dataset, [one.input_ids.tolist() for one in packed.packs]
    assert len([name for name in remote.objects if "/shards/" in name]) > 0
    assert trained(STORE, dataset) == wanted  # now there are copies
    for copy in (tmp_path / "cache").iterdir():
        copy.write_bytes(DAMAGES[damage](copy.read_bytes()))
    remote.calls.clear()
    if batches == "folder":
        assert trained(STORE, dataset) == wanted
    else:
        with running(STORE, runner=None) as server:
            if batches == "pack":
                assert trained(server.url, dataset) == wanted
            else:
                found = _ids(messages(server.stream(dataset, packs_per_step=2).body))
                assert found == wanted[: len(wanted) // 2 * 2]
            shard = server.get(f"/v1/datasets/{dataset}/shards/0")
            assert hashlib.sha256(shard.body).hexdigest() == shard.headers["etag"].strip('"')
    fetched = [call for call in remote.calls if call.startswith("GET") and "/shards/" in call]
    assert len(fetched) == len(set(fetched)) > 0  # of each once


def footer(data: bytes) -> bytes:
    """Damaged where an Arrow file says how long its footer is."""
    return data[:-9] + b"\xf1" + data[-8:]


@pytest.mark.parametrize("damage", [*DAMAGES.values(), footer], ids=[*DAMAGES, "footer"])
@pytest.mark.parametrize("asked", ["whole", "a range", "head"])
def test_a_damaged_copy_is_never_handed_out_as_a_file(
    remote: Remote, tmp_path: Path, damage: Callable[[bytes], bytes], asked: str
) -> None:
    packed = packed_into(remote)
    dataset = packed.job.dataset
    wanted = open_store(STORE).get(f"{dataset_key(dataset)}/shards/000000-000.arrow")
    with running(STORE, runner=None) as server:
        assert server.stream(dataset).status == 200  # now there are copies
    for copy in (tmp_path / "cache").iterdir():
        copy.write_bytes(damage(copy.read_bytes()))
    remote.calls.clear()
    path = f"/v1/datasets/{dataset}/shards/0"
    with running(STORE, runner=None) as server:
        for _ in range(2):
            if asked == "head":
                assert server.request("HEAD", path).headers["content-length"] == str(len(wanted))
            elif asked == "a range":
                assert server.get(path, Range="bytes=-200").body == wanted[-200:]
            else:
                assert server.get(path).body == wanted
    fetched = [call for call in remote.calls if call.startswith("GET") and "/shards/" in call]
    assert len(fetched) == 1


def test_a_copy_is_compared_with_its_digest_once(remote: Remote, tmp_path: Path) -> None:
    packed = packed_into(remote)
    path = f"/v1/datasets/{packed.job.dataset}/shards/0"
    with running(STORE, runner=None) as server:
        assert server.service is not None
        files, looks = server.service.files, []
        digest = files._digest
        files._digest = lambda *args: looks.append(args) or digest(*args)  # type: ignore[method-assign, func-returns-value]
        assert {server.get(path).status for _ in range(3)} == {200}
        assert len(looks) == 1
        assert server.stream(packed.job.dataset).status == 200
        assert len(looks) == 1
        files.forget("")  # as when a dataset was removed, to be packed again
        assert server.get(path).status == 200
        assert len(looks) == 2


def test_a_disk_that_damages_every_copy_is_told(remote: Remote, tmp_path: Path) -> None:
    packed = packed_into(remote)
    with running(STORE, runner=None) as server:
        assert server.service is not None
        server.service.files._digest = lambda *args: "another"  # type: ignore[method-assign]
        remote.calls.clear()
        answer = server.get(f"/v1/datasets/{packed.job.dataset}/shards/0")
        assert (answer.status, answer.json["title"]) == (500, "The dataset is damaged")
        assert "copy of" in answer.json["detail"]


def test_a_copy_whose_footer_is_damaged_gives_the_same_packs(remote: Remote, tmp_path: Path) -> None:
    """Who reads packs goes by the row index; who reads the file itself finds it, and has it fetched."""
    packed = packed_into(remote)
    dataset, wanted = packed.job.dataset, [one.input_ids.tolist() for one in packed.packs]
    assert trained(STORE, dataset) == wanted
    for copy in (tmp_path / "cache").iterdir():
        copy.write_bytes(footer(copy.read_bytes()))
    assert trained(STORE, dataset) == wanted
    with running(STORE, runner=None) as server:
        assert trained(server.url, dataset) == wanted
    again = pack_document(STORE, spec_of([f"dataset://{dataset}"], None, packing={"max_tokens": 64}))
    segments = sorted(ids for pieces in packed.segments.values() for ids, _ in pieces)
    assert sorted(ids for pieces in again.segments.values() for ids, _ in pieces) == segments


def test_an_object_that_is_damaged_itself_is_no_matter_of_copies(remote: Remote, tmp_path: Path) -> None:
    packed = packed_into(remote)
    (name,) = [name for name in remote.objects if name.endswith("shards/000000-000.arrow")]
    remote.objects[name] = flip(remote.objects[name])
    with pytest.raises(StreamTimeout, match=r"000000-000.arrow.*sha256 .* is required, found"):
        trained(STORE, packed.job.dataset, timeout_s=0.3)


def trained(source: str, dataset: str, **options: Any) -> list[list[int]]:
    with PackedStream(source, dataset=dataset, **options) as stream:
        return [batch.input_ids.tolist() for batch in stream]


def _ids(found: list[Any]) -> list[list[int]]:
    return [pack.input_ids.tolist() for one in found for pack in one.packs]


def test_finished_datasets_cost_few_calls_while_nothing_happens(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.scheduler._SCAN_S", 0.1)
    for seed in range(3):
        packed_into(remote, seed)
    with running(STORE, runner=InlineRunner()) as server:
        service = server.service
        assert service is not None
        assert service.scheduler is not None
        scheduler = service.scheduler
        wait_for(lambda: len(scheduler._settled) == 3)
        assert b'padfree_datasets{state="ready"} 3.0' in server.get("/metrics").body
        remote.calls.clear()
        scheduler._scan()
        service.count_again_s = 0.0
        server.get("/metrics")
        assert not [call for call in remote.calls if "/datasets/" in call]


def test_an_upload_is_packed_and_streamed_and_the_dataset_removed(remote: Remote, tmp_path: Path) -> None:
    spec = document(tmp_path, ".jsonl")
    here = pack_document(tmp_path / "folder", spec)
    with running(STORE, runner=InlineRunner(), data_roots=[tmp_path]) as server:
        body = (tmp_path / "rows.jsonl").read_bytes()
        upload = server.request("POST", "/v1/uploads?name=rows.jsonl", body=body)
        assert upload.status == 201
        spec["source"]["paths"] = [upload.json["upload"]]
        dataset = server.post_spec(spec).json["id"]
        server.wait_for_state(dataset, "ready")
        streamed = _ids(messages(server.stream(dataset).body))
        assert streamed == [one.input_ids.tolist() for one in here.packs]
        assert server.request("DELETE", f"/v1/datasets/{dataset}").status == 204
        assert server.get(f"/v1/datasets/{dataset}").status == 404
    assert not [name for name in remote.objects if dataset in name and not name.endswith("/")]


def test_a_store_that_is_away_makes_a_replica_unready(remote: Remote, tmp_path: Path) -> None:
    with running("s3://nowhere/store", runner=None) as server:
        answer = server.get("/readyz")
        assert answer.status == 503
        assert answer.json["checks"]["store"].endswith("s3://nowhere/store")


@pytest.mark.parametrize("name", ["spec.json", "finished.json", "commits/000000.arrow", "commits", ""])
def test_a_dataset_that_may_not_be_read_is_told_alike_everywhere(
    name: str, remote: Remote, tmp_path: Path
) -> None:
    """One object, or all of a dataset, that the store refuses us: the others are listed and served."""
    good, bad = (packed_into(remote, seed).job.dataset for seed in (1, 2))
    remote.refused.add(f"bucket/store/{dataset_key(bad, name)}")
    with running(STORE, runner=InlineRunner(), data_roots=(tmp_path,)) as server:
        views = {view["id"]: view for view in server.get("/v1/datasets").json["datasets"]}
        assert {one: view["state"] for one, view in views.items()} == {good: "ready", bad: "failed"}
        assert server.get(f"/v1/datasets/{bad}").json == views[bad]
        said = views[bad]["error"]["detail"]
        assert "Permission denied; where that is all, let it be read" in said
        assert f"--remove {bad}" in said
        if name != "spec.json":  # of no weight to what is packed
            answer = server.stream(bad)
            assert (answer.status, answer.json["type"]) == (409, "urn:padfree:problem:dataset-failed")
            assert "let it be read" in answer.json["detail"]
        assert b"event: failed" in server.get(f"/v1/datasets/{bad}/events").body
        assert server.stream(good).status == 200
        counted = server.get("/metrics").body
        assert b'padfree_datasets{state="failed"} 1.0' in counted
        assert b'padfree_datasets{state="ready"} 1.0' in counted
        remote.refused.clear()
        assert server.get(f"/v1/datasets/{bad}").json["state"] == "ready"
        assert server.stream(bad).status == 200


def test_a_cache_that_cannot_be_written_is_no_damage_of_the_dataset(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = packed_into(remote).job.dataset
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PADFREE_CACHE_DIR", str(tmp_path / "file/cache"))
    with pytest.raises(SettingsError, match="PADFREE_CACHE_DIR"):
        check_store(Settings.from_environment({}, store=STORE))
    with running(STORE) as server:
        for answer in (server.stream(dataset), server.get(f"/v1/datasets/{dataset}/shards/0")):
            assert (answer.status, answer.json["type"]) == (503, "urn:padfree:problem:transient")
        assert "set PADFREE_CACHE_DIR" in caplog.text
        assert str(tmp_path) not in answer.body.decode()


def test_a_service_ends_although_its_store_does_not_answer(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network that swallows packets: threads wait for a shard, and Python would wait for them."""
    dataset = pack_document(STORE, document(tmp_path, ".jsonl")).job.dataset
    monkeypatch.setenv("PADFREE_CACHE_DIR", str(tmp_path / "empty"))
    asked, end, send = threading.Event(), threading.Event(), _Handler._object

    def wait(handler: _Handler, data: bytes) -> None:
        if "/shards/" in handler.path:
            asked.set()
            end.wait(60)
        send(handler, data)

    with spawned(STORE, data_root=tmp_path) as server, ThreadPoolExecutor(1) as trainer:
        assert server.process is not None
        monkeypatch.setattr(_Handler, "_object", wait)
        answer = trainer.submit(server.stream, dataset)
        assert asked.wait(30)
        server.process.send_signal(signal.SIGTERM)
        try:
            assert server.process.wait(30) == 0
        finally:
            end.set()
        assert (answer.result().status, answer.result().json["type"][-9:]) == (503, "transient")
        assert "stopped, without an answer from the store" in server.said()
        assert "ERROR" not in server.said()


def test_a_packer_that_lost_its_lock_stops_and_changes_nothing(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packer.resolve import resolve
    from packer.spec import parse_spec

    store = open_store(STORE)
    job = resolve(parse_spec(document(tmp_path, ".jsonl")), store=store)

    def lost(key: str) -> None:
        assert key == lock_key(job.dataset)
        raise LockLost("taken over")

    monkeypatch.setattr(store, "check_lock", lost)
    with pytest.raises(Busy, match="taken over"):
        pack(job, store, InlineRunner())
    assert store.list(dataset_key(job.dataset, "commits")) == []
    assert not store.exists(dataset_key(job.dataset, "failed.json"))
    monkeypatch.undo()


@pytest.mark.slow
def test_f39_another_machine_goes_on_after_a_kill(tmp_path: Path) -> None:
    """The lease of the killed one runs out first."""
    objects: Objects = {"bucket/": b""}
    write_rows(tmp_path / "many.jsonl", rows(150_000))  # enough to be killed in the middle
    spec = spec_of(
        tmp_path / "many.jsonl", write_tokenizer(tmp_path / "tokenizer"), packing={"max_tokens": 64}
    )
    here = pack_document(tmp_path / "folder", spec)
    with s3_server(objects) as url:
        environ = environment(url)
        with spawned(STORE, data_root=tmp_path, PADFREE_CACHE_DIR=str(tmp_path / "one"), **environ) as first:
            dataset = first.post_spec(spec).json["id"]
            commits = f"bucket/store/{dataset_key(dataset)}/commits/"
            wait_for(lambda: any(name.startswith(commits) for name in list(objects)))
            assert first.process is not None
            os.kill(first.process.pid, signal.SIGKILL)
        assert f"bucket/store/{dataset_key(dataset)}/finished.json" not in objects
        with spawned(STORE, data_root=tmp_path, PADFREE_CACHE_DIR=str(tmp_path / "two"), **environ) as second:
            finished = f"bucket/store/{dataset_key(dataset)}/finished.json"
            wait_for(lambda: finished in objects, timeout_s=120)
            shards = second.get(f"/v1/datasets/{dataset}/shards").json["shards"]
    assert [one["sha256"] for one in shards] == here.digests
