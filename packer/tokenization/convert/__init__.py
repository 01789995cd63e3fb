"""Tokenizer files other than tokenizer.json, made into one that gives the same ids.

| file | of |
|---|---|
| tokenizer.model, spiece.model | SentencePiece; or tiktoken's lines under that name (Llama 3) |
| *.tiktoken | tiktoken |
| tekken.json | Mistral |
| vocab.json and merges.txt | transformers' byte-level tokenizers without a tokenizer.json |

Conversions are exact, by proof (ranks.py), and compared with the library that the files were
made for, where that is installed, on texts made to find differences. What cannot be carried over is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from packer.tokenization.convert.sentencepiece import convert_sentencepiece
from packer.tokenization.convert.slow import convert_slow
from packer.tokenization.convert.tekken import convert_tekken, is_tekken
from packer.tokenization.convert.tiktoken import convert_tiktoken, is_tiktoken
from packer.tokenization.convert.values import MODEL_NAME, ConversionError, Converted, as_object
from packer.tokenization.fast import trial_texts

__all__ = ["FOREIGN_NAMES", "ConversionError", "convert", "is_foreign"]

# What to look for in a folder, the first that is there. Each is given with all its files.
FOREIGN_NAMES = (
    ("tekken.json",),
    ("tokenizer.model",),
    ("spiece.model",),
    ("*.tiktoken",),
    ("vocab.json", "merges.txt"),
)


def is_foreign(data: bytes) -> bool:
    """Whether a file that stands alone is one to convert; else it is to be a tokenizer.json."""
    if data.lstrip()[:1] == b"{":
        return b'"token_bytes"' in data and is_tekken(as_object(data, "the file"))
    return is_tiktoken(data) or data[:1] == b"\n"  # how a SentencePiece model begins: with its first piece


def convert(foreign: Mapping[str, bytes], beside: Mapping[str, bytes]) -> dict[str, bytes]:
    """tokenizer.json made of `foreign`, and tokenizer_config.json with what they say of special tokens.

    foreign: files by name, as one line of FOREIGN_NAMES. beside: the configuration that lies there too; what
    it says goes before what they say. Raises ConversionError.
    """
    config = as_object(beside.get("tokenizer_config.json", b"{}"), "tokenizer_config.json")
    converted = _converted(foreign, config)
    if converted.reference is not None:
        _compare(converted)
    kept = {} if converted.model is None else {MODEL_NAME: converted.model}
    both = {**converted.config, **{key: value for key, value in config.items() if value is not None}}
    return {
        **kept,
        "tokenizer.json": json.dumps(converted.document, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(both, ensure_ascii=False).encode(),
    }


def _converted(foreign: Mapping[str, bytes], config: Mapping[str, Any]) -> Converted:
    name, data = next(iter(foreign.items()))
    if "merges.txt" in foreign:
        return convert_slow(as_object(foreign["vocab.json"], "vocab.json"), foreign["merges.txt"], config)
    if data.lstrip()[:1] == b"{":
        return convert_tekken(as_object(data, name), name)
    if is_tiktoken(data):
        return convert_tiktoken(data, name, config)
    return convert_sentencepiece(data, name, config)


def _compare(converted: Converted) -> None:
    """Raise ConversionError where the reference gives other ids for a trial text."""
    assert converted.reference is not None
    backend = tokenizers.Tokenizer.from_str(json.dumps(converted.document))
    backend.encode_special_tokens = True
    texts = trial_texts(token["content"] for token in converted.document["added_tokens"])
    mine = backend.encode_batch_fast(texts, add_special_tokens=False)
    for text, encoding, true in zip(texts, mine, converted.reference(texts), strict=True):
        if encoding.ids != true:
            raise ConversionError(
                f"for the text {text[:80]!r} the converted tokenizer gives the ids {encoding.ids[:16]}, the "
                "library it "
                f"was made for {true[:16]}; save the tokenizer as tokenizer.json with transformers"
            )
