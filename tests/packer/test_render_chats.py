"""Conversations to ids and masks: the public fault cases, and what people's conversations look like."""

import json

import numpy as np
import pytest
import toy

from packer.render import Renderer, RenderError
from packer.tokenization import Tokenizer

ROW = toy.chat(("user", "a b"), ("assistant", "c d"))
IDS = [1, 4, 10, 11, 7, 5, 12, 13, 7]
TRAINED = [0, 0, 0, 0, 0, 0, 1, 1, 1]

# T1 with tool calls: <call> name arguments-as-JSON.
TOOL_TEMPLATE = toy.T1.replace(
    "{{ message.content }}",
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ '<call>' + call.function.name + ' ' + call.function.arguments | tojson }}{% endfor %}",
)


def renderer(bundle, **options):
    return Renderer(Tokenizer(bundle), **{"format": "messages", "fields": {}, **options})


def split(out):
    """(ids, trained as 0 and 1) of each row."""
    stops = out.lengths.cumsum()
    return [
        (out.input_ids[stop - n : stop].tolist(), out.loss_mask[stop - n : stop].astype(int).tolist())
        for stop, n in zip(stops, out.lengths, strict=True)
    ]


def rendered(bundle, *rows, **options):
    out = renderer(bundle, **options).render(rows)
    assert out.errors == []
    return split(out)


def reasons(bundle, *rows, **options):
    out = renderer(bundle, **options).render(rows)
    assert len(out.input_ids) == out.lengths.sum() == len(out.loss_mask)
    assert all(out.lengths[position] == 0 for position, _ in out.errors)
    return out.errors


def call(arguments, content=None):
    turn = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }
    return {"messages": [{"role": "user", "content": "a"}, turn]}


def test_f03_the_mask_is_per_row():
    second = toy.chat(("user", "e"), ("assistant", "f"))
    assert rendered(toy.bundle(), ROW, second) == [
        (IDS, TRAINED),
        ([1, 4, 14, 7, 5, 15, 7], [0, 0, 0, 0, 0, 1, 1]),
    ]


@pytest.mark.parametrize("add_bos", ["auto", True])
def test_f09_one_bos(add_bos):
    bundle = toy.bundle(adds_bos=True)
    assert rendered(bundle, ROW, add_bos=add_bos) == [(IDS, TRAINED)]
    [(ids, _)] = rendered(bundle, {"text": "a b"}, format="text", add_bos=add_bos, add_eos=False)
    assert ids == [1, 10, 11]


def test_f10_the_end_of_turn_token_is_trained_or_its_absence_told():
    assert rendered(toy.bundle(chat_template=toy.T1), ROW) == [(IDS, TRAINED)]
    assert renderer(toy.bundle(chat_template=toy.T1)).warnings == ()
    assert rendered(toy.bundle(chat_template=toy.T2), ROW) == [(IDS, TRAINED)]
    [warning] = renderer(toy.bundle(chat_template=toy.T2)).warnings
    assert "'<end>'" in warning
    endless = toy.T2.replace("<end>", "")
    [warning] = renderer(toy.bundle(chat_template=endless)).warnings
    assert "never learns to stop" in warning


def test_f12_a_template_that_cannot_mark_the_assistants_words_is_refused():
    bundle = toy.bundle(chat_template=toy.T1_UNMARKED)
    with pytest.raises(RenderError, match=r"chat template has no \{% generation %\} markers.*'<asst>'"):
        renderer(bundle)
    assert rendered(bundle, ROW, loss="all") == [(IDS, [1] * 9)]


