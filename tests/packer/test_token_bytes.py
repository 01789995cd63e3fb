"""Places of tokens from the table of bytes, against the library's own offsets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.render.places import covered
from packer.tokenization import Bundle, Located, Tokenizer
from packer.tokenization.token_bytes import token_bytes

FOREIGN = Path(__file__).parents[1] / "golden" / "foreign"
NAMES = ["llama", "gemma"]  # with a space before each stretch, and without
WORDS = [
    "[INST]",
    "</s>",
    "<s>",
    "<unk>",
    "<0x0A>",
    "\n\n",
    "▁",
    "▁▁",
    "  ",
    " ",
    "the ",
    "é",
    "日",
    "🙂",
    "<table>",
]
texts = st.lists(
    st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), st.sampled_from(WORDS)),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: Tokenizer(Bundle.read(FOREIGN / f"{name}.model")) for name in NAMES}


def by_library(tokenizer: Tokenizer, batch: list[str]) -> Located:
    rows = tokenizer._located_rows(batch)
    bases = np.cumsum([0, *(len(text.encode()) for text in batch)])
    return Located(
        ids=np.concatenate([row[0] for row in rows]),
        offsets=np.cumsum([0, *(len(row[0]) for row in rows)]),
        starts=np.concatenate([row[1] + base for row, base in zip(rows, bases, strict=False)]),
        ends=np.concatenate([row[2] + base for row, base in zip(rows, bases, strict=False)]),
    )


@settings(max_examples=200)
@given(batch=st.lists(texts, min_size=1, max_size=4), data=st.data())
@pytest.mark.parametrize("name", NAMES)
def test_masks_are_those_by_the_librarys_offsets(
    tokenizers: dict[str, Tokenizer], name: str, batch: list[str], data: st.DataObject
) -> None:
    """Of any span of characters: where a character is several tokens, all are in it, or none."""
    mine, true = tokenizers[name].encode_chats(batch), by_library(tokenizers[name], batch)
    assert (mine.ids.tolist(), mine.offsets.tolist()) == (true.ids.tolist(), true.offsets.tolist())
    whole = "".join(batch)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    span = np.array([[len(whole[:start].encode()), len(whole[:stop].encode())]])
    if start < stop:
        assert covered(mine, span).tolist() == covered(true, span).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_used_but_for_texts_that_it_does_not_fit(
    tokenizers: dict[str, Tokenizer], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizers[name]
    asked: list[str] = []
    located = tokenizer._located_rows
    monkeypatch.setattr(tokenizer, "_located_rows", lambda batch: asked.extend(batch) or located(batch))
    batch = ["a  b\n", "<s>[INST] naïve 🙂[/INST] yes</s>", "", "a▁b", "é</s>"]
    found = tokenizer.encode_chats(batch)
    assert asked == ["a▁b"]  # a "▁" of its own reads as a space
    assert found.offsets[3] - found.offsets[2] == 0
    assert int(found.ends[-1]) == sum(len(text.encode()) for text in batch)


def test_the_space_before_a_stretch_is_part_of_its_first_character(tokenizers: dict[str, Tokenizer]) -> None:
    located = tokenizers["llama"].encode_chats(["[INST]🙂"])
    assert [tokenizers["llama"].token(i) for i in located.ids[:3]] == ["[INST]", "▁", "<0xF0>"]
    assert covered(located, np.array([[6, 10]])).tolist() == [False] + [True] * 5


def test_other_tokenizers_have_no_table(tokenizers: dict[str, Tokenizer]) -> None:
    document = tokenizers["llama"].bundle.document("tokenizer.json")
    vocab = document["model"]["vocab"]
    assert token_bytes(document, vocab, {1, 2}, len(vocab)) is not None
    for change in (
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": None},
        {
            "pre_tokenizer": {
                "type": "Metaspace",
                "replacement": "▁",
                "prepend_scheme": "first",
                "split": False,
            }
        },
        {"model": document["model"] | {"byte_fallback": False}},
    ):
        assert token_bytes(document | change, vocab, {1, 2}, len(vocab)) is None
    assert Tokenizer(toy.bundle())._token_bytes is None
