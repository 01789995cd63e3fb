"""The table of the spec in docs/http-api.md is what the spec's classes are."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from pathlib import Path
from typing import Any, Literal

from packer.spec import Spec

PAGE = Path(__file__).parents[2] / "docs" / "http-api.md"
# Objects that are always there in a spec: their fields are listed, not they.
HIDDEN = {"source", "packing"}


def documented() -> dict[str, tuple[str, str]]:
    """Values and default of each field, as the page has them."""
    section = PAGE.read_text().partition("#### The spec\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.+?) \| .+ \|$", section, re.MULTILINE)
    return {name: (values, default) for name, values, default in rows}


def fields_of(cls: type, prefix: str = "") -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    """Type and field of each field below a class, by dotted name, in the classes' order."""
    found: dict[str, tuple[Any, dataclasses.Field[Any]]] = {}
    for field in dataclasses.fields(cls):
        hint, name = typing.get_type_hints(cls)[field.name], f"{prefix}{field.name}"
        nested = next((one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)), None)
        if name not in HIDDEN:
            found[name] = hint, field
        if nested is not None:
            found |= fields_of(typing.cast(type, nested), f"{name}.")
    return found


def choices(hint: Any) -> set[str]:
    """The words that a field takes."""
    if typing.get_origin(hint) is Literal:
        return set(typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*map(choices, typing.get_args(hint)))
    return set()


def default_of(field: dataclasses.Field[Any]) -> str:
    """A default as the page writes it."""
    if field.default_factory is not dataclasses.MISSING:
        return json.dumps(field.default_factory())
    if field.default is dataclasses.MISSING:
        return "required"
    return f"`{field.default}`" if isinstance(field.default, str) else json.dumps(field.default)


def test_the_page_has_every_field_with_its_values_and_default() -> None:
    told, fields = documented(), fields_of(Spec)
    assert list(told) == list(fields)
    for name, (hint, field) in fields.items():
        values, default = told[name]
        assert default == default_of(field), name
        assert set(re.findall(r"`(\w+)`", values)) == choices(hint), name
