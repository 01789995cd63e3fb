"""Ready ids read many rows at once are those read row after row, or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from reading import read_source

from packer.sources.ids import IdLines, IdRows, list_values, table_ids
from packer.sources.watch import Watch

FIELDS = {"input_ids": "input_ids", "labels": "labels", "attention_mask": "attention_mask"}
NOTHING = Watch(FIELDS)
number = st.one_of(st.integers(0, 9), st.integers(0, 151_000), st.integers(-100, 9_999_999), st.just(-100))
numbers = st.lists(number, max_size=12)


@st.composite
def lines(draw: st.DrawFn) -> list[bytes]:
    """Lines as people write them, all alike."""
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (",", ": ")]))
    names = draw(
        st.sampled_from(
            [["input_ids"], ["input_ids", "labels"], ["labels", "input_ids"], ["input_ids", "attention_mask"]]
        )
    )
    extra = draw(st.sampled_from([{}, {"id": 7}, {"labels": None}, {"note": "x"}]))
    rows = [{**extra, **{name: draw(numbers) for name in names}} for _ in range(draw(st.integers(1, 6)))]
    return [json.dumps(row, separators=separators).encode() for row in rows]


def plain(rows: IdRows | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as the renderer sees them: labels that are null are none."""
    found = [{name: row[name] for name in FIELDS if row.get(name) is not None} for row in rows]
    return [{name: np.asarray(value).tolist() for name, value in row.items()} for row in found]


@given(lines())
def test_usual_lines_are_read_at_once(given_lines: list[bytes]) -> None:
    found = IdLines(FIELDS, NOTHING).parse(given_lines)
    assert found is not None
    assert plain(found) == plain([orjson.loads(line) for line in given_lines])
    assert all(flat.dtype == np.int32 for flat, _ in found.columns.values())


ODD = b'0019-,, []{}".e\t%#"\\x\r:nul'


@given(lines(), st.data())
@example([b'{"input_ids": [1, 2,%3]}'], None)
@example([b'{"input_ids": [1, 2,3]}'], None)
@example([b'{"input_ids": [1, , 3]}'], None)
@example([b'{"input_ids": [1, 2,]}'], None)
@example([b'{"input_ids": [ ]}', b'{"input_ids": [1, 2]}'], None)
@example([b'{"input_ids": [007, 1]}'], None)
@example([b'{"input_ids": [-, 1]}'], None)
@example([b'{"input_ids": [-01, 1]}'], None)
@example([b'{"input_ids": [1.5, 1]}'], None)
@example([b'{"input_ids": [true]}'], None)
@example([b'{"input_ids": ["1"]}'], None)
@example([b'{"input_ids": [[1]]}'], None)
@example([b'{"input_ids": [1], "input_ids": [2]}'], None)
@example([b'{"input_ids": [1], "a": {"labels": [2]}}'], None)
@example([b'{"input_ids": [1], "labels": "[2]"}'], None)
@example([b'{"input_ids": [1], "labels": 3}'], None)
@example([b'{"input_ids": [1]} x'], None)
@example([b'{"input_ids": [123456789012]}'], None)
@example([b"[1, 2]"], None)
def test_whatever_a_line_holds_what_is_read_is_what_it_says(
    given_lines: list[bytes], data: st.DataObject | None
) -> None:
    """One byte of one line is changed, taken out or put in."""
    if data is not None:
        which = data.draw(st.integers(0, len(given_lines) - 1))
        line = given_lines[which]
        at = data.draw(st.integers(0, len(line) - 1))
        put = bytes([data.draw(st.sampled_from(ODD))])
        given_lines[which] = data.draw(
            st.sampled_from(
                [line[:at] + put + line[at + 1 :], line[:at] + put + line[at:], line[:at] + line[at + 1 :]]
            )
        )
    found = IdLines(FIELDS, NOTHING).parse(given_lines)
    if found is not None:
        assert plain(found) == plain([orjson.loads(line) for line in given_lines])


NAMES = ["input_ids", "labels", "attention_mask", "input\\u005fids", "l\\u0061bels", "a[0]", "\\u005b"]
inner = st.one_of(
    st.sampled_from(["null", "[]", "1", '"[1]"', '"]"', '"["', '{"input_ids": [1]}', '{"labels": null}']),
    st.lists(st.integers(-100, 151_000), max_size=4).map(json.dumps),
    st.lists(st.integers(0, 9), max_size=3).map(json.dumps).map(lambda ids: f'{{"input_ids": {ids}}}'),
)
members = st.lists(st.tuples(st.sampled_from(NAMES), inner), min_size=1, max_size=6)


def written(pairs: list[tuple[str, str]]) -> bytes:
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in pairs) + "}").encode()