def test_markers_that_hold_nothing_of_the_assistant_are_refused():
    misplaced = (
        "{{ bos_token }}{% for m in messages %}{% generation %}{% endgeneration %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(RenderError, match="do not hold the assistant's words"):
        renderer(toy.bundle(chat_template=misplaced))


def test_f13_tool_arguments_as_text_or_object():
    bundle = toy.byte_level_bundle(chat_template=TOOL_TEMPLATE)
    as_object, as_text = rendered(bundle, call({"b": 1}), call('{"b": 1}'))
    assert as_object == as_text
    text = Tokenizer(bundle).decode(as_object[0])
    assert text == '<bos><usr>a<end><asst><call>f {"b": 1}<end>'
    errors = reasons(bundle, ROW, call("{b: 1"))
    assert errors[0][0] == 1
    assert "messages[1].tool_calls[0].arguments: JSON is required, found '{b: 1'" in errors[0][1]


def test_f13_with_a_template_that_wants_text():
    template = TOOL_TEMPLATE.replace("call.function.arguments | tojson", "call.function.arguments")
    bundle = toy.byte_level_bundle(chat_template=template)
    as_object, as_text = rendered(bundle, call({"b": 1}), call('{"b":  1}'))
    assert as_object == as_text
    assert '<call>f {"b": 1}<end>' in Tokenizer(bundle).decode(as_object[0])


def test_tool_calls_that_the_template_does_not_print_are_told():
    [(position, reason)] = reasons(toy.bundle(), ROW, call({"b": 1}))
    assert position == 1
    assert "prints no tool calls" in reason


@pytest.mark.parametrize("chat_template", [toy.T1, toy.T1_UNMARKED_PROMPT])
def test_f14_control_words_in_content_stay_plain(chat_template):
    bundle = toy.byte_level_bundle(chat_template=chat_template)
    row = toy.chat(("user", "a <end> <asst> b"), ("assistant", "c"))
    [(ids, trained)] = rendered(bundle, row)
    assert (ids.count(5), ids.count(7), ids.count(4)) == (1, 2, 1)
    tokenizer = Tokenizer(bundle)
    assert tokenizer.decode(ids[2 : ids.index(7)]) == "a <end> <asst> b"
    assert tokenizer.decode(np.array(ids)[np.array(trained) == 1]) == "c<end>"


@pytest.mark.parametrize("chat_template", [toy.T1, toy.T1_UNMARKED_PROMPT])
def test_control_words_in_the_assistants_words_are_trained_as_plain_words(chat_template):
    bundle = toy.byte_level_bundle(chat_template=chat_template)
    row = toy.chat(("user", "é"), ("assistant", "é<end><asst>ü"), ("user", "<usr>"), ("assistant", "<end>"))
    [(ids, trained)] = rendered(bundle, row)
    assert [ids.count(i) for i in (4, 5, 7)] == [2, 2, 4]
    assert Tokenizer(bundle).decode(np.array(ids)[np.array(trained) == 1]) == "é<end><asst>ü<end><end><end>"


def test_f14_a_tokenizer_that_cannot_keep_them_plain_says_so():
    [(position, reason)] = reasons(toy.bundle(), toy.chat(("user", "a <end>"), ("assistant", "c")))
    assert (position, "'<end>' out of plain text" in reason) == (0, True)
    [(position, reason)] = reasons(toy.bundle(), {"text": "a"}, {"text": "a <end> b"}, format="text")
    assert (position, "control tokens" in reason) == (1, True)


def test_f15_changed_templates_give_other_tokens_and_digests():
    row = toy.chat(("user", "a"), ("assistant", "b"))
    first = toy.bundle()
    changed = toy.bundle(chat_template=toy.template(prelude="{{- '<sys> z <end>' }}"))
    assert rendered(first, row)[0][0] == [1, 4, 10, 7, 5, 11, 7]
    assert rendered(changed, row)[0][0] == [1, 3, 35, 7, 4, 10, 7, 5, 11, 7]
    assert len({first.digest, changed.digest}) == 2
    assert toy.bundle().digest == first.digest


@pytest.mark.parametrize("chat_template", [toy.T1, toy.T1_UNMARKED_PROMPT])
def test_f16_an_empty_turn_stays(chat_template):
    row = toy.chat(("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "c"))
    assert rendered(toy.bundle(chat_template=chat_template), row) == [
        ([1, 4, 10, 7, 5, 7, 4, 11, 7, 5, 12, 7], [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1])
    ]


def test_sharegpt_messages():
    row = {"messages": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d"}]}
    assert rendered(toy.bundle(), row) == [(IDS, TRAINED)]
    [(_, reason)] = reasons(
        toy.bundle(), {"messages": [{"from": "alien", "value": "a"}]}, fields={"messages": "conversations"}
    )
    assert reason.startswith("field conversations[0].from: one of human, user, gpt")


def test_content_in_parts_is_joined():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert rendered(toy.bundle(), toy.chat(("user", parts), ("assistant", "c d"))) == [(IDS, TRAINED)]
    picture = [{"type": "image", "url": "x"}]
    [(_, reason)] = reasons(toy.bundle(), toy.chat(("user", picture), ("assistant", "c d")))
    assert "messages[0].content[0]: a part of type text is required, found type 'image'" in reason


def test_messages_as_json_text():
    row = {"messages": json.dumps(ROW["messages"])}
    assert rendered(toy.bundle(), row) == [(IDS, TRAINED)]


@pytest.mark.parametrize("chat_template", [toy.T1, toy.T1_UNMARKED_PROMPT])
def test_train_false_leaves_a_turn_out(chat_template):
    row = toy.chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    row["messages"][1]["train"] = False
    [(ids, trained)] = rendered(toy.bundle(chat_template=chat_template), row)
    assert [i for i, t in zip(ids, trained, strict=True) if t] == [13, 7]


def test_eos_behind_a_chat_only_when_asked_for_and_never_twice():
    bundle = toy.bundle()
    [(ids, trained)] = rendered(bundle, ROW, add_eos=True)
    assert (ids, trained) == ([*IDS, 2], [*TRAINED, 1])
    [(ids, trained)] = rendered(bundle, toy.chat(("user", "a")), add_eos=True)
    assert (ids, trained) == ([1, 4, 10, 7, 2], [0, 0, 0, 0, 0])
    ended = toy.bundle(chat_template=toy.T1 + "{{ eos_token }}")
    [(ids, _)] = rendered(ended, ROW, add_eos=True)
    assert ids == [*IDS, 2]


def test_what_is_wrong_with_a_row_is_told_by_the_names_of_the_source():
    rows = [
        {"messages": None},
        {"messages": []},
        {"messages": ["hi"]},
        {"messages": [{"content": "a"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "assistant", "content": None}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": "{"},
        toy.chat(("user", "\ud800")),
        toy.chat(("user", "a\ufdd0")),
        toy.chat(("alien", "a")),
    ]
    found = reasons(toy.bundle(), *rows, fields={"messages": "data.chat", "tools": "functions"})
    assert [position for position, _ in found] == list(range(10))
    wanted = [
        "field data.chat: a list of messages is required, found null",
        "field data.chat: at least one message is required, found an empty list",
        "field data.chat[0]: an object with role and content is required, found a text",
        "field data.chat[0].role: a text such as user or assistant is required, found null",
        "field data.chat[0].content: a text is required, found a number",
        "field data.chat[0].content: a text is required where there are no tool_calls, found null",
        "field functions: JSON is required, found '{'",
        "field data.chat: a text of Unicode characters is required, found a lone surrogate (U+D800)",
        "the words hold a Unicode noncharacter",
        "the chat template refuses the row",
    ]
    for (_, reason), start in zip(found, wanted, strict=True):
        assert reason.startswith(start)


def test_a_batch_without_rows_and_one_of_bad_rows_alone():
    out = renderer(toy.bundle()).render([])
    assert (len(out.input_ids), len(out.lengths), out.errors) == (0, 0, [])
    assert len(reasons(toy.bundle(), {}, {})) == 2


def test_a_speaker_that_is_no_text():
    [(_, reason)] = reasons(toy.bundle(), {"messages": [{"from": [], "value": "a"}]})
    assert reason.startswith("field messages[0].from: one of human")
