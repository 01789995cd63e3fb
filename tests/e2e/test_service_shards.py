"""Shards as files over HTTP, and the list of them."""

import hashlib
import json
import os
import threading

import pytest
from packs import build_dataset, commit_partition, fail_dataset, finish_dataset, random_packs, start_dataset
from serving import running, wait_for

from packer.manifest import commit_key, dataset_key, shard_key
from packer.shard import read_packs
from packer.store import LocalStore

PACKS = random_packs(23)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    dataset = build_dataset(root, PACKS, packs_per_shard=5)
    with running(root) as server:
        yield server, f"/v1/datasets/{dataset}/shards"


def test_the_list_and_the_files_agree(served):
    server, path = served
    page = server.get(path).json
    assert (page["finished"], page["state"], page["next"]) == (True, "ready", 5)
    packs = []
    for number, one in enumerate(page["shards"]):
        answer = server.get(f"{path}/{one['index']}")
        assert one["index"] == number
        assert len(answer.body) == one["num_bytes"] == int(answer.headers["content-length"])
        assert hashlib.sha256(answer.body).hexdigest() == one["sha256"] == answer.headers["etag"].strip('"')
        packs += read_packs(answer.body)
    assert packs == PACKS


@pytest.mark.parametrize("index", ["1" * 20, "x", "-1", "1.0"])
def test_an_index_that_is_none_is_told_the_range(served, index):
    server, path = served
    answer = server.get(f"{path}/{index}")
    assert answer.status == 404
    assert f"a whole number from 0 to 999999999, found '{index}'" in answer.json["detail"]


def test_a_page_begins_where_it_is_asked_to(served):
    server, path = served
    assert [one["index"] for one in server.get(f"{path}?start=3").json["shards"]] == [3, 4]
    after = server.get(f"{path}?start=5&wait_s=20").json
    assert (after["shards"], after["finished"], after["next"]) == ([], True, 5)


def test_long_lists_come_in_pages(served, monkeypatch):
    server, path = served
    monkeypatch.setattr("service.shards._PAGE", 2)
    start, seen, finished = 0, [], False
    while not finished:
        page = server.get(f"{path}?start={start}").json
        seen += [one["index"] for one in page["shards"]]
        start, finished = page["next"], page["finished"]
    assert seen == [0, 1, 2, 3, 4]


# ------------------------------------------------------------------ ranges and conditions


def test_f41_byte_ranges_follow_rfc_9110(served):
    server, path = served
    path = f"{path}/0"
    whole = server.get(path).body
    size = len(whole)
    for header, start, stop in [
        ("bytes=0-99", 0, 100),
        (f"bytes={size - 100}-", size - 100, size),
        ("bytes=-50", size - 50, size),
        (f"bytes=0-{size * 5}", 0, size),
        (f"bytes=-{size * 5}", 0, size),
        ("bytes=5-5", 5, 6),
    ]:
        answer = server.get(path, Range=header)
        assert answer.status == 206
        assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
        assert answer.body == whole[start:stop]
        assert answer.headers["content-length"] == str(stop - start)
    for header in (f"bytes={size}-", "bytes=-0"):
        answer = server.get(path, Range=header)
        assert answer.status == 416
        assert answer.headers["content-range"] == f"bytes */{size}"
    for header in ("bytes=5-4", "bytes=abc", "bytes=0-1,4-5"):
        answer = server.get(path, Range=header)
        assert (answer.status, answer.body) == (200, whole)
        assert "content-range" not in answer.headers


def test_f41_head_tells_length_and_that_ranges_are_taken(served):
    server, path = served
    answer = server.request("HEAD", f"{path}/0", headers={"Range": "bytes=0-9"})
    whole = server.get(f"{path}/0")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-length"] == str(len(whole.body))
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["etag"] == whole.headers["etag"]


def test_f42_a_range_is_honoured_only_for_the_same_content(served):
    server, path = served
    whole = server.get(f"{path}/0")
    stale = server.get(f"{path}/0", Range="bytes=500-", If_Range='"0000"')
    assert (stale.status, stale.body, stale.headers["etag"]) == (200, whole.body, whole.headers["etag"])
    fresh = server.get(f"{path}/0", Range="bytes=500-", If_Range=whole.headers["etag"])
    assert (fresh.status, fresh.body) == (206, whole.body[500:])


def test_what_the_client_has_is_not_sent_again(served):
    server, path = served
    etag = server.get(f"{path}/0").headers["etag"]
    answer = server.get(f"{path}/0", If_None_Match=etag)
    assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", etag)
    assert server.get(f"{path}/0", If_None_Match='"other"').status == 200


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/etc/passwd",
        "/etc/passwd",
        "a\\..\\..\\b",
        "a%00b",
        "-1",
        "1e3",
        "%D9%A1",
        "9" * 400,
        "link",
    ],
)
def test_f45_names_in_a_url_cannot_leave_the_data_directory(served, name):
    server, path = served
    store = server.service.store.root
    outside = store.parent / "outside"
    outside.write_text("secret")
    for folder in store.rglob("shards"):
        if not (folder / "link").exists():
            (folder / "link").symlink_to(outside)
    for url in (f"{path}/{name}", f"/v1/datasets/{name}", f"/v1/datasets/{name}/stream", f"/web/{name}"):
        answer = server.get(url)
        assert answer.status in (400, 403, 404)
        assert len(answer.body) < 400
        for told in (b"secret", b"root:", str(store).encode()):
            assert told not in answer.body


