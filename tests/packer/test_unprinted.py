"""Words that a chat template drops without a word: counted by role and told, or the row is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toy
from packing_job import write_tokenizer
from test_render_turns import CALL, answer, calling

from packer.coordinator import pack
from packer.preview import preview
from packer.render import Rendered, Renderer
from packer.resolve import resolve
from packer.runners import InlineRunner
from packer.spec import parse_spec
from packer.store import LocalStore
from packer.tokenization import Tokenizer

# Prints a system message only with a question that is the last message (as Mistral Nemo), and no results.
DROPPING = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<usr>' + (system if loop.last else '') + message.content + '<asst>' }}
    {%- elif message.role == 'assistant' %}
        {{- (message.content or '') | trim }}
        {%- for call in message.tool_calls or [] %}{{- '<call>' + call.function | tojson }}{%- endfor %}
        {{- '<end>' }}
    {%- endif %}
{%- endfor %}
"""
# Prints everything, but much of it in another form.
CHANGING = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<tool>' + message.content | tojson(ensure_ascii=true) + '<end>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<asst>' + message.content.split('</think>')[-1] | trim + '<end>' }}
    {%- elif message.role != 'system' %}
        {{- '<usr>' + message.content | trim + (messages[0].content if loop.index0 == 1 else '') + '<end>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<asst>' }}{%- endif %}
