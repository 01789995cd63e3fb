"""The stream over HTTP: what a rank receives, while packing and after, and how a stream ends."""

import http.client
import json
import os
import socket
import threading

import pytest
from packs import (
    build_dataset,
    commit_partition,
    fail_dataset,
    finish_dataset,
    numbered_packs,
    random_packs,
    start_dataset,
)
from serving import messages, packs_by_arrow, running, wait_for

from packer import shard
from packer.manifest import cancelled_key, dataset_key, shard_key
from packer.store import LocalStore
from trainer_client import DatasetFailed, PackedStream, UnknownDataset

PACKS = random_packs(29)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    dataset = build_dataset(root, PACKS, packs_per_shard=4)
    with running(root) as server:
        yield server, dataset


def problem(answer, status, kind):
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/problem+json"
    found = answer.json
    assert found["type"] == f"urn:padfree:problem:{kind}"
    assert found["status"] == status
    return found


# ------------------------------------------------------------------ what is in it


def test_any_arrow_reader_reads_a_stream(served):
    server, dataset = served
    answer = server.stream(dataset)
    assert answer.headers["content-type"] == "application/vnd.apache.arrow.stream"
    assert packs_by_arrow(answer.body) == [[pack] for pack in PACKS]


@pytest.mark.parametrize("batches", ["step", "pack"])
@pytest.mark.parametrize(("world_size", "packs_per_step"), [(1, 1), (1, 4), (2, 3), (4, 1), (3, 7)])
def test_ranks_together_see_every_pack_of_full_steps_once(served, world_size, packs_per_step, batches):
    server, dataset = served
    steps = len(PACKS) // (world_size * packs_per_step)
    of_step = [[] for _ in range(steps)]
    for rank in range(world_size):
        found = messages(
            server.stream(
                dataset, rank=rank, world_size=world_size, packs_per_step=packs_per_step, batches=batches
            ).body
        )
        assert len(found) == steps * (packs_per_step if batches == "pack" else 1)
        for message in found:
            of_step[message.stamp.step].extend(message.packs)
    flat = [pack for packs in of_step for pack in packs]
    assert flat == PACKS[: steps * world_size * packs_per_step]


def test_trained_tokens_are_those_of_all_ranks(served):
    server, dataset = served
    found = messages(server.stream(dataset, rank=1, world_size=3, packs_per_step=2).body)
    for step, message in enumerate(found):
        assert message.stamp.num_items == sum(pack.num_trained for pack in PACKS[step * 6 : step * 6 + 6])


def test_a_pack_goes_out_as_it_lies_in_the_shard(served):
    server, dataset = served
    file = server.get(f"/v1/datasets/{dataset}/shards/0").body
    first = messages(server.stream(dataset).body)[0]
    at, header_bytes, body_bytes = next(shard.iter_messages(file))
    assert first.body == file[at + header_bytes : at + header_bytes + body_bytes]


@pytest.mark.parametrize("batches", ["step", "pack"])
def test_a_stream_from_a_later_step_is_the_rest_of_the_whole(served, batches):
    server, dataset = served
    query = {
        "rank": 1,
        "world_size": 2,
        "packs_per_step": 2,
        "epoch": 2,
        "shuffle_seed": 7,
        "batches": batches,
    }
    whole = messages(server.stream(dataset, **query).body)
    size = len(whole) // 7
    for start in range(8):
        assert messages(server.stream(dataset, start=start, **query).body) == whole[start * size :]
    assert messages(server.stream(dataset, start=2, max_steps=3, **query).body) == whole[2 * size : 5 * size]


def test_a_later_epoch_has_another_order_of_the_same_packs(served):
    server, dataset = served
    orders = [
        [message.packs[0] for message in messages(server.stream(dataset, epoch=epoch, shuffle_seed=3).body)]
        for epoch in range(3)
    ]
    assert orders[0] == PACKS
    assert orders[1] != orders[2] != PACKS

    def key(pack):
        return pack.example_ids.tolist()

    assert sorted(orders[1], key=key) == sorted(orders[2], key=key) == sorted(PACKS, key=key)


def test_without_a_seed_every_epoch_is_in_commit_order(served):
    server, dataset = served
    assert packs_by_arrow(server.stream(dataset, epoch=5, shuffle_seed="").body) == [[pack] for pack in PACKS]


