"""What differs between the specs of two datasets, for those who loaded the wrong state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trainer_client.errors import ClientError, Lost
from trainer_client.transport import Transport

_MAX_SHOWN = 8


def differences(one: Transport, other: Transport) -> str:
    """One line: each field that differs, with both values. Empty where a spec is not known."""
    try:
        mine, theirs = one.spec(), other.spec()
    except (Lost, ClientError):
        return ""
    if not mine or not theirs:
        return ""
    lines = list(_differing("", mine, theirs))
    if not lines:
        return "their specs are the same: content of inputs or tokenizer differs"
    more = f" and {len(lines) - _MAX_SHOWN} more" if len(lines) > _MAX_SHOWN else ""
    return f"their specs differ in {'; '.join(lines[:_MAX_SHOWN])}{more}"


def _differing(prefix: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*mine, *theirs}):
        one, other = mine.get(name), theirs.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differing(f"{prefix}{name}.", one, other)
        elif one != other:
            yield f"{prefix}{name} ({_shown(one)} here, {_shown(other)} in the state's)"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
