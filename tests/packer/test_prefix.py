"""Cutting a text before it is tokenized changes none of its tokens, or is not done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_job import pack_document, spec_of, write_rows, write_tokenizer
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Backend

from packer.measure import measure
from packer.resolve import resolve
from packer.spec import parse_spec
from packer.store import LocalStore
from packer.tokenization import Bundle, Tokenizer, prefix
from packer.tokenization.prefix import _SPLITS, next_cut

EXAMPLE = Path(__file__).parents[2] / "examples" / "tokenizer"
# What stands at borders: white space of all kinds, apostrophes, digits, marks, words.
texts = st.lists(
    st.one_of(
        st.sampled_from(
            ["word", " word", "It's", " we'll", "s", " ", "  ", "\n", "\r\n", " \n", "\t", "\xa0"]
        ),
        st.sampled_from(
            ["12", " 3", "4567", "!", " ?!", "日本", "é", "e\u0301", "\u0301", "ſ", "İ", "🙂", "A"]
        ),
        st.sampled_from(
            ["<|im_end|>", "<think>", "'", "’", "…", "\u2028", "\u200b", "Ab", " aB", "/", "\n/"]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    ),
    max_size=30,
).map("".join)


def tokenizer_with(pre_tokenizer: Any, normalizer: str | None = None) -> Tokenizer:
    """The example's vocabulary behind another pre-tokenizer."""
    bundle = Bundle.read(EXAMPLE)
    document = json.loads(bundle.files["tokenizer.json"])
    document["pre_tokenizer"] = pre_tokenizer
    document["normalizer"] = {"type": normalizer} if normalizer else None
    return Tokenizer(Bundle(files={**bundle.files, "tokenizer.json": json.dumps(document).encode()}))


def split_by(*expressions: str) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
        for one in expressions
    ]
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, bytes_alone]}


TOKENIZERS = [
    *(tokenizer_with(split_by(expression), "NFC") for expression in sorted(_SPLITS)),
    tokenizer_with(split_by(*sorted(prefix._LOCAL_SPLITS), max(_SPLITS, key=len))),
    tokenizer_with({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}),
]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=150)
@given(text=texts, at=st.integers(0, 60))
def test_the_parts_tokens_are_the_texts(tokenizer: Tokenizer, text: str, at: int) -> None:
    assert tokenizer._can_cut
    cut = next_cut(text, at)
    assert cut == len(text) or cut > at
    whole, (ids, _) = tokenizer.encode([text])[0], tokenizer.encode([text[:cut], text[cut:]])
    np.testing.assert_array_equal(ids, whole)


@settings(max_examples=150)
@given(batch=st.lists(texts, max_size=5), num_tokens=st.integers(1, 12))
def test_the_first_tokens_are_the_first_of_all(batch: list[str], num_tokens: int) -> None:
    tokenizer = TOKENIZERS[0]
    ids, offsets, left = tokenizer.encode_starts(batch, num_tokens)
    all_ids, all_offsets = tokenizer.encode(batch)
    assert len(offsets) == len(batch) + 1
    assert left >= 0
    for i in range(len(batch)):
        found, wanted = ids[offsets[i] : offsets[i + 1]], all_ids[all_offsets[i] : all_offsets[i + 1]]
        assert len(found) >= min(num_tokens, len(wanted))
        np.testing.assert_array_equal(found, wanted[: len(found)])
    if not left:
        np.testing.assert_array_equal(ids, all_ids)


def test_little_of_a_long_text_is_looked_at() -> None:
    long = "some words and more of them " * 10_000
    ids, offsets, left = TOKENIZERS[0].encode_starts(["short", long, ""], 100)
    assert len(ids) < 1000
    assert left > len(long) - 2000
    assert np.diff(offsets)[2] == 0


# ------------------------------------------------------------------ tokenizers that are not cut


def with_added(**options: Any) -> Tokenizer:
    bundle = Bundle.read(EXAMPLE)
    backend = Backend.from_str(bundle.files["tokenizer.json"].decode())
    backend.add_tokens([AddedToken(**options)])
    return Tokenizer(Bundle(files={**bundle.files, "tokenizer.json": backend.to_str().encode()}))


@pytest.mark.parametrize(
    "tokenizer",
    [
        Tokenizer(toy.bundle()),  # words
        tokenizer_with(split_by(r"\s+")),
        tokenizer_with({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}),
        tokenizer_with(None),
        tokenizer_with(split_by(max(_SPLITS, key=len)), "NFKC"),
        tokenizer_with(json.loads(pre_tokenizers.ByteLevel(add_prefix_space=True).__getstate__())),
        with_added(content="two words"),
        with_added(content="word "),
        with_added(content="<x>", lstrip=True),
    ],
)
def test_other_tokenizers_are_not_cut(tokenizer: Tokenizer) -> None:
    assert not tokenizer._can_cut
    text = "a b c d e f " * 50
    ids, _, left = tokenizer.encode_starts([text], 3)
    assert left == 0
    np.testing.assert_array_equal(ids, tokenizer.encode([text])[0])


def test_a_control_word_that_merges_make_is_looked_for_everywhere() -> None:
    bundle = Bundle.read(EXAMPLE)
    document = json.loads(bundle.files["tokenizer.json"])
    merged = next("".join(pair) for pair in document["model"]["merges"] if len("".join(pair)) > 3)
    token_id = document["model"]["vocab"][merged]
    document["added_tokens"].append(
        {**document["added_tokens"][0], "id": token_id, "content": merged, "special": True}
    )
    files = {**bundle.files, "tokenizer.json": json.dumps(document).encode()}
    assert not Tokenizer(Bundle(files=files))._can_cut


# ------------------------------------------------------------------ in a dataset


@pytest.mark.parametrize("strategy", ["best_fit", "sequential", "wrapped", "minibatch"])
def test_shards_do_not_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    rows = [{"text": f"row {i} has words of its own " * (i % 7) ** 3} for i in range(40)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    packing = {"max_tokens": 64, "strategy": strategy}
    if strategy == "minibatch":
        packing |= {"minibatch_size": 2, "max_tokens": 128}
    document = spec_of(source, write_tokenizer(tmp_path / "tokenizer", Bundle.read(EXAMPLE)), packing=packing)
    found = pack_document(tmp_path / "cut", document)
    monkeypatch.setattr("packer.tokenization.tokenizer.can_cut", lambda *_: False)
    wanted = pack_document(tmp_path / "whole", document)
    assert found.digests == wanted.digests
    for name in ("rows_packed", "rows_truncated", "rows_empty", "tokens_packed", "tokens_trained"):
        assert found.report[name] == wanted.report[name]
    assert wanted.report["bytes_cut"] == 0
    assert (found.report["bytes_cut"] > 0) == (strategy != "wrapped")
    assert found.report["tokens_in"] <= wanted.report["tokens_in"]


def test_an_estimate_measures_whole_texts(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "some words of a text " * 500}])
    folder = write_tokenizer(tmp_path / "tokenizer", Bundle.read(EXAMPLE))
    store = LocalStore(tmp_path / "store")
    job = resolve(parse_spec(spec_of(source, folder, packing={"max_tokens": 64})), store=store)
    assert [length > 2000 for length in measure(job, store).lengths.tolist()] == [True]
