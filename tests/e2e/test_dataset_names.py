"""Datasets by name and by the beginning of their id: paths of the service, client, command line."""

import json

import pytest
from packing_job import write_rows
from packs import build_dataset, numbered_packs
from serving import running

from packer.runners import InlineRunner
from padfree.cli import main
from trainer_client import PackedStream, StreamRefused, StreamTimeout, UnknownDataset


@pytest.fixture
def stores(tmp_path):
    """Two datasets called `same`, and one `math 8k`."""
    ids = [
        build_dataset(tmp_path, numbered_packs(count), packs_per_shard=2, name=name)
        for count, name in ((3, "same"), (4, "same"), (5, "math 8k"))
    ]
    return tmp_path, ids


def test_paths_take_names_and_beginnings(stores):
    root, (first, second, third) = stores
    with running(root) as server:
        for called in ("math%208k", third, third[:8]):
            assert server.get(f"/v1/datasets/{called}").json["id"] == third
            assert server.get(f"/v1/datasets/{called}/shards").json["shards"]
            assert server.stream(called).status == 200
        text = server.get("/metrics").body.decode()
        assert 'route="/v1/datasets/{dataset}/stream"' in text
        unknown = server.get("/v1/datasets/math")
        assert unknown.status == 404
        assert "beginning of one" in unknown.json["detail"]
        both = server.get("/v1/datasets/same/stream", X_Request_Id="which")
        assert (both.status, both.json["type"]) == (409, "urn:padfree:problem:ambiguous-dataset")
        assert first in both.json["detail"]
        assert second in both.json["detail"]
        assert both.json["request_id"] == "which"
        lines = server.get("/metrics").body.decode().splitlines()
        counted = [
            line for line in lines if line.startswith("padfree_http_requests_total") and '"409"' in line
        ]
        assert len(counted) == 1
        assert 'route="/v1/datasets/{dataset}/stream"' in counted[0]
        assert server.request("DELETE", f"/v1/datasets/{first[:12]}").status == 204
        assert server.get("/v1/datasets/same").json["id"] == second


def test_a_dataset_called_as_a_route_does_not_hide_it(tmp_path):
    dataset = build_dataset(tmp_path, numbered_packs(3), packs_per_shard=2, name="preview")
    with running(tmp_path, runner=InlineRunner()) as server:
        assert server.get("/v1/datasets/preview").json["id"] == dataset
        posted = server.request("POST", "/v1/datasets/preview", body=b"no JSON")
        assert (posted.status, posted.json["type"]) == (400, "urn:padfree:problem:malformed-json")


def test_names_are_behind_the_tokens(stores):
    root, _ = stores
    with running(root, tokens=("secret",)) as server:
        assert server.get("/v1/datasets/same").status == server.get("/v1/datasets/nobody").status == 401


@pytest.mark.parametrize("where", ["service", "folder"])
def test_a_stream_by_name_is_the_stream_of_its_id(stores, where):
    root, (first, second, third) = stores
    with running(root) as server:
        source = server.url if where == "service" else root
        stream = PackedStream(source, dataset="math 8k")
        assert stream.dataset == stream.state_dict()["dataset"] == third
        assert len(list(stream)) == 5
        assert PackedStream(source, dataset=first[:10]).dataset == first
        with pytest.raises(StreamRefused, match=rf"one of 2 datasets.*{min(first, second)} \(same, ready\)"):
            PackedStream(source, dataset="same")
        with pytest.raises(UnknownDataset, match="there is no"):
            next(iter(PackedStream(source, dataset="nobody")))


def test_a_whole_id_asks_nobody_and_a_name_asks_as_long_as_it_may():
    PackedStream("http://127.0.0.1:9", dataset="0" * 32)
    with pytest.raises(StreamTimeout, match=r"asking for dataset 'math' for 0\.2 s"):
        PackedStream("http://127.0.0.1:9", dataset="math", timeout_s=0.2)


def padfree(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    told = capsys.readouterr()
    return status, told.out, told.err


@pytest.mark.parametrize("where", ["service", "folder"])
def test_the_command_line_takes_names(stores, capsys, where):
    root, (first, second, third) = stores
    with running(root) as server:
        place = ("--url", server.url) if where == "service" else ("--store", str(root))
        status, out, _ = padfree(capsys, "inspect", "math 8k", *place, "--json")
        assert status == 0
        assert third in out
        status, out, _ = padfree(capsys, "stream", third[:6], *place, "--json")
        assert (status, json.loads(out)["dataset"]) == (0, third)
        status, _, err = padfree(capsys, "inspect", "same", *place)
        assert status == 1
        assert first in err
        assert second in err
        status, out, _ = padfree(capsys, "datasets", *place)
        head, *lines = out.splitlines()
        assert head.split()[:3] == ["id", "state", "created"]
        assert len(lines) == 3
        assert any(line.startswith(third[:12]) and "math 8k" in line and " kB " in line for line in lines)
        status, out, _ = padfree(capsys, "datasets", "--remove", "math 8k", *place, "--json")
        assert (status, json.loads(out)) == (0, {"removed": third})
        assert padfree(capsys, "inspect", "math 8k", *place)[0] == 1
        status, out, _ = padfree(capsys, "datasets", "--remove", first, *place)
        assert (status, out) == (0, f"removed dataset {first} (same)\n")
        assert padfree(capsys, "datasets", "--remove", first, *place)[0] == 1


@pytest.mark.parametrize("where", ["service", "folder"])
def test_another_name_for_known_content_is_told(tmp_path, capsys, where):
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6, 7]}])
    store = tmp_path / "store"
    with running(store, runner=InlineRunner(), data_roots=(tmp_path,)) as server:
        place = ("--url", server.url) if where == "service" else ("--store", str(store), "--workers", "0")
        for name, told in (("first", False), ("first", False), ("second", True)):
            status, out, err = padfree(capsys, "pack", str(rows), "--name", name, *place, "--json")
            assert status == 0
            assert json.loads(out.splitlines()[-1])["name"] == "first"
            assert ("which is called 'first'; the name 'second' is not taken over" in err) is told
        document = {"source": {"paths": [str(rows)]}, "name": "third"}
        answer = server.request("POST", "/v1/datasets", body=json.dumps(document).encode())
        assert answer.status == 200
        assert any("'third' is not taken over" in text for text in answer.json["warnings"])
