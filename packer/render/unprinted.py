"""Words of a conversation that its chat template does not print.

Templates drop what they have no place for without a word: Mistral Nemo's the system message of every
conversation that ends with an answer, others tool results. Words that stand in the rendering, one message's
after the other's, are printed. Where some do not, marks are put into them; and what carries no mark out of
the template is given other words, which change the rendering unless they are not printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packer.render.conversations import Conversation, Habits
from packer.render.templates import ChatTemplate, RowProblem, unmark
from packer.render.turns import PROBE_TOOLS, calling_turn, num_probe_calls, pointed_words

_OTHER = "Xqpadfree"  # put behind words, to see whether they have any effect


def unprinted(template: ChatTemplate, talk: Conversation, text: str) -> list[int]:
    """Indices of the messages whose words have no part in `text`, the rendering of `talk`."""
    missing, at = set(), 0
    for i, message in enumerate(talk.messages):
        content = message.get("content")
        words = content.strip() if type(content) is str else content
        if not words:
            continue
        found = text.find(words, at) if type(words) is str else -1
        if found < 0:
            missing.add(i)
        else:
            at = found + len(words)
    if not missing:
        return []
    # Words of one that is dropped may have been found in another's: so that was missing.
    others = (i for i, message in enumerate(talk.messages) if message["role"] not in ("user", "assistant"))
    suspects = sorted(missing | {i for i in others if talk.messages[i].get("content")})
    suspects = [i for i in suspects if _has_words(talk.messages[i]["content"])]
    printed = _carried(template, talk, suspects)
    return [i for i in suspects if i not in printed and not _has_effect(template, talk, text, i)]


def _has_words(content: str | Sequence[Mapping[str, Any]]) -> bool:
    return bool((content if isinstance(content, str) else "".join(part["text"] for part in content)).strip())


def _carried(template: ChatTemplate, talk: Conversation, suspects: Sequence[int]) -> set[int]:
    """Those of the suspects whose words, with marks in them, are printed with the marks."""
    messages: list[Mapping[str, Any]] = [*talk.messages]
    for i in suspects:
        messages[i] = {**talk.messages[i], "content": pointed_words(talk.messages[i]["content"], i)}
    try:
        return {mark.message for mark in unmark(template.render(messages, talk.tools))[1]}
    except RowProblem:
        return set()


def _has_effect(template: ChatTemplate, talk: Conversation, text: str, i: int) -> bool:
    messages: list[Mapping[str, Any]] = [*talk.messages]
    content = talk.messages[i]["content"]
    if isinstance(content, str):
        # Not behind white space, which a template may trim.
        core = content.rstrip()
        content = f"{core}{_OTHER}{content[len(core) :]}"
    else:
        content = [{**part, "text": f"{part['text'].rstrip()}{_OTHER}"} for part in content]
    messages[i] = {**talk.messages[i], "content": content}
    try:
        return unmark(template.render(messages, talk.tools))[0] != text
    except RowProblem:  # it looked at the words, at least
        return True


def prints_tools(template: ChatTemplate, tools: Sequence[Any]) -> bool:
    """Whether schemas of tools have a part in what the template prints, by a trial."""
    talk = [{"role": "user", "content": "a"}]
    try:
        return template.render(talk, tools) != template.render(talk)
    except RowProblem:
        return True


def prints_reasoning(template: ChatTemplate) -> bool:
    """Whether the reasoning of an answer has a part in what the template prints, by a trial."""
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    thought = {"thinking": _OTHER, "reasoning_content": _OTHER, "reasoning": _OTHER}
    try:
        return template.render([question, answer | thought]) != template.render([question, answer])
    except RowProblem:
        return True


def prints_all_calls(template: ChatTemplate, habits: Habits) -> bool:
    """Whether every tool call is printed, also of several and beside words, by trials; what is refused is."""
    question = {"role": "user", "content": "a"}
    for num_calls in (1, 2):
        for content in ({}, {"content": "b"}):
            turn = {**calling_turn(habits, num_calls), **content}
            try:
                text = template.render([question, turn], PROBE_TOOLS)
            except RowProblem:
                continue
            if num_probe_calls(text) < num_calls:
                return False
    return True


def unprinted_call(template: ChatTemplate, talk: Conversation, text: str) -> int | None:
    """The first message with a tool call that has no part in `text`: without it the rendering is the same."""
    for i, message in enumerate(talk.messages):
        calls = message.get("tool_calls") or []
        for at in range(len(calls)):
            messages: list[Mapping[str, Any]] = [*talk.messages]
            messages[i] = {**message, "tool_calls": calls[:at] + calls[at + 1 :]}
            try:
                if unmark(template.render(messages, talk.tools))[0] == text:
                    return i
            except RowProblem:  # it looked at the calls, at least
                continue
    return None
