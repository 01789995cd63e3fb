"""Reading: the public fault cases of data input, and what each form of file gives."""

from __future__ import annotations

import csv
import functools
import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from reading import read_source

from packer.render import Renderer
from packer.sources import SourceError, detect_format, index_input, read_partition, resolve_inputs
from packer.sources.csvlines import csv_lines
from packer.sources.partitions import cut
from packer.spec import Format, SourceSpec
from packer.store import LocalStore

SEEDS = [None, 7]


def jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_bytes(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
    return path


def left_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# ------------------------------------------------------------------ fault cases


def test_f17_a_field_that_is_null_for_long_may_have_a_type_later(tmp_path: Path) -> None:
    rows = [{"text": "a", "meta": None}] * 5000 + [{"text": "b", "meta": {"url": "u"}}]
    out = read_source(jsonl(tmp_path / "a.jsonl", rows), tmp_path / "store")
    assert (len(out.rows), out.errors) == (5001, [])
    assert out.texts == ["a"] * 5000 + ["b"]


def test_f18_files_of_one_folder_may_differ_in_a_nested_type(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    jsonl(folder / "f1.jsonl", [{"text": "a", "r": {"b": 23}}])
    jsonl(folder / "f2.jsonl", [{"text": "b", "r": {"b": "23"}}])
    assert read_source(folder, tmp_path / "store").texts == ["a", "b"]
    # The renderer says which type is wanted; here each file's own value comes through.
    out = read_source(folder, tmp_path / "store", fields={"text": "r.b"})
    assert out.rows == [{"text": 23}, {"text": "23"}]
    assert str(out.locations[0]).endswith("f1.jsonl, line 1")


@pytest.mark.parametrize("seed", SEEDS)
def test_f19_a_bad_line_is_reported_with_its_file_and_line(tmp_path: Path, seed: int | None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text":"a"}\n{"text": "b\n[1,2]\n{"text":"c"}\n')
    out = read_source(path, tmp_path / "store", seed=seed)
    assert sorted(out.texts) == ["a", "c"]
    assert sorted(out.ids) == [0, 3]
    errors = sorted(out.errors, key=lambda error: error.example_id)
    assert [(error.example_id, error.line) for error in errors] == [(1, 2), (2, 3)]
    assert "not JSON" in errors[0].reason
    assert "not an object" in errors[1].reason
    assert errors[0].location == f"{path}, line 2"


def test_a_long_bad_line_is_shown_by_an_excerpt(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text":"a"}\n' + "x" * 5000 + "\n")
    assert len(read_source(path, tmp_path / "store").errors[0].reason) < 200


@pytest.mark.parametrize("seed", SEEDS)
def test_f20_only_the_newline_ends_a_row(tmp_path: Path, seed: int | None) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["a\u2028b", "a\u2029b", "a\u0085b", "a\fb"]
    path.write_text("".join(f'{{"text":"{t}"}}\n'.replace("\f", "\\f") for t in texts), encoding="utf-8")
    out = read_source(path, tmp_path / "store", seed=seed)
    assert (sorted(out.texts), out.errors) == (sorted(texts), [])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'\xef\xbb\xbf{"text":"a"}\r\n{"text":"b"}\r\n'),
        ("a.json", b'\xef\xbb\xbf{"text":"a"}\r\n{"text":"b"}\r\n'),
        ("a.json", b'\xef\xbb\xbf[{"text":"a"},\r\n{"text":"b"}]\r\n'),
        ("a.csv", b"\xef\xbb\xbftext\r\na\r\nb\r\n"),
    ],
)
def test_f21_byte_order_mark_and_crlf_are_harmless(
    tmp_path: Path, seed: int | None, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    out = read_source(tmp_path / name, tmp_path / "store", seed=seed)
    assert (sorted(out.texts), out.errors) == (["a", "b"], [])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz"])
def test_f22_a_line_longer_than_the_read_block_is_one_row(
    tmp_path: Path, seed: int | None, name: str
) -> None:
    texts = ["a", "a " * 10_485_760, "b"]
    path = tmp_path / name
    if name == "a.jsonl":
        jsonl(path, [{"text": text} for text in texts])
    elif name == "a.json":
        path.write_text(json.dumps([{"text": text} for text in texts]))
    elif name == "a.csv":
        path.write_text("text\n" + "".join(f"{text}\n" for text in texts))
    elif name == "a.parquet":
        pq.write_table(pa.table({"text": texts}), path)
    else:
        path.write_bytes(gzip.compress(jsonl(tmp_path / "b", [{"text": t} for t in texts]).read_bytes(), 1))
    out = read_source(path, tmp_path / "store", seed=seed)
    assert [out.texts[out.ids.index(i)] for i in range(3)] == texts


@pytest.mark.parametrize("seed", SEEDS)
def test_f22_a_row_over_the_limit_is_rejected_with_its_line_and_size(
    tmp_path: Path, seed: int | None
) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "a" * 5000}, {"text": "b"}])
    out = read_source(path, tmp_path / "store", seed=seed, max_row_bytes=4000)
    assert sorted(out.texts) == ["a", "b"]
    assert [(e.line, e.reason) for e in out.errors] == [
        (2, "the record has 5012 bytes, more than the limit of 4000: split it")
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_f23_parquet_with_nested_messages_in_a_large_row_group(tmp_path: Path, seed: int | None) -> None:
    user = "".join(f"{i:07d} " for i in range(131_072))  # 1 MiB that a dictionary does not shorten
    rows = [
        [{"role": "user", "content": f"{i:08d}{user[8:]}"}, {"role": "assistant", "content": "c"}]
        for i in range(40)
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": rows}), path)
    assert pq.ParquetFile(path).num_row_groups == 1
    out = read_source(path, tmp_path / "store", seed=seed)
    assert (len(out.rows), out.errors) == (40, [])
    for i, row in zip(out.ids, out.rows, strict=True):
        assert row["messages"] == rows[i]
        assert len(row["messages"][0]["content"]) == 1_048_576
    assert seed is not None or out.ids == list(range(40))


@pytest.mark.parametrize("seed", SEEDS)
def test_f24_compressed_variants_are_read_and_other_files_are_named(tmp_path: Path, seed: int | None) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text":"b"}\n'))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(b'{"text":"c"}\n'))
    jsonl(folder / "a.jsonl", [{"text": "a"}])
    jsonl(folder / ".hidden.jsonl", [{"text": "h"}])
    (folder / "d.txt.bak").write_text("d")
    out = read_source(folder, tmp_path / "store", seed=seed)
    assert [out.texts[out.ids.index(i)] for i in range(3)] == ["a", "b", "c"]
    assert [Path(name).name for name in out.ignored] == [".hidden.jsonl", "d.txt.bak"]


def test_f24_a_gz_file_that_is_not_gzip_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b'{"text":"a"}\n')
    with pytest.raises(SourceError, match=r"a\.jsonl\.gz.*gzip"):
        resolve_inputs([str(tmp_path)], roots=None)


_UNPACK = """
import resource, sys, time
from packer.render import Renderer
from packer.sources import SourceError, detect_format, index_input, resolve_inputs
from packer.spec import SourceSpec
from packer.store import LocalStore

path, store = sys.argv[1:]
inputs, _ = resolve_inputs([path], roots=None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    detect_format(inputs, SourceSpec(paths=(path,)))
except SourceError as error:
    print(error)
for random_access in (False, True):
    try:
        index_input(
            inputs[0], store=LocalStore(store), work_key="work", random_access=random_access,
            fields={"text": "text"}, max_unpacked_bytes=10 << 20,
        )
    except SourceError as error:
        print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@functools.cache
def _hundred_mib(kind: str) -> bytes:
    """Of zeros, in a few kilobytes."""
    file = io.BytesIO()
    writer: Any = (
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6)
        if kind == "gz"
        else zstandard.ZstdCompressor(write_content_size=False).stream_writer(file, closefd=False)
    )
    with writer:
        for _ in range(100):
            writer.write(bytes(1 << 20))
    return file.getvalue()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet"])
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_f46_unpacking_stops_at_the_limit(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / f"{name}.{kind}"
    path.write_bytes(_hundred_mib(kind))
    # A process of its own, so that the peak of memory is its own.
    done = subprocess.run(
        [sys.executable, "-c", _UNPACK, str(path), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    *errors, peak_kib = done.stdout.splitlines()
    assert len([error for error in errors if "unpacked size" in error and path.name in error]) >= 2, errors
    assert int(peak_kib) < 50 << 10
    assert left_in(tmp_path / "store") == []


def test_f46_gzip_within_gzip_is_unpacked_once(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(gzip.compress(b'{"text":"a"}\n' * 10)))
    out = read_source([tmp_path / "a.jsonl", tmp_path / "x.jsonl.gz"], tmp_path / "store")
    assert out.texts == ["a"]
    assert out.errors
    assert {error.file for error in out.errors} == {str(tmp_path / "x.jsonl.gz")}
    assert all("not UTF-8" in error.reason or "not JSON" in error.reason for error in out.errors)


# ------------------------------------------------------------------ damaged and changed files


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_compressed_file_that_is_cut_off_is_named(tmp_path: Path, kind: str, seed: int | None) -> None:
    raw = b"".join(json.dumps({"text": os.urandom(50).hex()}).encode() + b"\n" for _ in range(30_000))
    packed = gzip.compress(raw) if kind == "gz" else zstandard.compress(raw)
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(packed[:-100])
    with pytest.raises(SourceError, match=rf"a\.jsonl\.{kind}: .*cut off"):
        read_source(path, tmp_path / "store", seed=seed)
    assert left_in(tmp_path / "store") == []


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_damaged_table_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    table = pa.table({"text": [os.urandom(20).hex() for _ in range(20_000)]})
    if name == "a.parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    data = bytearray(path.read_bytes())
    data[-200:-8] = b"\xff" * 192
    path.write_bytes(data)
    with pytest.raises(SourceError, match=rf"{name}"):
        read_source(path, tmp_path / "store")


@pytest.mark.parametrize("change", ["longer", "same size"])
def test_a_file_that_changes_after_it_was_resolved_is_an_error(tmp_path: Path, change: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 5)
    inputs, _ = resolve_inputs([str(path)], roots=None)
    jsonl(path, [{"text": "a"}] * 6 if change == "longer" else [{"text": "b"}] * 5)
    os.utime(path, ns=(1, 1))
    with pytest.raises(SourceError, match=r"a\.jsonl: the file changed"):
        index_input(
            inputs[0], store=LocalStore(tmp_path), work_key="w", random_access=False, fields={"text": "text"}
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_file_that_changes_after_it_was_indexed_is_an_error(tmp_path: Path, seed: int | None) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 5)
    inputs, _ = resolve_inputs([str(path)], roots=None)
    store = LocalStore(tmp_path / "store")
    fields = {"text": "text"}
    index = index_input(inputs[0], store=store, work_key="w", random_access=seed is not None, fields=fields)
    jsonl(path, [{"text": "b"}] * 5)
    os.utime(path, ns=(1, 1))
    partitions = cut([index], shuffle_seed=seed)
    with pytest.raises(SourceError, match="changed"):
        list(read_partition(partitions[0], store=store, fields=fields))


def test_a_touched_file_of_the_same_content_is_no_error(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    inputs, _ = resolve_inputs([str(path)], roots=None)
    os.utime(path, ns=(1, 1))
    index = index_input(
        inputs[0], store=LocalStore(tmp_path), work_key="w", random_access=False, fields={"text": "text"}
    )
    assert index.file.num_records == 1


# ------------------------------------------------------------------ JSON


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ending", ["", "\n", "\n\n", "\r\n \t\r\n"])
def test_blank_lines_are_no_records_but_count_as_lines(tmp_path: Path, seed: int | None, ending: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n  \n{"text":"a"}\n\t\n\n  {"text":"b"}\r\n\r\n!\n{"text":"c"}' + ending, newline="")
    out = read_source(path, tmp_path / "store", seed=seed)
    places = {
        row["text"]: (i, at.number) for row, i, at in zip(out.rows, out.ids, out.locations, strict=True)
    }
    assert places == {"a": (0, 3), "b": (1, 6), "c": (3, 9)}
    assert [(error.example_id, error.line) for error in out.errors] == [(2, 8)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "\xff"}', "not UTF-8 (byte 11 of the line)"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b', "x": NaN}', "not JSON that can be read"),
        (b"null", "not an object but null"),
        (b'"a"', "not an object but a text"),
        (b"1", "not an object but a number"),
        (b"{}}", "not JSON"),
        (b"\x00\x00", "not JSON"),
    ],
)
def test_what_is_wrong_with_a_row_is_told(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    out = read_source(path, tmp_path / "store")
    assert out.texts == ["a", "b"]
    assert [error.line for error in out.errors] == [2]
    assert reason in out.errors[0].reason


@pytest.mark.parametrize("extra", ["NaN", "-Infinity", "123456789012345678901234567890", "1e999", "[[[]]]"])
def test_an_odd_value_in_a_field_that_is_not_used_is_no_fault(tmp_path: Path, extra: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "a", "x": {extra}}}\n')
    assert read_source(path, tmp_path / "store").rows == [{"text": "a"}]


def test_an_astral_character_as_an_escaped_pair_is_one_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n')
    assert read_source(tmp_path / "a.jsonl", tmp_path / "store").texts == ["\U0001f600"]


def test_fields_are_keys_dotted_paths_or_joined(tmp_path: Path) -> None:
    rows = [
        {"r": {"b": "deep"}, "r.b": "flat", "i": "do", "x": "this", "o": "1"},
        {"r": {"b": "deep"}, "i": "do", "x": "", "o": "2"},
        {"r": 5, "i": "do", "o": "3"},
    ]
    path = jsonl(tmp_path / "a.jsonl", rows)
    out = read_source(path, tmp_path / "store", fields={"text": "r.b"})
    assert out.rows == [{"text": "flat"}, {"text": "deep"}, {}]
    out = read_source(path, tmp_path / "store", fields={"prompt": "i+x", "completion": "o"})
    assert [row["prompt"] for row in out.rows] == ["do\n\nthis", "do", "do"]


MIXED = [
    {"i": "do", "x": "this", "o": "1"},
    {"i": "do", "x": ["a", "b"], "o": "2"},
    {"i": ["c"], "x": ["a", "b"], "o": "3"},
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "arrow"])
def test_a_row_whose_parts_are_not_all_texts_is_told_by_its_place(
    tmp_path: Path, form: str, seed: int | None
) -> None:
    path = tmp_path / f"a.{form}"
    rows: list[dict[str, Any]] = MIXED
    if form in ("parquet", "arrow"):  # one type a column: all rows are wrong
        rows = [row | {"i": "do", "x": ["a", "b"]} for row in MIXED]
        table = pa.Table.from_pylist(rows)
        if form == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
    elif form == "json":
        path.write_text(json.dumps(rows))
    else:
        jsonl(path, rows)
    out = read_source(path, tmp_path / "store", seed=seed, fields={"prompt": "i+x", "completion": "o"})
    wrong = [0, 1, 2] if form in ("parquet", "arrow") else [1, 2]
    assert sorted(error.example_id for error in out.errors) == wrong
    assert all("texts are required to be joined as 'i+x'" in error.reason for error in out.errors)
    assert all("found a list" in error.reason for error in out.errors)
    assert all(error.location.startswith(str(path)) for error in out.errors)
    assert [row["prompt"] for row in out.rows] == ["do\n\nthis"] * (3 - len(wrong))


def test_texts_of_a_table_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("i,x,o\ndo,7,1\n")
    out = read_source(path, tmp_path / "store", fields={"prompt": "i+x", "completion": "o"})
    assert (out.rows, out.errors) == ([{"prompt": "do\n\n7", "completion": "1"}], [])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "text",
    [
        '[{"text":"a"},{"text":"b"}]',
        '[\n  {\n    "text": "a"\n  },\n  {\n    "text": "b"\n  }\n]\n',
        '{"text":"a"}\n{"text":"b"}\n',
        '{\n "text": "a"\n}\n{\n "text":\n "b"}',
        ' \n\n [ {"text":"a"} , {"text":"b"} ] \n\n',
    ],
)
def test_json_files_of_every_form(tmp_path: Path, seed: int | None, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    out = read_source(path, tmp_path / "store", seed=seed)
    assert [out.texts[out.ids.index(i)] for i in range(2)] == ["a", "b"]
    assert out.errors == []


def test_bad_elements_of_a_json_array_are_records(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"text":"a"}, 5, "!x", null, {"text": "\xff"}, [1], {"text":"b"}]')
    out = read_source(path, tmp_path / "store")
    assert (out.texts, out.ids) == (["a", "b"], [0, 6])
    assert [(error.line, error.unit) for error in out.errors] == [(i, "record") for i in range(2, 7)]
    assert str(out.locations[1]) == f"{path}, record 7"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[{"text":"a"},\n{"text":"b"', 2),
        ('[{"text":"a"}\n\n {"text":"b"}]', 3),
        ('[{"text":"a"},\n{"text":}]', 2),
        ('[{"text":"a"}]\n[]', 2),
        ('[{"text":"a"}', 1),
        ('[{"text":"a"},]', 1),
    ],
)
def test_a_json_array_that_is_broken_is_refused_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SourceError, match=rf"a\.json, line {line}: "):
        read_source(tmp_path / "a.json", tmp_path / "store")
    assert left_in(tmp_path / "store") == []


def test_a_bad_line_of_json_lines_named_json_costs_that_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": "cut off\n{"text":"b"}\n')
    out = read_source(tmp_path / "a.json", tmp_path / "store")
    assert (out.texts, [error.line for error in out.errors]) == (["b"], [1])


def test_numbers_over_a_window_of_a_json_file_stay_whole(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(i, i + 1000))} for i in range(700)]
    (tmp_path / "a.json").write_text(json.dumps(rows))  # several windows
    assert read_source(tmp_path / "a.json", tmp_path / "store").rows == rows


# ------------------------------------------------------------------ CSV, text, tables


@pytest.mark.parametrize("seed", SEEDS)
def test_csv_records_keep_the_line_where_they_begin(tmp_path: Path, seed: int | None) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'id,text\r\n1,a\r\n\r\n2,"b\r\nb, ""b"""\r\n3\r\n4,d,e\r\n5,\xff\r\n6,7\r\n,\r\n8,z\ry\r\n9,i'
    )
    out = read_source(path, tmp_path / "store", seed=seed)
    places = {row["text"]: at.number for row, at in zip(out.rows, out.locations, strict=True)}
    assert places == {"a": 2, 'b\r\nb, "b"': 4, "7": 9, "": 10, "i": 12}
    reasons = {error.line: error.reason for error in out.errors}
    assert reasons[6] == "1 values for 2 columns"
    assert reasons[7] == "3 values for 2 columns"
    assert reasons[8] == "not UTF-8"
    assert "not CSV" in reasons[11]
    assert len(out.rows) + len(out.errors) == 9


