"""Uploads and progress events over HTTP."""

import gzip
import hashlib
import http.client
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from packs import commit_partition, fail_dataset, finish_dataset, numbered_packs, start_dataset
from serving import running, wait_for

from packer.manifest import cancelled_key, dataset_key
from packer.runners import InlineRunner
from packer.store import LocalStore, NoSpaceLeft
from packer.store.local import LocalStaged
from service import uploads

TOKENIZER = Path(__file__).parents[2] / "examples" / "tokenizer"
ROWS = "".join(json.dumps({"input_ids": [i % 90 + 1] * 6}) + "\n" for i in range(50)).encode()


@pytest.fixture
def server(tmp_path):
    (tmp_path / "data").mkdir()
    with running(tmp_path / "store", runner=InlineRunner(), data_roots=(tmp_path / "data",)) as server:
        yield server


def upload(server, body, name="rows.jsonl"):
    return server.request("POST", f"/v1/uploads?name={name}", body=body)


def files(server):
    (folder,) = uploads.roots(server.service.store)
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def spec_of(path):
    return {"source": {"paths": [path]}, "tokenizer": {"path": str(TOKENIZER)}, "packing": {"max_tokens": 32}}


@pytest.mark.parametrize(("name", "body"), [("rows.jsonl", ROWS), ("my rows.JSONL.gz", gzip.compress(ROWS))])
def test_an_upload_is_packed_like_a_file(server, tmp_path, name, body):
    answer = upload(server, body, name.replace(" ", "%20"))
    assert answer.status == 201
    assert answer.json["num_bytes"] == len(body)
    assert answer.json["sha256"] == hashlib.sha256(body).hexdigest()
    posted = server.post_spec(spec_of(answer.json["upload"]))
    assert posted.status == 202, posted.body
    assert server.wait_for_state(posted.json["id"], "ready", "failed")["report"]["rows_in"] == 50
    local = tmp_path / "data" / name.lower()
    local.write_bytes(body)
    assert server.post_spec(spec_of(str(local))).json["id"] == posted.json["id"]


def test_the_same_file_twice_is_kept_once(server):
    first, second = upload(server, ROWS), upload(server, ROWS)
    assert first.json == second.json
    assert len(files(server)) == 1


