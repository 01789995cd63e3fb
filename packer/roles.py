"""Turns of roles that look like the assistant's and are not: rendered as someone else's, and not trained."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping

_NAMES = {"gpt", "chatgpt", "bot", "chatbot", "model", "ai", "llm"}
_ROLE_CHARACTERS = 40  # of one that is told
_CLOSE = 0.8  # of difflib: two letters of `assistant` are wrong at most


@functools.lru_cache(maxsize=256)
def looks_like_assistant(role: str) -> bool:
    """Whether the model's own turns may be meant by a role that is not exactly `assistant`."""
    plain = role.strip(" \t\r\n:<>|_-").casefold()
    if role == "assistant" or len(plain) > _ROLE_CHARACTERS:
        return False
    is_close = difflib.SequenceMatcher(None, plain, "assistant").ratio() >= _CLOSE
    return plain in _NAMES or plain.startswith("gpt-") or is_close


def unlearned_warnings(counts: Mapping[str, int]) -> list[str]:
    """A warning of such turns. counts: by role."""
    if not counts:
        return []
    ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    named = ", ".join(f"{role!r} ({count:,})" for role, count in ordered[:10])
    num_turns = sum(counts.values())
    turns = f"{num_turns:,} turn{'s'[: num_turns > 1]}"
    return [
        f"{turns} with roles that are not `assistant` but look like it train nothing: {named}. Where they "
        "are the model's answers, name them `assistant` (in ShareGPT's form, `from` and `value`, gpt, "
        "chatgpt, model and bot are known too)"
    ]
