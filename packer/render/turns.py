"""Where the assistant's words are in a chat whose template does not mark them.

The turn of the assistant is what a model must print when it answers: it begins where the prompt given
at inference ends (the *generation prompt*: `<|im_start|>assistant\\n`), and ends with the *end-of-turn
token* (`<|im_end|>`). TurnFinder learns both from trial conversations when a job starts, and refuses a
template that does not show them. In a row, points (packer.render.templates) put into the assistant's words
say where its words are; the rendering without the points must be the plain rendering, or the row is
refused. (Plain chats can do without them: see TurnFinder._at_once.) Prefixes are not compared: Qwen3's
template rewrites earlier turns.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from packer.render.conversations import Conversation, Habits, no_content
from packer.render.templates import ChatTemplate, RenderError, RowProblem, point, unmark, unpoint

Span = tuple[int, int]

_PLAIN_ROLES = ("system", "user", "assistant")
_ROLES = ("user", "assistant", "user", "assistant")
_WORDS = ("probe-one", "probe-two", "probe-three", "probe-four")

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


def calling_turn(habits: Habits, num_calls: int = 1) -> dict[str, Any]:
    """A message of the assistant that calls a tool, for trials."""
    arguments = {"probe_key": "probe_value"}
    function = {
        "name": "probe_name",
        "arguments": json.dumps(arguments) if habits.arguments_as_text else arguments,
    }
    # Nine letters and digits, which Mistral's templates insist on.
    calls = [{"id": f"padfree0{i}", "type": "function", "function": function} for i in range(num_calls)]
    return {"role": "assistant", **no_content(habits), "tool_calls": calls}


def num_probe_calls(text: str) -> int:
    """How many calls of `calling_turn` are printed, with their arguments, in whatever form.

    As Python writes an object is none: the template is meant for arguments that are text.
    """
    return 0 if "'probe_key'" in text else min(text.count("probe_key"), text.count("probe_value"))


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
    content = message.get("content")
    if len(message) == 2 and type(content) is str and content == content.strip():  # nearly all are such
        return {**message, "content": f"{mark}{content}{mark}"}

    new = dict(message)
    calls = message.get("tool_calls")
    if content or (content is not None and not calls):
        new["content"] = pointed_words(content, index)
    for name in ("reasoning_content", "thinking", "reasoning"):
        if message.get(name):
            new[name] = _around(message[name], mark)
    if calls:
        new["tool_calls"] = [
            {**call, "function": {**call["function"], "name": _around(call["function"]["name"], mark)}}
            for call in calls
        ]
    return new


def pointed_words(content: Any, index: int) -> Any:
    """The content of a message, a text or parts, with points before and after its words."""
    mark = point(index)
    if isinstance(content, str):
        return _around(content, mark)
    return [{**part, "text": _around(part["text"], mark)} for part in content]


def _around(text: str, mark: str) -> str:
    core = text.strip()
    lead = text[: len(text) - len(text.lstrip())] if core else text
    return f"{lead}{mark}{core}{mark}{text[len(lead) + len(core) :]}"


class TurnFinder:
    """Finds the assistant's turns in chats of one template.

    control: matches control words. eos: the tokenizer's EOS token. Raises RenderError for a template that
    does not show where a turn begins or ends.
    """

    def __init__(
        self, template: ChatTemplate, control: re.Pattern[str], habits: Habits, eos: str | None = None
    ) -> None:
        self._template = template
        self._control = control
        self._habits = habits
        self._prompts: list[str] = []  # how generation prompts end, from their last control word on
        self._ends: set[str] = set()  # end-of-turn tokens
        # EOS, where it stands right behind them in every turn: it is what stops a model.
        self._eos = eos or ""
        self._inner: set[str] = set()  # control words inside turns: around tool calls, reasoning
        self._prompted = False  # the template has a generation prompt of its own
        self._whole_prompt = ""  # what stands between a question and its answer; "" where words could fake it
        self._leads: list[str] = []  # what may stand between the prompt and the assistant's words
        self._learn()
        self._learn_calls()

    # -------------------------------------------------------------- trials

    def _trial(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> tuple[str, list[list[int]]]:
        """A rendering of messages with points, without the points, and the points of each message."""
        text, marks = unmark(self._template.render(pointed(messages), **more))
        if text != unmark(self._template.render(messages, **more))[0]:
            raise _refusal("it prints other text when marks stand around the words")
        points: list[list[int]] = [[] for _ in messages]
        for mark in marks:
            points[mark.message].append(mark.position)
        return text, points

    def _learn(self) -> None:
        """The generation prompt and the end-of-turn token, from four turns of plain words."""
        talk = [{"role": role, "content": word} for role, word in zip(_ROLES, _WORDS, strict=True)]
        try:
            text, points = self._trial(talk)
            prompt, question = self._trial(talk[:1], generation_prompt=True)
            bare, _ = self._trial(talk[:1])
        except RowProblem as problem:
            raise _refusal(f"a conversation of user and assistant cannot be rendered: {problem}") from problem
        flat = [position for places in points for position in places]
        if not all(points) or flat != sorted(flat) or not question[0]:
            raise _refusal("it does not print every message once and in order")
        self._prompted = prompt != bare
        tail = prompt[question[0][-1] :]
        self._add_prompt(tail)
        self._whole_prompt = tail if self._control.search(tail) else ""
        for turn in (1, 3):
            lower = points[turn - 1][-1]
            start = self._start(text, lower, points[turn][0], [])
            if start is None:
                raise _refusal(
                    f"the prompt it gives at inference ends in {self._prompts[0]!r}, not what stands before "
                    "the assistant's words"
                )
            between = text[start : points[turn][0]]
            if not self._prompted and between.strip():
                raise _refusal(
                    f"it prints {between.strip()!r} between the prompt that inference would use and the "
                    "assistant's words: it has no generation prompt (add_generation_prompt) either"
                )
            self._inner.update(self._control.findall(between))
            if between not in self._leads:
                self._leads.append(between)
            stop = points[turn + 1][0] if turn == 1 else len(text)
            end = self._control.search(text, points[turn][-1], stop)
            if end is None or (self._ends and end[0] not in self._ends):
                raise _refusal("it prints no end-of-turn token after the assistant's words")
            self._ends.add(end[0])
            if not text.startswith(self._eos, end.end()):
                self._eos = ""

    def _learn_calls(self) -> None:
        """The same for tool calls and what follows their results, where the template prints any."""
        question = {"role": "user", "content": _WORDS[0]}
        for num_calls in (2, 1):  # some templates take no two calls at once, some end only these well
            turn = calling_turn(self._habits, num_calls)
            results = [
                {"role": "tool", "tool_call_id": call["id"], "name": "probe_name", "content": _WORDS[2]}
                for call in turn["tool_calls"]
            ]
            try:
                text, points = self._trial([question, turn], tools=PROBE_TOOLS)
                prompt, before = self._trial(
                    [question, turn, *results], tools=PROBE_TOOLS, generation_prompt=True
                )
            except (RowProblem, RenderError):
                continue
            if not all(points) or not before[-1]:
                continue
            self._add_prompt(prompt[before[-1][-1] :])
            start = self._start(text, points[0][-1], points[1][0], [])
            words = self._control.findall(text, points[1][-1])
            if start is None or not words:
                continue
            self._inner.update(self._control.findall(text, start, points[1][-1]))
            # A turn that calls may end otherwise than one that answers: Llama 3.1 has <|eom_id|>.
            end = next((i for i, word in enumerate(words) if word in self._ends), len(words) - 1)
            self._inner.update(words[:end])
            self._ends.add(words[end])
            return

    def _add_prompt(self, tail: str) -> None:
        starts = [match.start() for match in self._control.finditer(tail)]
        prompt = tail[starts[-1] :] if starts else tail
        if not prompt.strip():
            raise _refusal(
                "it prints nothing between a question and the place where the answer begins, so it has no "
                "generation prompt (add_generation_prompt) either"
            )
        if prompt not in self._prompts:
            self._prompts.append(prompt)

    # -------------------------------------------------------------- rows

    def find(self, text: str, marked: Conversation, talk: Conversation, words: list[Span]) -> list[Span]:
        """The trained turns of a chat rendered as `text`. Raises RowProblem where one cannot be told.

        marked: the conversation, with marks around stray control words where it has any; words: where
        these stand in the text.
        """
        assistants = talk.assistants
        if not assistants:
            return []
        if marked is talk:  # no control words in anyone's words
            at_once = self._at_once(text, talk)
            if at_once is not None:
                return at_once
        points = self._points(text, marked, talk)
        if points is None:
            raise RowProblem(
                "the chat template prints other text when marks stand around the assistant's words, so they "
                "cannot be found; put {% generation %} markers into the template"
            )
        everyones = sorted(position for places in points.values() for position in places)
        spans, lower = [], 0
        for i in assistants:
            if not points[i]:
                raise RowProblem(f"the chat template does not print the words of message {i}")
            start = self._start(text, lower, points[i][0], words)
            end = self._end(text, points[i][-1], words)
            if start is not None and start < points[i][0] and self._foreign(text, start, points[i][0], words):
                start = None
            if start is not None and end is not None:
                inside = bisect.bisect_left(everyones, end) - bisect.bisect_left(everyones, start)
                if inside != len(points[i]) or self._swallows_next(
                    text[points[i][-1] : end], i, points, talk
                ):
                    end = None  # words of another message lie in it
            if start is None or end is None:
                missing = "no generation prompt before" if start is None else "no end-of-turn token after"
                raise RowProblem(
                    f"the chat template prints {missing} the words of message {i}, so its turn is not known; "
                    "put {% generation %} markers into the template"
                )
            if talk.trained[i]:
                spans.append((start, end))
            lower = end
        return spans

    def _at_once(self, text: str, talk: Conversation) -> list[Span] | None:
        """The turns of a plain chat, found without rendering it a second time; None where it is not plain.

        Nobody's words hold a control word, and the prompt does. So the prompt stands only where the template
        put it, and if it is there once for each of the assistant's messages, and each time its words follow
        and at once an end-of-turn token, then these are the turns.
        """
        if not self._whole_prompt or any(prompt in lead for prompt in self._prompts for lead in self._leads):
            return None
        before, *parts = text.split(self._whole_prompt)
        spans, at, answers = [], len(before), iter(parts)
        for message, trained in zip(talk.messages, talk.trained, strict=True):
            role, content = message["role"], message.get("content")
            if role not in _PLAIN_ROLES or len(message) != 2 or type(content) is not str:
                return None
            if role != "assistant":
                continue
            part = next(answers, "")
            end = self._end_of_words(part, content)
            if end is None:
                return None
            at += len(self._whole_prompt)
            if trained:
                spans.append((at, at + end))
            at += len(part)
        return spans if next(answers, None) is None else None

    def _end_of_words(self, part: str, content: str) -> int | None:
        """Where the turn ends at the start of `part`, if it holds these words and nothing else."""
        for words in (content, content.strip()):
            for lead in self._leads:
                if part.startswith(words, len(lead)) and part.startswith(lead):
                    end = self._control.match(part, len(lead) + len(words))
                    if end is not None and end[0] in self._ends:
                        return self._with_eos(part, end.end())
        return None

    def _with_eos(self, text: str, end: int) -> int:
        """Where a turn ends whose end-of-turn token does: behind EOS where that follows."""
        return end + len(self._eos) if text.startswith(self._eos, end) else end

    def _points(self, text: str, marked: Conversation, talk: Conversation) -> dict[int, list[int]] | None:
        """Places in `text` of the points of each message; None where points change what is printed."""
        everything = [i for i, message in enumerate(talk.messages) if message["role"] != "system"]
        # Templates look into what users say (Qwen3's for "<tool_response>"); a point may hide it.
        for chosen in (everything, talk.assistants):
            messages = [*marked.messages]
            for i in chosen:
                messages[i] = _pointed(messages[i], i)
            raw = self._template.render(messages, marked.tools)
            try:
                plain, found = unpoint(raw)
            except ValueError:
                plain = ""
            if plain != text:  # other marks are there too, or points were taken apart
                plain, marks = unmark(raw)
                found = [(mark.message, mark.position) for mark in marks if mark.kind == ""]
            if plain == text:
                points: dict[int, list[int]] = {i: [] for i in chosen}
                for message, position in found:
                    points[message].append(position)
                return points
        return None

    @staticmethod
    def _swallows_next(tail: str, i: int, points: Mapping[int, list[int]], talk: Conversation) -> bool:
        """Whether the next message's words stand in the tail of turn i, where no points tell it."""
        if i + 1 == len(talk.messages) or i + 1 in points:
            return False
        content = talk.messages[i + 1].get("content")
        return isinstance(content, str) and bool(content.strip()) and content.strip() in tail

    def _start(self, text: str, lower: int, upper: int, words: list[Span]) -> int | None:
        """Where the turn begins whose words begin at `upper`: after the last generation prompt."""
        best = None
        for prompt in self._prompts:
            at = text.rfind(prompt, lower, upper)
            while at >= 0 and _overlaps(at, at + len(prompt), words):
                at = text.rfind(prompt, lower, at + len(prompt) - 1)
            if at >= 0 and (best is None or at + len(prompt) > best):
                best = at + len(prompt)
        return best

    def _foreign(self, text: str, start: int, stop: int, words: list[Span]) -> bool:
        """Whether a control word lies there that no turn of the trials had inside: another turn's."""
        inside = self._control.finditer(text, start, stop)
        return any(m[0] not in self._inner and not _overlaps(*m.span(), words) for m in inside)

    def _end(self, text: str, lower: int, words: list[Span]) -> int | None:
        """Where the turn ends whose words end at `lower`: after its end-of-turn token."""
        if not words:  # nearly always, and nearly always the token follows at once
            at_once = self._control.match(text, lower)
            if at_once is not None and at_once[0] in self._ends:
                return self._with_eos(text, at_once.end())
        for match in self._control.finditer(text, lower):
            if _overlaps(*match.span(), words):
                continue
            if match[0] in self._ends:
                return self._with_eos(text, match.end())
            if match[0] not in self._inner:
                return None
        return None


def _overlaps(start: int, stop: int, words: list[Span]) -> bool:
    if not words:
        return False
    at = bisect.bisect_right(words, (start, stop))
    return any(word[0] < stop and word[1] > start for word in words[max(at - 1, 0) : at + 1])


def _refusal(reason: str) -> RenderError:
    return RenderError(
        "loss assistant: the chat template has no {% generation %} markers, and the assistant's words cannot "
        f"be found without them: {reason}; put "
        "{% generation %} before and {% endgeneration %} after them in the template "
        "(tokenizer.chat_template), or use loss all"
    )
