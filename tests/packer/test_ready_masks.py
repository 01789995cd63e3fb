"""Ready ids: a mask that would not be read is refused, and padding is never trained."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packing_job import pack_document, spec_of, write_rows

from packer.coordinator import PackingFailed
from packer.preview import preview
from packer.resolve import resolve
from packer.sources import SourceError
from packer.spec import parse_spec
from packer.store import LocalStore

Rows = Sequence[dict[str, Any]]
IDS = [5, 6, 7, 8]


def as_jsonl(place: Path, rows: Rows) -> Path:
    return write_rows(place / "rows.jsonl", rows)


def as_parquet(place: Path, rows: Rows) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), place / "rows.parquet")
    return place / "rows.parquet"


def as_arrow(place: Path, rows: Rows) -> Path:
    table = pa.Table.from_pylist(list(rows))
    with pa.ipc.new_file(str(place / "rows.arrow"), table.schema) as out:
        out.write_table(table)
    return place / "rows.arrow"


def as_csv(place: Path, rows: Rows) -> Path:
    with (place / "rows.csv").open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(rows[0])
        writer.writerows([json.dumps(value) for value in row.values()] for row in rows)
    return place / "rows.csv"


FORMS = [as_jsonl, as_parquet, as_arrow, as_csv]
in_each_form = pytest.mark.parametrize("write", FORMS)
Write = Callable[[Path, Rows], Path]


def pack(tmp_path: Path, file: Path, **more: Any) -> dict[int, list[tuple[list[int], list[bool]]]]:
    return pack_document(tmp_path / "store", spec_of(file, None, **more)).segments


@in_each_form
@pytest.mark.parametrize(
    "name", ["loss_mask", "completion_mask", "assistant_masks", "prompt_mask", "LossMask", "target_ids"]
)
def test_a_mask_that_is_not_read_is_refused(tmp_path: Path, write: Write, name: str) -> None:
    file = write(tmp_path, [{"input_ids": IDS, name: [0, 0, 1, 1]}] * 3)
    with pytest.raises(SourceError) as raised:
        pack(tmp_path, file)
    for said in (str(file), "'labels' is required", f"found '{name}' instead", "-100", "--loss all"):
        assert said in str(raised.value)
    assert pack(tmp_path, file, loss="all")[2] == [(IDS, [False, True, True, True])]


def test_labels_are_followed_whatever_masks_are_beside_them(tmp_path: Path) -> None:
    row = {"input_ids": IDS, "loss_mask": [1, 1, 1, 1], "labels": [-100, -100, 7, 8]}
    assert pack(tmp_path, as_jsonl(tmp_path, [row])) == {0: [(IDS, [False, False, True, True])]}
    row["targets"] = row.pop("labels")
    renamed = {"fields": {"labels": "targets"}}
    assert pack(tmp_path, as_jsonl(tmp_path, [row]), source=renamed)[0] == [(IDS, [False, False, True, True])]


def test_a_mask_in_another_file_or_in_some_rows_is_refused_too(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"input_ids": IDS}])
    as_parquet(
        tmp_path, [{"input_ids": IDS, "loss_mask": None}, {"input_ids": IDS, "loss_mask": [0, 0, 1, 1]}]
    )
    with pytest.raises(SourceError, match=r"rows\.parquet: .*loss_mask"):
        pack(tmp_path, tmp_path)
    some = [{"input_ids": IDS, "labels": IDS}, {"input_ids": IDS, "labels": None, "loss_mask": [0, 0, 1, 1]}]
    with pytest.raises(SourceError, match=r"b\.jsonl: .*loss_mask"):
        pack(tmp_path, write_rows(tmp_path / "b.jsonl", some))


@pytest.mark.parametrize(
    "beside",
    [
        {"special_tokens_mask": [1, 0, 0, 1]},
        {"token_type_ids": [0, 0, 0, 0]},
        {"label": 3},
        {"label": [1, 0]},
        {"mask": "train"},
    ],
)
def test_other_fields_are_left_alone(tmp_path: Path, beside: dict[str, Any]) -> None:
    assert pack(tmp_path, as_jsonl(tmp_path, [{"input_ids": IDS, **beside}])) == {
        0: [(IDS, [False, True, True, True])]
    }


# ------------------------------------------------------------------ padding


@in_each_form
@pytest.mark.parametrize("ones", [[1, 1, 1, 1], [True] * 4, [1.0] * 4])
def test_an_attention_mask_of_ones_changes_nothing(tmp_path: Path, write: Write, ones: list[Any]) -> None:
    file = write(tmp_path, [{"input_ids": IDS, "attention_mask": ones}] * 2)
    assert pack(tmp_path, file)[1] == [(IDS, [False, True, True, True])]


@in_each_form
@pytest.mark.parametrize("kind", [int, bool])
def test_padding_is_not_trained_without_a_word(tmp_path: Path, write: Write, kind: type) -> None:
    rows = [{"input_ids": IDS, "attention_mask": [kind(1)] * 4}] * 200  # behind what is looked at first
    rows.append({"input_ids": [5, 6, 0, 0], "attention_mask": [kind(n) for n in (1, 1, 0, 0)]})
    file = write(tmp_path, rows)
    with pytest.raises(
        PackingFailed, match=r"field attention_mask\[2\]: 1 is required where a token is trained"
    ):
        pack(tmp_path, file)
    found = pack_document(tmp_path / "store", spec_of(file, None, source={"on_bad_row": "skip"}))
    assert (found.report["rows_rejected"], found.report["rows_packed"]) == (1, 200)
    assert found.report["rejected"][0]["line"] == (202 if write is as_csv else 201)
    with pytest.raises(PackingFailed, match=r"found 0 \(padding"):
        pack(tmp_path, file, loss="all")


def test_a_preview_tells_of_padding(tmp_path: Path) -> None:
    file = as_jsonl(tmp_path, [{"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]}])
    store = LocalStore(tmp_path / "store")
    job = resolve(parse_spec(spec_of(file, None)), store=store)
    assert "found 0 (padding)" in str(preview(job, store, 1).examples[0].error)


@in_each_form
def test_padding_at_the_end_under_labels_is_kept(tmp_path: Path, write: Write) -> None:
    row = {"input_ids": [5, 6, 0, 0], "labels": [5, 6, -100, -100], "attention_mask": [1, 1, 0, 0]}
    file = write(tmp_path, [row])
    assert pack(tmp_path, file) == {0: [([5, 6, 0, 0], [False, True, False, False])]}
    with pytest.raises(PackingFailed, match=r"attention_mask\[2\]"):
        pack(tmp_path, file, loss="all")


@pytest.mark.parametrize(
    ("labels", "mask", "told"),
    [
        ([-100, -100, 7, 8], [0, 1, 1, 1], r"\[0\]: padding \(0\) is required to be at the end"),
        ([-100, -100, 7, 8], [1, 1, 1, 0], r"\[3\]: 1 is required where a token is trained"),
        (IDS, [1, 1, 1], "4 values are required, 1 or 0 for each id, found 3 values"),
        (IDS, [1, 1, 2, 2], "found 4 values, among them 2"),
        (IDS, [[1, 1], [1]], "found 2 values, among them"),
        (IDS, "x", "found a text"),
    ],
)
def test_an_attention_mask_that_cannot_be_kept(
    tmp_path: Path, labels: list[int], mask: Any, told: str
) -> None:
    row = {"input_ids": IDS, "labels": labels, "attention_mask": mask}
    with pytest.raises(PackingFailed, match=rf"rows\.jsonl, line 1: field attention_mask.*{told}"):
        pack(tmp_path, as_jsonl(tmp_path, [row]))