def test_any_text_may_stand_in_csv_at_its_end_too(tmp_path: Path) -> None:
    """No text of the file is taken for the file's end."""
    (tmp_path / "a.csv").write_bytes(b'text\na\n\x00end\x00\n"b\x00end\x00"\n"c\nd"\n')
    out = read_source(tmp_path / "a.csv", tmp_path / "store")
    assert out.texts == ["a", "\x00end\x00", "b\x00end\x00", "c\nd"]
    assert [at.number for at in out.locations] == [2, 3, 4, 5]
    (tmp_path / "b.csv").write_bytes(b"text\na\n\x00end\x00")
    assert read_source(tmp_path / "b.csv", tmp_path / "store").texts == ["a", "\x00end\x00"]
    for nothing in (b"", b"\n\n", b"text", b"text\n"):
        (tmp_path / "c.csv").write_bytes(nothing)
        assert not list(csv_lines(io.BytesIO(nothing), "c.csv", names=None, max_bytes=100))


@pytest.mark.parametrize(("text", "line"), [('text\na\n"b\nc\n', 3), ('"text\na\n', 1), ('text\na\n"', 3)])
def test_a_csv_quote_that_is_not_closed_is_refused(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(SourceError, match=r"quote.* not closed") as caught:
        read_source(tmp_path / "a.csv", tmp_path / "store")
    assert line == 1 or f"line {line}:" in str(caught.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_csv_quote_that_is_not_doubled_makes_its_row_a_bad_one(tmp_path: Path, seed: int | None) -> None:
    """Python's csv would take it out without a word; Spark writes a backslash before it."""
    rows = ['"say ""hi""",1', '"say "hi" now",2', '"say \\"hi\\"",3', 'a 5" disk,4', '"end"']
    (tmp_path / "a.csv").write_text("\r\n".join(["text,n", *rows, ""]), newline="")
    out = read_source(tmp_path / "a.csv", tmp_path / "store", seed=seed, on_bad_row="skip")
    assert sorted(out.texts) == ['a 5" disk', 'say "hi"']
    assert sorted((one.line, "is to be doubled" in one.reason) for one in out.errors) == [
        (3, True),
        (4, True),
        (6, False),
    ]


def test_a_csv_header_that_names_a_column_in_use_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    with pytest.raises(SourceError, match="'text' twice"):
        read_source(tmp_path / "a.csv", tmp_path / "store")
    (tmp_path / "a.csv").write_text("text,,\na,b,c\n")
    assert read_source(tmp_path / "a.csv", tmp_path / "store").texts == ["a"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_text_file_is_one_document(tmp_path: Path, seed: int | None) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (folder / "b.txt.gz").write_bytes(gzip.compress("drei \u2028\n\n".encode()))
    (folder / "c.txt").write_bytes(b"bad \xff")
    (folder / "d.txt").write_bytes(b"")
    jsonl(folder / "e.jsonl", [{"content": "json"}])
    out = read_source(folder, tmp_path / "store", seed=seed)
    by_id = dict(zip(out.ids, out.texts, strict=True))
    assert by_id == {0: "one\r\ntwo\n", 1: "drei \u2028\n\n", 3: "", 4: "json"}
    assert [(e.example_id, e.reason) for e in out.errors] == [(2, "not UTF-8 (byte 5 of the file)")]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", ["parquet", "parquet.zst", "arrow", "stream.arrow", "arrow.gz"])
def test_tables_of_every_form(tmp_path: Path, seed: int | None, form: str) -> None:
    rows = [
        {"text": f"t{i}", "unused": i, "messages": [{"role": "user", "content": "c", "n": i}]}
        for i in range(1000)
    ]
    table = pa.Table.from_pylist(rows)
    raw = tmp_path / "raw"
    if "parquet" in form:
        pq.write_table(table, raw, row_group_size=300)
    else:
        new = pa.ipc.new_stream if "stream" in form else pa.ipc.new_file
        with new(str(raw), table.schema) as writer:
            writer.write_table(table, max_chunksize=77)
    data = raw.read_bytes()
    data = gzip.compress(data) if form.endswith("gz") else data
    data = zstandard.compress(data) if form.endswith("zst") else data
    path = tmp_path / f"a.{form}"
    path.write_bytes(data)
    cutting = {"first_bytes": 1000, "max_bytes": 4000}
    for fields, name in (({"text": "text"}, "text"), ({"messages": "messages"}, "messages")):
        out = read_source(path, tmp_path / "store", seed=seed, fields=fields, cutting=cutting)
        assert len(out.partitions) > 1
        assert sorted(out.ids) == list(range(1000))
        assert (out.ids == list(range(1000))) == (seed is None)
        assert all(row[name] == rows[i][name] for row, i in zip(out.rows, out.ids, strict=True))
        assert all(
            at.number == i + 1 and at.unit == "row" for at, i in zip(out.locations, out.ids, strict=True)
        )
    # Unpacked tables do not stay.
    assert {path.suffix for path in left_in(tmp_path / "store")} <= {".jsonl", ".offsets", ".index"}


@pytest.mark.parametrize("seed", SEEDS)
def test_table_values_that_json_has_not(tmp_path: Path, seed: int | None) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array([b"abc", b"\xff", None, "é".encode()], pa.binary())}), path)
    out = read_source(path, tmp_path / "store", seed=seed)
    assert dict(zip(out.ids, (row["text"] for row in out.rows), strict=True)) == {0: "abc", 2: None, 3: "é"}
    assert [(e.example_id, e.line, e.unit) for e in out.errors] == [(1, 2, "row")]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["a.parquet", "a.parquet.gz"])
