"""Columns of a table as the JSON values that their rows stand for.

A table has one type for all rows, JSON has none. So what one row has and another has not is null in the
other; an object of free keys is a map, or its JSON text (type arrow.json, in which `datasets` keeps objects
that differ). A chat template would print all of these as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from packer.sources.parse import parse_value

_Convert = Callable[[Any], Any]
_JSON: Any = getattr(pa, "JsonType", ())  # before pyarrow 19 such a column is one of texts


def json_values(column: pa.Array) -> list[Any]:
    """The values of a column, as JSON has them.

    Maps are objects, JSON texts what stands in them; and of the objects of a list (messages, tools) a field
    that is null is left out, as it is in all rows that never had it.
    """
    values = column.to_pylist()
    if not _differs(column, in_list=False):
        return values
    convert = _converter(column.type, in_list=False)
    return values if convert is None else [None if value is None else convert(value) for value in values]


def _differs(column: pa.Array, *, in_list: bool) -> bool:
    """Whether `to_pylist` gives something else: so that nearly all columns are not looked through."""
    of = column.type
    if pa.types.is_struct(of):
        parts = [column.field(i) for i in range(of.num_fields)]
        return any((in_list and part.null_count) or _differs(part, in_list=in_list) for part in parts)
    if is_list(of):
        return _differs(column.values, in_list=True)
    return _converter(of, in_list=in_list) is not None


def _converter(of: pa.DataType, *, in_list: bool) -> _Convert | None:
    """What makes JSON of a Python value of a type, which is not None; None where it is that already."""
    if pa.types.is_dictionary(of) or pa.types.is_run_end_encoded(of):
        return _converter(of.value_type, in_list=in_list)
    if isinstance(of, _JSON):
        return _from_text
    if isinstance(of, pa.BaseExtensionType):
        return _converter(of.storage_type, in_list=in_list)
    if pa.types.is_map(of):
        return _of_map(_converter(of.item_type, in_list=in_list))
    if is_list(of):
        return _of_list(_converter(of.value_type, in_list=True))
    if pa.types.is_struct(of):
        fields = [of.field(i) for i in range(of.num_fields)]
        return _of_struct({one.name: _converter(one.type, in_list=in_list) for one in fields}, in_list)
    return None


def _from_text(text: str) -> Any:
    try:
        return parse_value(text)
    except ValueError:
        return text  # a text then, whatever the type says


def _of_map(convert: _Convert | None) -> _Convert:
    if convert is None:
        return dict
    return lambda pairs: {key: None if value is None else convert(value) for key, value in pairs}


def _of_list(convert: _Convert | None) -> _Convert | None:
    if convert is None:
        return None
    return lambda values: [None if value is None else convert(value) for value in values]


def _of_struct(converts: Mapping[str, _Convert | None], in_list: bool) -> _Convert | None:
    if not in_list and not any(converts.values()):
        return None

    def convert(record: Mapping[str, Any]) -> dict[str, Any]:
        made = {}
        for name, value in record.items():
            if value is not None:
                change = converts[name]
                made[name] = value if change is None else change(value)
            elif not in_list:
                made[name] = None
        return made

    return convert


def is_list(of: pa.DataType) -> bool:
    """Whether a type is one of lists, however they lie in memory."""
    lists = (
        pa.types.is_list,
        pa.types.is_large_list,
        pa.types.is_fixed_size_list,
        pa.types.is_list_view,
        pa.types.is_large_list_view,
    )
    return any(is_one(of) for is_one in lists)
