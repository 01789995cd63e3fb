"""What conversions give, and the parts of a tokenizer.json that they share.

Errors: ConversionError (a ValueError): the files cannot be converted exactly; its text says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_DIGITS = 10  # an id has fewer: it is an int32
MODEL_NAME = "sentencepiece.model"  # in a bundle that packer.tokenization.pieces encodes


class ConversionError(ValueError):
    """Tokenizer files that cannot be read, or not be converted exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A tokenizer as `tokenizers` reads it.

    document: the tokenizer.json. config: what its own files say of special tokens, as tokenizer_config.json
    would. reference: encodes words with the library that the files were made for; None where that is not
    installed. model: a SentencePiece model that its own library encodes (packer.tokenization.pieces).
    """

    document: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    reference: Callable[[Sequence[str]], list[list[int]]] | None = None
    model: bytes | None = None


def document(
    model: Mapping[str, Any],
    *,
    added: Iterable[tuple[int, str, bool]],
    normalizers: Sequence[Mapping[str, Any]] = (),
    pre_tokenizers: Sequence[Mapping[str, Any]] = (),
    decoders: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """A tokenizer.json. added: id, text, and whether it is special, of each added token."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
            for token_id, text, special in sorted(added)
        ],
        "normalizer": _sequence(normalizers, "normalizers"),
        "pre_tokenizer": _sequence(pre_tokenizers, "pretokenizers"),
        "post_processor": None,
        "decoder": _sequence(decoders, "decoders"),
        "model": model,
    }


def bpe(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> dict[str, Any]:
    """The byte-pair model of a tokenizer.json; options take the place of what is usual."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(vocab),
        "merges": [list(pair) for pair in merges],
    } | options


def byte_level(*, use_regex: bool, add_prefix_space: bool = False) -> dict[str, Any]:
    """The step, pre-tokenizer or decoder, that spells each byte as a character."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def split(expression: str) -> dict[str, Any]:
    """The pre-tokenizer that cuts a text into the matches of a regular expression, and what is between."""
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _sequence(parts: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any] | None:
    if not parts:
        return None
    return dict(parts[0]) if len(parts) == 1 else {"type": "Sequence", key: list(parts)}


def as_object(data: bytes, name: str) -> dict[str, Any]:
    """A JSON object. Raises ConversionError."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ConversionError(f"{name} must be JSON: {error}; copy the file again") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{name} must be a JSON object, found a {type(value).__name__}")
    return value


def added_tokens(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """`added_tokens_decoder` of a tokenizer_config.json: by id, objects with a text `content`.

    Raises ConversionError.
    """
    field = "tokenizer_config.json: added_tokens_decoder"
    wanted = 'ids with their tokens are required, {"5": {"content": "<s>", "special": true}}'
    found = config.get("added_tokens_decoder")
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ConversionError(f"{field}: {wanted}, found a {type(found).__name__}; copy the file again")
    for key, token in found.items():
        if not is_id(key) or not isinstance(token, Mapping) or not isinstance(token.get("content"), str):
            raise ConversionError(
                f"{field}: {wanted}, found {key[:40]!r}: {token!r:.60}; copy the file again"
            )
    return {int(key): token for key, token in found.items()}


def is_id(key: Any) -> bool:
    """Whether a key of a JSON object is the id of a token."""
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < MOST_DIGITS


def token_ids(vocab: Mapping[str, Any], name: str) -> dict[str, int]:
    """A file that gives each token its id. Raises ConversionError."""
    for text, token_id in vocab.items():
        if type(token_id) is not int or not 0 <= token_id < 10 ** (MOST_DIGITS - 1):
            raise ConversionError(
                f"{name}: tokens with their ids, whole numbers, are required, found {text[:40]!r}: "
                f"{token_id!r:.60}; copy the file again"
            )
    return dict(vocab)
