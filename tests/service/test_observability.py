"""What operators see: counted tasks, lags of streams, the store's space, ids in the log."""

import json
import logging
import os
import re
import socket
import threading

import pytest
from packs import build_dataset, numbered_packs, random_packs
from serving import running, wait_for

from packer import logs
from packer.logs import dataset_id, request_id
from packer.runners import InlineRunner, WorkerDied
from packer.store import StoreError
from service import logs as service_logs
from service.metrics import Metrics
from service.settings import Settings
from service.tasks import CountedRunner
from trainer_client import PackedStream, UnknownDataset


def value(text: str, sample: str) -> float:
    found = re.search(rf"^{re.escape(sample)} (\S+)$", text, flags=re.MULTILINE)
    assert found, f"{sample} is not in the metrics"
    return float(found[1])


def fail(error):
    raise error


def test_tasks_are_counted_by_how_they_end():
    metrics = Metrics()
    with CountedRunner(InlineRunner(), metrics).open() as tasks:
        for function, argument in (
            (abs, -1),
            (fail, WorkerDied("gone")),
            (fail, StoreError("stale handle")),
            (fail, ValueError("bad")),
        ):
            tasks.submit(function, argument)
        assert value(metrics.text().decode(), 'padfree_tasks_running{kind="input"}') == 4
        ended = [done for _ in range(4) for done in tasks.wait(1.0)]
        assert len(ended) == 4
        with logs.using({"partition": 0}):
            tasks.submit(abs, -1)  # cancelled when the block ends
        assert value(metrics.text().decode(), 'padfree_tasks_running{kind="partition"}') == 1
    text = metrics.text().decode()
    for kind in ("input", "partition"):
        assert value(text, f'padfree_tasks_running{{kind="{kind}"}}') == 0
    for how in ("done", "worker_died", "store_failed", "failed"):
        assert value(text, f'padfree_tasks_ended_total{{how="{how}"}}') == 1


def test_counters_are_there_before_they_count():
    """Else the first failure would raise no alert: a rate needs a zero to rise from."""
    text = Metrics().text().decode()
    assert value(text, 'padfree_jobs_ended_total{how="failed"}') == 0
    assert value(text, 'padfree_streams_ended_total{how="cut"}') == 0
    assert value(text, 'padfree_rows_left_out_total{reason="rejected"}') == 0


def test_a_counted_runner_is_not_closed_with_a_job():
    class Inner(InlineRunner):
        closed = False

        def close(self):
            self.closed = True

    inner = Inner()
    counted = CountedRunner(inner, Metrics())
    assert (counted.name, counted.num_workers) == ("inline", 1)
    counted.close()
    assert not inner.closed


def test_a_rank_that_does_not_read_lags(tmp_path):
    packs = random_packs(100, max_tokens=8192) * 8
    dataset = build_dataset(tmp_path, packs, packs_per_shard=200)
    lag = f'padfree_stream_lag_steps{{dataset="{dataset}",rank="1"}}'
    with running(tmp_path, max_chunk_bytes=64 << 10) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        connection.connect(("127.0.0.1", server.port))
        call = f"GET /v1/datasets/{dataset}/stream?rank=1&world_size=2 HTTP/1.1\r\nHost: x\r\n\r\n"
        connection.sendall(call.encode())
        left = wait_for(
            lambda: (
                lag in (text := server.get("/metrics").body.decode())
                and (now := value(text, lag)) < 400
                and now
            )
        )
        assert left > 200  # of 400 steps; what was sent fills no more than the sockets
        connection.close()
        wait_for(lambda: server.service.num_streams == 0)
        assert lag not in server.get("/metrics").body.decode()


def test_the_space_of_the_store_is_told(tmp_path):
    build_dataset(tmp_path, numbered_packs(4), packs_per_shard=2)
    with running(tmp_path) as server:
        text = server.get("/metrics").body.decode()
    free, size = (value(text, f"padfree_store_{what}_bytes") for what in ("free", "size"))
    assert 0 < free <= size


@pytest.fixture
def json_logs():
    return lambda: service_logs.configure(Settings.from_environment({}, log_format="json"))


def test_json_logs_carry_dataset_and_partition(json_logs, capsys):
    tokens = dataset_id.set("d1"), request_id.set("abc")
    try:
        json_logs()
        logging.getLogger("padfree.packer").warning("tried again", extra={"partition": 3})
        logging.getLogger("padfree.access").info("GET", extra={"dataset": "d2"})
    finally:
        dataset_id.reset(tokens[0])
        request_id.reset(tokens[1])
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["dataset"], first["partition"], first["request_id"]) == ("d1", 3, "abc")
    assert second["dataset"] == "d2"
    assert "partition" not in second


