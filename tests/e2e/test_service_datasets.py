"""Datasets over HTTP: post, view, cancel, remove; with the real packer in this process."""

import contextlib
import gzip
import json
import shutil
import threading
from pathlib import Path

import pytest
from packs import build_dataset, numbered_packs
from serving import messages, packs_by_arrow, running, spawned, wait_for

from packer import coordinator
from packer.manifest import cancelled_key, dataset_key
from packer.runners import ClusterLost, InlineRunner
from packer.store import LocalStore, NoSpaceLeft

TOKENIZER = Path(__file__).parents[2] / "examples" / "tokenizer"


def write_rows(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def rows_of(count, length=5):
    return [{"input_ids": [i % 100 + 1] * (2 + (i * 7) % length)} for i in range(count)]


@pytest.fixture(autouse=True)
def scans(monkeypatch):
    """The store is looked through often, so that no test waits for it."""
    monkeypatch.setattr("service.scheduler._SCAN_S", 0.1)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder / "rows.jsonl", rows_of(200, 12))
    return folder


@pytest.fixture
def server(tmp_path, data):
    with running(tmp_path / "store", runner=InlineRunner(), data_roots=(data, TOKENIZER)) as server:
        yield server


def spec_of(path, **packing):
    return {
        "name": "numbers",
        "source": {"paths": [str(path)]},
        "tokenizer": {"path": str(TOKENIZER)},
        "packing": {"max_tokens": 32, **packing},
        "shuffle_seed": None,
    }


def test_the_way_of_a_dataset(server, data):
    posted = server.post_spec(spec_of(data / "rows.jsonl"))
    assert posted.status == 202, posted.body
    dataset = posted.json["id"]
    assert posted.json["name"] == "numbers"
    assert posted.json["state"] in ("queued", "packing", "ready")
    assert posted.headers["location"] == f"/v1/datasets/{dataset}"
    view = server.wait_for_state(dataset, "ready", "failed")
    assert view["error"] is None
    report = view["report"]
    assert report["rows_in"] == report["rows_packed"] == 200
    ids = [i for m in messages(server.stream(dataset).body) for p in m.packs for i in p.example_ids.tolist()]
    assert sorted(ids) == list(range(200))
    again = server.post_spec(spec_of(data / "rows.jsonl"))
    assert (again.status, again.json) == (200, view)
    assert server.get("/v1/datasets").json == {"datasets": [view]}
    assert b"padfree_packed_rows_total 200.0" in server.get("/metrics").body
    assert b'padfree_datasets{state="ready"} 1.0' in server.get("/metrics").body


def test_two_posts_at_once_are_one_dataset(server, data):
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(server.post_spec(spec_of(data / "rows.jsonl"))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.json["id"] for answer in answers} == {answers[0].json["id"]}
    assert {answer.status for answer in answers} <= {200, 202}
    assert server.wait_for_state(answers[0].json["id"], "ready")["report"]["rows_in"] == 200


def test_packs_of_several_capacities(server, data):
    rows = [{"input_ids": list(range(length))} for length in (*[12] * 5, *[50] * 2)]
    (data / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = server.post_spec(spec_of(data / "two.jsonl", max_tokens=[64, 16])).json["id"]
    report = server.wait_for_state(dataset, "ready", "failed")["report"]
    assert [(one["max_tokens"], one["num_packs"]) for one in report["capacities"]] == [(16, 5), (64, 2)]
    assert report["fill"] == (5 * 12 + 2 * 50) / (5 * 16 + 2 * 64)
    room = f"padfree_packed_capacity_tokens_total {5 * 16 + 2 * 64}.0"
    assert room in server.get("/metrics").body.decode()
    found = problem(server.post_spec(spec_of(data / "two.jsonl", max_tokens=[])), 422)
    assert found["field"] == "packing.max_tokens"


# ------------------------------------------------------------------ wrong specs


def problem(answer, status):
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/problem+json"
    assert set(answer.json) >= {"type", "title", "status", "detail"}
    return answer.json


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_json(server, body):
    assert problem(server.post_spec(body), 400)["type"].endswith("malformed-json")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sauce": 1}, "sauce"),
        ({"packing": {"max_tokens": 0}}, "packing.max_tokens"),
        ({"packing": {"strategy": "best-fit"}}, "packing.strategy"),
        ({"source": {"paths": []}}, "source.paths"),
        ({"source": {"paths": ["nothing.jsonl"]}}, "source.paths"),
        ({"source": {"paths": ["/etc/passwd"]}}, "source.paths"),
        ({"tokenizer": {"path": "no-such-folder"}}, "tokenizer.path"),
    ],
)
def test_a_wrong_spec_names_its_field(server, data, change, field):
    found = problem(server.post_spec({**spec_of(data / "rows.jsonl"), **change}), 422)
    assert found["field"] == field
    assert found["type"] == "urn:padfree:problem:bad-spec"
    assert server.get("/v1/datasets").json == {"datasets": []}


