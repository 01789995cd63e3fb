"""Chat templates: Jinja in a sandbox, as transformers runs them, and marks that survive rendering.

*Marks* are Unicode noncharacters (U+FDD0 … U+FDEF: never text, by the standard) put into a rendering to
learn where something lies in it, and taken out again by `unmark`. There are three kinds: around what a
`{% generation %}` block prints, around control words that stand in a message's own words, and points
inside the words of a message.

Errors: RenderError (a ValueError), permanent: the template cannot be used. RowProblem (a ValueError)
is about one row; the renderer turns it into an entry of its `errors`.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from types import BuiltinMethodType
from typing import Any, NamedTuple

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

GENERATION_OPEN, GENERATION_CLOSE = "\ufdd1", "\ufdd2"
WORD_OPEN, WORD_CLOSE = "\ufdd3", "\ufdd4"
_POINT_OPEN, _POINT_CLOSE = "\ufdd5", "\ufdd6"
_DIGITS = "\ufde0\ufde1\ufde2\ufde3\ufde4\ufde5\ufde6\ufde7\ufde8\ufde9"
_TO_DIGITS = str.maketrans("0123456789", _DIGITS)
_FROM_DIGITS = str.maketrans(_DIGITS, "0123456789")
_MARK = re.compile(f"([\ufdd1-\ufdd4]|{_POINT_OPEN}[{_DIGITS}]+{_POINT_CLOSE})")
NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")

# What strftime_now prints: the day that Llama's templates fall back to. A shard is a function of its
# spec, so it must not depend on the day of packing.
TODAY = datetime.datetime(2024, 7, 26)


class RenderError(ValueError):
    """A job cannot be rendered: its template, tokenizer, format and loss do not go together."""


class RowProblem(ValueError):
    """One row cannot be rendered; the text is the reason. Never leaves the renderer."""


# ------------------------------------------------------------------ marks


class Mark(NamedTuple):
    """A mark that was in a rendering. `position`: characters before it, marks not counted."""

    kind: str  # GENERATION_OPEN, …; "" for a point
    message: int  # of a point; else -1
    position: int


@functools.lru_cache(maxsize=4096)
def point(message: int) -> str:
    """The mark of a place in the words of the message with this index."""
    return f"{_POINT_OPEN}{str(message).translate(_TO_DIGITS)}{_POINT_CLOSE}"


def unmark(text: str) -> tuple[str, list[Mark]]:
    """A rendering without its marks, and the marks in order. Raises RowProblem for a broken mark."""
    pieces = _MARK.split(text)
    marks, position = [], 0
    for piece, mark in zip(pieces[::2], pieces[1::2], strict=False):
        position += len(piece)
        if len(mark) == 1:
            marks.append(Mark(mark, -1, position))
        else:
            marks.append(Mark("", _number(mark[1:-1]), position))
    plain = "".join(pieces[::2])
    if not plain.isascii() and NONCHARACTERS.search(plain):
        raise RowProblem("the chat template takes the words of a message apart, so their place is lost")
    return plain, marks


def unpoint(text: str) -> tuple[str, list[tuple[int, int]]]:
    """`unmark` of a rendering that has no marks but points, in a quarter of the time: (message, position).

    Raises ValueError for a broken point; other marks stay in the text.
    """
    first, *pieces = text.split(_POINT_OPEN)
    parts, points, position = [first], [], len(first)
    for piece in pieces:
        digits, close, words = piece.partition(_POINT_CLOSE)
        if not close:
            raise ValueError("a point is taken apart")
        points.append((_number(digits), position))
        parts.append(words)
        position += len(words)
    return "".join(parts), points


@functools.lru_cache(maxsize=4096)
def _number(digits: str) -> int:
    return int(digits.translate(_FROM_DIGITS))


# ------------------------------------------------------------------ template


class ChatTemplate:
    """A tokenizer's chat template, compiled.

    templates: by name, of which "tool_use" (where it is there) renders rows with tools and "default"
    the others. special_tokens: names a template may print, {"bos_token": "<s>", …}.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        if "default" not in templates:
            found = f"only templates named {', '.join(templates)}" if templates else "none"
            raise RenderError(
                f"format messages requires a chat template, the tokenizer has {found}; "
                "set tokenizer.chat_template to a Jinja text or to the path of one"
            )
        environment = _environment()
        self.sources = dict(templates)
        self._environment = environment
        self._compiled: dict[str, tuple[jinja2.Template, dict[str, Any]]] = {}  # with what each render begins
        for name, source in templates.items():
            try:
                template = environment.from_string(source)
                self._compiled[name] = template, {**template.globals, "documents": None, **special_tokens}
            except jinja2.TemplateSyntaxError as error:
                raise RenderError(
                    f"the chat template {name!r} is not valid Jinja: line {error.lineno}: {error.message}; "
                    "correct it or set tokenizer.chat_template"
                ) from error

    @property
    def has_generation(self) -> bool:
        """Whether every template marks the assistant's words with {% generation %}."""
        return all(re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", text) for text in self.sources.values())

    @property
    def uses_today(self) -> bool:
        return any("strftime_now" in text for text in self.sources.values())

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, generation_prompt: bool = False
    ) -> str:
        """The text of a conversation, with marks around generation blocks. Raises RowProblem."""
        name = "tool_use" if tools is not None and "tool_use" in self._compiled else "default"
        template, given = self._compiled[name]
        values = {**given, "messages": messages, "tools": tools, "add_generation_prompt": generation_prompt}
        try:
            # What Template.render does, but for putting all globals together anew each time.
            context = jinja2.runtime.new_context(
                self._environment, template.name, template.blocks, values, shared=True
            )
            return "".join(template.root_render_func(context))
        except Exception as error:  # a template is a program: it may fail in any way
            raise RowProblem(f"the chat template refuses the row: {_excerpt(error)}") from error