def test_f27_a_short_last_step_is_dropped_or_filled_up(served, tmp_path):
    packs = numbered_packs(5)
    dataset = build_dataset(tmp_path, packs, packs_per_shard=2)
    with running(tmp_path) as server:
        drop = [messages(server.stream(dataset, rank=r, world_size=2).body) for r in range(2)]
        assert [[m.packs[0] for m in rank] for rank in drop] == [packs[0:4:2], packs[1:4:2]]
        pad = [messages(server.stream(dataset, rank=r, world_size=2, tail="pad").body) for r in range(2)]
        assert [len(rank) for rank in pad] == [3, 3]
        assert [m.stamp.padding for m in pad[1]] == [False, False, True]
        assert pad[0][2].packs == [packs[4]]
        assert not pad[1][2].packs[0].loss_mask.any()
        assert {m.stamp.num_items for m in (pad[0][2], pad[1][2])} == {packs[4].num_trained}


def test_another_world_size_goes_on_at_the_same_global_pack(served):
    server, dataset = served
    before = [messages(server.stream(dataset, rank=r, world_size=4, max_steps=3).body) for r in range(4)]
    after = [messages(server.stream(dataset, rank=r, world_size=2, offset=12).body) for r in range(2)]
    seen = [rank[step].packs[0] for step in range(3) for rank in before]
    seen += [rank[step].packs[0] for step in range(len(after[0])) for rank in after]
    assert seen == PACKS[:28]
    assert after[0][0].stamp.step == 0


# ------------------------------------------------------------------ while packing


class Reading:
    """A stream that is read message by message in a thread."""

    def __init__(self, server, dataset, **query):
        path = f"/v1/datasets/{dataset}/stream?" + "&".join(f"{k}={v}" for k, v in query.items())
        self.connection, self.response = server.open("GET", path)
        self.status = self.response.status
        self.got: list[tuple[int, list]] = []  # (step, packs)
        self.error: Exception | None = None
        self.ended = False
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _exactly(self, count):
        data = self.response.read(count)
        if len(data) < count:
            raise http.client.IncompleteRead(data)
        return data

    def _read(self):
        try:
            while True:
                prefix = self._exactly(8)
                if prefix == shard.END_OF_STREAM:
                    self.ended = True
                    assert self.response.read() == b""
                    return
                header = prefix + self._exactly(int.from_bytes(prefix[4:], "little"))
                if b"padfree1 crc32=" not in header:  # the schema
                    continue
                stamp = shard.read_stamp(header)
                body = self._exactly(stamp.body_bytes)
                self.got.append((stamp.step, shard.decode_message(header + body)))
        except Exception as error:
            self.error = error

    def join(self):
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.connection.close()


def test_a_stream_starts_while_packing_and_ends_with_it(tmp_path):
    dataset = start_dataset(tmp_path, identity="growing")
    with running(tmp_path) as server:
        reading = Reading(server, dataset, world_size=2, rank=1)
        assert reading.status == 200
        commit_partition(tmp_path, dataset, 0, PACKS[:5], packs_per_shard=3)
        wait_for(lambda: len(reading.got) == 2)  # the third step lacks rank 1's pack
        commit_partition(tmp_path, dataset, 1, PACKS[5:6], packs_per_shard=3)
        wait_for(lambda: len(reading.got) == 3)
        assert not reading.ended
        commit_partition(tmp_path, dataset, 2, PACKS[6:11], packs_per_shard=3)
        finish_dataset(tmp_path, dataset, 3, PACKS[:11])
        reading.join()
        assert reading.ended
        assert reading.got == [(i, [PACKS[2 * i + 1]]) for i in range(5)]


def test_a_filled_up_last_step_comes_once_the_dataset_is_finished(tmp_path):
    dataset = start_dataset(tmp_path, identity="growing")
    with running(tmp_path) as server:
        reading = Reading(server, dataset, world_size=2, rank=1, tail="pad")
        commit_partition(tmp_path, dataset, 0, PACKS[:3], packs_per_shard=3)
        wait_for(lambda: len(reading.got) == 1)
        finish_dataset(tmp_path, dataset, 1, PACKS[:3])
        reading.join()
        assert reading.ended
        assert reading.got == [(0, [PACKS[1]]), (1, [shard.padding_pack()])]


def test_a_later_epoch_waits_for_the_number_of_packs(tmp_path):
    dataset = start_dataset(tmp_path, identity="growing")
    commit_partition(tmp_path, dataset, 0, PACKS[:9], packs_per_shard=3)
    with running(tmp_path) as server:
        reading = Reading(server, dataset, epoch=1, shuffle_seed=0)
        early = Reading(server, dataset)
        wait_for(lambda: len(early.got) == 9)
        assert reading.got == []
        finish_dataset(tmp_path, dataset, 1, PACKS[:9])
        reading.join()
        early.join()
        assert len(reading.got) == 9


