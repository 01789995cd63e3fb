"""SentencePiece models (tokenizer.model) as `tokenizers` reads them.

What the library does to a text, in its order: the normaliser's table of characters, surplus spaces taken
out, a space put before it (the dummy prefix), spaces written as "▁"; pieces that a user defined are cut out
whole; what is between is encoded by merging, again and again, the leftmost of the adjacent pairs whose piece
has the highest score (model type bpe); what is no piece becomes its bytes, or one unknown token. That is
carried over exactly. Models of type unigram, or with a table of characters, are kept for their own library.

Control words of a chat cut the text; what is between is encoded as a text of its own, dummy prefix and all
(not so where tokenizer_config.json has `legacy` false).

Errors: ConversionError, for what cannot be carried over.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from packer.tokenization.convert.proto import read_model
from packer.tokenization.convert.ranks import last_pair, merged
from packer.tokenization.convert.values import ConversionError, Converted, bpe, document, split

_SPACE = "▁"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_KINDS = {3: "word", 4: "char"}
# Classes of transformers that number and split as the model does.
_FAITHFUL = (
    "",
    "LlamaTokenizer",
    "CodeLlamaTokenizer",
    "GemmaTokenizer",
    "PreTrainedTokenizer",
    "TokenizersBackend",
)


def convert_sentencepiece(data: bytes, name: str, config: Mapping[str, Any]) -> Converted:
    """The tokenizer of a SentencePiece model. config: its tokenizer_config.json. Raises ConversionError."""
    model = read_model(data, name)
    _check(model, name, config)
    trainer, normalizer = model.trainer, model.normalizer
    pieces = [(piece.piece, piece.score, piece.type) for piece in model.pieces]
    if trainer.model_type == 1 or normalizer.precompiled_charsmap:
        return _kept(data, model)
    user_defined = [piece for piece, _, kind in pieces if kind == _USER_DEFINED]
    unknown = next((piece for piece, _, kind in pieces if kind == _UNKNOWN), None)
    # Said by transformers' Llama: control words cut no text, so only its beginning gets the dummy prefix.
    # What it then does with spaces at the beginning is its own way, too.
    stretches_joined = config.get("legacy") is False
    scheme = "first" if normalizer.add_dummy_prefix else "never"
    metaspace = [{"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False}]
    if not stretches_joined:
        metaspace = []
    return Converted(
        document=document(
            bpe(
                {piece: i for i, (piece, _, _) in enumerate(pieces)},
                _merges(pieces, name, whole=bool(user_defined)),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=trainer.byte_fallback,
                ignore_merges=bool(user_defined),
            ),
            added=[(i, piece, True) for i, (piece, _, kind) in enumerate(pieces) if kind == _CONTROL],
            normalizers=[] if stretches_joined else _normalizers(normalizer),
            pre_tokenizers=[*metaspace, *(_cuts(pieces, user_defined) if user_defined else [])],
            decoders=_decoders(normalizer),
        ),
        config=_config(model),
        reference=None if stretches_joined else _reference(data),
    )


def _kept(data: bytes, model: Any) -> Converted:
    """A model that its own library encodes (pieces.py); the tokenizer.json holds the vocabulary.

    `tokenizers` does not do it exactly: of segmentations of equal likelihood it takes another by its
    rounding, it takes the words "<0x0A>" for that byte, and its normaliser replaces whole graphemes.
    """
    vocab = [[piece.piece, piece.score] for piece in model.pieces]
    unknown = next((i for i, piece in enumerate(model.pieces) if piece.type == _UNKNOWN), None)
    return Converted(
        document=document(
            {
                "type": "Unigram",
                "unk_id": unknown,
                "vocab": vocab,
                "byte_fallback": model.trainer.byte_fallback,
            },
            added=[(i, piece.piece, True) for i, piece in enumerate(model.pieces) if piece.type == _CONTROL],
            decoders=_decoders(model.normalizer),
        ),
        config=_config(model),
        model=data,
    )


def _check(model: Any, name: str, config: Mapping[str, Any]) -> None:
    """Raise ConversionError for a model that is not carried over."""
    own = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    kinds = Counter(piece.type for piece in model.pieces)
    reasons = {
        f"transformers' {own} changes what the model gives": own not in _FAITHFUL,
        f"it is of type {_KINDS.get(model.trainer.model_type, model.trainer.model_type)}": (
            model.trainer.model_type not in (1, 2)
        ),
        "it writes spaces behind words": model.trainer.treat_whitespace_as_suffix,
        "it does not write spaces as ▁": not model.normalizer.escape_whitespaces,
        "it has unused pieces": kinds[_UNUSED] > 0,
        "legacy is false in tokenizer_config.json, and it takes surplus spaces out": (
            config.get("legacy") is False and model.normalizer.remove_extra_whitespaces
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConversionError(
                f"{name}: {reason}, which cannot be carried over exactly; save it as tokenizer.json with "
                "`AutoTokenizer.from_pretrained(...).save_pretrained(folder)` of transformers"
            )


def _merges(pieces: Sequence[tuple[str, float, int]], name: str, *, whole: bool) -> list[tuple[str, str]]:
    """The pairs that make each piece, the highest score first (ranks.py has the proof).

    whole: every piece must come of merges, since `tokenizers` will take any that stands alone.
    """
    ranks = {piece: -score for piece, score, kind in pieces if kind == _NORMAL}
    known = {piece for piece, _, _ in pieces}
    # Of pieces with one score the longest first: see _check_ties.
    order = sorted(
        (piece for piece in ranks if len(piece) > 1), key=lambda piece: (ranks[piece], -len(piece))
    )
    pairs: dict[str, tuple[str, str]] = {}
    for piece in order:
        pair = last_pair(list(piece), ranks)
        if pair is not None and not known.issuperset(pair):
            raise ConversionError(
                f"{name}: the piece {piece!r} is made of {pair[0]!r} and {pair[1]!r}, which are not both "
                "pieces, so `tokenizers` cannot make it"
            )
        if pair is None and whole:
            raise ConversionError(
                f"{name}: the piece {piece!r} is never made by merging, and there are pieces that a user "
                "defined, so `tokenizers` would give other ids"
            )
        if pair is not None:
            pairs[piece] = pair
    for _, tied in groupby(pairs, ranks.__getitem__):
        _check_ties([*tied], pairs, name)
    return list(pairs.values())


def _cuts(pieces: Sequence[tuple[str, float, int]], user_defined: list[str]) -> list[dict[str, Any]]:
    """Pre-tokenizers that cut out what a user defined, which `ignore_merges` then takes whole.

    It would take words that spell a control or byte piece whole too, where they stand alone between cuts. So
    these are cut once more, at a place where their own merging leaves a border: that changes no id.
    """
    ranks = {piece: -score for piece, score, kind in pieces if kind == _NORMAL}
    apart = []
    for piece, _, kind in pieces:
        if kind in (_CONTROL, _UNKNOWN, _BYTE) and len(piece) > 1:
            first = merged([*piece], lambda left, right: ranks.get(left + right))[0]
            apart.append(rf"{re.escape(first)}(?={re.escape(piece[len(first) :])}\z)")
    wanted = "|".join(map(re.escape, sorted(user_defined, key=len, reverse=True)))
    return [split(wanted), split(rf"\A(?:{'|'.join(apart)})")]


def _check_ties(tied: list[str], pairs: Mapping[str, tuple[str, str]], name: str) -> None:
    """Raise ConversionError unless pieces with one score are made in any text as the library makes them.

    It takes the leftmost of them, `tokenizers` the first of its list. Llama's runs of spaces (its only such
    pieces) come out alike if the longest stand first in the list: so the leftmost run grows before another
    begins.
    """
    if len(tied) == 1:
        return
    character, longest = tied[0][0], len(tied[0])
    same = dict.fromkeys(tied, 0)
    listed = {pairs[piece]: rank for rank, piece in enumerate(tied)}
    for length in range(2, 4 * longest) if all(set(piece) == {character} for piece in tied) else [0]:
        by_place = merged([character] * length, lambda left, right: same.get(left + right))
        by_list = merged([character] * length, lambda left, right: listed.get((left, right)))
        if by_place != by_list or not length:
            raise ConversionError(
                f"{name}: {len(tied)} pieces ({tied[0]!r}, {tied[1]!r}, …) have one score, so which of them "
                "is made first is not said by the model but by the text; `tokenizers` cannot do that"
            )


def _normalizers(normalizer: Any) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if normalizer.remove_extra_whitespaces:
        steps += [_replaced({"Regex": r"\A +"}, ""), _replaced({"Regex": " {2,}"}, " ")]
    if normalizer.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append(_replaced({"String": " "}, _SPACE))
    if normalizer.remove_extra_whitespaces:
        steps.append(_replaced({"Regex": rf"{_SPACE}+\z"}, ""))
    return steps


def _replaced(pattern: Mapping[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": dict(pattern), "content": content}


def _decoders(normalizer: Any) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = [
        _replaced({"String": _SPACE}, " "),
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if normalizer.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps


def _config(model: Any) -> dict[str, Any]:
    """The special tokens that the model names. A model that has a BOS token gets it before texts."""
    named: dict[str, Any] = {}
    for key, token_id in (
        ("bos_token", model.trainer.bos_id),
        ("eos_token", model.trainer.eos_id),
        ("pad_token", model.trainer.pad_id),
        ("unk_token", model.trainer.unk_id),
    ):
        if 0 <= token_id < len(model.pieces) and model.pieces[token_id].type in (_CONTROL, _UNKNOWN):
            named[key] = model.pieces[token_id].piece
    return {**named, "add_bos_token": "bos_token" in named}


def _reference(data: bytes) -> Callable[[Sequence[str]], list[list[int]]] | None:
    """The library itself, where it is installed."""
    try:
        import sentencepiece  # optional
    except ImportError:
        return None
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = processor.encode(list(texts), out_type=int)
        return ids

    return encode
