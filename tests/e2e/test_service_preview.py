"""POST /v1/datasets/preview: what would be trained, over HTTP and through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import toy
from packing_job import pack_document, write_rows, write_tokenizer
from serving import Answer, Server, running

from packer.runners import InlineRunner
from packer.store import LocalStore
from service import previews

TOKEN = "secret"
ROWS = [toy.chat(("user", "a b"), ("assistant", "c d")), toy.chat(("user", "e"), ("assistant", "f"))] * 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write_rows(tmp_path / "data" / "rows.jsonl", ROWS)
    write_tokenizer(tmp_path / "data" / "tokenizer")
    with running(
        tmp_path / "store", runner=InlineRunner(), data_roots=(tmp_path / "data",), tokens=(TOKEN,)
    ) as found:
        yield found


def ask(server: Server, document: Any, token: str = TOKEN) -> Answer:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return server.request(
        "POST", "/v1/datasets/preview", body=body, headers={"Authorization": f"Bearer {token}"}
    )


def spec_at(tmp_path: Path, **more: Any) -> dict[str, Any]:
    data = tmp_path / "data"
    return {
        "source": {"paths": [str(data / "rows.jsonl")]},
        "tokenizer": {"path": str(data / "tokenizer")},
        "packing": {"max_tokens": 16},
        **more,
    }


def test_the_examples_are_those_that_are_packed(server: Server, tmp_path: Path) -> None:
    answer = ask(server, spec_at(tmp_path, examples=3))
    assert answer.status == 200, answer.body
    packed = pack_document(tmp_path / "other", spec_at(tmp_path))
    found = answer.json
    assert [one["example"] for one in found["examples"]] == [0, 1, 2]
    for one in found["examples"]:
        ((ids, trained),) = packed.segments[one["example"]]
        assert [token["id"] for token in one["tokens"]] == ids
        assert [token["trained"] for token in one["tokens"]] == trained
        assert (one["num_tokens"], one["num_trained"]) == (len(ids), sum(trained))
    assert found["examples"][0]["tokens"][0]["text"] == "<bos>"
    assert found["num_rows"] == 8
    assert found["warnings"] == ["6 of the first 8 rows (75%) have the tokens of an earlier row: duplicates"]
    assert len(ask(server, spec_at(tmp_path)).json["examples"]) == 5


def test_nothing_remains(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    assert ask(server, spec_at(tmp_path)).status == 200
    assert ask(server, spec_at(tmp_path, loss="completion")).status == 422
    assert list((tmp_path / "scratch").iterdir()) == []
    assert LocalStore(tmp_path / "store").list("datasets") == []
    assert LocalStore(tmp_path / "store").list("tokenizers") == []


@pytest.mark.parametrize(
    ("more", "field", "text"),
    [
        ({"examples": 0}, "examples", "from 1 to 100"),
        ({"examples": "5"}, "examples", "from 1 to 100"),
        ({"examples": 101}, "examples", "from 1 to 100"),
        ({"packing": {"max_token": 3}}, "packing.max_token", "max_tokens"),
        ({"source": {"paths": ["nowhere.jsonl"]}}, "source.paths", "no such file"),
        ({"source": {"paths": ["/etc/passwd"]}}, "source.paths", "data folders"),
        ({"loss": "completion"}, "loss", "takes loss auto or assistant"),
        ({"tokenizer": None}, "tokenizer.path", "requires a tokenizer"),
    ],
)
def test_errors_name_the_field(
    server: Server, tmp_path: Path, more: dict[str, Any], field: str, text: str
) -> None:
    answer = ask(server, spec_at(tmp_path, **more))
    assert answer.status == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json["field"] == field
    assert text in answer.json["detail"]


def test_other_errors(server: Server, tmp_path: Path) -> None:
    assert ask(server, b"{").status == 400
    assert ask(server, [1]).status == 422
    assert ask(server, spec_at(tmp_path), token="wrong").status == 401
    assert ask(server, b" " * (5 << 20)).status == 413


def test_a_replica_that_does_not_pack_says_so(server: Server, tmp_path: Path) -> None:
    with running(tmp_path / "store", tokens=(TOKEN,)) as other:
        answer = ask(other, spec_at(tmp_path))
    assert (answer.status, answer.json["title"]) == (405, "This replica does not pack")


def test_an_upload_and_a_dataset_can_be_previewed(server: Server, tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    data = (tmp_path / "data" / "rows.jsonl").read_bytes()
    upload = server.request("POST", "/v1/uploads?name=a.jsonl", body=data, headers=headers).json["upload"]
    assert len(ask(server, spec_at(tmp_path, source={"paths": [upload]})).json["examples"]) == 5
    packed = pack_document(tmp_path / "store", spec_at(tmp_path))
    before = sorted(path for path in (tmp_path / "store").rglob("*"))
    found = ask(server, {"source": {"paths": [f"dataset://{packed.job.dataset}"]}, "examples": 8}).json
    assert sorted(one["example"] for one in found["examples"]) == list(range(8))
    assert sorted(path for path in (tmp_path / "store").rglob("*")) == before


def test_it_is_documented(server: Server) -> None:
    document = server.get("/openapi.json").json["paths"]["/v1/datasets/preview"]["post"]
    properties = document["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert properties["examples"] == {
        "default": 5, "maximum": previews.MAX_EXAMPLES, "minimum": 1, "title": "Examples", "type": "integer"
    }  # fmt: skip
    assert {"200", "400", "401", "405", "413", "422", "507"} <= set(document["responses"])


def test_the_command_asks_the_service(server: Server, tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [sys.executable, "-m", "padfree", "pack", "rows.jsonl", "--tokenizer", "tokenizer"]
    place = ["--url", server.url, "--token", TOKEN]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--preview", "1", *more], cwd=data, capture_output=True, text=True, timeout=120
        )

    here, there = run(), run(*place)
    assert there.returncode == 0, there.stderr
    assert "<asst>|[c]|[d]|[<end>]" in there.stdout
    assert here.stdout == there.stdout
    assert json.loads(run(*place, "--json").stdout) == json.loads(run("--json").stdout)
    wrong = run(*place, "--loss", "completion")
    assert (wrong.returncode, "loss" in wrong.stderr) == (2, True)
