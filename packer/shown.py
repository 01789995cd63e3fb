"""How values that somebody gave are shown in errors."""

from __future__ import annotations

import json
from typing import Any


def is_text(value: str) -> bool:
    """Whether it can be written down: no lone half of a surrogate pair, no null."""
    return "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


def kind(value: Any) -> str:
    """What a value of a JSON document is, in words."""
    return {dict: "an object", list: "a list", str: "a text", type(None): "null", bool: "true or false"}.get(
        type(value), "a number"
    )


def shown(value: Any) -> str:
    """A value of a JSON document, cut short."""
    text = json.dumps(value, ensure_ascii=not is_text(str(value)), default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
