"""Conversations to text, with the places of the assistant's words and of stray control words.

Which characters the assistant's words are is found in one of two ways:

- The template says so with {% generation %} blocks.
- It does not (none that ships with a well-known model does): packer.render.turns finds them, or refuses.

Raises RenderError where the template cannot do what the job needs, before any row is rendered.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from packer.render.conversations import Conversation, Habits, conversation
from packer.render.templates import (
    GENERATION_CLOSE,
    GENERATION_OPEN,
    WORD_CLOSE,
    WORD_OPEN,
    ChatTemplate,
    Mark,
    RenderError,
    RowProblem,
    unmark,
)
from packer.render.turns import (
    PROBE_TOOLS,
    Span,
    TurnFinder,
    calling_turn,
    control_pattern,
    num_probe_calls,
    pointed,
)
from packer.render.unprinted import (
    prints_all_calls,
    prints_reasoning,
    prints_tools,
    unprinted,
    unprinted_call,
)
from packer.roles import looks_like_assistant
from packer.tokenization import Tokenizer

# Whose words may be missing in a rendering, of all but the user and the assistant.
_PARTS = {"system": "system", "developer": "system", "tool": "tool", "function": "tool", "ipython": "tool"}
_NONCHARACTER_LEAD = b"\xef\xb7"
_NONCHARACTER_BYTES = rb"\xef\xb7[\x90-\xaf]"  # U+FDD0 … U+FDEF in UTF-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A rendered conversation; places are (start, stop) in characters of `text`, ascending."""

    text: str
    trained: list[Span]  # the assistant's words with their end-of-turn tokens
    words: list[Span]  # control words that stand in someone's words: plain text
    ends_with_assistant: bool  # with a message that is trained
    unprinted: frozenset[str] = frozenset()  # of _PARTS: whose words the template does not print
    unlearned: tuple[str, ...] = ()  # a role each turn that looks like the assistant's and trains nothing