def test_a_field_that_is_there_twice_is_named(server):
    """Whichever of the two were taken, the other was meant by somebody."""
    body = b'{"source": {"paths": ["a.jsonl"]}, "packing": {"max_tokens": 16, "max_tokens": 32}}'
    found = problem(server.post_spec(body), 422)
    assert (found["field"], "several times" in found["detail"]) == ("max_tokens", True)


def test_a_file_that_is_not_what_its_name_says(server, data):
    (data / "fake.parquet").write_bytes(b"not parquet")
    found = problem(server.post_spec(spec_of(data / "fake.parquet")), 422)
    assert "fake.parquet" in found["detail"]


def test_a_spec_that_is_too_long(tmp_path, data):
    with running(tmp_path / "store", runner=InlineRunner(), max_spec_bytes=100) as server:
        problem(server.post_spec(spec_of(data / "rows.jsonl")), 413)


def test_a_bad_row_fails_the_dataset_and_posting_again_starts_it_again(server, data):
    (data / "bad.jsonl").write_text('{"input_ids": [1, 2]}\n{"input_ids": "x"}\n')
    spec = spec_of(data / "bad.jsonl")
    dataset = server.post_spec(spec).json["id"]
    view = server.wait_for_state(dataset, "failed")
    assert "bad.jsonl" in view["error"]["detail"]
    assert "2" in view["error"]["detail"]
    assert server.get(f"/v1/datasets/{dataset}/shards").json["shards"] == []
    assert server.post_spec(spec).status == 202
    server.wait_for_state(dataset, "failed")


def test_posting_a_failed_dataset_again_goes_by_what_is_said_now(server, data):
    """What is no part of the id may be what it failed for: where a file lies, and what was left open."""
    rows = [{"text": "One two three."}] * 150
    write_rows(data / "a.jsonl", [*rows, {"text": "Four five six.", "loss_mask": [0, 1, 1]}])
    write_rows(data / "b.jsonl", rows[:3])
    spec = spec_of(data)
    spec["source"]["paths"] = [str(data / "a.jsonl"), str(data / "b.jsonl")]
    failed = server.post_spec(spec).json["id"]
    view = server.wait_for_state(failed, "failed")
    assert "a.jsonl, line 151: what is trained must be said by" in view["error"]["detail"]
    (data / "b.jsonl").rename(data / "c.jsonl")
    spec["source"]["paths"][1] = str(data / "c.jsonl")
    again = server.post_spec({**spec, "loss": "all", "name": "another"})
    assert (again.status, again.json["id"], again.json["name"]) == (202, failed, "numbers")
    view = server.wait_for_state(failed, "ready", "failed")
    assert (view["state"], view["error"]) == ("ready", None)
    assert view["report"]["rows_packed"] == 154


