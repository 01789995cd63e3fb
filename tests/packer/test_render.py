"""Texts, prompts with completions and ready ids, to tokens and masks."""

from pathlib import Path

import numpy as np
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from packer.render import Renderer, RenderError
from packer.tokenization import Bundle, Tokenizer, TokenizerError

EXAMPLE = Path(__file__).parents[2] / "examples" / "tokenizer"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(Bundle.read(EXAMPLE))


def renderer(format, bundle=None, fields=None, **options):
    return Renderer(Tokenizer(bundle or toy.bundle()), format=format, fields=fields or {}, **options)


def split(out):
    stops = out.lengths.cumsum()
    assert len(out.input_ids) == len(out.loss_mask) == out.lengths.sum()
    assert (out.input_ids.dtype, out.loss_mask.dtype, out.lengths.dtype) == (np.int32, np.bool_, np.int64)
    return [
        (out.input_ids[stop - n : stop].tolist(), out.loss_mask[stop - n : stop].astype(int).tolist())
        for stop, n in zip(stops, out.lengths, strict=True)
    ]


# ------------------------------------------------------------------ text


@pytest.mark.parametrize(
    ("adds_bos", "options", "ids"),
    [
        (False, {}, [10, 11, 2]),
        (True, {}, [1, 10, 11, 2]),
        (True, {"add_bos": False, "add_eos": False}, [10, 11]),
        (False, {"add_bos": True, "add_eos": True}, [1, 10, 11, 2]),
    ],
)
def test_text_between_bos_and_eos(adds_bos, options, ids):
    out = renderer("text", toy.bundle(adds_bos=adds_bos), **options).render([{"text": "a b"}, {"text": ""}])
    assert split(out) == [(ids, [1] * len(ids)), ([], [])]


def test_no_eos_known():
    bundle = toy.bundle(eos=False)
    out = renderer("text", bundle)
    assert split(out.render([{"text": "a"}])) == [([10], [1])]
    assert "names no EOS token" in out.warnings[0]
    assert renderer("text", bundle, add_eos=False).warnings == ()
    for format in ("text", "messages"):
        with pytest.raises(TokenizerError, match=r"tokenizer\.add_eos: true requires"):
            renderer(format, bundle, add_eos=True)


def test_f18_what_is_not_a_text_is_told_by_the_sources_field():
    rows = [
        {"text": 23},
        {"text": "a"},
        {"text": None},
        {"text": ["a"]},
        {},
        {"text": True},
        {"text": "\udfff"},
    ]
    out = renderer("text", fields={"text": "r.b"}).render(rows)
    assert split(out)[1] == ([10, 2], [1, 1])
    assert out.lengths.tolist() == [0, 2, 0, 0, 0, 0, 0]
    assert out.errors == [
        (0, "field r.b: a text is required, found a number (23)"),
        (2, "field r.b: a text is required, found null"),
        (3, "field r.b: a text is required, found a list"),
        (4, "field r.b: a text is required, found no such field in the row"),
        (5, "field r.b: a text is required, found true or false"),
        (
            6,
            "field r.b: a text of Unicode characters is required, found a lone surrogate (U+DFFF) "
            "at character 0",
        ),
    ]


# ------------------------------------------------------------------ prompt and completion


def test_completion_and_eos_are_trained():
    rows = [
        {"prompt": "a b", "completion": "c"},
        {"prompt": "", "completion": ""},
        {"prompt": "a", "completion": ""},
        {"prompt": "", "completion": "c"},
    ]
    out = renderer("prompt_completion", toy.bundle(adds_bos=True)).render(rows)
    assert split(out) == [
        ([1, 10, 11, 12, 2], [0, 0, 0, 1, 1]),
        ([], []),
        ([1, 10, 2], [0, 0, 1]),
        ([1, 12, 2], [0, 1, 1]),
    ]
    everything = renderer("prompt_completion", toy.bundle(adds_bos=True), loss="all").render(rows)
    assert np.array_equal(everything.input_ids, out.input_ids)
    assert everything.loss_mask.all()


def test_a_bad_half_makes_the_row_bad_and_no_other():
    rows = [
        {"prompt": "a", "completion": 1},
        {"prompt": None, "completion": "b"},
        {"prompt": "a", "completion": "b"},
    ]
    out = renderer("prompt_completion", fields={"completion": "answer"}).render(rows)
    assert split(out) == [([], []), ([], []), ([10, 11, 2], [0, 1, 1])]
    assert out.errors == [
        (0, "field answer: a text is required, found a number (1)"),
        (1, "field prompt: a text is required, found null"),
    ]


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                name: st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
                for name in ("prompt", "completion")
            }
        ),
        max_size=5,
    )
)
def test_prompt_and_completion_are_encoded_apart(tokenizer, rows):
    out = Renderer(tokenizer, format="prompt_completion", fields={}).render(rows)
    for row, (ids, trained) in zip(rows, split(out), strict=True):
        if not row["prompt"] and not row["completion"]:
            assert ids == []
            continue
        prompt = tokenizer.encode([row["prompt"]])[0].tolist()
        completion = tokenizer.encode([row["completion"]])[0].tolist()
        assert ids == [tokenizer.bos_id, *prompt, *completion, tokenizer.eos_id]
        assert trained == [0] * (1 + len(prompt)) + [1] * (len(completion) + 1)


