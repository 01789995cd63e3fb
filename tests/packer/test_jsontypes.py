"""Rows of a table are those of JSON Lines, whatever types the table needs to hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading import read_source

from packer.sources.jsontypes import json_values


def calling(name: str, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments, **more}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def schema(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


QUESTION = {"role": "user", "content": "x"}
# Objects of different keys, in lists and deeper.
ROWS = [
    {
        "messages": [QUESTION, calling("f", {"city": "q", "units": ["c", "f"]})],
        "tools": [schema("f", city={"type": "string"})],
    },
    {
        "messages": [QUESTION, calling("g", {"n": 3}, strict=True), {"role": "tool", "content": "4"}],
        "tools": [schema("g", n={"type": "integer", "description": "d"}), schema("f", city={"type": "x"})],
    },
]


def same_as_lines(tmp_path: Path, file: Path, rows: list[Any]) -> None:
    for seed in (None, 1):
        found = read_source(file, tmp_path / f"work {seed}", seed=seed)
        assert found.errors == []
        assert [
            row for _, row in sorted(zip(found.ids, found.rows, strict=True), key=lambda one: one[0])
        ] == rows


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_what_only_other_rows_have_is_not_in_a_row(tmp_path: Path, kind: str) -> None:
    table, file = pa.Table.from_pylist(ROWS), tmp_path / f"rows.{kind}"
    assert "null" in json.dumps(table.to_pylist())
    if kind == "parquet":
        pq.write_table(table, file)
    else:
        with pa.ipc.new_file(str(file), table.schema) as out:
            out.write_table(table)
    same_as_lines(tmp_path, file, ROWS)


@pytest.mark.parametrize("how", ["read from JSON", "by default", "named"])
def test_what_datasets_writes_is_read_as_it_was(tmp_path: Path, how: str) -> None:
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Json") or not hasattr(pa, "JsonType"):
        pytest.skip("needs datasets and pyarrow with a type for JSON")
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    if how == "read from JSON":
        made = datasets.load_dataset(
            "json", data_files=str(lines), split="train", cache_dir=str(tmp_path / "cache")
        )
    elif how == "by default":
        made = datasets.Dataset.from_list(ROWS)
    else:
        message = {
            "role": datasets.Value("string"),
            "content": datasets.Value("string"),
            "tool_calls": datasets.List(datasets.Json()),
        }
        features = {"messages": datasets.List(message), "tools": datasets.List(datasets.Json())}
        made = datasets.Dataset.from_list(ROWS, features=datasets.Features(features))
    made.to_parquet(str(tmp_path / "rows.parquet"))
    same_as_lines(tmp_path, tmp_path / "rows.parquet", ROWS)


def test_a_map_is_an_object(tmp_path: Path) -> None:
    arguments = pa.map_(pa.string(), pa.string())
    function = pa.struct([("name", pa.string()), ("arguments", arguments)])
    message = pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("tool_calls", pa.list_(pa.struct([("function", function)]))),
        ]
    )
    rows = [
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": one}}]}]}
        for one in ({"city": "q", "unit": None}, {})
    ]
    pq.write_table(
        pa.Table.from_pylist(rows, pa.schema([("messages", pa.list_(message))])), tmp_path / "rows.parquet"
    )
    same_as_lines(tmp_path, tmp_path / "rows.parquet", rows)  # a map says itself what is null


def test_nulls_that_mean_something_stay() -> None:
    plain = pa.array([{"a": None, "b": 1}, None])
    assert json_values(plain) == [{"a": None, "b": 1}, None]
    within = pa.array([{"a": None, "list": [{"c": None, "d": [None, 1]}, None]}])
    assert json_values(within) == [{"a": None, "list": [{"d": [None, 1]}, None]}]


@pytest.mark.skipif(not hasattr(pa, "JsonType"), reason="needs a pyarrow with a type for JSON")
def test_json_texts_are_what_stands_in_them() -> None:
    texts = ['{"a": null, "n": 100000000000000000001}', "[1]", None, '"word"', "no JSON"]
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts))
    assert json_values(column) == [{"a": None, "n": 100000000000000000001}, [1], None, "word", "no JSON"]


def test_a_slice_of_a_table_is_its_rows() -> None:
    column = pa.array([[{"a": 1}], [{"b": 2}], [], None, [{"a": None, "b": 3}]])
    assert json_values(column.slice(1, 4)) == [[{"b": 2}], [], None, [{"b": 3}]]
