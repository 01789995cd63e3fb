"""Where the assistant's words are in a chat whose template does not mark them.

The turn of the assistant is what a model must print when it answers: it begins where the prompt given
at inference ends (the *generation prompt*: `<|im_start|>assistant\\n`), and ends with the *end-of-turn
token* (`<|im_end|>`). TurnFinder learns both from trial conversations when a job starts, and refuses a
template that does not show them. In a row, points (packer.templates) put into the assistant's words
say where its words are; the rendering without the points must be the plain rendering, or the row is
refused. Prefixes are not compared: Qwen3's template rewrites earlier turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from packer.conversations import Conversation, Habits
from packer.templates import ChatTemplate, RenderError, point

Span = tuple[int, int]

PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "probe_name",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]


def probe_call(*, arguments_as_text: bool) -> dict[str, Any]:
    """A tool call for trials."""
    arguments = {"probe_key": "probe_value"}
    return {
        "id": "padfree01",  # nine letters and digits, which Mistral's templates insist on
        "type": "function",
        "function": {
            "name": "probe_name",
            "arguments": json.dumps(arguments) if arguments_as_text else arguments,
        },
    }


def control_pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Matches any control word, the longest first."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def pointed(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy with a point before and after the words of each message.

    Points stand inside of white space at the ends, since templates trim it.
    """
    return [_pointed(message, index) for index, message in enumerate(messages)]


def _pointed(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    mark = point(index)

    def around(text: str) -> str:
        core = text.strip()
        lead = text[: len(text) - len(text.lstrip())] if core else text
        return f"{lead}{mark}{core}{mark}{text[len(lead) + len(core) :]}"

    new = dict(message)
    calls = message.get("tool_calls")
    content = message.get("content")
    if isinstance(content, str) and (content or not calls):
        new["content"] = around(content)
    elif isinstance(content, list):
        new["content"] = [{**part, "text": around(part["text"])} for part in content]
    for name in ("reasoning_content", "thinking", "reasoning"):
        if message.get(name):
            new[name] = around(message[name])
    if calls:
        new["tool_calls"] = [
            {**call, "function": {**call["function"], "name": around(call["function"]["name"])}}
            for call in calls
        ]
    return new


class TurnFinder:
    def __init__(self, template: ChatTemplate, control: re.Pattern[str], habits: Habits) -> None:
        raise RenderError(
            "the chat template has no {% generation %} markers, so the assistant's words cannot be found; "
            "put them into the template, or use loss all"
        )

    def find(self, text: str, marked: Conversation, talk: Conversation, words: list[Span]) -> list[Span]:
        raise NotImplementedError