# ------------------------------------------------------------------ ready ids


def test_ready_ids_and_labels():
    rows = [
        {"input_ids": [10, 11, 12]},
        {"input_ids": [10, 11, 12], "labels": [-100, -100, 12]},
        {"input_ids": np.array([10, 11]), "labels": None},
        {"input_ids": []},
    ]
    out = renderer("tokens").render(rows)
    assert split(out) == [([10, 11, 12], [1] * 3), ([10, 11, 12], [0, 0, 1]), ([10, 11], [1, 1]), ([], [])]
    assert renderer("tokens", loss="all").render(rows).loss_mask.all()
    framed = renderer("tokens", add_bos=True, add_eos=True).render(
        [{"input_ids": [1, 10]}, {"input_ids": [10, 2]}]
    )
    assert split(framed) == [([1, 10, 2], [1, 1, 1]), ([1, 10, 2], [0, 1, 1])]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": "1 2"}, "field ids: a list of whole numbers is required, found a text"),
        ({"input_ids": None}, "field ids: a list of whole numbers is required, found null"),
        ({"input_ids": [10, 1.5]}, "field ids: whole numbers are required, found a number (1.5)"),
        ({"input_ids": [10, True]}, "field ids: whole numbers are required, found true or false (True)"),
        ({"input_ids": [[10]]}, "field ids: whole numbers are required, found a list ([10])"),
        ({"input_ids": [10, 2**70]}, "field ids: numbers of at most 64 bits are required"),
        ({"input_ids": np.array([1.0])}, "field ids: whole numbers are required, found an array of float64"),
        (
            {"input_ids": [10, 512]},
            "field ids[1]: an id from 0 to 511 is required, found 512; were these ids made by another",
        ),
        ({"input_ids": [-1]}, "field ids[0]: an id from 0 to 511 is required, found -1"),
        ({"input_ids": [10], "labels": [10, 11]}, "field y: 1 labels are required, one an id, found 2"),
        (
            {"input_ids": [10, 11, 12], "labels": [-100, 13, 12]},
            "field y[1]: -100 or the id at the same place (11) is required, found 13",
        ),
        (
            {"input_ids": [10, 11, 12], "labels": [-100, 12, -100]},
            "field y[1]: -100 or the id at the same place (11) is required, found 12; they look shifted by "
            "one: give them unshifted, aligned with input_ids",
        ),
    ],
)
def test_ready_ids_that_are_wrong(row, reason):
    out = renderer("tokens", fields={"input_ids": "ids", "labels": "y"}).render([row, {"input_ids": [10]}])
    assert out.lengths.tolist() == [0, 1]
    [(position, found)] = out.errors
    assert position == 0
    assert found.startswith(reason)
    assert ("shifted" in found) == ("shifted" in reason)


# ------------------------------------------------------------------ jobs


@pytest.mark.parametrize(
    ("format", "loss"),
    [
        ("text", "completion"),
        ("text", "assistant"),
        ("prompt_completion", "assistant"),
        ("messages", "completion"),
    ],
)
def test_losses_that_do_not_go_with_the_format(format, loss):
    with pytest.raises(RenderError, match=f"loss: format {format} goes with auto or"):
        renderer(format, loss=loss)


def test_chats_without_a_template_and_with_a_broken_one():
    with pytest.raises(RenderError, match=r"requires a chat template, the tokenizer has none"):
        renderer("messages", toy.bundle(chat_template=None))
    with pytest.raises(RenderError, match=r"not valid Jinja: line 1"):
        renderer("messages", toy.bundle(chat_template="{% for %}"))


# ------------------------------------------------------------------ anything

NAMES = [
    "role",
    "content",
    "from",
    "value",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "type",
    "text",
    "train",
]
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 600),
        st.floats(allow_nan=False),
        st.text(max_size=6),
        st.sampled_from(
            ["user", "assistant", "tool", "human", "gpt", "<end>", '{"a": 1}', "\ud800", "\ufdd1"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELDS = ["text", "prompt", "completion", "messages", "tools", "input_ids", "labels"]


@pytest.mark.parametrize("chat_template", [toy.T1, toy.T1_UNMARKED_PROMPT])
@pytest.mark.parametrize("format", ["text", "prompt_completion", "messages", "tokens"])
@given(rows=st.lists(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4), max_size=4))
def test_whatever_the_rows_are_each_is_rendered_or_told(format, chat_template, rows):
    out = RENDERERS[format, chat_template].render(rows)
    split(out)
    positions = [position for position, _ in out.errors]
    assert positions == sorted(set(positions))
    assert all(out.lengths[position] == 0 for position in positions)
    assert all(reason and len(reason) < 400 for _, reason in out.errors)


RENDERERS = {
    (format, chat_template): renderer(format, toy.byte_level_bundle(chat_template=chat_template))
    for format in ("text", "prompt_completion", "messages", "tokens")
    for chat_template in (toy.T1, toy.T1_UNMARKED_PROMPT)
}