def test_an_index_that_is_not_there_is_told(served):
    server, path = served
    answer = server.get(f"{path}/5")
    assert answer.status == 404
    assert "5 shards" in answer.json["detail"]


def test_a_shard_that_was_cut_off_is_not_served(tmp_path):
    dataset = build_dataset(tmp_path, PACKS, packs_per_shard=5)
    store = LocalStore(tmp_path)
    os.truncate(store.path(shard_key(dataset, 0, 0)), 50)
    store.delete(shard_key(dataset, 0, 1))
    with running(tmp_path) as server:
        for index in (0, 1):
            answer = server.get(f"/v1/datasets/{dataset}/shards/{index}")
            assert answer.status == 500
            assert answer.json["type"] == "urn:padfree:problem:dataset-damaged"
        assert server.get(f"/v1/datasets/{dataset}/shards/2").status == 200


# ------------------------------------------------------------------ while packing


def test_the_list_waits_for_the_next_shard(tmp_path):
    dataset = start_dataset(tmp_path, identity="growing")
    path = f"/v1/datasets/{dataset}/shards"
    with running(tmp_path) as server:
        assert server.get(path).json == {
            "shards": [], "next": 0, "finished": False, "state": "queued", "error": None,
        }  # fmt: skip
        pages = []
        thread = threading.Thread(target=lambda: pages.append(server.get(f"{path}?wait_s=50").json))
        thread.start()
        wait_for(lambda: server.service.feeds._feeds[dataset]._num_waiting)
        assert pages == []
        commit_partition(tmp_path, dataset, 0, PACKS[:8], packs_per_shard=5)
        thread.join()
        assert [one["num_packs"] for one in pages[0]["shards"]] == [5, 3]
        assert pages[0]["finished"] is False
        finish_dataset(tmp_path, dataset, 1, PACKS[:8])
        assert server.get(f"{path}?start=2&wait_s=50").json["finished"] is True


def test_waiting_ends_when_the_time_is_over(tmp_path):
    dataset = start_dataset(tmp_path, identity="growing")
    with running(tmp_path) as server:
        page = server.get(f"/v1/datasets/{dataset}/shards?wait_s=0.2").json
        assert (page["shards"], page["finished"]) == ([], False)
        for wrong in ("-1", "inf", "nan", "x"):
            answer = server.get(f"/v1/datasets/{dataset}/shards?wait_s={wrong}")
            assert (answer.status, answer.json["field"]) == (422, "wait_s")


def test_a_failed_dataset_lists_and_serves_no_shard(tmp_path):
    dataset = start_dataset(tmp_path, identity="failing")
    commit_partition(tmp_path, dataset, 0, PACKS[:8], packs_per_shard=5)
    fail_dataset(tmp_path, dataset, title="BadRow", detail="rows.jsonl, line 7: not JSON")
    with running(tmp_path) as server:
        page = server.get(f"/v1/datasets/{dataset}/shards?wait_s=50").json
        assert (page["shards"], page["finished"], page["state"]) == ([], False, "failed")
        assert "line 7" in page["error"]["detail"]
        answer = server.get(f"/v1/datasets/{dataset}/shards/0")
        assert answer.status == 409
        assert "line 7" in answer.json["detail"]


def test_another_process_removes_a_dataset(tmp_path):
    dataset = build_dataset(tmp_path, PACKS, packs_per_shard=5)
    with running(tmp_path) as server:
        assert server.get(f"/v1/datasets/{dataset}/shards/0").status == 200
        LocalStore(tmp_path).delete(dataset_key(dataset))
        assert server.get(f"/v1/datasets/{dataset}/shards/0").status == 404
        assert server.get(f"/v1/datasets/{dataset}").status == 404
        assert server.get("/v1/datasets").json == {"datasets": []}
        assert build_dataset(tmp_path, PACKS, packs_per_shard=5) == dataset
        assert server.get(f"/v1/datasets/{dataset}/shards").json["finished"] is True


def test_two_replicas_serve_one_store(tmp_path):
    dataset = start_dataset(tmp_path, identity="growing")
    with running(tmp_path) as first, running(tmp_path) as second:
        for number in range(3):
            commit_partition(tmp_path, dataset, number, PACKS[number * 5 : number * 5 + 5], packs_per_shard=2)
            pages = [server.get(f"/v1/datasets/{dataset}/shards").body for server in (first, second)]
            assert pages[0] == pages[1]
            assert len(json.loads(pages[0])["shards"]) == 3 * (number + 1)


def test_a_damaged_manifest_hides_no_other_dataset(tmp_path):
    good = build_dataset(tmp_path, PACKS, packs_per_shard=5)
    bad = build_dataset(tmp_path, PACKS[:9], packs_per_shard=5)
    LocalStore(tmp_path).put(commit_key(bad, 0), b"ARROW1 and no more")
    with running(tmp_path) as server:
        states = {view["id"]: view["state"] for view in server.get("/v1/datasets").json["datasets"]}
        assert states == {good: "ready", bad: "failed"}
        assert "damaged" in server.get(f"/v1/datasets/{bad}").json["error"]["detail"]
        answer = server.stream(bad)
        assert answer.status == 409
        assert str(tmp_path) not in answer.body.decode()
        assert server.stream(good).status == 200
