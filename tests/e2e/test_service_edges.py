"""What stands around every call: tokens, request ids, problems, health, pages, the end of the process."""

import contextlib
import json
import logging
import shutil
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from packing_job import write_rows
from packs import build_dataset, numbered_packs, start_dataset
from serving import messages, packs_by_arrow, running, spawned, wait_for

from packer.logs import request_id
from packer.runners import InlineRunner
from packer.store import LocalStore
from service import logs
from service.files import ShardFiles, WouldBlock
from service.health import check_writing
from service.settings import Settings
from trainer_client import PackedStream


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("store")) as server:
        yield server


# ------------------------------------------------------------------ tokens


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        ("Bearer beta", 200),
        ("bearer alpha", 200),
        ("Bearer gamma", 401),
        ("Bearer ", 401),
        ("Bearer", 401),
        ("Basic alpha", 401),
        ("alpha", 401),
        ("Bearer alpha,beta", 401),
        ("Bearer \xe9", 401),
    ],
)
def test_v1_needs_one_of_the_tokens(tmp_path, given, status):
    with running(tmp_path, tokens=("alpha", "beta")) as server:
        headers = {} if given is None else {"Authorization": given}
        answer = server.request("GET", "/v1/datasets", headers=headers)
        assert answer.status == status
        if status == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json["type"] == "urn:padfree:problem:unauthorized"
            assert "alpha" not in answer.json["detail"]


def test_every_v1_call_is_guarded_and_the_rest_is_open(tmp_path):
    with running(tmp_path, tokens=("one",)) as server:
        for method, path in [
            ("POST", "/v1/datasets"),
            ("DELETE", f"/v1/datasets/{'0' * 32}"),
            ("GET", f"/v1/datasets/{'0' * 32}/stream"),
            ("GET", f"/v1/datasets/{'0' * 32}/shards/0"),
            ("GET", "/v1/nothing"),
            ("GET", "/v1"),
        ]:
            assert server.request(method, path).status == 401
        for path in ("/healthz", "/readyz", "/metrics", "/docs", "/"):
            assert server.get(path).status == 200


# ------------------------------------------------------------------ problems and ids


def test_an_unknown_name_is_repeated_in_the_answer(tmp_path):
    with running(tmp_path) as server:
        said = server.get("/v1/datasets/gsm8k").json["detail"]
        assert said.startswith("there is no dataset 'gsm8k': an id (32 hexadecimal digits), the beginning")


def test_every_error_is_a_problem(server):
    for method, path, status in [
        ("GET", "/nothing", 404),
        ("PUT", "/v1/datasets", 405),
        ("POST", "/healthz", 405),
        ("GET", "/v1/datasets?page=2", 422),
    ]:
        answer = server.request(method, path)
        assert answer.status == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json["status"] == status
        assert set(answer.json) >= {"type", "title", "status", "detail"}


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/datasets", "GET, POST"),
        (f"/v1/datasets/{'0' * 32}", "GET, DELETE"),
        (f"/v1/datasets/{'0' * 32}/shards/0", "GET, HEAD"),
        ("/healthz", "GET"),
        ("/web/index.js", "GET, HEAD"),
    ],
)
def test_what_is_possible_names_every_method(server, path, allowed):
    answer = server.request("PUT", path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)
    assert answer.json["detail"].endswith(f"possible: {allowed}")


def test_an_error_of_our_own_tells_nothing_but_its_id(server, monkeypatch, caplog):
    def broken(*args):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("service.feeds.list_datasets", broken)
    monkeypatch.setattr(logging.getLogger("padfree"), "propagate", True)
    answer = server.get("/v1/datasets", X_Request_Id="abc")
    monkeypatch.undo()
    assert answer.status == 500
    assert answer.json["type"] == "urn:padfree:problem:internal"
    assert b"secret" not in answer.body
    assert answer.headers["x-request-id"] == "abc"
    assert "ZeroDivisionError: secret" in caplog.text
    assert b'route="/v1/datasets",status="500"' in server.get("/metrics").body


def test_a_request_has_an_id(server):
    assert server.get("/healthz", X_Request_Id="train-7.rank0").headers["x-request-id"] == "train-7.rank0"
    first, second = (server.get("/nothing").headers["x-request-id"] for _ in range(2))
    assert len(first) == 32
    assert first != second
    assert server.get("/healthz", X_Request_Id="a b" * 100).headers["x-request-id"] != "a b" * 100


def test_json_logs_carry_the_request_id(capsys):
    chosen = Settings.from_environment({}, log_format="json")
    token = request_id.set("abc")
    try:
        logs.configure(chosen)
        logging.getLogger("padfree.service").warning("dataset %s\n failed", "d")
        logging.getLogger("uvicorn.error").error("ASGI callable returned without completing response.")
    finally:
        request_id.reset(token)
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert (found["message"], found["level"], found["request_id"]) == ("dataset d\n failed", "warning", "abc")