class Chats:
    """Renders rows of format messages with a tokenizer's chat template.

    masked: find the assistant's words (loss assistant); else they are not looked for. last_only: of a
    conversation only its last message of the assistant is trained (nor it, where its train is false).
    """

    def __init__(
        self, tokenizer: Tokenizer, *, masked: bool, last_only: bool = False, names: Mapping[str, str]
    ) -> None:
        self.template = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
        habits, self.prints_calls = learn_habits(self.template)
        reads_calls = any("function_call" in source for source in self.template.sources.values())
        self.habits = dataclasses.replace(habits, function_call=reads_calls)
        self._prints_all_calls = prints_all_calls(self.template, self.habits)
        self._prints_tools = prints_tools(self.template, PROBE_TOOLS)
        self._prints_reasoning = prints_reasoning(self.template)
        self.masked = masked
        self._last_only = last_only
        self._names = {
            "messages_name": names.get("messages", "messages"),
            "tools_name": names.get("tools", "tools"),
        }
        self._control = control_pattern(tokenizer.control_words)
        words = [re.escape(orjson.dumps(word)[1:-1]) for word in tokenizer.control_words]
        # Apart from noncharacters: what all words begin with is then searched for first, ten times as fast.
        self._control_bytes = re.compile(b"|".join(words) or b"(?!)")
        self._warnings: list[str] = []
        self._finder: TurnFinder | None = None
        self._end_outside: re.Pattern[str] | None = None
        if self.template.uses_today:
            self._warnings.append(
                "the chat template prints today's date; padfree always prints 26 July 2024 there, so that "
                "packing again gives equal bytes"
            )
        if masked and self.template.has_generation:
            self._learn_generation()
        elif masked:
            eos = tokenizer.special_tokens.get("eos_token")
            self._finder = TurnFinder(self.template, self._control, self.habits, eos)
            self._warnings.append(
                "the chat template has no {% generation %} markers; the assistant's words were found by "
                "rendering with marks around them"
            )

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings)

    def chat(self, row: Mapping[str, Any]) -> Chat:
        """Render a row. Raises RowProblem, whose text is the reason."""
        talk = conversation(row, self.habits, **self._names, masked=self.masked)
        if not self.prints_calls and any("tool_calls" in message for message in talk.messages):
            raise RowProblem(
                "the chat template prints no tool calls, so this row's would vanish; use a template that does"
            )
        if self._last_only:
            talk = talk.last_only()
        raw = self.template.render(talk.messages, talk.tools)
        text, marks = unmark(raw) if GENERATION_OPEN in raw else (raw, [])
        missing = self._missing(talk, text)
        words: list[Span] = []
        shielded = self._shielded(talk)
        if shielded is not None:
            words = self._words(text, shielded)
        trained: list[Span] = []
        if self._finder is not None:
            trained = self._finder.find(text, shielded or talk, talk, words)
        elif self.masked:
            trained = self._generated(text, marks, talk)
        return Chat(
            text=text,
            trained=trained,
            words=words,
            ends_with_assistant=talk.messages[-1]["role"] == "assistant" and talk.trained[-1],
            unprinted=missing,
            unlearned=self._unlearned(talk, trained),
        )

    def _unlearned(self, talk: Conversation, trained: list[Span]) -> tuple[str, ...]:
        """The roles of turns that look like the assistant's, where the template does not train them."""
        if not self.masked:
            return ()
        roles = [message["role"] for message in talk.messages]
        found = tuple(
            role for role, may in zip(roles, talk.trained, strict=True) if may and looks_like_assistant(role)
        )
        # Generation blocks may hold other roles' words: then there are more than turns of the assistant.
        return found if found and len(trained) <= len(talk.assistants) else ()

    def _missing(self, talk: Conversation, text: str) -> frozenset[str]:
        """Whose words the template does not print. Raises RowProblem for a user's or the assistant's."""
        parts = {"tool"} if talk.tools and not self._prints_tools else set()
        if not self._prints_reasoning and any(message.get("reasoning_content") for message in talk.messages):
            parts.add("reasoning")
        if not self._prints_all_calls and (lost := unprinted_call(self.template, talk, text)) is not None:
            raise RowProblem(
                f"the chat template does not print all tool calls of message {lost}, or none beside its "
                "content; use a template that does (tokenizer.chat_template), or give the calls a message "
                "each, without content"
            )
        for i in unprinted(self.template, talk, text):
            role = talk.messages[i]["role"]
            if role in ("user", "assistant"):
                raise RowProblem(
                    f"the chat template does not print the words of message {i} ({role}); use a template "
                    "that does (tokenizer.chat_template), or correct the row"
                )
            parts.add(_PARTS.get(role, "other"))
        return frozenset(parts)

    # -------------------------------------------------------------- control words in words

    def _shielded(self, talk: Conversation) -> Conversation | None:
        """The conversation with marks around control words in its words; None where it has none."""
        content = [talk.messages, talk.tools]
        try:
            data = orjson.dumps(content)
        except TypeError:  # whole numbers over 64 bits, lone surrogates
            data = json.dumps(content, ensure_ascii=False, default=str).encode(errors="surrogatepass")
        nonsense = _NONCHARACTER_LEAD in data and re.search(_NONCHARACTER_BYTES, data)
        if not nonsense and self._control_bytes.search(data) is None:
            return None
        if nonsense:
            raise RowProblem(
                "the words hold a Unicode noncharacter (U+FDD0 to U+FDEF), which padfree needs for itself; "
                "take it out: it is never part of a text"
            )
        return Conversation(
            messages=[self._shield(message) for message in talk.messages],
            tools=self._shield(talk.tools),
            trained=talk.trained,
        )

    def _shield(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._control.sub(f"{WORD_OPEN}\\g<0>{WORD_CLOSE}", value)
        if isinstance(value, Mapping):
            return {self._shield(key): self._shield(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._shield(item) for item in value]
        return value

    def _words(self, text: str, shielded: Conversation) -> list[Span]:
        plain, marks = unmark(self.template.render(shielded.messages, shielded.tools))
        if plain != text:
            raise RowProblem(
                "the row's words hold control words of the tokenizer, and the chat template acts on them: "
                "they cannot be kept plain"
            )
        return _pairs(marks, WORD_OPEN, WORD_CLOSE)

    # -------------------------------------------------------------- generation blocks

    def _learn_generation(self) -> None:
        """See by a trial whether the blocks hold the end-of-turn token (what tells a model to stop)."""
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            text, marks = unmark(self.template.render(pointed(talk)))
            spans = _pairs(marks, GENERATION_OPEN, GENERATION_CLOSE)
        except RowProblem as problem:
            raise RenderError(
                f"loss assistant: a conversation of user and assistant cannot be rendered: {problem}; "
                "correct the template (tokenizer.chat_template)"
            ) from problem
        points = [mark.position for mark in marks if mark.message == 1]
        if not spans or not points or not any(start <= points[-1] <= stop for start, stop in spans):
            raise RenderError(
                "the {% generation %} markers of the chat template do not hold the assistant's words: "
                f"they mark {[text[start:stop] for start, stop in spans]} of {text[:80]!r}; "
                "put them around the words and their end-of-turn token, or use loss all"
            )
        stop = spans[-1][1]
        if self._control.search(text, points[-1], stop):
            return
        outside = self._control.search(text, stop)
        if outside is None or text[stop : outside.start()].strip():
            self._warnings.append(
                "the chat template prints no end-of-turn token after the assistant's words: a model trained "
                "on it never learns to stop"
            )
            return
        word = outside[0]
        self._end_outside = re.compile(r"\s*" + re.escape(word))
        self._warnings.append(
            f"the chat template leaves the end-of-turn token {word!r} outside its generation markers: "
            "padfree trains it with them, since a model that never learns it never stops"
        )

    def _generated(self, text: str, marks: list[Mark], talk: Conversation) -> list[Span]:
        spans = _pairs(marks, GENERATION_OPEN, GENERATION_CLOSE)
        if self._end_outside is not None:
            ends = [self._end_outside.match(text, stop) for _, stop in spans]
            spans = [
                (start, end.end() if end else stop) for (start, stop), end in zip(spans, ends, strict=True)
            ]
        if not all(talk.trained):
            assistants = talk.assistants
            if len(assistants) != len(spans):
                raise RowProblem(
                    "not all of the assistant's messages are to be trained (train false, or loss "
                    f"last_assistant), but the chat template prints {len(spans)} generation blocks for "
                    f"{len(assistants)} assistant messages, so it is not known which is which"
                )
            spans = [span for span, i in zip(spans, assistants, strict=True) if talk.trained[i]]
        return spans


def _pairs(marks: Iterable[Mark], opening: str, closing: str) -> list[Span]:
    """Spans between opening and closing marks; of nested ones the outermost."""
    spans, depth, start = [], 0, 0
    for mark in marks:
        if mark.kind == opening:
            start = mark.position if depth == 0 else start
            depth += 1
        elif mark.kind == closing:
            depth -= 1
            if depth == 0:
                spans.append((start, mark.position))
    if depth:
        raise RowProblem("the chat template takes the words of a message apart, so their place is lost")
    return spans


def learn_habits(template: ChatTemplate) -> tuple[Habits, bool]:
    """What the template can take, by trial; and whether it prints tool calls at all."""

    def tried(*messages: Mapping[str, Any], tools: Any = None) -> str | None:
        try:
            return template.render(messages, tools)
        except RowProblem:
            return None

    question = {"role": "user", "content": "probe_text"}
    as_text = tried(question)
    in_parts = tried({"role": "user", "content": [{"type": "text", "text": "probe_text"}]})
    parts = as_text is not None and in_parts == as_text
    num_none = (tried(question, tools=PROBE_TOOLS) or "").count("None")  # of the template's own words
    for null in ("absent", "empty", "null"):
        for arguments_as_text in (False, True):
            habits = Habits(parts=parts, arguments_as_text=arguments_as_text, null=null)
            text = tried(question, calling_turn(habits), tools=PROBE_TOOLS)
            if text is not None and text.count("None") == num_none and num_probe_calls(text):
                beside = tried(question, {**calling_turn(habits), "content": ""}, tools=PROBE_TOOLS)
                takes_empty = beside is None or bool(num_probe_calls(beside))
                return dataclasses.replace(habits, empty=takes_empty), True
    return Habits(parts=parts), False
