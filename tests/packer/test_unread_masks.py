"""Masks of messages, and beside words: read, or refused by name; never ignored without a word."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import toy
from packing_job import pack_document, spec_of, write_rows, write_tokenizer

from packer.coordinator import PackingFailed
from packer.preview import preview
from packer.resolve import resolve
from packer.sources import SourceError
from packer.spec import parse_spec
from packer.store import LocalStore

TURNS = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
NOTHING_MORE = [{}, {}, {}, {}]


def talk(*more: dict[str, Any], **beside: Any) -> dict[str, Any]:
    """A chat of four turns, whose messages have these keys besides."""
    messages = toy.chat(*TURNS)["messages"]
    return {"messages": [{**one, **keys} for one, keys in zip(messages, more, strict=True)], **beside}


def trained(tmp_path: Path, rows: list[dict[str, Any]], **more: Any) -> list[list[int]]:
    """What is trained of each row."""
    document = spec_of(
        write_rows(tmp_path / "rows.jsonl", rows), write_tokenizer(tmp_path / "tokenizer"), **more
    )
    found = pack_document(tmp_path / "store", document).segments
    return [
        [token for token, is_trained in zip(*segment, strict=True) if is_trained]
        for example in sorted(found)
        for segment in found[example]
    ]


@pytest.mark.parametrize("none", [0, 0.0])
@pytest.mark.parametrize("one", [1, 1.0, None])
def test_weight_is_train(tmp_path: Path, none: float, one: float | None) -> None:
    plain = trained(tmp_path, [talk({}, {"train": False}, {}, {"train": True})])
    assert trained(tmp_path, [talk({}, {"weight": none}, {}, {"weight": one})]) == plain == [[13, 7]]
    assert (
        trained(tmp_path, [talk({}, {"weight": 0, "train": False}, {}, {"weight": 1, "train": True})])
        == plain
    )
    turns = [{"from": "human", "value": "a", "weight": 0.0}, {"from": "gpt", "value": "b", "weight": none}]
    row = {"conversations": [*turns, {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]}
    assert trained(tmp_path, [row]) == plain


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"weight": 0.5}, r"weight: 0 \(not trained\) or 1 \(trained\) is required, found a number \(0.5\)"),
        ({"weight": True}, "found true or false"),
        ({"weight": "0"}, "found a text"),
        (
            {"weight": 1, "train": False},
            r"weight: the same as messages\[1\].train \(false\) is required, found 1",
        ),
        ({"loss_mask": 0}, "`train` is required to say .* found 'loss_mask', which is not read: use `train`"),
        ({"mask": True}, "'mask'"),
        ({"Loss_Mask": [0, 1]}, "'Loss_Mask'"),
        ({"loss": False}, "'loss'"),
        ({"loss": 0}, "'loss'"),
        ({"training": False}, "'training'"),
        ({"trainable": "false"}, "'trainable'"),
        ({"train_on_turn": False}, "'train_on_turn'"),
        ({"masked": 1}, "'masked'"),
        ({"Train": False}, "'Train'"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]}, "'train_detail'"),
    ],
)
def test_a_message_s_mask_is_followed_or_refused(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    rows = [talk(*NOTHING_MORE), talk({}, keys, {}, {})]
    with pytest.raises(PackingFailed, match=rf"rows.jsonl, line 2: field messages\[1\].*{told}"):
        trained(tmp_path, rows)
    assert len(trained(tmp_path, rows, source={"on_bad_row": "skip"})) == 1
    if "train" not in keys:
        assert len(trained(tmp_path, rows, loss="all")) == 2


def test_a_preview_tells_of_a_message_s_mask(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [talk({}, {"loss_mask": 0}, {}, {})])
    store = LocalStore(tmp_path / "store")
    job = resolve(parse_spec(spec_of(file, write_tokenizer(tmp_path / "tokenizer"))), store=store)
    assert "'loss_mask'" in str(preview(job, store, 1).examples[0].error)


@pytest.mark.parametrize(
    "keys",
    [
        {"loss_mask": None, "weight": None, "training": None},
        {"name": "x", "id": 3, "score": 0.5, "label": 1, "tokens": 12},
        {"loss": 1.73, "mask": "wearing one", "training": "a course", "attention_mask": [1, 1]},
    ],
)
def test_other_keys_of_messages_are_left_alone(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert trained(tmp_path, [talk({}, keys, {}, keys)]) == trained(tmp_path, [talk(*NOTHING_MORE)])


# ------------------------------------------------------------------ beside the words

PROMPT = {"prompt": "a b", "completion": "c d"}


def as_file(place: Path, kind: str, row: dict[str, Any]) -> Path:
    """A row, in a file of a kind."""
    if kind == "jsonl":
        return write_rows(place / "rows.jsonl", [row])
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), place / "rows.parquet")
        return place / "rows.parquet"
    with (place / "rows.csv").open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(row)
        writer.writerow([one if isinstance(one, str) else json.dumps(one) for one in row.values()])
    return place / "rows.csv"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize(
    ("row", "name", "loss"),
    [
        (talk(*NOTHING_MORE, loss_mask=[0, 0, 0, 1]), "loss_mask", "assistant"),
        (talk(*NOTHING_MORE, mask=[0, 1]), "mask", "assistant"),
        (talk(*NOTHING_MORE, train=[False, False, False, True]), "train", "assistant"),
        (talk(*NOTHING_MORE, weights=[0.0, 0.0, 0.0, 1.0]), "weights", "assistant"),
        (PROMPT | {"completion_mask": [0, 1]}, "completion_mask", "completion"),
        ({"text": "a b", "loss_mask": [0, 1]}, "loss_mask", "all"),
        ({"text": "a b", "labels": [-100, 11]}, "labels", "all"),
    ],
)
def test_a_mask_beside_words_is_refused(
    tmp_path: Path, kind: str, row: dict[str, Any], name: str, loss: str
) -> None:
    file = as_file(tmp_path, kind, row)
    spec = spec_of(file, write_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(SourceError) as raised:
        pack_document(tmp_path / "store", spec)
    for said in (str(file), "`train`", f"found '{name}' beside", f"--loss {loss})"):
        assert said in str(raised.value)
    assert pack_document(tmp_path / "store", {**spec, "loss": loss}).report["rows_packed"] == 1


@pytest.mark.parametrize("words", [talk(*NOTHING_MORE), PROMPT, {"text": "a b"}])
@pytest.mark.parametrize(
    "beside",
    [
        {"mask": "worn", "masks": ["cloth", "paper"]},
        {"mask": None, "loss_mask": []},
        {"attention_mask": [1, 1], "special_tokens_mask": [1, 0]},
        {"train": True, "loss": 0.4, "weight": 0.5, "weights": [0.2, 0.3, 0.5]},
        {"labels": [3, 4], "label": 1, "targets": ["x"]},
    ],
)
def test_other_fields_beside_words_are_left_alone(
    tmp_path: Path, words: dict[str, Any], beside: dict[str, Any]
) -> None:
    assert trained(tmp_path, [{**words, **beside}]) == trained(tmp_path, [words])