# ------------------------------------------------------------------ health and pages


def test_readiness_names_what_is_missing(tmp_path):
    with running(tmp_path) as server:
        assert server.get("/readyz").json == {"ready": True, "packing": False, "checks": {"store": "ok"}}
        server.service.store.root = tmp_path / "gone"
        answer = server.get("/readyz")
        assert answer.status == 503
        assert answer.json["checks"]["store"].endswith("/gone")
        assert server.get("/healthz").status == 200


def test_a_store_that_is_full_is_served_from(tmp_path, monkeypatch):
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=2)
    with running(tmp_path, runner=InlineRunner()) as server:
        assert wait_for(lambda: server.get("/readyz").json["packing"])
        monkeypatch.setattr(server.service.store, "space", lambda: (1000, 10**9))
        answer = server.get("/readyz")
        assert (answer.status, answer.json["ready"], answer.json["packing"]) == (200, True, False)
        assert answer.json["checks"]["writing"] == "only 1000 bytes are free, make room"
        assert len(packs_by_arrow(server.stream(dataset).body)) == 4


def test_the_store_check_leaves_nothing(tmp_path):
    store = LocalStore(tmp_path / "new")
    assert check_writing(store) == "ok"
    assert list(store.root.iterdir()) == []


def test_pages_need_nothing_from_elsewhere(server):
    for path in ("/", "/docs", "/web/index.js", "/web/docs.js", "/web/style.css"):
        answer = server.get(path)
        assert answer.status == 200
        for outside in (b"https://", b"http://", b'src="//'):
            assert outside not in answer.body
    assert server.get("/").headers["content-security-policy"] == "default-src 'self'"


def test_openapi_documents_every_call(server):
    document = server.get("/openapi.json").json
    calls = {(method, path) for path, operations in document["paths"].items() for method in operations}
    one = "/v1/datasets/{dataset}"
    assert calls >= {
        ("post", "/v1/datasets"), ("get", "/v1/datasets"), ("get", one), ("delete", one),
        ("get", f"{one}/shards"), ("get", f"{one}/shards/{{index}}"), ("get", f"{one}/stream"),
        ("get", "/healthz"), ("get", "/readyz"), ("get", "/metrics"),
    }  # fmt: skip
    names = {one["name"] for one in document["paths"][f"{one}/stream"]["get"]["parameters"]}
    assert names >= {"rank", "world_size", "packs_per_step", "epoch", "start", "offset", "tail", "batches"}
    assert document["paths"]["/v1/datasets"]["post"]["requestBody"]
    assert {"405", "500", "507"} <= set(document["paths"]["/v1/datasets"]["post"]["responses"])
    # Wherever a name may stand it may be that of several datasets.
    answers = {
        (method, path): operation["responses"]
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if path.startswith(one)
    }
    assert len(answers) > 6
    assert [call for call, found in answers.items() if not {"404", "409"} <= set(found)] == []


def test_metrics_count_what_was_served(tmp_path):
    dataset = build_dataset(tmp_path, numbered_packs(6), packs_per_shard=3)
    with running(tmp_path) as server:
        size = len(server.stream(dataset).body)
        shard_size = len(server.get(f"/v1/datasets/{dataset}/shards/0").body)
        text = server.get("/metrics").body.decode()
    assert f'padfree_served_bytes_total{{kind="stream"}} {float(size)}' in text
    assert f'padfree_served_bytes_total{{kind="shard"}} {float(shard_size)}' in text
    assert 'padfree_streams_ended_total{how="complete"} 1.0' in text
    assert 'padfree_first_batch_seconds_count{dataset_state="ready"} 1.0' in text
    assert "padfree_streams_open 0.0" in text


# ------------------------------------------------------------------ the end of the process


