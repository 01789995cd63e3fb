"""Clients tell how long their loops wait: counted by dataset and rank, in a bounded number of series."""

import json
import math
import re

import pytest
from packs import build_dataset, numbered_packs
from prometheus_client import CollectorRegistry, generate_latest
from serving import running, wait_for

from service.clients import ClientMetrics
from trainer_client import PackedStream


def stalls(text: str) -> dict[tuple[str, str], float]:
    pattern = r'^padfree_client_stall_seconds_total{dataset="(.*)",rank="(.*)"} (.*)$'
    return {(d, r): float(value) for d, r, value in re.findall(pattern, text, flags=re.MULTILINE)}


def test_series_are_bounded_and_their_sum_is_right():
    registry, now = CollectorRegistry(), [0.0]
    clients = ClientMetrics(registry, most=10, clock=lambda: now[0])

    def add(dataset: str, rank: int) -> None:
        clients.add(dataset, rank, steps=1, elapsed_s=2.0, stall_s=1.0, retries=0)

    for rank in range(30):
        add("a", rank)
    add("b", 7)
    found = stalls(generate_latest(registry).decode())
    assert found == {("a", str(rank)): 1.0 for rank in range(10)} | {
        ("a", "other"): 20.0,
        ("other", "other"): 1.0,
    }
    now[0] = 1800.0
    for rank in range(1, 10):
        add("a", rank)
    now[0] = 3600.0  # rank 0 and the rest were not heard of for an hour
    add("b", 7)
    add("b", 8)
    found = stalls(generate_latest(registry).decode())
    assert ("a", "0") not in found
    assert (found["b", "7"], found["b", "8"]) == (1.0, 1.0)
    assert found["a", "9"] == 2.0


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({}, 204, None),
        ({"rank": -1}, 422, "rank"),
        ({"stall_s": math.nan}, 422, "stall_s"),
        ({"stall_s": 1e9}, 422, "stall_s"),
        ({"unknown": 1}, 422, "unknown"),
        ({"steps": None}, 422, "steps"),
        ({"rank": True}, 422, "rank"),
        ({"steps": "1"}, 422, "steps"),
        ({"elapsed_s": "4"}, 422, "elapsed_s"),
        ({"retries": False}, 422, "retries"),
        ({"elapsed_s": 2, "stall_s": 3.5}, 422, "stall_s"),
        ({"elapsed_s": 2}, 204, None),
    ],
)
def test_a_report_is_checked(tmp_path, change, status, field):
    dataset = build_dataset(tmp_path, numbered_packs(2), packs_per_shard=2)
    report = {"rank": 3, "steps": 10, "elapsed_s": 4.0, "stall_s": 1.5, "retries": 1} | change
    with running(tmp_path) as server:
        answer = server.request("POST", f"/v1/datasets/{dataset}/streams", body=json.dumps(report).encode())
        text = server.get("/metrics").body.decode()
    assert answer.status == status, answer.body
    assert stalls(text) == ({(dataset, "3"): 1.5} if status == 204 else {})
    if field:
        assert answer.json["field"] == field


def test_a_report_of_an_unknown_dataset_or_a_long_one_is_refused(tmp_path):
    dataset = build_dataset(tmp_path, numbered_packs(2), packs_per_shard=2)
    with running(tmp_path) as server:
        assert server.request("POST", f"/v1/datasets/{'0' * 32}/streams", body=b"{}").status == 404
        assert server.request("POST", f"/v1/datasets/{dataset}/streams", body=b" " * 5000).status == 413


def test_a_stream_tells_the_service_what_its_loop_did(tmp_path):
    dataset = build_dataset(tmp_path, numbered_packs(50), packs_per_shard=10)
    with running(tmp_path, tokens=("secret",)) as server:

        def steps() -> float:
            found = re.search(
                rf'^padfree_client_steps_total{{dataset="{dataset}",rank="1"}} (.*)$',
                server.get("/metrics").body.decode(),
                flags=re.MULTILINE,
            )
            return float(found[1]) if found else 0.0

        options = {"dataset": dataset, "rank": 1, "world_size": 2, "token": "secret"}
        with PackedStream(server.url, **options, report_s=0.05) as stream:
            batches = iter(stream)
            for _ in range(10):
                next(batches)
            wait_for(lambda: steps() == 10)  # while the loop is busy with something else
            assert len(list(batches)) == 15
            wait_for(lambda: steps() == 25)  # the last report
        with PackedStream(server.url, **options, report_s=None) as stream:
            assert len(list(stream)) == 25
        assert steps() == 25


def test_counters_of_a_rank_begin_at_zero_with_its_stream(tmp_path):
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=2)
    with running(tmp_path) as server:
        server.stream(dataset, rank=1, world_size=2)
        assert stalls(server.get("/metrics").body.decode()) == {(dataset, "1"): 0.0}