def test_packing_logs_under_the_request_that_asked_for_it(json_logs, capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 20)
    json_logs()
    with running(tmp_path / "store", runner=InlineRunner(), data_roots=(tmp_path,)) as server:
        spec = {"source": {"paths": ["rows.jsonl"]}, "packing": {"max_tokens": 8}}
        posted = server.request(
            "POST", "/v1/datasets", headers={"X-Request-Id": "job-7"}, body=json.dumps(spec).encode()
        )
        assert posted.status == 202, posted.body
        dataset = posted.json["id"]
        ended_view = server.wait_for_state(dataset, "ready")
        text = server.get("/metrics").body.decode()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    told = [line for line in lines if line["logger"] == "padfree.packer"]
    assert [line["message"].split(":")[0] for line in told] == [
        "partition 0 begins",
        "partition 0 is packed, to be committed",
        "partition 0 is committed",
    ]
    (ended,) = [line for line in lines if "ended after" in line["message"]]
    for line in (*told, ended):
        assert (line["request_id"], line["dataset"]) == ("job-7", dataset)
    assert {line["partition"] for line in told} == {0}
    assert len({line["job"] for line in (*told, ended)}) == 1
    assert told[-1]["worker"].endswith(f"/{os.getpid()}")
    assert value(text, "padfree_packed_tokens_total") == 60
    assert value(text, "padfree_packed_bytes_total") == ended_view["progress"]["num_bytes"] > 0
    assert (
        value(text, "padfree_packed_capacity_tokens_total") == value(text, "padfree_packed_packs_total") * 8
    )


def test_packing_after_a_restart_goes_on_under_the_request(json_logs, capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 20)
    spec = json.dumps({"source": {"paths": ["rows.jsonl"]}, "packing": {"max_tokens": 8}}).encode()
    never = threading.Event()

    def no_runner():
        never.wait()
        raise RuntimeError("no Ray here")

    with running(tmp_path / "store", runner=no_runner, data_roots=(tmp_path,)) as server:
        headers = {"X-Request-Id": "first"}
        dataset = server.request("POST", "/v1/datasets", headers=headers, body=spec).json["id"]
        never.set()
    json_logs()
    with running(tmp_path / "store", runner=InlineRunner(), data_roots=(tmp_path,)) as server:
        view = server.wait_for_state(dataset, "ready")
    assert view["request_id"] == "first"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", view["created"])
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {line["request_id"] for line in lines if line["logger"] == "padfree.packer"} == {"first"}


def test_a_problem_names_the_request(tmp_path):
    with running(tmp_path) as server:
        assert server.get("/v1/datasets/none", X_Request_Id="ask-1").json["request_id"] == "ask-1"


def test_a_stream_is_followed_from_client_to_service(json_logs, capsys, tmp_path):
    dataset = build_dataset(tmp_path, numbered_packs(6), packs_per_shard=3)
    json_logs()
    with running(tmp_path) as server:
        with PackedStream(server.url, dataset=dataset) as stream:
            assert len(list(stream)) == 6
            name = stream.request_id
        other = PackedStream(server.url, dataset="0" * 32)
        with pytest.raises(UnknownDataset, match=rf"\(request {other.request_id}\.1\)"):
            next(iter(other))
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    mine = [line for line in lines if line.get("request_id", "").startswith(f"{name}.")]
    begun, ended = [line for line in mine if "/stream" in line["message"]]
    assert "begins: 200" in begun["message"]
    assert begun["request_id"] == ended["request_id"]
    assert begun["dataset"] == dataset


def test_polls_are_told_at_level_debug_only(json_logs, capsys, tmp_path):
    dataset = build_dataset(tmp_path, numbered_packs(6), packs_per_shard=3)
    json_logs()
    with running(tmp_path) as server:
        one = f"/v1/datasets/{dataset}"
        for path in ("/healthz", "/readyz", "/metrics", "/v1/datasets", one, f"{one}/shards?start=0"):
            assert server.get(path).status == 200
        server.get(f"{one}/shards/0")
        server.get("/v1/datasets/none")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    told = [line["message"].split(",")[0] for line in lines if line["logger"] == "padfree.access"]
    # In either order: a download is told when its answer is put away, when the next one may have come.
    assert sorted(told) == sorted([f"GET {one}/shards/0 200", "GET /v1/datasets/none 404"])


def test_the_ranks_that_lag_most_are_told_and_the_later_stream_of_a_rank_counts(monkeypatch):
    monkeypatch.setattr("service.metrics._MOST_LAGS", 2)
    metrics = Metrics()
    metrics.show_lags([("d", 0, 5), ("d", 0, 7), ("d", 1, 1), ("d", 2, 9)])
    told = re.findall(r"^padfree_stream_lag_steps(.*)$", metrics.text().decode(), flags=re.MULTILINE)
    assert told == ['{dataset="d",rank="2"} 9.0', '{dataset="d",rank="0"} 7.0']