def test_no_space_is_told_as_such(server, data, monkeypatch):
    def full(self, key, content):
        raise NoSpaceLeft(28, "no space left")

    monkeypatch.setattr(LocalStore, "put", full)
    found = problem(server.post_spec(spec_of(data / "rows.jsonl")), 507)
    assert "space" in found["detail"]
    monkeypatch.undo()
    assert server.get("/readyz").status == 200
    assert server.post_spec(spec_of(data / "rows.jsonl")).status == 202


def test_a_replica_that_does_not_pack_says_so(tmp_path, data):
    dataset = build_dataset(tmp_path, numbered_packs(3), packs_per_shard=2)
    with running(tmp_path) as server:
        assert problem(server.post_spec(spec_of(data / "rows.jsonl")), 405)["type"].endswith("read-only")
        assert len(packs_by_arrow(server.stream(dataset).body)) == 3


# ------------------------------------------------------------------ removing, resuming


class HeldRunner(InlineRunner):
    """An inline runner whose tasks wait for `go`."""

    def __init__(self):
        self.go = threading.Event()

    def open(self):
        return _holding(super().open(), self.go)


class _holding:  # noqa: N801
    def __init__(self, tasks, go):
        self.tasks, self.go = tasks, go

    def __enter__(self):
        self.inner = self.tasks.__enter__()
        return self

    def __exit__(self, *error):
        return self.tasks.__exit__(*error)

    def submit(self, *args):
        return self.inner.submit(*args)

    def wait(self, timeout_s):
        return self.inner.wait(timeout_s) if self.go.wait(0.05) else []


def test_a_ready_dataset_is_removed(server, data):
    dataset = server.post_spec(spec_of(data / "rows.jsonl")).json["id"]
    server.wait_for_state(dataset, "ready")
    assert server.request("DELETE", f"/v1/datasets/{dataset}").status == 204
    assert server.get(f"/v1/datasets/{dataset}").status == 404
    assert server.request("DELETE", f"/v1/datasets/{dataset}").status == 404
    assert not server.service.store.path(dataset_key(dataset)).exists()
    assert server.post_spec(spec_of(data / "rows.jsonl")).status == 202  # packed anew
    assert server.wait_for_state(dataset, "ready")["report"]["rows_in"] == 200


def test_a_dataset_that_is_being_packed_is_cancelled_then_removed(tmp_path, data):
    runner = HeldRunner()
    with running(tmp_path / "store", runner=runner, data_roots=(data, TOKENIZER)) as server:
        dataset = server.post_spec(spec_of(data / "rows.jsonl")).json["id"]
        server.wait_for_state(dataset, "packing")
        connection, response = server.open("GET", f"/v1/datasets/{dataset}/stream")
        assert server.request("DELETE", f"/v1/datasets/{dataset}").status == 204
        with pytest.raises(Exception, match="IncompleteRead"):
            response.read()
        connection.close()
        assert server.get(f"/v1/datasets/{dataset}").status == 404
        assert server.get("/v1/datasets").json == {"datasets": []}


def test_another_replica_cancels(tmp_path, data):
    runner = HeldRunner()
    with (
        running(tmp_path / "store", runner=runner, data_roots=(data, TOKENIZER)) as packing,
        running(tmp_path / "store") as other,
    ):
        dataset = packing.post_spec(spec_of(data / "rows.jsonl")).json["id"]
        other.wait_for_state(dataset, "packing")
        assert other.request("DELETE", f"/v1/datasets/{dataset}").status == 204
        assert packing.get(f"/v1/datasets/{dataset}").status == 404


def test_max_jobs_are_packed_at_once_and_the_rest_wait(tmp_path, data):
    for number in range(3):
        write_rows(data / f"{number}.jsonl", rows_of(50 + number))
    runner = HeldRunner()
    with running(tmp_path / "store", runner=runner, data_roots=(data, TOKENIZER), max_jobs=1) as server:
        datasets = [server.post_spec(spec_of(data / f"{number}.jsonl")).json["id"] for number in range(3)]
        server.wait_for_state(datasets[0], "packing")
        assert [server.get(f"/v1/datasets/{d}").json["state"] for d in datasets[1:]] == ["queued"] * 2
        assert b'padfree_jobs{state="queued"} 2.0' in server.get("/metrics").body
        runner.go.set()
        for dataset in datasets:
            server.wait_for_state(dataset, "ready")


