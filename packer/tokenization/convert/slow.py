"""vocab.json and merges.txt, as transformers' byte-level tokenizers read them without a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packer.tokenization.convert.tiktoken import FAMILIES
from packer.tokenization.convert.values import (
    ConversionError,
    Converted,
    bpe,
    byte_level,
    document,
    split,
    token_ids,
)

_GPT2 = ("GPT2Tokenizer", "CodeGenTokenizer")
_QWEN2 = ("Qwen2Tokenizer",)


def convert_slow(vocab: Mapping[str, Any], merges: bytes, config: Mapping[str, Any]) -> Converted:
    """The tokenizer of a vocabulary and its merges. config: its tokenizer_config.json.

    Raises ConversionError where the configuration does not name a class that is known here: the two files say
    nothing of how texts are split.
    """
    own = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if own not in (*_GPT2, *_QWEN2):
        raise ConversionError(
            "vocab.json and merges.txt do not say how texts are split; tokenizer_config.json must name one "
            "of the "
            f"classes {', '.join((*_GPT2, *_QWEN2))}, found {own or 'none'}; save the tokenizer as "
            "tokenizer.json "
            "with `AutoTokenizer.from_pretrained(...).save_pretrained(folder)` of transformers"
        )
    ids = token_ids(vocab, "vocab.json")
    prefix = bool(config.get("add_prefix_space"))
    if own in _QWEN2:
        steps = [split(FAMILIES[151643].pattern), byte_level(use_regex=False, add_prefix_space=prefix)]
    else:
        steps = [byte_level(use_regex=True, add_prefix_space=prefix)]
    end = "<|endoftext|>"
    return Converted(
        document=document(
            bpe(ids, _pairs(merges), continuing_subword_prefix="", end_of_word_suffix=""),
            added=[],
            normalizers=[{"type": "NFC"}] if own in _QWEN2 else [],
            pre_tokenizers=steps,
            decoders=[byte_level(use_regex=True)],
        ),
        # What the classes name where the configuration does not.
        config={"eos_token": end, "unk_token": end} | ({} if own in _QWEN2 else {"bos_token": end}),
    )


def _pairs(merges: bytes) -> list[tuple[str, str]]:
    pairs = []
    try:
        lines = merges.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConversionError(
            f"merges.txt must be UTF-8, found another at byte {error.start + 1}; copy it again"
        ) from error
    for number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        if not line or line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise ConversionError(
                f"merges.txt: line {number} must be two tokens, found something else; copy it again"
            )
        pairs.append((left, right))
    return pairs