def test_a_row_of_parquet_is_known_by_row_group_and_row(tmp_path: Path, seed: int | None, name: str) -> None:
    sink = io.BytesIO()
    texts = pa.array([b"a", b"b", b"c", b"\xff", b"e", b"\xfe", b"g"], pa.binary())
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=3)
    path = tmp_path / name
    path.write_bytes(gzip.compress(sink.getvalue()) if name.endswith("gz") else sink.getvalue())
    out = read_source(path, tmp_path / "store", seed=seed)
    assert sorted(error.location for error in out.errors) == [
        f"{path}, row 4 (row group 2, row 1)",
        f"{path}, row 6 (row group 2, row 3)",
    ]
    assert {str(at) for at in out.locations} == {
        f"{path}, row {row} (row group {group}, row {within})"
        for row, group, within in ((1, 1, 1), (2, 1, 2), (3, 1, 3), (5, 2, 2), (7, 3, 1))
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_a_parquet_text_that_is_not_utf8_is_a_bad_row(tmp_path: Path, seed: int | None) -> None:
    binary = pa.array([b"abc", b"\xff\xfe", b"x"] * 200, pa.binary())
    text = pa.StringArray.from_buffers(len(binary), *binary.buffers()[1:])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": text}), path)
    out = read_source(path, tmp_path / "store", seed=seed)
    assert sorted(e.line for e in out.errors) == list(range(2, 600, 3))
    assert sorted(out.texts) == ["abc"] * 200 + ["x"] * 200


def test_a_table_without_the_column_gives_rows_without_the_field(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    pq.write_table(pa.table({"other": ["x", "y"]}), tmp_path / "b.parquet")
    both = [tmp_path / "a.jsonl", tmp_path / "b.parquet"]
    out = read_source(both, tmp_path / "store", on_bad_row="skip")
    assert out.rows == [{"text": "a"}, {}, {}]


# ------------------------------------------------------------------ files of several kinds


def mixed_folder(folder: Path, rows: list[dict[str, Any]], compression: str) -> Path:
    """The rows in a file of each kind, plain or each compressed."""
    folder.mkdir()
    texts = [
        {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
        for row in rows
    ]
    jsonl(folder / "a.jsonl", rows)
    (folder / "b.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "c.parquet")
    with (folder / "d.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(texts)
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(str(folder / "e.arrow"), table.schema) as arrow:
        arrow.write_table(table)
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(compression)
    for path in list(folder.iterdir()) if compress else ():
        path.with_name(path.name + compression).write_bytes(compress(path.read_bytes()))
        path.unlink()
    return folder


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "rows",
    [
        [{"text": "a b"}, {"text": "c"}],
        [{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}],
        [{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [3], "labels": [3]}],
    ],
)
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_files_of_all_kinds_with_the_same_fields_are_one_source(
    tmp_path: Path, rows: list[dict[str, Any]], seed: int | None, compression: str
) -> None:
    folder = mixed_folder(tmp_path / "all", rows, compression)
    out = read_source(folder, tmp_path / "store", seed=seed)
    assert not out.errors
    assert sorted(out.ids) == list(range(10))
    renderer = Renderer(None, format="tokens", fields={})
    for i, row in zip(out.ids, out.rows, strict=True):
        wanted = list(rows[i % 2].values())
        if isinstance(wanted[0], list):  # ids are texts in CSV: they come out alike
            ids, labels = (np.array(value) for value in wanted)
            rendered = renderer.render([row])
            assert not rendered.errors
            assert rendered.input_ids.tolist() == ids.tolist()
            assert rendered.loss_mask.tolist() == (labels != -100).tolist()
        else:
            assert list(row.values()) == wanted


@pytest.mark.parametrize("format", ["auto", "prompt_completion"])
def test_a_file_of_other_fields_is_named_with_what_it_has(tmp_path: Path, format: Format) -> None:
    jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "completion": "a"}])
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "b.parquet")
    with pytest.raises(
        SourceError, match=r"b\.parquet: .*prompt and completion.* found 'body', 'id'"
    ) as caught:
        read_source([tmp_path / "a.jsonl", tmp_path / "b.parquet"], tmp_path / "store", format=format)
    assert f"as in {tmp_path / 'a.jsonl'}" in str(caught.value)
    (tmp_path / "c.txt").write_text("words")
    with pytest.raises(SourceError, match=r"c\.txt: .* found 'text'"):
        read_source([tmp_path / "a.jsonl", tmp_path / "c.txt"], tmp_path / "store", format=format)