def test_what_was_not_finished_goes_on_at_the_next_start(tmp_path, data, caplog):
    caplog.set_level("INFO", "padfree.service")
    runner = HeldRunner()
    with running(tmp_path / "store", runner=runner, data_roots=(data, TOKENIZER)) as server:
        dataset = server.post_spec(spec_of(data / "rows.jsonl")).json["id"]
        server.wait_for_state(dataset, "packing")
    (said,) = [line for line in caplog.messages if line.startswith(f"packing {dataset} ended")]
    assert "the service stops" in said
    assert "cancelled" not in said  # which is a state of datasets, and not that of this one
    with running(tmp_path / "store", runner=InlineRunner(), data_roots=(data, TOKENIZER)) as server:
        assert server.wait_for_state(dataset, "ready", "failed")["report"]["rows_in"] == 200


def test_a_replica_takes_over_from_one_that_died(tmp_path, data):
    """The first is killed; its lock goes with it."""
    runner = HeldRunner()
    with running(tmp_path / "store", runner=runner, data_roots=(data, TOKENIZER)) as held:
        dataset = held.post_spec(spec_of(data / "rows.jsonl")).json["id"]
        held.wait_for_state(dataset, "packing")
        with running(tmp_path / "store", runner=InlineRunner(), data_roots=(data, TOKENIZER)) as other:
            assert other.get(f"/v1/datasets/{dataset}").json["state"] == "packing"
            held.service.scheduler.stop(10)  # as good as gone
            other.wait_for_state(dataset, "ready")


def test_a_cancelled_dataset_is_not_taken_up_again(tmp_path, data, monkeypatch):
    runner = HeldRunner()
    with running(tmp_path / "store", runner=runner, data_roots=(data, TOKENIZER)) as server:
        dataset = server.post_spec(spec_of(data / "rows.jsonl")).json["id"]
        server.wait_for_state(dataset, "packing")
        server.service.store.put(cancelled_key(dataset), b"{}")
        server.service.scheduler.cancel(dataset)
        wait_for(lambda: not server.service.scheduler._running)
        server.service.scheduler._scan()
        assert server.service.scheduler._queue == []
        assert server.get(f"/v1/datasets/{dataset}").json["state"] == "cancelled"
        runner.go.set()
        assert server.post_spec(spec_of(data / "rows.jsonl")).status == 202
        server.wait_for_state(dataset, "ready")


def test_serving_goes_on_while_the_runner_cannot_start(tmp_path, data, monkeypatch):
    monkeypatch.setattr("service.scheduler._RUNNER_RETRY_S", (0.05,))
    allowed = threading.Event()

    def make():
        if not allowed.is_set():
            raise ConnectionError("no Ray at 10.0.0.1:6379")
        return InlineRunner()

    ready = build_dataset(tmp_path / "store", numbered_packs(4), packs_per_shard=2)
    with running(tmp_path / "store", runner=make, data_roots=(data, TOKENIZER)) as server:
        answer = wait_for(lambda: (a := server.get("/readyz")).json["checks"]["runner"] != "starting" and a)
        assert (answer.status, answer.json["packing"]) == (200, False)
        assert "10.0.0.1:6379" in answer.json["checks"]["runner"]
        assert len(packs_by_arrow(server.stream(ready).body)) == 4
        dataset = server.post_spec(spec_of(data / "rows.jsonl")).json["id"]
        assert server.get(f"/v1/datasets/{dataset}").json["state"] == "queued"
        allowed.set()
        server.wait_for_state(dataset, "ready")
        assert server.get("/readyz").json["packing"]


