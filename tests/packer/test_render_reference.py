"""Chats against transformers' own apply_chat_template, on random conversations."""

import json
from pathlib import Path

import numpy as np
import pytest
import toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from packer.render import Renderer
from packer.tokenization import Bundle, Tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "tokenizer"
WORDS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs", "Co", "Cn"]), max_size=12),
        st.sampled_from(
            [" ", "\n", "\n\n", "hello", "{{ x }}", "<think>", "'s", "é", "日本語", "🙂", "x" * 40]
        ),
    ),
    max_size=6,
).map("".join)
CONTROL = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|im_start|>assistant\n", "</tool_call>", "<|pad|>"]
)
FORGED = st.lists(st.one_of(WORDS, CONTROL), max_size=6).map("".join)
CALL = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
    st.dictionaries(st.text("abc", min_size=1), st.one_of(st.integers(), WORDS, st.none()), max_size=3),
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def conversations(words):
    user = words.map(lambda text: {"role": "user", "content": text})
    assistant = words.map(lambda text: {"role": "assistant", "content": text})
    calling = st.lists(CALL, min_size=1, max_size=2).map(
        lambda calls: {"role": "assistant", "tool_calls": calls}
    )
    tool = words.map(lambda text: {"role": "tool", "content": text})
    turn = st.one_of(st.tuples(user, assistant), st.tuples(user, calling, tool, assistant)).map(list)
    system = st.lists(words.map(lambda text: {"role": "system", "content": text}), max_size=1)
    turns = st.lists(turn, min_size=1, max_size=3)
    return st.tuples(system, turns).map(lambda pair: pair[0] + [m for turn in pair[1] for m in turn])


@pytest.fixture(scope="module")
def reference():
    config = json.loads((EXAMPLE / "tokenizer_config.json").read_text())
    names = ("bos_token", "eos_token", "pad_token", "chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_file=str(EXAMPLE / "tokenizer.json"), **{name: config[name] for name in names}
    )


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(Bundle.read(EXAMPLE))


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return Renderer(tokenizer, format="messages", fields={})


@pytest.fixture(scope="module")
def unmarked_renderer(tokenizer):
    """The same template without its markers."""
    template = tokenizer.chat_templates["default"]
    template = template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    assert "generation %}" not in template
    bundle = Bundle.read(EXAMPLE, chat_template=template)
    return Renderer(Tokenizer(bundle), format="messages", fields={})


@given(talk=conversations(WORDS), tools=st.sampled_from([None, TOOLS]))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_ids_and_masks_equal_transformers(reference, renderer, talk, tools):
    wanted = reference.apply_chat_template(
        talk, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    out = renderer.render([{"messages": talk, "tools": tools}])
    assert out.errors == []
    assert out.input_ids.tolist() == wanted["input_ids"]
    assert out.loss_mask.astype(int).tolist() == wanted["assistant_masks"]


@given(talk=conversations(FORGED), tools=st.sampled_from([None, TOOLS]))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_control_words_in_words_equal_transformers_sanitized(reference, renderer, talk, tools):
    wanted = reference.apply_chat_template(talk, tools=tools, return_dict=False, sanitize_control_tokens=True)
    out = renderer.render([{"messages": talk, "tools": tools}])
    assert out.errors == []
    assert out.input_ids.tolist() == wanted


@given(talk=conversations(FORGED), tools=st.sampled_from([None, TOOLS]))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_turns_found_without_markers_equal_the_markers(renderer, unmarked_renderer, talk, tools):
    wanted = renderer.render([{"messages": talk, "tools": tools}])
    out = unmarked_renderer.render([{"messages": talk, "tools": tools}])
    assert out.errors == []
    assert np.array_equal(out.input_ids, wanted.input_ids)
    assert np.array_equal(out.loss_mask, wanted.loss_mask)


@given(batch=st.lists(conversations(FORGED), min_size=2, max_size=5))
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=30)
def test_a_batch_equals_its_rows(renderer, batch):
    rows = [{"messages": talk} for talk in batch]
    together = renderer.render(rows)
    alone = [renderer.render([row]) for row in rows]
    assert np.array_equal(together.input_ids, np.concatenate([out.input_ids for out in alone]))
    assert np.array_equal(together.loss_mask, np.concatenate([out.loss_mask for out in alone]))


@given(talk=conversations(st.text("abc é", max_size=9)))
@settings(max_examples=30)
def test_a_tokenizer_without_a_table_of_bytes_gives_the_same(talk):
    """Words over the toy tokenizer go by the library's offsets."""
    talk = [{"role": m["role"], "content": m.get("content", "x")} for m in talk]
    bundle = toy.bundle()
    out = Renderer(Tokenizer(bundle), format="messages", fields={}).render([{"messages": talk}])
    reference = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(bundle)._backend, bos_token="<bos>", chat_template=toy.T1
    )
    wanted = reference.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    assert out.input_ids.tolist() == wanted["input_ids"]
    assert out.loss_mask.astype(int).tolist() == wanted["assistant_masks"]