def test_f43_shutdown_cuts_open_streams_and_the_client_goes_on(tmp_path):
    packs = numbered_packs(100)
    dataset = build_dataset(tmp_path, packs, packs_per_shard=10)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(spawned(tmp_path))
        stream = PackedStream(first.url, dataset=dataset, prefetch_steps=1)
        stack.callback(stream.close)
        seen = []
        for batch in stream:
            seen.append(batch.example_ids.tolist())
            if len(seen) == 30:
                first.process.send_signal(signal.SIGTERM)
                assert first.process.wait(60) == 0
                stack.enter_context(spawned(tmp_path, port=first.port))
    assert seen == [[i] for i in range(100)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_f43_a_waiting_stream_is_cut_not_ended(tmp_path, number):
    dataset = start_dataset(tmp_path, identity="waiting")
    with spawned(tmp_path, PADFREE_PACKING="0") as server:
        connection, response = server.open("GET", f"/v1/datasets/{dataset}/stream")
        assert response.status == 200
        server.process.send_signal(number)
        with pytest.raises(Exception, match="IncompleteRead"):
            response.read()
        connection.close()
        assert server.process.wait(60) == 0
        said = server.said()
        assert "Traceback" not in said
        assert said.splitlines()[-1].endswith("padfree.service: stopped")


def test_shards_that_take_long_to_fetch_hold_nobody_else_up(tmp_path, monkeypatch):
    """As from an object store, where each of many ranks waits for another shard that is not in the cache."""
    dataset = build_dataset(tmp_path, numbered_packs(40), packs_per_shard=2)
    fetched, read_all = threading.Event(), ShardFiles.read_all

    def waits(files, pieces, *, wait=True):
        if not wait:
            raise WouldBlock
        assert fetched.wait(60)
        read_all(files, pieces)

    monkeypatch.setattr(ShardFiles, "read_all", waits)
    with running(tmp_path) as server, ThreadPoolExecutor(20) as ranks:
        streams = [ranks.submit(server.stream, dataset, start=2 * rank, max_steps=1) for rank in range(20)]
        wait_for(lambda: len(server.service.streams) == 20)
        for path in ("/readyz", "/v1/datasets", f"/v1/datasets/{dataset}/shards", "/metrics"):
            assert server.get(path).status == 200, path
        fetched.set()
        assert [len(messages(one.result().body)) for one in streams] == [1] * 20


def test_a_long_poll_ends_with_the_service(tmp_path):
    dataset = start_dataset(tmp_path, identity="waiting")
    answers = []
    with running(tmp_path) as server:
        path = f"/v1/datasets/{dataset}/shards?wait_s=60"
        thread = threading.Thread(target=lambda: answers.append(server.get(path)))
        thread.start()
        wait_for(lambda: server.service.feeds._feeds and server.service.feeds._feeds[dataset]._num_waiting)
    thread.join(60)
    assert answers[0].json["shards"] == []


def test_a_stream_that_is_complete_is_not_cut(tmp_path):
    packs = numbered_packs(5)
    dataset = build_dataset(tmp_path, packs, packs_per_shard=10)
    with spawned(tmp_path) as server:
        body = server.stream(dataset).body
    assert [message.packs[0] for message in messages(body)] == packs
    assert packs_by_arrow(body) == [[pack] for pack in packs]


def test_f43_a_request_that_outlasts_the_patience_is_told_and_leaves_no_traceback(tmp_path):
    with spawned(tmp_path, PADFREE_SHUTDOWN_S="1") as server:
        with socket.create_connection(("127.0.0.1", server.port)) as upload:
            head = b"POST /v1/uploads?name=a.jsonl HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n"
            upload.sendall(head + b"never complete")
            wait_for(lambda: list((tmp_path / "uploads").rglob("*")))
            server.process.send_signal(signal.SIGINT)
            answer = upload.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503")
        assert server.process.wait(60) == 0
        told = server.said()
        assert "POST /v1/uploads is given up: the service stops" in told
        assert "Traceback" not in told


def test_a_store_that_cannot_be_written_is_not_to_be_tried_again(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6, 7]}])
    body = json.dumps({"source": {"paths": [str(rows)]}}).encode()
    (tmp_path / "store").write_text("no folder")
    with running(tmp_path / "store", runner=InlineRunner(), data_roots=(tmp_path,)) as server:
        answer = server.request("POST", "/v1/datasets", body=body)
    assert (answer.status, answer.json["type"]) == (500, "urn:padfree:problem:store-unusable")
    assert "--store" in answer.json["detail"]
    assert str(tmp_path) not in answer.json["detail"]
    assert "retry-after" not in answer.headers


@pytest.mark.parametrize("place", ["", "datasets"])
def test_a_file_in_the_place_of_a_folder_of_the_store_is_told(tmp_path, place):
    """No error of the service's own: what is required, what was found, what to do."""
    store = tmp_path / "store"
    dataset = build_dataset(store, numbered_packs(3), packs_per_shard=2)
    path = store / place.replace("ID", dataset)
    with running(store) as server:
        shutil.rmtree(path)
        path.write_text("no folder")
        asked = [server.get("/v1/datasets"), server.get(f"/v1/datasets/{dataset}/shards/0")]
        asked.append(server.stream(dataset))
    failed = [answer for answer in asked if answer.status >= 500]
    assert failed
    assert {answer.json["type"] for answer in failed} == {"urn:padfree:problem:store-unusable"}
    for answer in failed:
        assert "a file in a folder's place" in answer.json["detail"]
        assert "--store" in answer.json["detail"]
        assert str(tmp_path) not in answer.json["detail"]
