"""The fast encoder: the reference's ids or none, whatever happens."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_job import pack_document, spec_of, write_rows

from packer.rows import _cached_renderer
from packer.tokenization import Bundle, Tokenizer, fast
from packer.tokenization.fast import CheckedEncoder, FastEncoder, sample, trial_texts

pytest.importorskip("fastokens", reason="the extra fast is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "tokenizer"
texts = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        st.sampled_from(["<|im_end|>", "<|im_start|>", "<think>", "e\u0301", "\n\n", "  ", "日本", "🙂"]),
    ),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Bundle.read(EXAMPLE))


@pytest.fixture(scope="module")
def quick(tokenizer: Tokenizer) -> FastEncoder:
    return FastEncoder(tokenizer._backend.to_str())


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fast encoder from the first text on; no renderer of an earlier test is met."""
    monkeypatch.setattr(fast, "_WARM_CHARACTERS", 0)
    _cached_renderer.cache_clear()
    yield
    _cached_renderer.cache_clear()


@settings(max_examples=200)
@given(st.lists(texts, max_size=6), st.booleans())
def test_the_ids_are_the_references(quick, tokenizer, batch, plain):
    ids, offsets = quick.encode(batch, plain=plain)
    true_ids, true_offsets = tokenizer._encode_slowly(batch, plain)
    np.testing.assert_array_equal(ids, true_ids)
    np.testing.assert_array_equal(offsets, true_offsets)
    assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)


