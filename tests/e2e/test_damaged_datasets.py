"""A dataset that is damaged in any of its files is told, and hides no other, wherever they are listed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packing_job import spec_of, write_rows
from packs import build_dataset, commit_partition, numbered_packs, start_dataset
from serving import Answer, running, wait_for

from packer.manifest import cancelled_key, dataset_key
from packer.runners import InlineRunner
from packer.store import LocalStore, local
from packer.verify import verify_store
from padfree.cli import main

PACKS = numbered_packs(12)
SHARD = "shards/000000-000.arrow"
REMOVE = "padfree datasets --remove"


def deny(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody read a file, or look into a folder (tests may run as root, whom modes do not stop)."""

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(where: Any, *args: Any, **options: Any) -> Any:
            if str(where) == str(path) or str(where).startswith(f"{path}/"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(where))
            return function(where, *args, **options)

        return call

    monkeypatch.setattr(Path, "read_bytes", guarded(Path.read_bytes))
    monkeypatch.setattr(local, "open", guarded(open), raising=False)
    if path.is_dir():
        monkeypatch.setattr(os, "stat", guarded(os.stat))


def damage(path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "denied":
        if not path.exists():
            path.write_bytes(b"{}")
        deny(path, monkeypatch)
        return
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if how == "folder":
        (path / "something").mkdir(parents=True)
    elif how == "other JSON":
        path.write_text('{"dataset": "x", "spec": [], "inputs": {}, "num_partitions": "1", "detail": 5}')
    elif how == "nested":
        path.write_text(200_000 * "[")
    else:
        path.write_bytes({"binary": bytes(range(256)) * 3, "empty": b""}[how])


def require_told(answer: Answer, dataset: str, root: Path) -> None:
    """An answer, or an error that is no riddle."""
    assert str(root) not in answer.body.decode(errors="replace")
    if answer.status < 400:
        return
    problem = answer.json
    assert problem["type"].rpartition(":")[2] in ("dataset-damaged", "dataset-failed"), problem
    assert dataset in problem["detail"]
    assert REMOVE in problem["detail"]


def all_answers(server: Any, dataset: str) -> dict[str, Answer]:
    paths = ("", "/shards", "/shards/0", "/stream", "/stream?epoch=1", "/steps", "/balance", "/events")
    return {path: server.get(f"/v1/datasets/{dataset}{path}") for path in paths}


HOWS = ("folder", "binary", "empty", "denied")
FILES = ("spec.json", "plan.json", "finished.json", "failed.json", "commits/000000.arrow", "commits")
DAMAGE = [
    *[(name, how) for name in FILES for how in HOWS if (name, how) != ("commits", "folder")],
    *[(name, how) for name in ("spec.json", "finished.json") for how in ("other JSON", "nested")],
]


@pytest.mark.parametrize(("name", "how"), DAMAGE)
def test_a_damaged_file_fails_its_dataset_alone(
    name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = (build_dataset(tmp_path, packs, packs_per_shard=5) for packs in (PACKS, PACKS[:9]))
    damage(tmp_path / dataset_key(bad, name), how, monkeypatch)
    with running(tmp_path, runner=InlineRunner()) as server:
        listed = server.get("/v1/datasets")
        assert listed.status == 200
        views = {view["id"]: view for view in listed.json["datasets"]}
        assert {one: view["state"] for one, view in views.items()} == {good: "ready", bad: "failed"}
        assert REMOVE in views[bad]["error"]["detail"]
        assert name.split("/")[0] in views[bad]["error"]["detail"]
        assert str(tmp_path) not in listed.body.decode()
        answers = all_answers(server, bad)
        for answer in answers.values():
            require_told(answer, bad, tmp_path)
        assert answers[""].json == views[bad]
        assert server.stream(good).status == server.get(f"/v1/datasets/{good}/shards/0").status == 200
        metrics = server.get("/metrics")
        assert metrics.status == 200
        assert b'padfree_datasets{state="failed"} 1.0' in metrics.body
        assert server.get("/readyz").json["ready"]
        assert server.get("/").status == 200
        for place in (["--url", server.url], ["--store", str(tmp_path)]):
            assert main(["datasets", "--json", *place]) == 0
            found = json.loads(capsys.readouterr().out.splitlines()[-1])
            assert {view["id"]: view["state"] for view in found} == {good: "ready", bad: "failed"}
            assert main(["datasets", *place]) == 0
            assert main(["inspect", bad, *place]) in (0, 1)
        assert "Traceback" not in capsys.readouterr().err
        monkeypatch.undo()  # who may remove may read
        assert server.request("DELETE", f"/v1/datasets/{bad}").status == 204
        assert [view["id"] for view in server.get("/v1/datasets").json["datasets"]] == [good]
    assert not (tmp_path / dataset_key(bad)).exists()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", [SHARD, "shards"])
def test_a_damaged_shard_is_told_by_who_needs_it(
    name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (build_dataset(tmp_path, packs, packs_per_shard=5) for packs in (PACKS, PACKS[:9]))
    damage(tmp_path / dataset_key(bad, name), how, monkeypatch)
    with running(tmp_path) as server:
        answers = all_answers(server, bad)
        for answer in answers.values():
            require_told(answer, bad, tmp_path)
        for path in ("/shards/0", "/stream", "/stream?epoch=1"):
            assert answers[path].status == 500, path
        states = {view["id"]: view["state"] for view in server.get("/v1/datasets").json["datasets"]}
        assert states == {good: "ready", bad: "ready"}
    assert verify_store(LocalStore(tmp_path)).faults


@pytest.mark.parametrize("how", HOWS)
def test_when_it_was_asked_for_is_of_no_weight(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = build_dataset(tmp_path, PACKS, packs_per_shard=5)
    damage(tmp_path / dataset_key(dataset, "origin.json"), how, monkeypatch)
    with running(tmp_path) as server:
        view = server.get(f"/v1/datasets/{dataset}").json
        assert (view["state"], view["created"]) == ("ready", None)
        assert server.stream(dataset).status == 200


@pytest.mark.parametrize(("name", "how"), [one for one in DAMAGE if one[0] != "finished.json"])
def test_a_damaged_dataset_that_is_not_finished_keeps_no_other_from_being_packed(
    name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    bad = start_dataset(store, identity="bad")
    commit_partition(store, bad, 0, PACKS, packs_per_shard=5)
    damage(store / dataset_key(bad, name), how, monkeypatch)
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6, 7]}] * 3)
    with running(store, runner=InlineRunner(), data_roots=(tmp_path,)) as server:
        assert server.service is not None
        scheduler = server.service.scheduler
        assert scheduler is not None
        good = server.post_spec(spec_of(rows, None, packing={"max_tokens": 8})).json["id"]
        server.wait_for_state(good, "ready")
        assert server.wait_for_state(bad, "failed")["error"]["detail"]
        scheduler._scan()
        wait_for(lambda: not scheduler._running and not scheduler._queue)
        scheduler._scan()
        assert not scheduler._queue or name == "spec.json"  # nothing is tried without end
        for answer in all_answers(server, bad).values():
            require_told(answer, bad, tmp_path)


@pytest.mark.parametrize("place", ["locks/ID", "cancelled/ID.json"])
def test_a_folder_in_the_place_of_a_marker_hides_no_other(tmp_path: Path, place: str) -> None:
    good = build_dataset(tmp_path, PACKS, packs_per_shard=5)
    bad = start_dataset(tmp_path, identity="bad")
    assert cancelled_key("ID") == "cancelled/ID.json"
    (tmp_path / place.replace("ID", bad) / "something").mkdir(parents=True)
    with running(tmp_path, runner=InlineRunner()) as server:
        views = {view["id"]: view["state"] for view in server.get("/v1/datasets").json["datasets"]}
        assert views == {good: "ready", bad: "failed" if place == "locks/ID" else "cancelled"}
        assert server.get("/metrics").status == 200
        if place != "locks/ID":
            assert server.request("DELETE", f"/v1/datasets/{bad}").status == 204


def test_a_store_that_stumbles_over_one_dataset_shows_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (build_dataset(tmp_path, packs, packs_per_shard=5) for packs in (PACKS, PACKS[:9]))
    get = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if bad in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return get(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with running(tmp_path) as server:
        views = {view["id"]: view for view in server.get("/v1/datasets").json["datasets"]}
        assert {one: view["state"] for one, view in views.items()} == {good: "ready", bad: "failed"}
        assert "ask again" in views[bad]["error"]["detail"]
        for path in ("", "/events", "/shards/0", "/stream"):
            answer = server.get(f"/v1/datasets/{bad}{path}")
            assert (answer.status, answer.json["type"]) == (503, "urn:padfree:problem:transient"), path
        bad = "datasets"  # of the whole store
        assert server.get("/v1/datasets").status == 503