@given(st.lists(members, min_size=1, max_size=3), st.integers(1, 3))
@example([[("attention_mask", "null"), ("input_ids", "[5, 6, 7]"), ("attention_mask", "[1, 1, 1]")]], 1)
@example([[("labels", "null"), ("input_ids", "[5, 6, 7]"), ("labels", "[-100, 6, 7]")]], 2)
@example([[("input_ids", "[1]"), ("labels", "[1]"), ("input_ids", "null")]], 1)
@example([[("labels", "[1]"), ("input_ids", "[1]"), ("l\\u0061bels", "null")]], 1)
def test_of_a_key_that_comes_twice_the_last_value_counts(
    given_lines: list[list[tuple[str, str]]], repeats: int
) -> None:
    raws = [written(pairs) for pairs in given_lines] * repeats
    found = IdLines(FIELDS, NOTHING).parse(raws)
    if found is not None:
        assert plain(found) == plain([orjson.loads(raw) for raw in raws])


def test_keys_that_come_twice_are_read_at_once() -> None:
    """The usual way: so the test before looks at something."""
    raws = [b'{"labels": null, "input_ids": [5, 6], "labels": [-100, 6]}'] * 3
    found = IdLines(FIELDS, NOTHING).parse(raws)
    assert found is not None
    assert plain(found) == [{"input_ids": [5, 6], "labels": [-100, 6]}] * 3


@pytest.mark.parametrize(
    "second", [b'{"input_ids": [1], "labels": [1]}', b'{"text": "a"}', b"{", b'{"labels": [1]}', b"\xff"]
)
def test_lines_that_are_not_alike_are_read_one_by_one(second: bytes) -> None:
    assert IdLines(FIELDS, NOTHING).parse([b'{"input_ids": [1]}', second]) is None


def test_other_formats_are_left_alone() -> None:
    line = b'{"input_ids": [1]}'
    assert IdLines({"text": "input_ids"}, NOTHING).parse([line]) is None
    assert IdLines({"input_ids": "a.input_ids"}, NOTHING).parse([line]) is None


@pytest.mark.parametrize("of", [pa.int8(), pa.int16(), pa.int32(), pa.int64()])
@pytest.mark.parametrize("large", [False, True])
def test_columns_of_a_table_are_its_lists(of: pa.DataType, large: bool) -> None:
    values = [[9], [1, 2, 3], [], [4], [5, 6]]
    column = pa.array(values, pa.large_list(of) if large else pa.list_(of))
    for part, wanted in ((column, values), (column.slice(1, 3), values[1:4]), (column.slice(5), [])):
        found = table_ids(pa.record_batch({"a": part, "text": [""] * len(part)}), {"input_ids": "a"})
        assert found is not None
        assert [row["input_ids"].tolist() for row in found] == wanted


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[1], None], pa.list_(pa.int32())),
        pa.array([[1, None]], pa.list_(pa.int32())),
        pa.array([[1]], pa.list_(pa.uint32())),
        pa.array([[1.0]], pa.list_(pa.float32())),
        pa.array([1]),
    ],
)
def test_other_columns_are_read_row_by_row(column: pa.Array) -> None:
    assert list_values(column) is None


def test_rows_are_a_sequence() -> None:
    rows = IdRows({"input_ids": (np.arange(6), np.array([1, 0, 5]))})
    assert [row["input_ids"].tolist() for row in rows] == [[0], [], [1, 2, 3, 4, 5]]
    assert rows[-1]["input_ids"].tolist() == rows[1:][1]["input_ids"].tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(IndexError):
        rows[3]
    both = IdRows.joined([rows, rows])
    assert (len(both), both.num_values) == (6, 12)
    assert both[5]["input_ids"].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", [None, 3])
def test_a_bad_row_among_many_keeps_its_line_and_the_order_of_all(tmp_path: Path, seed: int | None) -> None:
    rows = [json.dumps({"input_ids": [i, 1]}) for i in range(3000)]
    rows[1500] = '{"input_ids": [5, 007]}'
    rows[2500] = '{"input_ids": [5, 0.5], "labels": null}'
    path = tmp_path / "ids.jsonl"
    path.write_text("\n".join(rows))
    read = read_source(path, tmp_path / "store", seed=seed)
    assert [(error.line, error.example_id) for error in read.errors] == [(1501, 1500)]
    first = {i: row["input_ids"][0] for i, row in zip(read.ids, read.rows, strict=True)}
    assert first == {i: i for i in range(3000) if i not in (1500, 2500)} | {2500: 5}
    assert {at.number - 1 for at in read.locations} == set(first)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_table_of_ids_and_one_of_texts_do_not_mix_up(tmp_path: Path, seed: int | None) -> None:
    pq.write_table(pa.table({"input_ids": [[1], [2, 3]], "labels": [[1], [-100, 3]]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"input_ids": [4]}\n{"input_ids": [5], "labels": [5]}\n')
    pq.write_table(pa.table({"input_ids": [[6], None]}), tmp_path / "c.parquet")
    read = read_source(
        [tmp_path / f"{name}" for name in ("a.parquet", "b.jsonl", "c.parquet")], tmp_path / "s", seed=seed
    )
    found = dict(zip(read.ids, read.rows, strict=True))
    assert [found[i].get("input_ids") for i in range(6)] == [[1], [2, 3], [4], [5], [6], None]
    assert [found[i].get("labels") for i in range(6)] == [[1], [-100, 3], None, [5], None, None]