def test_a_body_without_a_length_is_taken(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    parts = (ROWS[i : i + 700] for i in range(0, len(ROWS), 700))
    connection.request("POST", "/v1/uploads?name=a.jsonl", body=parts, encode_chunked=True,
                       headers={"Transfer-Encoding": "chunked"})  # fmt: skip
    assert json.loads(connection.getresponse().read())["sha256"] == hashlib.sha256(ROWS).hexdigest()
    connection.close()


@pytest.mark.parametrize("name", ["rows", "rows.exe", "", "rows.jsonl.bz2", ".gz"])
def test_a_name_must_tell_the_format(server, name):
    answer = upload(server, ROWS, name)
    assert (answer.status, answer.json["field"]) == (422, "name")
    assert files(server) == []


def test_an_upload_without_a_name_is_told_what_to_add(server):
    answer = server.request("POST", "/v1/uploads", body=ROWS)
    assert (answer.status, answer.json["field"]) == (422, "name")
    assert "add ?name=… to the url" in answer.json["detail"]


@pytest.mark.parametrize(
    "path", ["upload://nothing", f"upload://{'0' * 32}.jsonl", "upload://../../etc/passwd", "upload://"]
)
def test_an_upload_that_is_not_there_is_told(server, path):
    answer = server.post_spec(spec_of(path))
    assert (answer.status, answer.json["field"]) == (422, "source.paths")


def test_f44_no_space_is_told_and_leaves_nothing(server, monkeypatch):
    def full(staged, data):
        if full.left < len(data):
            raise NoSpaceLeft(28, "No space left on device")
        full.left -= len(data)
        write(staged, data)

    write, full.left = LocalStaged.write, 1 << 20
    monkeypatch.setattr(LocalStaged, "write", full)
    answer = upload(server, b"x" * (2 << 20))
    monkeypatch.undo()
    assert answer.status == 507
    assert "space" in answer.json["detail"]
    assert files(server) == []
    assert server.get("/v1/datasets").json == {"datasets": []}
    assert server.get("/healthz").status == 200
    assert upload(server, b"x" * (100 << 10)).status == 201


@pytest.mark.parametrize("chunked", [False, True])
def test_an_upload_that_is_too_large_is_refused(tmp_path, chunked):
    with running(tmp_path, max_upload_bytes=1 << 20) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        body = [b"x" * 700_000] * 2
        headers = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": "1400000"}
        connection.request(
            "POST", "/v1/uploads?name=a.txt", body=iter(body), encode_chunked=chunked, headers=headers
        )
        answer = connection.getresponse()
        assert answer.status == 413
        connection.close()
        wait_for(lambda: files(server) == [])


def test_an_upload_that_breaks_off_leaves_nothing(server):
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = b"POST /v1/uploads?name=a.jsonl HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000\r\n\r\n"
    connection.sendall(head + b"x" * 2_000_000)
    wait_for(lambda: files(server))  # it is being written
    connection.close()
    wait_for(lambda: files(server) == [])


def test_what_a_killed_service_left_is_removed_a_day_later(tmp_path):
    (folder,) = uploads.roots(LocalStore(tmp_path))
    folder.mkdir()
    (folder / ".tmp-old").write_text("")
    os.utime(folder / ".tmp-old", (time.time() - 2 * 86400,) * 2)
    (folder / ".tmp-new").write_text("")
    with running(tmp_path) as server:
        assert server.get("/healthz").status == 200  # it has started
        assert files(server) == [".tmp-new"]


# ------------------------------------------------------------------ events


class Listening:
    """Server-sent events, read in a thread."""

    def __init__(self, server, dataset):
        self.connection, self.response = server.open("GET", f"/v1/datasets/{dataset}/events")
        self.got = []
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self):
        for text in self._events():
            name, data = (line.partition(": ")[2] for line in text.splitlines())
            self.got.append((name, json.loads(data)))

    def _events(self):
        lines = []
        while line := self.response.readline():
            if line == b"\n":
                yield "\n".join(lines)
                lines = []
            else:
                lines.append(line.decode().rstrip("\n"))

    def join(self):
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.connection.close()
        return self.got


def test_events_tell_progress_and_end_with_the_dataset(tmp_path):
    packs = numbered_packs(9)
    dataset = start_dataset(tmp_path, identity="growing")
    with running(tmp_path) as server:
        listening = Listening(server, dataset)
        assert listening.response.headers["content-type"].startswith("text/event-stream")
        for number in range(3):
            wait_for(
                lambda number=number: (
                    listening.got and listening.got[-1][1]["progress"]["num_packs"] == 3 * number
                )
            )
            commit_partition(tmp_path, dataset, number, packs[3 * number : 3 * number + 3], packs_per_shard=3)
        wait_for(lambda: listening.got[-1][1]["progress"]["num_packs"] == 9)
        finish_dataset(tmp_path, dataset, 3, packs)
        got = listening.join()
        assert [name for name, _ in got] == ["progress"] * 4 + ["ready"]
        assert got[-1][1] == server.get(f"/v1/datasets/{dataset}").json


def test_events_of_a_dataset_at_rest_are_one(tmp_path):
    dataset = start_dataset(tmp_path, identity="failed")
    fail_dataset(tmp_path, dataset, detail="line 7")
    with running(tmp_path) as server:
        ((name, view),) = Listening(server, dataset).join()
        assert (name, view["error"]["detail"]) == ("failed", "line 7")
        LocalStore(tmp_path).put(cancelled_key(dataset), b"{}")
        assert Listening(server, dataset).join()[0][0] == "cancelled"


def test_events_of_a_removed_dataset_end(tmp_path):
    dataset = start_dataset(tmp_path, identity="waiting")
    with running(tmp_path) as server:
        listening = Listening(server, dataset)
        wait_for(lambda: listening.got)
        LocalStore(tmp_path).delete(dataset_key(dataset))
        assert [name for name, _ in listening.join()] == ["progress", "removed"]
