"""What differs between the specs of two datasets, for those who loaded the wrong state.

A state carries the fields of its dataset's spec, each as a short text: the dataset itself may be gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from trainer_client.errors import ClientError, Lost
from trainer_client.transport import Transport

_MAX_SHOWN = 8
_MAX_CHARACTERS = 60


def of_state(spec: Mapping[str, Any] | None) -> dict[str, dict[str, str]]:
    """What a state says of a spec, about a kilobyte; nothing where the spec is not known."""
    return {"spec": dict(_fields("", spec))} if spec else {}


def differences(state: Mapping[str, Any], here: Transport, there: Transport) -> str:
    """One line: each field in which the spec of the dataset `here` is not as the state says, or as the
    state's own dataset `there` does, with both values. Empty where neither tells."""
    try:
        mine = dict(_fields("", here.spec()))
        theirs = state.get("spec") or dict(_fields("", there.spec()))
    except (Lost, ClientError):
        return ""
    if not mine or not theirs:
        return ""
    lines = [
        f"{name} ({mine.get(name, 'null')} here, {theirs.get(name, 'null')} in the state's)"
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]
    if not lines:
        return "their specs are the same: content of inputs or tokenizer differs"
    more = f" and {len(lines) - _MAX_SHOWN} more" if len(lines) > _MAX_SHOWN else ""
    return f"their specs differ in {'; '.join(lines[:_MAX_SHOWN])}{more}"


def _fields(prefix: str, spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, text) of each field that is set."""
    for name, value in spec.items():
        if isinstance(value, Mapping):
            yield from _fields(f"{prefix}{name}.", value)
        elif value is not None:
            yield f"{prefix}{name}", _shown(value)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= _MAX_CHARACTERS:
        return text
    # Two long ones that differ are to differ here too.
    return f"{text[: _MAX_CHARACTERS - 20]}… (sha256 {hashlib.sha256(text.encode()).hexdigest()[:8]})"
