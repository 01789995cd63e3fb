"""A tokenizer whose ids can be read: the toy tokenizer and the templates of the public fault cases.

Words are split at white space: letters a to z are 10 to 35, w36 is 36, and so on.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from packer.tokenization import Bundle

CONTROL = ["<pad>", "<bos>", "<eos>", "<sys>", "<usr>", "<asst>", "<tool>", "<end>", "<unk>", "<call>"]
NUM_WORDS = 512

_MARKERS = {"system": "<sys>", "user": "<usr>", "assistant": "<asst>", "tool": "<tool>"}
_TURN = """\
{%- if message.role == 'assistant' %}
{{- '<asst>' }}{% generation %}{{ message.content }}INSIDE{% endgeneration %}OUTSIDE
{%- else %}
{{- MARKERS[message.role] + message.content + '<end>' }}
{%- endif %}
"""
_TEMPLATE = (
    "{%- set MARKERS = "
    + json.dumps(_MARKERS)
    + " %}{{- bos_token }}PRELUDE{%- for message in messages %}"
    + _TURN
    + "{%- endfor %}PROMPT"
)


def template(
    *, end_inside: bool = True, markers: bool = True, generation_prompt: bool = False, prelude: str = ""
) -> str:
    """T1, or with another setting one of its relatives."""
    text = _TEMPLATE.replace("INSIDE", "<end>" if end_inside else "")
    text = text.replace("OUTSIDE", "" if end_inside else "<end>").replace("PRELUDE", prelude)
    prompt = "{%- if add_generation_prompt %}{{- '<asst>' }}{%- endif %}" if generation_prompt else ""
    text = text.replace("PROMPT", prompt)
    if not markers:
        text = text.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return text


T1 = template()
T2 = template(end_inside=False)
T1_UNMARKED = template(markers=False)
T1_UNMARKED_PROMPT = template(markers=False, generation_prompt=True)


def bundle(
    *,
    chat_template: str | None = T1,
    adds_bos: bool = False,
    eos: bool = True,
    config: dict[str, Any] | None = None,
) -> Bundle:
    """The toy tokenizer's files."""
    vocab = {word: i for i, word in enumerate(CONTROL)}
    vocab |= {chr(ord("a") + i): 10 + i for i in range(26)}
    vocab |= {f"w{i}": i for i in range(36, NUM_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _bundle(tokenizer, chat_template=chat_template, adds_bos=adds_bos, eos=eos, config=config or {})


def byte_level_bundle(
    *, chat_template: str | None = T1, adds_bos: bool = False, config: dict[str, Any] | None = None
) -> Bundle:
    """A tokenizer with the same control words (ids 0 to 9) over bytes: any text, a token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: i for i, word in enumerate([*CONTROL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _bundle(tokenizer, chat_template=chat_template, adds_bos=adds_bos, eos=True, config=config or {})


def _bundle(
    tokenizer: Tokenizer, *, chat_template: str | None, adds_bos: bool, eos: bool, config: dict[str, Any]
) -> Bundle:
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in CONTROL])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    names = {"bos_token": "<bos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    if eos:
        names["eos_token"] = "<eos>"
    if chat_template is not None:
        config = {"chat_template": chat_template, **config}
    return Bundle(
        files={
            "tokenizer.json": tokenizer.to_str().encode(),
            "tokenizer_config.json": json.dumps({**names, **config}).encode(),
        }
    )


def chat(*turns: tuple[str, Any]) -> dict[str, Any]:
    """A row of format messages: chat(("user", "a b"), ("assistant", "c d"))."""
    return {"messages": [{"role": role, "content": content} for role, content in turns]}
