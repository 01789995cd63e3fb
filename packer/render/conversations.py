"""A row's conversation as chat templates want it: messages of role and content, tools, tool calls.

What people have differs: ShareGPT's from/value, arguments as JSON text or as object, content null or in
parts, tools as JSON text. `conversation` brings all of it to one form. Raises RowProblem.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packer.render.templates import RowProblem
from packer.sources.masks import unread_flag

# ShareGPT's speakers.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
_PLAIN_KEYS = {"role", "content"}
_FLAG_KEYS = ("train", "weight")  # whether a message is trained; templates do not get them
_REASONING = ("reasoning_content", "thinking", "reasoning")  # the first is the one that templates read


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages and tools, normalised; `trained[i]`: message i may be learned (its `train` or `weight`)."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    trained: list[bool]

    @property
    def assistants(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def last_only(self) -> Conversation:
        """The same, but of the assistant's messages none before the last is to be trained."""
        earlier = set(self.assistants[:-1])
        return dataclasses.replace(
            self, trained=[trained and i not in earlier for i, trained in enumerate(self.trained)]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What a chat template can take; learned from it by trial (packer.render.chats)."""

    parts: bool = False  # content in parts
    arguments_as_text: bool = False  # tool-call arguments as JSON text, not as an object
    null: Literal["absent", "empty", "null"] = "absent"  # what content is that is null beside tool calls
    empty: bool = True  # whether content may be an empty text there; else it is taken for null
    function_call: bool = False  # reads OpenAI's older form of a tool call itself


def kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {bool: "true or false", dict: "an object", list: "a list", str: "a text", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def told(value: Any) -> str:
    """What a JSON value is, and if it is a number which."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{kind(value)} ({str(value)[:40]})" if is_number else kind(value)


def conversation(
    row: Mapping[str, Any],
    habits: Habits,
    *,
    messages_name: str = "messages",
    tools_name: str = "tools",
    masked: bool = True,
) -> Conversation:
    """The conversation of a row. The names are the source's, for the reasons given.

    masked: not every token is trained, so masks of messages matter, and one that is not read is an error.
    """
    found = row.get("messages")
    if isinstance(found, str):
        found = _parsed(found, messages_name)
    if not isinstance(found, list):
        said = told(found) if "messages" in row else "no such field in the row"
        raise RowProblem(f"field {messages_name}: a list of messages is required, found {said}")
    if not found:
        raise RowProblem(f"field {messages_name}: at least one message is required, found an empty list")
    messages, trained = [], []
    for index, message in enumerate(found):
        if type(message) is dict and message.keys() == _PLAIN_KEYS:  # nearly all are such
            role, content = message["role"], message["content"]
            if type(role) is str and role and type(content) is str:
                messages.append({**message})
                trained.append(True)
                continue
        name = f"{messages_name}[{index}]"
        if not isinstance(message, Mapping):
            raise RowProblem(
                f"field {name}: an object with role and content is required, found {kind(message)}"
            )
        trained.append(_is_trained(message, name, masked))
        messages.append(_message(message, name, habits))
    return Conversation(messages=messages, tools=_tools(row.get("tools"), tools_name), trained=trained)


def _is_trained(message: Mapping[str, Any], name: str, masked: bool) -> bool:
    """What `train`, or OpenAI's `weight`, says of a message. Raises RowProblem for a mask of another name."""
    train = message.get("train")
    if train is not None and not isinstance(train, bool):
        raise RowProblem(f"field {name}.train: true or false is required, found {kind(train)}")
    if not masked:
        return train is not False
    weight = message.get("weight")
    if weight is not None:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or weight not in (0, 1):
            raise RowProblem(
                f"field {name}.weight: 0 (not trained) or 1 (trained) is required, found {told(weight)}; "
                "messages have no weights between; say it with `train`: true or false"
            )
        if train is not None and train != bool(weight):
            raise RowProblem(
                f"field {name}.weight: the same as {name}.train ({json.dumps(train)}) is required, found "
                f"{weight}; leave one of them out"
            )
        train = bool(weight)
    if (unread := unread_flag(message)) is not None:
        raise RowProblem(
            f"field {name}.{unread}: `train` is required to say whether a message is trained, found "
            f"{unread!r}, which is not read: use `train` (true or false), leave {unread!r} out, or set "
            'loss to "all" (--loss all) to train every token'
        )
    return train is not False


def _message(message: Mapping[str, Any], name: str, habits: Habits) -> dict[str, Any]:
    if "role" not in message and "from" in message:
        message = _from_sharegpt(message, name)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RowProblem(
            f"field {name}.role: a text such as user or assistant is required, found {kind(role)}"
        )
    # As in transformers, a key that is null is one that is not there.
    clean = {key: value for key, value in message.items() if value is not None and key not in _FLAG_KEYS}
    if "function_call" in clean and not habits.function_call:
        if clean.get("tool_calls"):
            raise RowProblem(
                f"field {name}: tool_calls or function_call is required, found both; leave one out"
            )
        clean["tool_calls"] = [clean.pop("function_call")]
    content = clean.get("content")
    if isinstance(content, list):
        content = clean["content"] = _content_parts(content, name, habits)
    elif content is not None and not isinstance(content, str):
        raise RowProblem(f"field {name}.content: a text is required, found {told(content)}")
    if content is None and "tool_calls" not in clean and role == "assistant" and "function_call" not in clean:
        raise RowProblem(
            f"field {name}.content: a text is required where there are no tool_calls, found null"
        )
    if "tool_calls" in clean:
        clean["tool_calls"] = _tool_calls(clean["tool_calls"], name, habits)
        if not clean["tool_calls"]:
            del clean["tool_calls"]
    if content == "" and not habits.empty and "tool_calls" in clean:
        content = None
        del clean["content"]
    if content is None:
        clean |= no_content(habits) if "tool_calls" in clean else {"content": ""}
    reasoning = next((clean[key] for key in _REASONING if key in clean), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise RowProblem(f"field {name}.reasoning_content: a text is required, found {kind(reasoning)}")
        clean = {"thinking": reasoning, **clean, "reasoning_content": reasoning}
    return clean


def no_content(habits: Habits) -> dict[str, Any]:
    """The content of a message that only calls tools."""
    if habits.null == "absent":
        return {}
    return {"content": "" if habits.null == "empty" else None}


def _from_sharegpt(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    speaker, value = message["from"], message.get("value")
    rest = {key: item for key, item in message.items() if key not in ("from", "value")}
    if speaker == "function_call":
        call = _parsed(value, f"{name}.value") if isinstance(value, str) else value
        calls = call if isinstance(call, list) else [call]
        return {"role": "assistant", "content": None, "tool_calls": calls, **rest}
    if not isinstance(speaker, str) or speaker not in _ROLES:
        known = ", ".join([*_ROLES, "function_call"])
        raise RowProblem(f"field {name}.from: one of {known} is required, found {str(speaker)[:40]!r}")
    if not isinstance(value, str):
        raise RowProblem(f"field {name}.value: a text is required, found {kind(value)}")
    return {"role": _ROLES[speaker], "content": value, **rest}


def _content_parts(parts: list[Any], name: str, habits: Habits) -> str | list[dict[str, Any]]:
    clean = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise RowProblem(
                f"field {name}.content[{index}]: a part of type text is required, found {kind(part)}"
            )
        if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise RowProblem(
                f"field {name}.content[{index}]: a part of type text is required, "
                f"found type {str(part.get('type'))[:40]!r}; padfree trains on text alone"
            )
        clean.append({"type": "text", "text": part["text"]})
    return clean if habits.parts else "".join(part["text"] for part in clean)


def _tool_calls(calls: Any, name: str, habits: Habits) -> list[dict[str, Any]]:
    if isinstance(calls, str):
        calls = _parsed(calls, f"{name}.tool_calls")
    if not isinstance(calls, list):
        raise RowProblem(f"field {name}.tool_calls: a list is required, found {kind(calls)}")
    clean = []
    for index, call in enumerate(calls):
        where = f"{name}.tool_calls[{index}]"
        if not isinstance(call, Mapping):
            raise RowProblem(f"field {where}: an object is required, found {kind(call)}")
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowProblem(f"field {where}: a function with a name is required, found {kind(function)}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"{where}.arguments")
        if arguments is None:
            arguments = {}
        if habits.arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        rest = {key: value for key, value in function.items() if key not in ("name", "arguments")}
        if function is call:  # {"name": …, "arguments": …} without its envelope
            kept = {key: rest.pop(key) for key in ("id", "type") if key in rest}
            call = {"type": "function", **{k: v for k, v in kept.items() if v is not None}}
        function = {"name": function["name"], "arguments": arguments, **rest}
        clean.append({**{k: v for k, v in call.items() if v is not None}, "function": function})
    return clean


def _tools(tools: Any, name: str) -> list[Any] | None:
    if isinstance(tools, str):
        tools = _parsed(tools, name) if tools.strip() else None
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        found = kind(tools) if not isinstance(tools, list) else "something else in the list"
        raise RowProblem(f"field {name}: a list of tool schemas (objects) is required, found {found}")
    return tools or None


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowProblem(f"field {name}: JSON is required, found {text[:40]!r}: {error}") from error
