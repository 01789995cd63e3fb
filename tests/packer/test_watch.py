"""What first appears behind the first records: a mask that is not read, or an instruction's second part."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import toy
from packing_job import pack_document, spec_of, write_rows, write_tokenizer

from packer.coordinator import PackingFailed, pack
from packer.measure import measure
from packer.preview import preview
from packer.resolve import resolve
from packer.runners import InlineRunner
from packer.sources import SourceError
from packer.sources.watch import Watch
from packer.spec import canonical_json, job_from_document, job_to_document, parse_spec
from packer.store import LocalStore

Rows = Sequence[dict[str, Any]]
NUM_ROWS = 150  # more than are looked at before packing

CHAT = toy.chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
PROMPT = {"prompt": "a b", "completion": "c d"}
IDS = {"input_ids": [5, 6, 7, 8]}
INSTRUCTION = {"instruction": "a", "output": "b"}


def as_jsonl(place: Path, rows: Rows) -> Path:
    return write_rows(place / "rows.jsonl", rows)


def as_json(place: Path, rows: Rows) -> Path:
    (place / "rows.json").write_text(json.dumps(rows))
    return place / "rows.json"


def as_parquet(place: Path, rows: Rows) -> Path:
    """Rows of two row groups; what only later ones have is null before."""
    pq.write_table(_table(rows), place / "rows.parquet", row_group_size=70)
    return place / "rows.parquet"


def as_arrow(place: Path, rows: Rows) -> Path:
    table = _table(rows)
    with pa.ipc.new_file(str(place / "rows.arrow"), table.schema) as out:
        out.write_table(table)
    return place / "rows.arrow"


def _table(rows: Rows) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def as_csv(place: Path, rows: Rows) -> Path:
    names = dict.fromkeys(name for row in rows for name in row)
    with (place / "rows.csv").open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(names)
        for row in rows:
            values = (row.get(name, "") for name in names)
            writer.writerow([one if isinstance(one, str) else json.dumps(one) for one in values])
    return place / "rows.csv"


in_each_form = pytest.mark.parametrize("write", [as_jsonl, as_json, as_parquet, as_arrow, as_csv])
Write = Callable[[Path, Rows], Path]


def rows_of(usual: dict[str, Any], **late: Any) -> list[dict[str, Any]]:
    """Many rows, of which the last but one holds more than the first."""
    return [usual] * (NUM_ROWS - 2) + [{**usual, **late}, usual]


def spec_for(tmp_path: Path, file: Path, **more: Any) -> dict[str, Any]:
    return spec_of(file, write_tokenizer(tmp_path / "tokenizer"), **more)


@in_each_form
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    ("usual", "late", "loss"),
    [
        (CHAT, {"loss_mask": [0, 0, 0, 1]}, "assistant"),
        (CHAT, {"train": [False, False, False, True]}, "assistant"),
        (PROMPT, {"completion_mask": [0, 1]}, "completion"),
        ({"text": "a b"}, {"labels": [-100, 11]}, "all"),
        (IDS, {"loss_mask": [0, 0, 1, 1]}, "all"),
        (IDS, {"targets": [-100, 6, 7, 8]}, "all"),
    ],
)
def test_a_mask_that_comes_late_makes_its_row_a_bad_one(
    tmp_path: Path, write: Write, seed: int | None, usual: dict[str, Any], late: dict[str, Any], loss: str
) -> None:
    file = write(tmp_path, rows_of(usual, **late))
    spec = spec_for(tmp_path, file, shuffle_seed=seed)
    (name,) = late
    at = NUM_ROWS if write is as_csv else NUM_ROWS - 1
    with pytest.raises(PackingFailed, match=rf"{file.name}, \w+ {at}.*found '{name}'.* not read") as raised:
        pack_document(tmp_path / "store", spec)
    assert f"--loss {loss})" in str(raised.value)
    skipping = {**spec, "source": {**spec["source"], "on_bad_row": "skip"}}
    report = pack_document(tmp_path / "store", skipping).report
    assert (report["rows_packed"], report["rows_rejected"]) == (NUM_ROWS - 1, 1)
    # Whoever names the loss has settled what is trained: in the same store.
    assert pack_document(tmp_path / "store", {**spec, "loss": loss}).report["rows_packed"] == NUM_ROWS


@in_each_form
@pytest.mark.parametrize("usual", [CHAT, PROMPT, {"text": "a b"}, IDS])
def test_what_only_looks_like_a_mask_is_left_alone_late_too(
    tmp_path: Path, write: Write, usual: dict[str, Any]
) -> None:
    for beside in ({"mask": "worn", "weight": 0.5}, {"special_tokens_mask": [1, 0]}, {"label": [1, 0]}):
        file = write(tmp_path, rows_of(usual, **beside))
        found = pack_document(tmp_path / "store", spec_for(tmp_path, file)).segments
        plain = pack_document(
            tmp_path / "store", spec_for(tmp_path, write(tmp_path, rows_of(usual)))
        ).segments
        assert found == plain


@in_each_form
def test_labels_beside_a_late_mask_are_followed(tmp_path: Path, write: Write) -> None:
    row = {**IDS, "labels": [-100, -100, 7, 8]}
    found = pack_document(
        tmp_path / "store", spec_for(tmp_path, write(tmp_path, rows_of(row, loss_mask=[1, 1, 1, 1])))
    )
    assert {len(one) for one in found.segments.values()} == {1}
    assert all(one == [([5, 6, 7, 8], [False, False, True, True])] for one in found.segments.values())


@in_each_form
def test_ids_without_labels_among_others_need_none_but_no_mask(tmp_path: Path, write: Write) -> None:
    labelled = {**IDS, "labels": [-100, -100, 7, 8]}
    rows: Rows = [*[labelled] * NUM_ROWS, {**IDS, "labels": None, "loss_mask": [0, 0, 0, 1]}]
    if write is as_csv:
        rows[-1]["labels"] = ""
    with pytest.raises(PackingFailed, match=r"'labels' is required .* found 'loss_mask' instead"):
        pack_document(tmp_path / "store", spec_for(tmp_path, write(tmp_path, rows)))


def test_a_mask_beside_the_messages_inside_an_object(tmp_path: Path) -> None:
    rows = [{"data": CHAT}] * NUM_ROWS + [{"data": {**CHAT, "loss_mask": [0, 0, 0, 1]}}]
    fields = {"fields": {"messages": "data.messages"}}
    for write in (as_jsonl, as_parquet):
        spec = spec_for(tmp_path, write(tmp_path, rows), source=fields)
        with pytest.raises(PackingFailed, match="found 'loss_mask' beside"):
            pack_document(tmp_path / "store", spec)


def test_a_mask_inside_an_object_of_which_texts_are_joined(tmp_path: Path) -> None:
    row = {"title": "a", "page": {"body": "b c"}}
    file = as_jsonl(tmp_path, rows_of(row, page={"body": "b c", "loss_mask": [0, 1]}))
    fields = {"text": "title+page.body"}
    with pytest.raises(PackingFailed, match=f"line {NUM_ROWS - 1}.*'loss_mask' beside title"):
        pack_document(tmp_path / "store", spec_for(tmp_path, file, source={"fields": fields}))


def test_a_mask_in_a_file_behind_those_that_are_looked_at(tmp_path: Path) -> None:
    for number in range(20):
        write_rows(tmp_path / "in" / f"{number:02}.jsonl", [CHAT])
    write_rows(tmp_path / "in" / "20.jsonl", [{**CHAT, "loss_mask": [0, 0, 0, 1]}])
    with pytest.raises(PackingFailed, match=r"20\.jsonl, line 1: .*'loss_mask'"):
        pack_document(tmp_path / "store", spec_for(tmp_path, tmp_path / "in"))


def test_preview_and_estimate_tell_of_it(tmp_path: Path) -> None:
    file = as_jsonl(tmp_path, rows_of(CHAT, loss_mask=[0, 0, 0, 1]))
    store = LocalStore(tmp_path / "store")
    job = resolve(parse_spec(spec_for(tmp_path, file)), store=store)
    assert any(
        "cannot be used" in warning and f"line {NUM_ROWS - 1}" in warning
        for warning in preview(job, store, 1).warnings
    )
    assert measure(job, store).counters.rows_rejected == 1


# ------------------------------------------------------------------ an instruction's second part


@in_each_form
@pytest.mark.parametrize("name", ["input", "context"])
def test_an_input_that_comes_late_is_not_lost(tmp_path: Path, write: Write, name: str) -> None:
    late = {name: "w77"}
    file = write(tmp_path, rows_of(INSTRUCTION, **late))
    spec = spec_for(tmp_path, file)
    if write in (as_csv, as_parquet, as_arrow):  # whose every record has the field
        found = pack_document(tmp_path / "store", spec).segments
        assert found[NUM_ROWS - 2] == [([10, 77, 11, 2], [False, False, True, True])]
        return
    with pytest.raises(
        PackingFailed, match=rf"{NUM_ROWS - 1}: the field '{name}'.*prompt=instruction\+{name}"
    ):
        pack_document(tmp_path / "store", spec)
    for prompt, ids in ((f"instruction+{name}", [10, 77, 11, 2]), ("instruction", [10, 11, 2])):
        named = {**spec, "source": {**spec["source"], "fields": {"prompt": prompt}}}
        segments = pack_document(tmp_path / "store", named).segments
        assert segments[NUM_ROWS - 2][0][0] == ids


@pytest.mark.parametrize("late", ["", "  ", None, 3, ["x"], [1, -100]])
def test_an_input_without_words_is_none(tmp_path: Path, late: Any) -> None:
    file = as_jsonl(tmp_path, rows_of(INSTRUCTION, input=late))
    assert pack_document(tmp_path / "store", spec_for(tmp_path, file)).report["rows_packed"] == NUM_ROWS


def test_an_input_in_the_first_rows_of_another_file_is_told_before_packing(tmp_path: Path) -> None:
    write_rows(tmp_path / "in" / "a.jsonl", [INSTRUCTION])
    write_rows(tmp_path / "in" / "b.jsonl", [{**INSTRUCTION, "input": "c"}])
    with pytest.raises(SourceError, match=r"b\.jsonl: the field 'input'"):
        pack_document(tmp_path / "store", spec_for(tmp_path, tmp_path / "in"))


def test_names_that_are_new_in_each_record_are_not_all_remembered() -> None:
    watch = Watch({"text": "text"}, ("masks",))
    for number in range(10_000):
        watch.check({"text": "a", str(number): 1})
    assert len(watch._harmless) <= 1 << 12


def test_masks_of_a_whole_batch_of_ids_are_seen(tmp_path: Path) -> None:
    """Lines of one kind are read at once, without a look at each."""
    file = as_jsonl(tmp_path, [IDS] * 1500 + [{**IDS, "loss_mask": [0, 0, 1, 1]}] * 2500)
    spec = spec_for(tmp_path, file, source={"on_bad_row": "skip"})
    report = pack_document(tmp_path / "store", spec).report
    assert (report["rows_packed"], report["rows_rejected"]) == (1500, 2500)


@pytest.mark.parametrize(
    ("usual", "late", "settled"),
    [
        (CHAT, {"loss_mask": [0, 0, 0, 1]}, {"loss": "assistant"}),
        (PROMPT, {"completion_mask": [0, 1]}, {"loss": "completion"}),
        (INSTRUCTION, {"input": "w77"}, {"source": {"fields": {"prompt": "instruction"}}}),
    ],
)
def test_what_leaves_rows_out_where_they_are_skipped_is_part_of_the_id(
    tmp_path: Path, usual: dict[str, Any], late: dict[str, Any], settled: dict[str, Any]
) -> None:
    """Or whoever settles it afterwards, as the reason says, would be given the dataset without these rows."""
    file = as_jsonl(tmp_path, rows_of(usual, **late))
    spec = spec_for(tmp_path, file, source={"on_bad_row": "skip"})
    named = {**spec, **settled, "source": {**spec["source"], **settled.get("source", {})}}
    skipped, whole = (pack_document(tmp_path / "store", document) for document in (spec, named))
    assert skipped.job.dataset != whole.job.dataset
    assert (skipped.report["rows_rejected"], whole.report["rows_rejected"]) == (1, 0)


def test_a_job_that_was_written_down_gives_the_same_reasons(tmp_path: Path) -> None:
    """Its fields come back in another order, and reasons are part of commits."""
    file = as_jsonl(tmp_path, rows_of(PROMPT, completion_mask=[0, 1]))
    spec = parse_spec(spec_for(tmp_path, file, source={"on_bad_row": "skip"}))
    stores = [LocalStore(tmp_path / name) for name in ("a", "b")]
    job = resolve(spec, store=stores[0])
    resolve(spec, store=stores[1])
    written = job_from_document(json.loads(canonical_json(job_to_document(job))))
    reports = [pack(one, store, InlineRunner()) for one, store in zip((job, written), stores, strict=True)]
    assert reports[0]["rejected"] == reports[1]["rejected"]
    assert "beside prompt and completion" in reports[0]["rejected"][0]["reason"]


@in_each_form
def test_several_masks_are_told_in_one_order(tmp_path: Path, write: Write) -> None:
    """However the rows have them, and whatever the seed of a process's hashes."""
    names = [f"{name}_mask" for name in "hgfedcba"]
    file = write(tmp_path, rows_of(PROMPT, **{name: [0, 1] for name in names}))
    spec = spec_for(tmp_path, file, source={"on_bad_row": "skip"})
    [rejected] = pack_document(tmp_path / "store", spec).report["rejected"]
    assert f"found {', '.join(map(repr, sorted(names)))} beside" in rejected["reason"]
