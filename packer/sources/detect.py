"""Which kind of examples a source holds, and which of its fields are which: settled by the first records."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from packer.sources import hubstream, tabular
from packer.sources.convert import open_path
from packer.sources.csvlines import csv_lines
from packer.sources.jsonvalues import is_json_lines, value_lines
from packer.sources.lines import BOM, TooLong, read_lines
from packer.sources.parse import JOIN, RowFault, find, is_missing, kind, parse_converted, parse_object
from packer.sources.remote import is_remote
from packer.sources.streams import Stream, blocks, open_stream
from packer.sources.unread import unread_warning
from packer.sources.values import MAX_UNPACKED_BYTES, MIB, SourceError
from packer.sources.watch import INSTRUCTION_INPUTS, Watch, watch_of
from packer.spec import Format, InputFile, Loss, SourceSpec

_SAMPLE_RECORDS = 100
_SAMPLE_BYTES = MIB
_MAX_CHECKED = 16  # files that are looked at beside the first
# A first record up to this size still tells its fields.
_FIRST_RECORD_BYTES = 32 * MIB

_TABLES = ("parquet", "arrow")

REQUIRED: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "tokens": ("input_ids",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
OPTIONAL: dict[Format, tuple[str, ...]] = {
    "messages": ("tools",),
    "tokens": ("labels", "attention_mask"),  # the latter so that no padding is trained
}
# The names that are tried for each field, in this order.
ALIASES = {
    "messages": ("messages", "conversations", "conversation"),
    "input_ids": ("input_ids",),
    "prompt": ("prompt", "instruction", "question", "query", "problem", "input"),
    "completion": ("completion", "response", "output", "answer", "solution"),
    "text": ("text", "content"),
}

Rows = Sequence[Mapping[str, Any]]
# Whether a field of ours can be the one of that name in the sample.
_Fits = Callable[[str, str, Sequence[Mapping[str, Any]]], bool]


class Detected(NamedTuple):
    """format, fields: what the records are, and all of padfree's names to the source's. warning: what is left
    out and may be missed, or None."""

    format: Format
    fields: dict[str, str]
    warning: str | None


def detect_format(
    inputs: Sequence[InputFile],
    source: SourceSpec,
    *,
    loss: Loss = "auto",
    max_unpacked_bytes: int = MAX_UNPACKED_BYTES,
) -> Detected:
    """The format, and which of the source's fields are which.

    "auto" is settled by the first records of the first input that has any; fields that `source.fields`
    does not name are looked for under usual names. Optional fields (tools, labels) are always mapped:
    a later record may have them. Raises SourceError where the records do not say, and where a file of another
    kind or folder has other fields, unless bad rows are to be skipped; or where the first records of one hold
    what is not read and would change what is trained (packer.sources.watch).
    """
    # A text file fits whatever name the other files have for their texts.
    telling = [input for input in inputs if input.reader != "txt"] or inputs
    sample, name, fault = _first_sample(telling, max_unpacked_bytes)
    if not sample and fault is not None:
        raise SourceError(f"{name}: no record could be read; the first: {fault}")
    if not sample:
        where = f"the {len(inputs)} input files" if len(inputs) > 1 else "the input file"
        raise SourceError(f"{name}: no record in {where}; give files that hold some")
    formats = _candidates(source.format, source.fields)

    @functools.cache
    def rows_of(input: InputFile) -> Rows:
        return [row for row in _records(input, max_unpacked_bytes) if not isinstance(row, RowFault)]

    # First rows that are bad do not hide what the others hold. In a format that was asked for a field of its
    # very name is meant, whatever it holds: each row says then what is wrong with it.
    tests = [_looks_like, _may_be, *([_is_called] if source.format != "auto" else [])]
    for fits, format in ((fits, format) for fits in tests for format in formats):
        fields = _mapping(format, source.fields, sample, fits)
        if fields is not None:
            watch = Watch(fields, watch_of(source, loss, fields))
            for input in _first_of_each(inputs, at_least=1) if watch.what else ():
                _check_all(watch, input.path, rows_of(input))
            if source.on_bad_row == "fail":
                _check_alike(inputs, name, format, fields, rows_of)
            return Detected(format, fields, unread_warning(sample, format, fields, source.fields))
    seen = list(dict.fromkeys(key for record in sample for key in record))
    absent = _absent(formats, source.fields, sample)
    if absent:
        raise SourceError(
            f"{name}: required is the field {' and '.join(absent)}, which source.fields names and none "
            f"of the first records has; found {_listed(seen)}; name one that is there"
        )
    wanted = "; or ".join(_named(format) for format in formats)
    plural = len(formats) > 1 or len(REQUIRED[formats[0]]) > 1
    ours = "text" if "text" in formats else REQUIRED[formats[0]][0]
    raise SourceError(
        f"{name}: required {'are the fields' if plural else 'is the field'} {wanted}; "
        f"found {_listed(seen, sample)}; name yours in source.fields, for example "
        f'{{"{ours}": "its name there"}}'
    )


def _check_all(watch: Watch, path: str, sample: Rows) -> None:
    """Raise SourceError where a file's first records hold what is not read: it would change nothing."""
    for record in sample:
        try:
            watch.check(record)
        except RowFault as fault:
            raise SourceError(f"{path}: {fault}") from fault


