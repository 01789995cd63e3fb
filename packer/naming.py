"""What a dataset may be called."""

from __future__ import annotations

import json
import re

_MOST_CHARACTERS = 255
_SHOWN = 60


def name_fault(name: str | None) -> str | None:
    """What is wrong with a name for a dataset; None where nothing is.

    It stands in paths of urls, where it must be one part, and beside ids, none of which it may look like.
    """
    if name is None:
        return None
    shown = json.dumps(name, ensure_ascii=not name.isprintable())
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
    if not name.strip() or name in (".", ".."):
        wrong = shown
    elif "/" in name:
        wrong = f'{shown} with a "/"'
    elif not name.isprintable():
        wrong = f"{shown} with a character that does not print"
    elif re.fullmatch("[0-9a-f]{32}", name):
        wrong = f"{shown}, which reads as an id"
    elif len(name) > _MOST_CHARACTERS:
        wrong = f"{len(name)} characters"
    else:
        return None
    return (
        f'up to {_MOST_CHARACTERS} printable characters without "/" are required, neither "." nor ".." nor '
        f'an id (it stands in paths of urls), found {wrong}; give another name, for example "math-8k"'
    )