@settings(max_examples=100)
@given(st.lists(texts, min_size=1, max_size=6))
def test_places_in_chats_are_the_references(tokenizer, batch):
    quick_one = Tokenizer(Bundle.read(EXAMPLE)) if not hasattr(tokenizer, "twin") else tokenizer.twin
    tokenizer.twin = quick_one
    quick_one._encoder._num_characters = 1 << 30
    found, wanted = quick_one.encode_chats(batch), tokenizer.encode_chats(batch)
    assert quick_one.encoder_name.startswith("fastokens")
    assert tokenizer.encoder_name.startswith("tokenizers")
    for name in ("ids", "offsets", "starts", "ends"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


# ------------------------------------------------------------------ when it is used


def test_little_work_is_left_to_the_reference(tokenizer, monkeypatch):
    fresh = Tokenizer(tokenizer.bundle)
    fresh.encode(["a few words"] * 10)
    assert fresh.encoder_name.startswith("tokenizers")
    fresh.encode(["word " * (1 << 16)])
    assert fresh.encoder_name.startswith("fastokens")


@pytest.mark.usefixtures("eager")
def test_no_byte_pair_encoding_no_fast_encoder(caplog):
    caplog.set_level(logging.INFO, "padfree.packer")
    words = Tokenizer(toy.bundle())
    assert words.encode(["a b"])[0].tolist() == [10, 11]
    assert words.encoder_name.startswith("tokenizers")
    assert words.encoder_faults == ()
    assert "does not take this tokenizer" in caplog.text


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("how", ["not installed", "switched off"])
def test_it_can_be_absent(tokenizer, monkeypatch, how):
    if how == "not installed":
        monkeypatch.setitem(sys.modules, "fastokens", None)
    else:
        monkeypatch.setenv("PADFREE_FAST", "0")
    fresh = Tokenizer(tokenizer.bundle)
    np.testing.assert_array_equal(fresh.encode(["one word"])[0], tokenizer.encode(["one word"])[0])
    assert fresh.encoder_name.startswith("tokenizers")


def wrong_for(word: str, monkeypatch: pytest.MonkeyPatch, *, raises: bool = False) -> None:
    """From here on the fast encoder errs on texts with `word` in them."""
    right = FastEncoder.encode

    def encode(self: FastEncoder, texts: list[str], *, plain: bool) -> Any:
        ids, offsets = right(self, texts, plain=plain)
        if not any(word in text for text in texts):
            return ids, offsets
        if raises:
            raise fast.Unusable("fastokens failed: made to, by a test")
        ids = ids.copy()
        for i, text in enumerate(texts):
            if word in text:
                ids[offsets[i]] += 1
        return ids, offsets

    monkeypatch.setattr(FastEncoder, "encode", encode)


@pytest.mark.usefixtures("eager")
def test_a_tokenizer_that_it_gets_wrong_is_refused(tokenizer, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "padfree.packer")
    wrong_for("camelCase", monkeypatch)
    fresh = Tokenizer(tokenizer.bundle)
    fresh.encode(["word"])
    assert fresh.encoder_name.startswith("tokenizers")
    assert "other ids than tokenizers" in caplog.text
    assert "camelCase" in caplog.text


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("raises", [False, True])
def test_what_goes_wrong_at_work_goes_to_the_reference(tokenizer, monkeypatch, raises):
    wrong_for("zebra", monkeypatch, raises=raises)
    fresh = Tokenizer(tokenizer.bundle)
    fresh.encode(["a horse"])
    assert fresh.encoder_name.startswith("fastokens")
    np.testing.assert_array_equal(fresh.encode(["a zebra"])[0], tokenizer.encode(["a zebra"])[0])
    assert fresh.encoder_name.startswith("tokenizers")
    (reason,) = fresh.encoder_faults
    assert "fastokens" in reason


def rows_with(words: list[str]) -> list[dict[str, str]]:
    return [{"text": f"{word} number {i} of many, in a text of its own"} for i, word in enumerate(words)]


def packed(tmp_path: Path, name: str, rows: list[dict[str, str]]) -> Any:
    _cached_renderer.cache_clear()
    source = write_rows(tmp_path / name / "rows.jsonl", rows)
    return pack_document(tmp_path / name / "store", spec_of(source, EXAMPLE, packing={"max_tokens": 64}))


@pytest.mark.usefixtures("eager")
def test_shards_are_the_same_with_and_without(tmp_path, monkeypatch):
    rows = rows_with(["horse", "Straße", "<|im_end|>", "日本語", ""] * 20)
    quick = packed(tmp_path, "quick", rows)
    monkeypatch.setenv("PADFREE_FAST", "0")
    slow = packed(tmp_path, "slow", rows)
    assert (quick.digests, quick.job.dataset, quick.report) == (slow.digests, slow.job.dataset, slow.report)


@pytest.mark.usefixtures("eager")
def test_a_partition_with_a_difference_is_made_anew_and_told(tmp_path, monkeypatch):
    # 2,100 rows are three batches. Each zebra gets a wrong id; in the batch whose sample has none it stays
    # unseen, and only the whole partition made anew is right.
    rows = rows_with(["horse"] * 300 + ["zebra"] + ["horse"] * 999 + ["zebra"] * 800)
    monkeypatch.setenv("PADFREE_FAST", "0")
    wanted = packed(tmp_path, "reference", rows)
    monkeypatch.delenv("PADFREE_FAST")
    wrong_for("zebra", monkeypatch)
    found = packed(tmp_path, "wrong", rows)
    assert found.digests == wanted.digests
    assert (found.report["num_fallbacks"], wanted.report["num_fallbacks"]) == (1, 0)
    (told,) = found.report["fallbacks"]
    assert told["partition"] == 0
    assert "zebra" in told["reason"]
    same = {key: value for key, value in found.report.items() if key not in ("num_fallbacks", "fallbacks")}
    assert same.items() <= wanted.report.items()


# ------------------------------------------------------------------ samples


@given(st.lists(st.text(max_size=3), max_size=2000))
def test_the_sample_is_small_and_of_the_batch(batch):
    found = sample(batch)
    assert set(found) <= set(batch)
    assert len(found) <= len(batch) // 512 + 2
    assert bool(found) == bool(batch)
    assert found == sample(list(batch))


def test_trials_hold_every_word_and_no_half_characters():
    found = trial_texts(["<|x|>", "<y>"])
    assert {"<|x|>", "<y>", ""} <= set(found)
    assert "\n".join(found).encode()
    assert found == trial_texts(["<y>", "<|x|>"])
    assert len(trial_texts(f"<{i}>" for i in range(5000))) < 4000


def test_a_checked_encoder_names_the_place_of_a_difference(eager):
    def reference(batch: list[str], plain: bool) -> fast.Flat:
        return np.arange(3, dtype=np.int32), np.array([0, 3])

    def quick(batch: list[str], *, plain: bool) -> fast.Flat:
        return np.array([0, 9, 2], np.int32), np.array([0, 3])

    with pytest.raises(fast.Unusable, match=r"for 'abc': token 1 of 3, \[9, 2\] instead of \[1, 2\]"):
        fast._compare(quick, reference, ["abc"], True)
    assert CheckedEncoder(reference, lambda: "{}", []).encode(["abc"], plain=True)[0].tolist() == [0, 1, 2]
