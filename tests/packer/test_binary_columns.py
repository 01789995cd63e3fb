"""Tables with columns that are no text (images, sounds, keys) beside those in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packing_job import pack_document, spec_of, write_tokenizer

from packer.sources import SourceError

PNG = b"\x89PNG\xff"
NUM_ROWS = 5
NOT_UTF8 = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())


def written(place: Path, table: pa.Table, kind: str) -> Path:
    path = place / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as out:
            out.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    "column",
    [
        {"image": pa.array([{"bytes": PNG, "path": None}] * NUM_ROWS)},
        {"images": pa.array([[{"bytes": PNG, "path": "a.png"}]] * NUM_ROWS)},
        {"key": pa.array([PNG] * NUM_ROWS)},
        {"mask": pa.array([[PNG]] * NUM_ROWS)},
        {"title": pa.concat_arrays([NOT_UTF8] * NUM_ROWS)},
    ],
    ids=lambda column: next(iter(column)),
)
def test_what_is_no_text_in_columns_that_are_not_used_stops_nobody(
    tmp_path: Path, kind: str, column: dict[str, Any]
) -> None:
    file = written(tmp_path, pa.table({"text": ["a b"] * NUM_ROWS, **column}), kind)
    packed = pack_document(tmp_path / "store", spec_of(file, write_tokenizer(tmp_path / "tokenizer")))
    assert packed.report["rows_packed"] == NUM_ROWS


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_words_that_are_no_text_are_told_where_they_stand(tmp_path: Path, kind: str) -> None:
    file = written(tmp_path, pa.table({"text": [b"a b", PNG], "id": [1, 2]}), kind)
    spec = spec_of(file, write_tokenizer(tmp_path / "tokenizer"), source={"on_bad_row": "skip"})
    report = pack_document(tmp_path / "store", spec).report
    assert report["rows_packed"] == 1
    [rejected] = report["rejected"]
    assert (rejected["line"], rejected["reason"]) == (2, "bytes that are not UTF-8 text")
    nothing = written(tmp_path, pa.table({"text": [PNG] * 2}), kind)
    with pytest.raises(SourceError, match="no record could be read; the first: bytes that are not UTF-8"):
        pack_document(tmp_path / "store", spec_of(nothing, tmp_path / "tokenizer"))