@pytest.mark.parametrize("folder", ["in", "in/below"])
def test_a_file_of_other_names_is_told_how_to_be_packed(tmp_path: Path, folder: str) -> None:
    """In the same folder too, before anything is packed."""
    (tmp_path / folder).mkdir(parents=True)
    jsonl(tmp_path / "in" / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    jsonl(tmp_path / folder / "b.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(
        SourceError, match=r"b\.jsonl: required are the fields prompt and completion"
    ) as caught:
        read_source(tmp_path / "in", tmp_path / "store")
    assert "found 'question', 'answer'" in str(caught.value)
    assert 'source.fields {"prompt": "question", "completion": "answer"}' in str(caught.value)
    assert "MixedStream" in str(caught.value)


def test_a_file_that_reads_as_nothing_is_told_so_plainly(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    jsonl(tmp_path / "in" / "a.jsonl", [{"text": "a"}])
    jsonl(tmp_path / "in" / "b.jsonl", [{"body": "a"}])
    with pytest.raises(SourceError, match=r"found 'body'. Pack files like it as a dataset of their own and"):
        read_source(tmp_path / "in", tmp_path / "store")


# ------------------------------------------------------------------ detection


@pytest.mark.parametrize(
    ("record", "format", "fields"),
    [
        ({"text": "a"}, "text", {"text": "text"}),
        ({"content": "a", "id": 1}, "text", {"text": "content"}),
        (
            {"prompt": "a", "completion": "b"},
            "prompt_completion",
            {"prompt": "prompt", "completion": "completion"},
        ),
        (
            {"question": "a", "answer": "b"},
            "prompt_completion",
            {"prompt": "question", "completion": "answer"},
        ),
        (
            {"instruction": "a", "input": "b", "output": "c", "text": "abc"},
            "prompt_completion",
            {"prompt": "instruction+input", "completion": "output"},
        ),
        (
            {"instruction": "a", "output": "c"},
            "prompt_completion",
            {"prompt": "instruction", "completion": "output"},
        ),
        ({"input": "a", "output": "c"}, "prompt_completion", {"prompt": "input", "completion": "output"}),
        ({"messages": []}, "messages", {"messages": "messages", "tools": "tools"}),
        ({"conversations": [], "text": "x"}, "messages", {"messages": "conversations", "tools": "tools"}),
        (
            {"input_ids": [1]},
            "tokens",
            {"input_ids": "input_ids", "labels": "labels", "attention_mask": "attention_mask"},
        ),
        ({"text": None}, "text", {"text": "text"}),
    ],
)
def test_auto_is_settled_by_the_first_record(
    tmp_path: Path, record: dict[str, Any], format: str, fields: dict[str, str]
) -> None:
    inputs, _ = resolve_inputs([str(jsonl(tmp_path / "a.jsonl", [record]))], roots=None)
    assert detect_format(inputs, SourceSpec(paths=("a",)))[:2] == (format, fields)


def test_given_fields_decide_the_format(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a", "q": "b", "answer": "c", "messages": []}])
    inputs, _ = resolve_inputs([str(path)], roots=None)
    assert detect_format(inputs, SourceSpec(paths=("a",), fields={"prompt": "q"}))[:2] == (
        "prompt_completion",
        {"prompt": "q", "completion": "answer"},
    )
    assert detect_format(inputs, SourceSpec(paths=("a",), format="text")) == ("text", {"text": "text"}, None)


@pytest.mark.parametrize(
    ("record", "fields", "words"),
    [
        (
            {"question": "q", "context": "c", "answer": "a"},
            {},
            ["'context'", "--field prompt=context+question"],
        ),
        ({"problem": "q", "solution": "s", "answer": "a"}, {}, ["'solution'", "completion=solution+answer"]),
        ({"instruction": "i", "input": "c", "context": "d", "output": "o"}, {}, ["'context'"]),
        ({"system_prompt": "s", "question": "q", "response": "r"}, {}, ["prompt=system_prompt+question"]),
        ({"system": "s", "messages": [{"role": "user", "content": "u"}]}, {}, ["'system'", "first message"]),
        # Nothing is missed: blank, used, said by the user, of another kind, or of names that say nothing.
        ({"question": "q", "context": " ", "answer": "a"}, {}, None),
        ({"instruction": "i", "input": "c", "output": "o"}, {}, None),
        ({"question": "q", "context": "c", "answer": "a"}, {"prompt": "question"}, None),
        ({"problem": "q", "solution": "s", "answer": "a"}, {"completion": "answer"}, None),
        ({"prompt": "q", "completion": "a", "input": 5, "url": "u", "category": "c"}, {}, None),
        ({"text": "t", "question": "q"}, {}, None),
        ({"prompt": "p", "messages": [{"role": "user", "content": "u"}]}, {}, None),
    ],
)
def test_words_that_are_not_read_are_warned_of(
    tmp_path: Path, record: dict[str, Any], fields: dict[str, str], words: list[str] | None
) -> None:
    inputs, _ = resolve_inputs([str(jsonl(tmp_path / "a.jsonl", [record]))], roots=None)
    warning = detect_format(inputs, SourceSpec(paths=("a",), fields=fields)).warning
    assert (warning is None) == (words is None)
    for word in words or ():
        assert word in warning


@pytest.mark.parametrize(
    ("content", "spec", "message"),
    [
        ('{"body": "a"}\n', {}, "found 'body'"),
        ('{"body": "a"}\n', {"format": "text", "fields": {"text": "bdy"}}, "found 'body'"),
        ('{"text": "a"}\n', {"fields": {"text": "text", "prompt": "text"}}, "belong to one format"),
        ('{"text": "a"}\n', {"format": "text", "fields": {"prompt": "text"}}, "belong to one format"),
        ("nothing\n", {}, "not JSON"),
        ("\n\n", {}, "no record"),
        ("", {}, "no record"),
    ],
)
def test_a_source_that_does_not_say_is_refused(
    tmp_path: Path, content: str, spec: dict[str, Any], message: str
) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    inputs, _ = resolve_inputs([str(tmp_path)], roots=None)
    with pytest.raises(SourceError, match=message):
        detect_format(inputs, SourceSpec(paths=("a",), **spec))