def _named(format: Format) -> str:
    """The required fields of a format; its name too, where that says more."""
    names = " and ".join(REQUIRED[format])
    return names if names == format else f"{names} ({format})"


def _check_alike(
    inputs: Sequence[InputFile],
    first: str,
    format: Format,
    fields: Mapping[str, str],
    rows_of: Callable[[InputFile], Rows],
) -> None:
    """Raise SourceError where the first file of a kind or folder has none of a required field.

    The rows would be bad each by itself; this says what is wrong with all of them.
    """
    wanted = [fields[ours] for ours in REQUIRED[format]]
    for input in _first_of_each(inputs):
        if input.reader == "txt":
            sample, fits = rows_of(input), format == "text"
        else:
            sample = rows_of(input)
            fits = not sample or all(_values(theirs, sample) for theirs in wanted)
        if not fits:
            found = list(dict.fromkeys(key for record in sample for key in record))
            names = " and ".join(wanted)
            raise SourceError(
                f"{input.path}: required {'are the fields' if len(wanted) > 1 else 'is the field'} {names} "
                f"(format {format}), as in {first} (a dataset has one "
                f"name for each of its fields, in all files); found {_listed(found)}. {_way_out(sample)}"
            )


def _way_out(sample: Sequence[Mapping[str, Any]]) -> str:
    """What to do with a file whose fields are not those of the others."""
    own = ((format, _mapping(format, {}, sample)) for format in REQUIRED)
    found = next(((format, fields) for format, fields in own if fields is not None), None)
    as_what = ""
    if found is not None:
        format, fields = found
        named = {ours: fields[ours] for ours in REQUIRED[format]}
        as_what = f" (it reads as {format}, with source.fields {json.dumps(named, ensure_ascii=False)})"
    return (
        f"Pack files like it as a dataset of their own{as_what} and train on both (MixedStream), or give its "
        'fields the names of the others; source.on_bad_row "skip" leaves its rows out, counted'
    )


def _first_of_each(inputs: Sequence[InputFile], *, at_least: int = 0) -> list[InputFile]:
    """The first input of each kind in each folder, and others whose first rows cost nothing to read; some at
    most, and behind the first `at_least` none that must be unpacked as a whole."""
    found: dict[tuple[str, str | None, str], InputFile] = {}
    for number, input in enumerate(inputs):
        if number < at_least or input.compression is None or input.reader not in _TABLES:
            found.setdefault((input.reader, input.compression, input.path.rpartition("/")[0]), input)
    firsts = list(found.values())
    cheap = (
        one
        for one in inputs
        if one.reader in ("jsonl", "json", "csv") and not is_remote(one.path) and one not in firsts
    )
    return list(islice(chain(firsts, cheap), _MAX_CHECKED))


def _listed(names: Sequence[str], sample: Sequence[Mapping[str, Any]] = ()) -> str:
    """Names of fields; with what stands in those that have a known name and hold no text or list."""
    known = {alias for aliases in ALIASES.values() for alias in aliases}
    told = []
    for name in names[:20]:
        values = [value for value in _values(name, sample) if value is not None] if name in known else []
        odd = bool(values) and not isinstance(values[0], str | list | np.ndarray)
        told.append(f"{name!r} ({kind(values[0])})" if odd else repr(name))
    return ", ".join(told) or "none"


def _candidates(format: Format, given: Mapping[str, str]) -> list[Format]:
    """The formats that are asked for and have all the given fields."""
    asked = list(REQUIRED) if format == "auto" else [format]
    fits = [name for name in asked if set(given) <= {*REQUIRED[name], *OPTIONAL.get(name, ())}]
    if not fits:
        known = "; ".join(
            f"{name}: {', '.join((*REQUIRED[name], *OPTIONAL.get(name, ())))}" for name in asked
        )
        raise SourceError(
            f"source.fields: {', '.join(given)} do not all belong to one format; it has {known}"
        )
    return fits


def _mapping(
    format: Format, given: Mapping[str, str], sample: Sequence[Mapping[str, Any]], fits: _Fits | None = None
) -> dict[str, str] | None:
    """All fields of `format`, or None where a required one is not in the sample. fits: whether a name of the
    sample can be one of ours; `_looks_like` if not given."""
    fits = fits or _looks_like
    fields: dict[str, str] = {}
    for ours in REQUIRED[format]:
        if ours in given:  # taken at its word: a value of a wrong type is the fault of its row
            theirs = given[ours] if _values(given[ours], sample) else None
        else:
            free = (name for name in ALIASES[ours] if name not in fields.values())
            theirs = next((name for name in free if fits(ours, name, sample)), None)
        if theirs is None:
            return None
        fields[ours] = theirs
    if fields.get("prompt") == "instruction" and "prompt" not in given:
        for part in INSTRUCTION_INPUTS:
            if part not in fields.values() and _looks_like("prompt", part, sample):
                fields["prompt"] = f"instruction{JOIN}{part}"
                break
    for ours in OPTIONAL.get(format, ()):
        fields[ours] = given.get(ours, ours)
    return fields


