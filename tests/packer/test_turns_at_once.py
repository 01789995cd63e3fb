"""Turns that are found without a second rendering are those that points find."""

from __future__ import annotations

from typing import Any

import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.render import RowProblem
from packer.render.chats import Chats
from packer.tokenization import Tokenizer

# As Qwen3: the last answer has (empty) thoughts before it; what is thought is taken out of earlier ones.
THINKING = """\
{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<asst>\\n' }}
{%- set words = m.content.split('</t>')[-1].lstrip('\\n') %}
{%- if loop.last %}{{- '<t>\\n\\n</t>\\n\\n' }}{%- endif %}{{- words + '<end>\\n' }}
{%- else %}{{- '<usr>' + m.role + '\\n' + m.content + '<end>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<asst>\\n' }}{%- endif %}"""
# As Llama 3: one control word before every role, words without white space at their ends.
HEADERS = """\
{{- '<bos>' }}{%- for m in messages %}
{{- '<sys>' + m.role + '<usr>\\n\\n' + m.content | trim + '<end>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<sys>assistant<usr>\\n\\n' }}{%- endif %}"""
# As Mistral: no prompt of its own, the question is closed; earlier answers end otherwise than others.
CLOSED = """\
{%- for m in messages %}{%- if m.role == 'user' %}{{- '<usr>' + m.content + '<asst>' }}
{%- elif m.role == 'assistant' %}{{- m.content + '<end>' }}
{%- else %}{{- m.content + '\\n' }}{%- endif %}{%- endfor %}"""
# Prompts that words can fake: these are never found at once.
WORDS_ALONE = """\
{%- for m in messages %}{{- m.role + ': ' + m.content }}
{{- '<end>\\n' if m.role == 'assistant' else '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""

TEMPLATES = {
    "toy": toy.T1_UNMARKED_PROMPT,
    "thinking": THINKING,
    "headers": HEADERS,
    "closed": CLOSED,
    "words": WORDS_ALONE,
}

pieces = st.sampled_from(
    [
        "a",
        "yes",
        " ",
        "\n",
        "assistant",
        "assistant: a",
        "\n\n",
        "<t>\n\n</t>\n\n",
        "</t>",
        "é",
        "<end>",
        "<asst>",
    ]
)
words = st.lists(pieces, max_size=4).map("".join)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "user", "assistant", "system", "other"]),
            "content": words,
        },
        optional={"train": st.booleans(), "name": st.just("x")},
    ),
    min_size=1,
    max_size=7,
)


def spans(chats: Chats, talk: list[dict[str, Any]]) -> tuple[list[tuple[int, int]] | None, str]:
    try:
        chat = chats.chat({"messages": talk})
    except RowProblem as problem:
        return None, str(problem)
    return chat.trained, chat.text


def both(chats: Chats, talk: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What is found, and what points alone find."""
    found = spans(chats, talk)
    with monkeypatch.context() as patched:
        patched.setattr(type(chats._finder), "_at_once", lambda *_: None)
        return found, spans(chats, talk)


MADE = {
    name: Chats(Tokenizer(toy.byte_level_bundle(chat_template=source)), masked=True, names={})
    for name, source in TEMPLATES.items()
}


@pytest.mark.parametrize("name", list(MADE))
@settings(max_examples=300)
@given(talk=messages)
def test_the_same_turns(name: str, talk: list[dict[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        (found, text), (wanted, reason) = both(MADE[name], talk, monkeypatch)
    if wanted is not None:
        assert (found, text) == (wanted, reason)
    elif found is not None:
        # Points changed what is printed, so points could not tell. What was found is what was said.
        assert "prints other text when marks" in reason
        said = [m["content"].strip() for m in talk if m["role"] == "assistant"]
        assert all(any(words in text[a:b] for words in said) for a, b in found)


@pytest.mark.parametrize("name", ["toy", "thinking", "headers", "closed"])
def test_a_plain_chat_is_found_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = MADE[name]
    monkeypatch.setattr(type(chats._finder), "_points", lambda *_: pytest.fail("rendered a second time"))
    talk = [("user", "a b"), ("assistant", "a b"), ("user", "assistant"), ("assistant", "e\nf")]
    found, text = spans(chats, [{"role": role, "content": content} for role, content in talk])
    assert found is not None
    turns = [text[a:b] for a, b in found]
    assert len(turns) == 2
    assert turns[0].startswith("a b")
    assert "e\nf" in turns[1]


def test_words_that_look_like_a_prompt_are_left_to_points() -> None:
    assert MADE["words"]._finder is not None
    assert MADE["words"]._finder._whole_prompt == ""