"""


def rendered(chat_template: str, *messages: dict[str, Any], loss: str = "assistant", **row: Any) -> Rendered:
    tokenizer = Tokenizer(toy.byte_level_bundle(chat_template=chat_template))
    return Renderer(tokenizer, format="messages", fields={}, loss=loss).render(
        [{"messages": list(messages), **row}]
    )


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("loss", ["assistant", "all"])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_that_is_dropped_is_counted(role: str, loss: str) -> None:
    talk = [said("user", "hi"), answer("yes")]
    assert rendered(DROPPING, said(role, "Be brief."), *talk, loss=loss).unprinted == {"system": 1}
    assert rendered(DROPPING, *talk, loss=loss).unprinted == {}
    assert rendered(DROPPING, said(role, " \n"), *talk, loss=loss).unprinted == {}
    # Words that stand in someone else's message are no proof that they are printed.
    assert rendered(DROPPING, said(role, "yes"), *talk, loss=loss).unprinted == {"system": 1}


def test_a_system_message_that_is_printed_elsewhere_is_none() -> None:
    out = rendered(DROPPING, said("system", "Be brief."), said("user", "hi"), loss="all")
    assert (out.unprinted, out.errors) == ({}, [])


def test_tools_and_their_results_and_other_roles() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    talk = [said("user", "hi"), calling(CALL), said("tool", "4"), answer("yes"), said("critic", "bad")]
    out = rendered(DROPPING, *talk, loss="all")
    assert (out.unprinted, out.errors) == ({"tool": 1, "other": 1}, [])
    assert rendered(DROPPING, said("user", "hi"), answer("yes"), tools=tools).unprinted == {"tool": 1}
    printing = "{{ tools | tojson if tools }}" + DROPPING
    assert rendered(printing, said("user", "hi"), answer("yes"), tools=tools).unprinted == {}


def test_words_in_another_form_are_printed() -> None:
    out = rendered(
        CHANGING,
        said("system", "Be brief."),
        said("user", " hi\n"),
        answer("<think>hm</think> yes "),
        said("tool", 'a "quoted" result\n'),
        answer("<think>only thoughts</think>"),
        said("user", "hi"),
        answer("yes"),
    )
    assert (out.unprinted, out.errors) == ({}, [])


@pytest.mark.parametrize("loss", ["assistant", "all"])
def test_words_of_the_user_or_the_assistant_that_vanish_make_the_row_an_error(loss: str) -> None:
    forgetful = DROPPING.replace(
        "(message.content or '') | trim", "'' if message.tool_calls else message.content"
    )
    [(_, reason)] = rendered(forgetful, said("user", "hi"), calling(CALL, content="Wait."), loss=loss).errors
    assert "does not print the words of message 1 (assistant)" in reason
    deaf = DROPPING.replace("+ message.content +", "+ (message.content if loop.index < 5 else '') +")
    talk = [said("user", "hi"), answer("yes")] * 2
    [(_, reason)] = rendered(deaf, *talk, said("user", "and?"), answer("no"), loss=loss).errors
    assert "does not print the words of message 4 (user)" in reason


CALLS = "{%- for call in message.tool_calls or [] %}{{- '<call>' + call.function | tojson }}{%- endfor %}"
# Prints calls only where content is null, as DeepSeek's; or of several calls the first.
NULL_CALLS = DROPPING.replace(CALLS, "{%- if message.content is none %}" + CALLS + "{%- endif %}").replace(
    "(message.content or '') | trim", "message.content if message.content is not none else ''"
)
FIRST_CALL = DROPPING.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
OTHER_CALL = {"id": "2", "type": "function", "function": {"name": "g", "arguments": {"b": 2}}}


@pytest.mark.parametrize("loss", ["assistant", "all"])
def test_tool_calls_that_vanish_make_the_row_an_error(loss: str) -> None:
    assert NULL_CALLS != DROPPING != FIRST_CALL
    question = said("user", "hi")
    told = "does not print all tool calls of message 1"
    [(_, reason)] = rendered(NULL_CALLS, question, calling(CALL, content="Wait."), loss=loss).errors
    assert told in reason
    [(_, reason)] = rendered(FIRST_CALL, question, calling(CALL, OTHER_CALL), loss=loss).errors
    assert told in reason
    for chat_template, message in (
        (FIRST_CALL, calling(CALL, content="Wait.")),
        (NULL_CALLS, calling(CALL, OTHER_CALL)),
        (NULL_CALLS, answer("yes")),
        (DROPPING, calling(CALL, OTHER_CALL, content="Wait.")),
    ):
        assert rendered(chat_template, question, message, loss="all").errors == []


def test_an_empty_content_beside_calls_is_null_where_the_template_needs_that() -> None:
    question = said("user", "hi")
    empty, null = (
        rendered(NULL_CALLS, question, calling(CALL, content=one), loss="all") for one in ("", None)
    )
    assert (empty.errors, null.errors) == ([], [])
    assert empty.input_ids.tolist() == null.input_ids.tolist()


def test_a_function_call_of_the_older_form_is_a_tool_call() -> None:
    question = said("user", "hi")
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"b": 1}'}}
    found, new = (rendered(DROPPING, question, one, loss="all") for one in (old, calling(CALL)))
    assert (found.errors, found.input_ids.tolist()) == ([], new.input_ids.tolist())
    [(_, reason)] = rendered(DROPPING, question, old | {"tool_calls": [CALL]}, loss="all").errors
    assert "tool_calls or function_call is required, found both" in reason
    none = rendered(DROPPING, question, old | {"tool_calls": []}, loss="all")
    assert (none.errors, none.input_ids.tolist()) == ([], new.input_ids.tolist())
    callless = DROPPING.replace("message.tool_calls or []", "[]")
    [(_, reason)] = rendered(callless, question, old, loss="all").errors
    assert "prints no tool calls" in reason
    # A template that reads it gets it as it is.
    reading = callless.replace("| trim }}", "| trim }}{{ (message.function_call or {}).name }}")
    tokenizer = Tokenizer(toy.byte_level_bundle())
    out = rendered(reading, question, old, loss="all")
    assert tokenizer.decode(out.input_ids.tolist()).endswith("<asst>f<end>")


def test_reasoning_that_is_dropped_is_counted() -> None:
    talk = [said("user", "hi"), answer("yes", reasoning_content="so"), said("user", "ho"), answer("no")]
    for loss in ("assistant", "all"):
        out = rendered(DROPPING, *talk, loss=loss)
        assert (out.unprinted, out.errors) == ({"reasoning": 1}, [])
    assert rendered(DROPPING, talk[0], answer("yes", thinking="so")).unprinted == {"reasoning": 1}
    assert rendered(DROPPING, talk[0], answer("yes", reasoning_content="")).unprinted == {}
    # What a template prints of the last answer alone, by design, is not dropped.
    printing = DROPPING.replace(
        "(message.content or '')",
        "((message.reasoning_content or '') if loop.last else '') + (message.content or '')",
    )
    assert rendered(printing, *talk).unprinted == {}


def test_the_report_and_the_preview_warn(tmp_path: Path) -> None:
    rows = [
        toy.chat(("system", "w40"), ("user", "a"), ("assistant", "b")),
        toy.chat(("user", "a"), ("assistant", "b")),
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows]))
    store = LocalStore(tmp_path / "store")
    tokenizer = write_tokenizer(tmp_path / "toy", toy.bundle(chat_template=DROPPING))
    document = {"source": {"paths": [str(tmp_path / "rows.jsonl")]}, "tokenizer": {"path": str(tokenizer)}}
    job = resolve(parse_spec(document), store=store)
    warning = "2 of 4 rows have a system message that the chat template does not print"
    assert sum(text.startswith(warning) for text in preview(job, store, 1).warnings) == 1
    report = pack(job, store, InlineRunner())
    assert (report["rows_system_unprinted"], report["rows_tool_unprinted"]) == (2, 0)
    assert report["rows_packed"] == 4
    assert sum(text.startswith(warning) for text in report["warnings"]) == 1