def test_a_dataset_that_fails_breaks_the_stream_off_and_says_why_when_asked_again(tmp_path):
    dataset = start_dataset(tmp_path, identity="failing")
    commit_partition(tmp_path, dataset, 0, PACKS[:3], packs_per_shard=3)
    with running(tmp_path) as server:
        reading = Reading(server, dataset)
        wait_for(lambda: len(reading.got) == 3)
        fail_dataset(
            tmp_path, dataset, title="BadRow", detail="rows.jsonl, line 7: not JSON", field="source.paths"
        )
        reading.join()
        assert not reading.ended
        assert isinstance(reading.error, http.client.IncompleteRead)
        found = problem(server.stream(dataset, start=3), 409, "dataset-failed")
        assert "rows.jsonl, line 7" in found["detail"]
        assert found["field"] == "source.paths"


def test_a_dataset_that_ends_up_too_small_gives_both_numbers(tmp_path):
    dataset = start_dataset(tmp_path, identity="small")
    commit_partition(tmp_path, dataset, 0, PACKS[:3], packs_per_shard=3)
    with running(tmp_path) as server:
        reading = Reading(server, dataset, world_size=2, packs_per_step=2)
        finish_dataset(tmp_path, dataset, 1, PACKS[:3])
        reading.join()
        assert not reading.ended
        found = problem(server.stream(dataset, world_size=2, packs_per_step=2), 409, "dataset-too-small")
        assert "3 packs" in found["detail"]
        assert "needs 4" in found["detail"]
        assert len(messages(server.stream(dataset, world_size=2, packs_per_step=2, tail="pad").body)) == 1


def test_a_damaged_shard_is_told_not_served(tmp_path):
    dataset = build_dataset(tmp_path, PACKS, packs_per_shard=4)
    path = LocalStore(tmp_path).path(shard_key(dataset, 0, 1))
    os.truncate(path, 100)
    with running(tmp_path) as server:
        found = problem(server.stream(dataset, start=4), 500, "dataset-damaged")
        assert "000000-001.arrow" in found["detail"]
        assert str(tmp_path) not in found["detail"]
        reading = Reading(server, dataset)  # begins well
        reading.join()
        assert not reading.ended
        assert reading.got == [(i, [PACKS[i]]) for i in range(len(reading.got))]


@pytest.mark.parametrize("what", ["stream?start=4", "shards/1"])
@pytest.mark.parametrize("gone", [("finished.json", "commits", "shards"), ("",)])
def test_who_meets_a_removal_is_told_so_not_of_damage(tmp_path, gone, what):
    """Of a dataset that was read before: as far as the service knows it is ready."""
    dataset = build_dataset(tmp_path, PACKS, packs_per_shard=4)
    with running(tmp_path) as server:
        assert len(messages(server.stream(dataset, max_steps=1).body)) == 1
        for name in gone:
            LocalStore(tmp_path).delete(dataset_key(dataset, name))
        found = problem(server.get(f"/v1/datasets/{dataset}/{what}"), 404, "unknown-dataset")
        assert dataset in found["detail"]
        assert "damage" not in found["detail"]


def test_a_client_whose_dataset_is_removed_is_told_so_at_once(tmp_path):
    dataset = build_dataset(tmp_path, PACKS, packs_per_shard=4)
    with running(tmp_path) as server:
        stream = PackedStream(server.url, dataset=dataset, prefetch_steps=1, timeout_s=60)
        batches = iter(stream)
        next(batches)
        assert server.request("DELETE", f"/v1/datasets/{dataset}").status == 204
        stream.close()  # what lay ready is let go
        with pytest.raises((UnknownDataset, DatasetFailed), match=r"no dataset|removed"):
            list(stream)
        assert stream.stats().num_retries <= 1


# ------------------------------------------------------------------ connections


def test_a_client_that_leaves_ends_its_stream_at_once(tmp_path):
    dataset = start_dataset(tmp_path, identity="waiting")
    with running(tmp_path) as server:
        connection, _ = server.open("GET", f"/v1/datasets/{dataset}/stream")
        wait_for(lambda: server.service.num_streams == 1)
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        wait_for(lambda: server.service.num_streams == 0)
        assert b'padfree_streams_ended_total{how="disconnected"} 1.0' in server.get("/metrics").body


