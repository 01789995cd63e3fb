"""Turns of roles that look like the assistant's train nothing: report, preview, estimate and error say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toy
from packing_job import pack_document, spec_of, write_rows, write_tokenizer

from packer.coordinator import PackingFailed
from packer.preview import preview
from packer.render import Renderer
from packer.resolve import resolve
from packer.roles import looks_like_assistant, unlearned_warnings
from packer.spec import parse_spec
from packer.store import LocalStore
from packer.tokenization import Tokenizer
from padfree.cli import main


@pytest.mark.parametrize(
    "role",
    [
        *("Assistant", "ASSISTANT", "asistant", "assistent", "assitant", "assistants", " assistant"),
        *("assistant:", "bot", "gpt", "GPT-4", "chatgpt", "model", "AI", "<|assistant|>"),
    ],
)
def test_roles_that_look_like_the_assistant_s(role: str) -> None:
    assert looks_like_assistant(role)


@pytest.mark.parametrize(
    "role",
    ["assistant", "user", "human", "system", "developer", "tool", "function", "ipython", "observation"],
)
def test_other_roles(role: str) -> None:
    assert not looks_like_assistant(role)


def lenient(chat_template: str) -> str:
    """The template, which prints roles that it does not know as it prints users."""
    return chat_template.replace("MARKERS[message.role]", "MARKERS.get(message.role, '<usr>')")


def job_of(tmp_path: Path, rows: list[Any], chat_template: str = toy.T1, **more: Any) -> dict[str, Any]:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", toy.bundle(chat_template=lenient(chat_template)))
    return spec_of(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, **more)


def of_roles(warnings: list[str]) -> list[str]:
    return [one for one in warnings if "train nothing" in one]


MIXED = [
    toy.chat(("user", "a"), ("Assistant", "b"), ("user", "c"), ("assistant", "d")),
    toy.chat(("user", "a"), ("bot", "b"), ("user", "c"), ("assistant", "d")),
    toy.chat(("user", "a"), ("Assistant", "b"), ("user", "c"), ("assistant", "d")),
]
SAID = unlearned_warnings({"Assistant": 2, "bot": 1})


@pytest.mark.parametrize("chat_template", [toy.T1, toy.T1_UNMARKED_PROMPT])
def test_all_tell_of_the_roles_and_the_turns(
    tmp_path: Path, chat_template: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = job_of(tmp_path, MIXED, chat_template)
    found = pack_document(tmp_path / "store", document)
    assert of_roles(found.report["warnings"]) == SAID
    assert "3 turns" in SAID[0]
    assert "'Assistant' (2), 'bot' (1)" in SAID[0]
    store = LocalStore(tmp_path / "preview")
    assert of_roles(preview(resolve(parse_spec(document), store=store), store, 1).warnings) == SAID
    tokenizer = document["tokenizer"]["path"]
    assert main(["estimate", *document["source"]["paths"], "--tokenizer", tokenizer, "--json"]) == 0
    assert of_roles(json.loads(capsys.readouterr().out.splitlines()[-1])["warnings"]) == SAID


def test_where_nothing_trains_the_error_names_them(tmp_path: Path) -> None:
    with pytest.raises(PackingFailed) as raised:
        pack_document(tmp_path / "store", job_of(tmp_path, [toy.chat(("user", "a"), ("asistant", "b"))]))
    assert "of 1 rows 1 have no token to train; 1 turn with" in str(raised.value)
    assert "'asistant' (1)" in str(raised.value)
    assert "max_tokens" not in str(raised.value)


def test_turns_that_are_trained_or_meant_to_be_left_out_are_not_told_of(tmp_path: Path) -> None:
    assert (
        of_roles(pack_document(tmp_path / "a", job_of(tmp_path, MIXED, loss="all")).report["warnings"]) == []
    )
    rows = [json.loads(json.dumps(row)) for row in MIXED]
    for row in rows:
        row["messages"][1]["train"] = False
    assert of_roles(pack_document(tmp_path / "b", job_of(tmp_path, rows)).report["warnings"]) == []
    sharegpt = {"conversations": [{"from": "human", "value": "a"}, {"from": "bot", "value": "b"}]}
    assert of_roles(pack_document(tmp_path / "c", job_of(tmp_path, [sharegpt])).report["warnings"]) == []
    # A template whose generation blocks hold them too.
    blocks = toy.T1.replace("message.role == 'assistant'", "message.role in ['assistant', 'bot']")
    assert blocks != toy.T1
    renderer = Renderer(
        Tokenizer(toy.bundle(chat_template=blocks)), format="messages", fields={}, loss="assistant"
    )
    assert renderer.render(MIXED[1:2]).unlearned == {}