def _excerpt(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}: marks what is printed between."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: jinja2.runtime.Macro) -> str:
        return f"{GENERATION_OPEN}{caller()}{GENERATION_CLOSE}"


class _Dict:
    """`dict` without attributes to break out by."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


_DICT_ATTRIBUTES = frozenset(dir(dict))
# jinja2 wraps what formats, and keeps everything with an underscore to itself.
_PLAIN_STR_ATTRIBUTES = frozenset(
    name for name in dir(str) if not name.startswith(("_", "format")) and callable(getattr(str, name))
)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """jinja2's, but keys of messages and attributes of loops are looked up in place, without a call."""

    def visit_Getattr(self, node: jinja2.nodes.Getattr, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        if node.attr in _DICT_ATTRIBUTES or node.attr.startswith("_"):
            super().visit_Getattr(node, frame)
            return
        it, key = self.temporary_identifier(), repr(node.attr)
        self.write(f"({it}[{key}] if type({it} := ")
        self.visit(node.node, frame)
        self.write(f") is dict and {key} in {it} else ")
        if isinstance(node.node, jinja2.nodes.Name) and node.node.name == "loop":
            self.write(f"{it}.{node.attr} if type({it}) is LoopContext else ")
        self.write(f"environment.getattr({it}, {key}))")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with a short way to what templates ask for most.

    The short way gives what the long one gives: keys of a message, methods of texts, and public attributes
    of loops and namespaces.
    """

    code_generator_class = _CodeGenerator

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        kind = type(obj)
        if kind is BuiltinMethodType and type(obj.__self__) is str and obj.__name__ in _PLAIN_STR_ATTRIBUTES:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is jinja2.utils.Namespace and not attribute.startswith("_"):
            attributes = object.__getattribute__(obj, "_Namespace__attrs")
            return (
                attributes[attribute] if attribute in attributes else self.undefined(obj=obj, name=attribute)
            )
        if kind is jinja2.runtime.LoopContext and not attribute.startswith("_"):
            return getattr(obj, attribute)
        if kind is str and attribute in _PLAIN_STR_ATTRIBUTES:
            return getattr(obj, attribute)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def _environment() -> _Sandbox:
    """What transformers gives to chat templates; today's date is always TODAY."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    environment.globals["dict"] = _Dict()
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