def test_a_reader_that_left_is_sent_no_more_and_holds_nobody_up(tmp_path):
    packs = random_packs(100, max_tokens=8192) * 8
    dataset = build_dataset(tmp_path, packs, packs_per_shard=200)
    size = sum(path.stat().st_size for path in tmp_path.rglob("shards/*"))
    with running(tmp_path, max_chunk_bytes=64 << 10) as server:
        sent = server.service.metrics.served_bytes.labels("stream")
        assert len(messages(server.stream(dataset, max_steps=800).body)) == 800  # all is in memory now
        before = sent._value.get()
        connection, response = server.open("GET", f"/v1/datasets/{dataset}/stream")
        response.read(100)
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        wait_for(lambda: server.service.num_streams == 0)
        assert sent._value.get() - before < size / 2
        assert b'padfree_streams_ended_total{how="disconnected"} 1.0' in server.get("/metrics").body


def test_a_slow_reader_is_waited_for_and_holds_little(tmp_path):
    packs = random_packs(100, max_tokens=8192) * 8
    dataset = build_dataset(tmp_path, packs, packs_per_shard=200)
    size = sum(path.stat().st_size for path in tmp_path.rglob("shards/*"))
    assert size > 16 << 20  # far more than the buffers of two sockets
    with running(tmp_path, max_chunk_bytes=64 << 10) as server:
        sent = server.service.metrics.served_bytes.labels("stream")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(f"GET /v1/datasets/{dataset}/stream HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        wait_for(lambda: sent._value.get() > 0)
        assert server.get("/healthz").status == 200
        stalled = -1.0
        while stalled != (stalled := sent._value.get()):  # until nothing more is taken
            threading.Event().wait(0.3)
        assert stalled < size / 2
        # Left open: the server's end, below, must not wait for it.
    connection.close()


def test_many_streams_share_one_look_at_the_store(tmp_path):
    dataset = start_dataset(tmp_path, identity="growing")
    with running(tmp_path) as server:
        readings = [Reading(server, dataset, world_size=8, rank=rank) for rank in range(8)]
        commit_partition(tmp_path, dataset, 0, PACKS[:24], packs_per_shard=5)
        finish_dataset(tmp_path, dataset, 1, PACKS[:24])
        for rank, reading in enumerate(readings):
            reading.join()
            assert reading.ended
            assert [packs[0] for _, packs in reading.got] == PACKS[rank:24:8]
        assert len(server.service.feeds._feeds) == 1


def test_the_client_reads_the_service(served):
    server, dataset = served
    seen = []
    for rank in range(2):
        with PackedStream(server.url, dataset=dataset, rank=rank, world_size=2, epochs=2) as stream:
            seen.append([batch.example_ids.tolist() for batch in stream])
    assert [len(rank) for rank in seen] == [28, 28]
    first = [ids for pair in zip(*(rank[:14] for rank in seen), strict=True) for ids in pair]
    assert first == [pack.example_ids.tolist() for pack in PACKS[:28]]


# ------------------------------------------------------------------ wrong requests


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("rank=2&world_size=2", "rank"),
        ("rank=-1", "rank"),
        ("rank=x", "rank"),
        ("world_size=0", "world_size"),
        ("packs_per_step=0", "packs_per_step"),
        ("packs_per_step=5000", "packs_per_step"),
        ("epoch=-1", "epoch"),
        ("epoch=100000000", "epoch"),
        ("start=-1", "start"),
        ("start=30", "start"),
        ("start=99999999999999999999", "start"),
        ("offset=30", "offset"),
        ("max_steps=0", "max_steps"),
        ("shuffle_seed=x", "shuffle_seed"),
        ("tail=cut", "tail"),
        ("batches=all", "batches"),
        ("worldsize=2", "worldsize"),
        ("rank=0&rank=1&world_size=2", "rank"),
    ],
)
def test_a_wrong_parameter_is_named(served, query, field):
    server, dataset = served
    found = problem(server.get(f"/v1/datasets/{dataset}/stream?{query}"), 422, "bad-parameter")
    assert found["field"] == field
    assert found["detail"].startswith(f"{field}: ")


def test_an_unknown_dataset_is_named(served):
    server, _ = served
    assert "0" * 32 in problem(server.stream("0" * 32), 404, "unknown-dataset")["detail"]


def test_a_cancelled_dataset_is_not_served(tmp_path):
    dataset = build_dataset(tmp_path, PACKS, packs_per_shard=4, finished=False)
    LocalStore(tmp_path).put(cancelled_key(dataset), json.dumps({}).encode())
    with running(tmp_path) as server:
        problem(server.stream(dataset), 409, "dataset-cancelled")