def _absent(
    formats: Sequence[Format], given: Mapping[str, str], sample: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Required fields that the user mapped to a name which no record of the sample has."""
    required = {ours for format in formats for ours in REQUIRED[format]}
    return [
        f"{theirs!r} (for {ours})"
        for ours, theirs in given.items()
        if ours in required and not _values(theirs, sample)
    ]


def _values(name: str, sample: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What stands under a source name; None where it is there and of a wrong type, its row's fault."""
    values = []
    for record in sample:
        try:
            value = find(record, name)
        except RowFault:
            value = None
        if not is_missing(value):
            values.append(value)
    return values


def _looks_like(ours: str, name: str, sample: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some record has the field and its first value is no number or object (null may be any)."""
    values = _values(name, sample)
    first = next((value for value in values if value is not None), None)
    return bool(values) and (first is None or isinstance(first, _types_of(ours)))


def _may_be(ours: str, name: str, sample: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some record has the field with a value that it can have."""
    return any(isinstance(value, _types_of(ours)) for value in _values(name, sample))


def _is_called(ours: str, name: str, sample: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it may be the field, or has its very name."""
    return _may_be(ours, name, sample) or (name == ours and bool(_values(name, sample)))


def _types_of(ours: str) -> tuple[type, ...]:
    return (list, str, np.ndarray) if ours in ("messages", "input_ids") else (str,)


# ------------------------------------------------------------------ sample


def _first_sample(
    inputs: Sequence[InputFile], max_unpacked_bytes: int
) -> tuple[list[dict[str, Any]], str, RowFault | None]:
    """Records of the first input that has any; else the first reason why not."""
    name, fault = inputs[0].path, None
    for input in inputs:
        rows = []
        for row in _records(input, max_unpacked_bytes):
            if not isinstance(row, RowFault):
                rows.append(row)
            elif fault is None:
                name, fault = input.path, row
        if rows:
            return rows, input.path, None
    return [], name, fault


def _records(input: InputFile, max_unpacked_bytes: int) -> Iterator[dict[str, Any] | RowFault]:
    return islice(_sample(input, max_unpacked_bytes), _SAMPLE_RECORDS)


def _sample(input: InputFile, max_unpacked_bytes: int) -> Iterator[dict[str, Any] | RowFault]:
    if input.reader == hubstream.READER:
        for rows in hubstream.stream_rows(input, rows=tabular.rows_to_look_at):
            yield from rows
        return
    with open_stream(input, max_unpacked_bytes=max_unpacked_bytes) as stream:
        if input.reader in _TABLES:
            yield from _table_sample(input, stream)
        elif input.reader == "txt":
            yield {"text": ""}
        elif input.reader == "csv":
            yield from _parsed(csv_lines(stream, input.path, max_bytes=_FIRST_RECORD_BYTES))
        elif input.reader == "json" and not _has_lines(input, max_unpacked_bytes):
            yield from _parsed(value_lines(stream, input.path, max_bytes=_FIRST_RECORD_BYTES))
        else:
            yield from _line_sample(stream)


def _has_lines(input: InputFile, max_unpacked_bytes: int) -> bool:
    with open_stream(input, max_unpacked_bytes=max_unpacked_bytes) as stream:
        return is_json_lines(stream)


def _parsed(lines: Iterator[bytes]) -> Iterator[dict[str, Any] | RowFault]:
    for line in lines:
        try:
            yield parse_converted(line.lstrip())
        except RowFault as fault:
            yield fault


def _line_sample(stream: Stream) -> Iterator[dict[str, Any] | RowFault]:
    num_bytes = 0
    first = True
    for lines in read_lines(stream, max_bytes=_FIRST_RECORD_BYTES, block_bytes=MIB // 4):
        for raw in lines:
            if isinstance(raw, TooLong):
                yield RowFault(f"the record has {raw.num_bytes} bytes, too many to look at")
                return
            num_bytes += len(raw)
            text = raw.removeprefix(BOM) if first else raw
            first = False
            if text and not text.isspace():
                try:
                    yield parse_object(text)
                except RowFault as fault:
                    yield fault
        if num_bytes > _SAMPLE_BYTES:
            return


def _table_sample(input: InputFile, stream: Stream) -> Iterator[dict[str, Any] | RowFault]:
    with contextlib.ExitStack() as stack:
        file: Any = stream
        if input.compression is not None:
            copy = stack.enter_context(tempfile.NamedTemporaryFile())
            for block in blocks(stream):
                copy.write(block)
            copy.flush()
            file, _ = stack.enter_context(open_path(copy.name, input.reader))
        elif not is_remote(input.path):
            file, _ = stack.enter_context(open_path(input.path, input.reader))
        table = stack.enter_context(tabular.open_table(input.path, file, input.reader))
        if input.reader == "parquet":
            batches = tabular.parquet_batches(table, table.schema_arrow.names, tabular.rows_to_look_at)
        else:
            batches = tabular.arrow_batches(table, table.schema.names, lambda: None, tabular.rows_to_look_at)
        for rows in batches:
            yield from rows
