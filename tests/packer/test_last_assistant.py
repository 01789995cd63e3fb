"""loss last_assistant: of each conversation only the last message of the assistant is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toy
from test_render_turns import CALL, CLOSING, THINKING, answer, calling, shown

from packer import resolve
from packer.render import Renderer
from packer.spec import SpecError, parse_spec
from packer.store import LocalStore
from packer.tokenization import Tokenizer

QUESTION = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "content": "ok"}
TALK = toy.chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"))


def trained_ids(chat_template: str, row: dict[str, Any], loss: str = "last_assistant") -> list[int]:
    renderer = Renderer(
        Tokenizer(toy.bundle(chat_template=chat_template)), format="messages", fields={}, loss=loss
    )
    rendered = renderer.render([row])
    assert rendered.errors == []
    return rendered.input_ids[rendered.loss_mask].tolist()


@pytest.mark.parametrize("chat_template", [toy.T1, toy.T2, toy.T1_UNMARKED_PROMPT])
def test_only_the_last_turn_of_the_assistant_is_trained(chat_template: str) -> None:
    assert trained_ids(chat_template, TALK, "assistant") == [11, 7, 13, 7]
    assert trained_ids(chat_template, TALK) == [13, 7]
    assert trained_ids(chat_template, toy.chat(("user", "a"), ("assistant", "b"))) == [11, 7]
    assert trained_ids(chat_template, toy.chat(("user", "a"))) == []


@pytest.mark.parametrize("chat_template", [toy.T1, toy.T1_UNMARKED_PROMPT])
def test_train_false_counts_too_and_no_earlier_turn_takes_its_place(chat_template: str) -> None:
    row = {"messages": [dict(message) for message in TALK["messages"]]}
    row["messages"][1]["train"] = False
    assert trained_ids(chat_template, row) == [13, 7]
    row["messages"][3]["train"] = False
    assert trained_ids(chat_template, row) == []


def test_the_answer_behind_tool_calls_is_the_last() -> None:
    assert shown(THINKING, QUESTION, calling(CALL), RESULT, answer("yes"), loss="last_assistant") == (
        "<usr>hi<end>\n"
        '<asst><tool_call>{"name": "f", "arguments": {"b": 1}}</tool_call><end>\n'
        "<usr><tool_response>ok</tool_response><end>\n"
        "<asst>«<think>\n\n</think>\nyes<end>»\n"
    )
    assert shown(CLOSING, QUESTION, answer("no"), QUESTION, calling(CALL), loss="last_assistant") == (
        '<bos><usr> hi<asst> no<eos><usr> hi<asst>«<call>[{"name": "f", "arguments": {"b": 1}}]<eos>»'
    )


def test_markers_that_do_not_go_by_message_are_told() -> None:
    once = toy.T1.replace("{% generation %}", "{% if loop.last %}{% generation %}").replace(
        "{% endgeneration %}", "{% endgeneration %}{% else %}{{ message.content }}<end>{% endif %}"
    )
    row = {"messages": TALK["messages"][:4]}
    renderer = Renderer(
        Tokenizer(toy.bundle(chat_template=once)), format="messages", fields={}, loss="last_assistant"
    )
    [(_, reason)] = renderer.render([row]).errors
    assert "1 generation blocks for 2 assistant messages" in reason


def test_the_spec_takes_it_for_messages_alone(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    for name, data in toy.bundle().files.items():
        (folder / name).write_bytes(data)
    chats, texts = tmp_path / "chats.jsonl", tmp_path / "texts.jsonl"
    chats.write_text(json.dumps(TALK) + "\n")
    texts.write_text('{"text": "a"}\n')
    store = LocalStore(tmp_path / "store")

    def job(path: Path, loss: str) -> Any:
        document = {"source": {"paths": [str(path)]}, "tokenizer": {"path": str(folder)}, "loss": loss}
        return resolve.resolve(parse_spec(document), store=store)

    assert job(chats, "last_assistant").spec.loss == "last_assistant"
    assert job(chats, "last_assistant").dataset != job(chats, "assistant").dataset
    with pytest.raises(SpecError, match='format "text" takes loss auto or all'):
        job(texts, "last_assistant")
