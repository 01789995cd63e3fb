"""Parts of long answers that go around ASGI: the same bytes, no copy, at the reader's pace."""

import asyncio
import contextlib
import logging
from types import SimpleNamespace

import pytest
from packs import build_dataset, random_packs
from serving import running

from packer.shard import END_OF_STREAM
from service.wire import Wire

PACKS = random_packs(40, max_tokens=8192) * 4


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    return root, build_dataset(root, PACKS, packs_per_shard=50)


def asked(root, dataset):
    """Status, headers, body and the byte count that was logged, of each call."""
    calls = [("stream", {}), ("stream?world_size=2&rank=1&packs_per_step=3&start=4", {})]
    calls += [("shards/1", {}), ("shards/0", {"Range": "bytes=100-70000"}), ("stream?start=9999", {})]
    found = []
    with running(root) as server:
        for path, headers in calls:
            answer = server.get(f"/v1/datasets/{dataset}/{path}", X_Request_Id="one", **headers)
            stable = {k: v for k, v in answer.headers.items() if k != "date"}
            found.append((answer.status, stable, answer.body))
        served = {
            kind: server.service.metrics.served_bytes.labels(kind)._value.get()
            for kind in ("stream", "shard")
        }
    return found, served


def test_the_wire_carries_what_asgi_would(place, monkeypatch, caplog):
    def logged():
        return [record.args[3] for record in caplog.records if record.msg.startswith("%s %s %d, %d bytes")]

    caplog.set_level(logging.INFO, "padfree.access")
    by_wire, told = asked(*place), logged()
    caplog.clear()
    monkeypatch.setattr("service.main.with_wires", lambda app: app)
    assert by_wire == asked(*place)
    assert told == logged() == [len(body) for _, _, body in by_wire[0]]
    assert len(by_wire[0][0][2]) > 1 << 20  # several chunks


def test_the_end_of_a_stream_leaves_in_one_piece(place, monkeypatch):
    root, dataset = place
    sent = []

    def watched(app):
        async def run(scope, receive, send):
            async def told(message):
                sent.append(message)
                await send(message)

            await app(scope, receive, told)

        return run

    monkeypatch.setattr("service.main.with_wires", watched)
    with running(root) as server:
        body = server.stream(dataset).body
    *parts, last = (message for message in sent if message["type"] == "http.response.body")
    assert (bytes(last["body"]), last["more_body"]) == (END_OF_STREAM, False)
    assert b"".join([*(bytes(part["body"]) for part in parts), END_OF_STREAM]) == body


class Connection:
    """Of uvicorn's cycle, what a wire uses."""

    def __init__(self, *, length=None):
        self.chunked_encoding = length is None
        self.expected_content_length = length or 0
        self.disconnected = False
        self.written = []
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.is_closing = False
        self.transport = SimpleNamespace(
            is_closing=lambda: self.is_closing, write=self.written.append, writelines=self.written.extend
        )
        self.flow = self

    @property
    def write_paused(self):
        return not self.is_free.is_set()

    async def drain(self):
        await self.is_free.wait()


def test_a_part_is_handed_over_as_it_lies_in_its_frame():
    one, data = Connection(), memoryview(bytearray(300))
    wire = Wire(one)
    asyncio.run(wire.write(data))
    assert one.written == [b"12c\r\n", data, b"\r\n"]
    assert one.written[1] is data
    assert wire.num_bytes == 300


def test_a_known_length_is_kept_to():
    one = Connection(length=300)
    wire = Wire(one)
    asyncio.run(wire.write(bytes(300)))
    assert one.written == [bytes(300)]
    with pytest.raises(RuntimeError, match="Content-Length"):
        asyncio.run(wire.write(b"x"))


@pytest.mark.parametrize("leaves", [False, True])
def test_a_part_waits_for_the_reader_and_is_dropped_where_it_left(leaves):
    async def run():
        one = Connection()
        wire = Wire(one)
        one.is_free.clear()
        assert wire.must_wait
        writing = asyncio.create_task(wire.write(b"abc"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(writing), 0.05)
        assert not one.written
        one.disconnected = leaves
        one.is_free.set()
        await writing
        return one.written, wire.num_bytes

    assert asyncio.run(run()) == (([], 0) if leaves else ([b"3\r\n", b"abc", b"\r\n"], 3))


def test_nothing_is_written_to_a_connection_that_closes():
    one = Connection()
    one.is_closing = True
    asyncio.run(Wire(one).write(b"abc"))
    assert one.written == []