class LostAtFirst(InlineRunner):
    """A runner whose cluster is lost once `num_tasks` tasks have run."""

    def __init__(self, num_tasks):
        self.left, self.closed = num_tasks, False

    @property
    def num_workers(self):
        if self.left <= 0:
            raise ClusterLost("its head ended")
        return 1

    @contextlib.contextmanager
    def open(self):
        with super().open() as tasks:
            wait = tasks.wait

            def lost_in_the_end(timeout_s):
                if self.left <= 0:
                    raise ClusterLost("its head ended")
                self.left -= 1
                return wait(timeout_s)

            tasks.wait = lost_in_the_end
            yield tasks

    def close(self):
        self.closed = True


def test_packing_goes_on_with_another_cluster_when_one_is_lost(tmp_path, data):
    first = LostAtFirst(1)  # the one that indexes
    runners = iter([first, InlineRunner()])
    with running(tmp_path / "store", runner=lambda: next(runners), data_roots=(data, TOKENIZER)) as server:
        dataset = server.post_spec(spec_of(data / "rows.jsonl")).json["id"]
        server.wait_for_state(dataset, "ready")
        assert first.closed
        assert b'padfree_jobs_ended_total{how="cluster_lost"} 1.0' in server.get("/metrics").body
        assert wait_for(lambda: server.get("/readyz").json["packing"])


def test_an_error_of_the_packer_itself_does_not_end_the_scheduler(server, data, monkeypatch):
    def broken(*args, **more):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(coordinator, "pack", broken)
    dataset = server.post_spec(spec_of(data / "rows.jsonl")).json["id"]
    none = b'padfree_jobs_ended_total{how="error"} 0.0'
    wait_for(lambda: none not in server.get("/metrics").body)
    monkeypatch.undo()
    server.wait_for_state(dataset, "ready")  # the next scan tries again


def test_the_command_serves(tmp_path, data):
    shutil.copytree(TOKENIZER, data / "tokenizer")
    spec = {**spec_of(data / "rows.jsonl"), "tokenizer": {"path": str(data / "tokenizer")}}
    with spawned(tmp_path / "store", data_root=data) as server:
        dataset = server.post_spec(spec).json["id"]
        assert server.wait_for_state(dataset, "ready", "failed")["state"] == "ready"


def test_a_dataset_is_packed_anew_from_another(server, data):
    first = server.post_spec(spec_of(data / "rows.jsonl")).json["id"]
    ready = server.wait_for_state(first, "ready")
    spec = {"source": {"paths": [f"dataset://{first}"]}, "packing": {"max_tokens": 64}}
    posted = server.post_spec(spec)
    assert posted.status == 202, posted.body
    view = server.wait_for_state(posted.json["id"], "ready")
    assert view["spec"]["tokenizer"] == ready["spec"]["tokenizer"]
    for name in ("rows_packed", "tokens_packed", "tokens_trained"):
        assert view["report"][name] == ready["report"][name]
    assert server.post_spec(spec).status == 200
    begun = {**spec, "source": {"paths": [f"dataset://{first[:8]}"]}}
    assert server.post_spec(begun).status == 200  # the same dataset, however its source is called
    refused = server.post_spec({"source": {"paths": ["dataset://" + "0" * 32]}})
    assert (refused.status, refused.json["field"]) == (422, "source.paths")
    assert "none of that id" in refused.json["detail"]
    refused = server.post_spec({**spec, "loss": "completion"})
    assert (refused.status, refused.json["field"]) == (422, "loss")


def test_a_source_that_is_not_ready_cannot_be_packed_anew(tmp_path, data):
    runner = HeldRunner()
    with running(tmp_path / "store", runner=runner, data_roots=(data, TOKENIZER)) as server:
        first = server.post_spec(spec_of(data / "rows.jsonl")).json["id"]
        server.wait_for_state(first, "packing")
        refused = server.post_spec({"source": {"paths": [f"dataset://{first}"]}})
        assert refused.status == 422
        assert "is not packed yet" in refused.json["detail"]
        runner.go.set()
        server.wait_for_state(first, "ready")
        assert server.post_spec({"source": {"paths": [f"dataset://{first}"]}}).status == 202
