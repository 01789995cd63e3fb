"""What is not read, looked for in every record: where it first appears says nothing of where it matters.

Which fields are which is settled by the first records. Some of what they do not hold would make a later
record mean something else than it is taken for; such a record is a bad one, wherever it stands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pyarrow as pa

from packer.sources.jsontypes import is_list
from packer.sources.masks import mask_reason, masks_in, may_mask
from packer.sources.parse import JOIN, RowFault, roots
from packer.spec import Format, Loss, SourceSpec, What

# An instruction's second part, which must not be lost.
INSTRUCTION_INPUTS = ("input", "context")
_INSTRUCTION = "instruction"
_MOST_NAMES = 1 << 12  # of keys that are remembered as harmless: some sources have new ones in each record


def watch_of(source: SourceSpec, loss: Loss, fields: Mapping[str, str]) -> tuple[What, ...]:
    """What to look for. source, loss: as asked for (whoever names a thing has settled it). fields: all."""
    found: list[What] = []
    if loss == "auto":
        found.append("masks")
    if "prompt" not in source.fields and fields.get("prompt") == _INSTRUCTION:
        found.append("inputs")
    return tuple(found)


class Watch:
    """Looks at records before their fields are taken out. fields: our names to the source's."""

    def __init__(self, fields: Mapping[str, str], what: Collection[What] = ()) -> None:
        self.what = frozenset(what)
        self._fields = dict(fields)
        self._format = _format_of(fields)
        self._used = roots(fields)
        # Objects that a path in use leads through: what stands in them stands beside it, too.
        names = {part for name in fields.values() for part in (name, *name.split(JOIN))}
        self._ways = sorted({way for name in names if "." in name for way in _ways(name)})
        self._harmless: set[str] = set()

    def may_matter(self, name: str) -> bool:
        """Whether what stands under a name of the source is to be looked at."""
        if name in self._used:
            return False
        is_input = "inputs" in self.what and name in INSTRUCTION_INPUTS
        return is_input or ("masks" in self.what and may_mask(name, self._format))

    def check(self, record: Mapping[str, Any]) -> None:
        """Raise RowFault where a record holds what it must not."""
        # One look for nearly all records: this is the hot loop.
        if self.what and (self._ways or not record.keys() <= self._harmless):
            self._look(record)

    def _look(self, record: Mapping[str, Any]) -> None:
        for beside in self._objects(record):
            suspects = {}
            for name in beside.keys() - self._harmless:
                if self.may_matter(name):
                    suspects[name] = beside[name]
                elif len(self._harmless) < _MOST_NAMES:
                    self._harmless.add(name)
            if suspects:
                self._judge(suspects, record)

    def _objects(self, record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        yield record
        for way in self._ways:
            value: Any = record
            for key in way:
                value = value.get(key) if isinstance(value, Mapping) else None
            if isinstance(value, Mapping):
                yield value

    def _judge(self, suspects: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        if "inputs" in self.what:
            for name in INSTRUCTION_INPUTS:
                value = suspects.get(name)
                if isinstance(value, str) and value.strip():
                    raise RowFault(_input_reason(name))
        if "masks" in self.what:
            suspects = {name: one for name, one in suspects.items() if may_mask(name, self._format)}
            if found := masks_in(suspects, record, self._format, self._fields):
                raise RowFault(mask_reason(found, self._format, self._fields))

    # -------------------------------------------------------------- tables

    def columns(self, schema: pa.Schema) -> list[str]:
        """The columns to be read for this alone, in the file's order: those of a type that could matter."""
        if not self.what:
            return []
        return [one.name for one in schema if self.may_matter(one.name) and _may_be_list_or_text(one.type)]

    def checked(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of a table without the columns that were read for this alone. Raises RowFault."""
        self.check(row)
        return {name: value for name, value in row.items() if not self.may_matter(name)} if self.what else row

    # -------------------------------------------------------------- ready ids

    def passes(self, batch: pa.RecordBatch) -> bool:
        """Whether no row of a table of ready ids can hold what it must not, as the columns say."""
        labels = self._fields.get("labels")
        if labels in batch.schema.names and not batch.column(labels).null_count:
            return True
        return all(batch.column(name).null_count == len(batch) for name in self.columns(batch.schema))

    def passes_lists(self, lists: Collection[str]) -> bool:
        """The same of objects that hold lists under these names, and nothing else that may be one."""
        return self._fields.get("labels") in lists or not any(map(self.may_matter, lists))


def _ways(name: str) -> Iterator[tuple[str, ...]]:
    keys = name.split(".")
    for length in range(1, len(keys)):
        yield tuple(keys[:length])


def _format_of(fields: Mapping[str, str]) -> Format:
    known: dict[str, Format] = {"messages": "messages", "input_ids": "tokens", "text": "text"}
    return next((format for name, format in known.items() if name in fields), "prompt_completion")


def _may_be_list_or_text(of: pa.DataType) -> bool:
    """Whether a column may hold lists of numbers, or their JSON text, or words."""
    if pa.types.is_dictionary(of):
        return _may_be_list_or_text(of.value_type)
    if isinstance(of, pa.BaseExtensionType):
        return _may_be_list_or_text(of.storage_type)
    if pa.types.is_string(of) or pa.types.is_large_string(of) or pa.types.is_string_view(of):
        return True
    binary = (
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_fixed_size_binary,
        pa.types.is_binary_view,
    )
    return is_list(of) and not (
        pa.types.is_nested(of.value_type) or any(is_one(of.value_type) for is_one in binary)
    )


def _input_reason(name: str) -> str:
    joined = f"{_INSTRUCTION}{JOIN}{name}"
    return (
        f"the field {name!r}, which none of the first records has, holds words beside {_INSTRUCTION!r} and "
        f"would be left out of the prompt: set source.fields to prompt={joined} (--field prompt={joined}) to "
        f"put them together, or to prompt={_INSTRUCTION} to leave it out"
    )
