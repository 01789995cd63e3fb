"""tiktoken files: a line a token, its bytes in base64 and its rank.

They say neither by which expression texts are split, nor what special tokens there are. Both are known here
for the published encodings (FAMILIES); for others, tokenizer_config.json beside the file has to say them:
`pat_str` (as tiktoken calls it), and the special tokens in `added_tokens_decoder`.
"""

from __future__ import annotations

import base64
import binascii
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from packer.tokenization.convert.ranks import byte_pair_model, checked_ranks
from packer.tokenization.convert.values import (
    ConversionError,
    Converted,
    added_tokens,
    byte_level,
    document,
    split,
)

_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END
)


def _words(digits: str) -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_END}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A published encoding: how it splits, and its special tokens, {text: id}."""

    name: str
    pattern: str
    special: Mapping[str, int]
    bos: str | None = None
    eos: str | None = None
    nfc: bool = False  # texts are brought to NFC first


def _numbered(start: int, *texts: str) -> dict[str, int]:
    return {text: start + i for i, text in enumerate(texts)}


def _reserved(start: int, stop: int, name: str = "reserved_special_token") -> list[str]:
    return [f"<|{name}_{i}|>" for i in range(start, stop)]


_LLAMA3 = _numbered(
    128000,
    *("<|begin_of_text|>", "<|end_of_text|>", *_reserved(0, 2), "<|finetune_right_pad_id|>", "<|step_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
    *_reserved(2, 246),
)
_LLAMA4_NAMED = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>"),
    *_reserved(0, 6, "text_post_train_reserved_special_token"),
    *("<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>"),
    *_reserved(8, 69, "text_post_train_reserved_special_token"),
    *("<|image_start|>", "<|image_end|>", *_reserved(0, 2, "vision_reserved_special_token")),
    *("<|tile_x_separator|>", "<|tile_y_separator|>", *_reserved(2, 6, "vision_reserved_special_token")),
    *("<|image|>", *_reserved(6, 7, "vision_reserved_special_token"), "<|patch|>"),
    *_reserved(7, 1048, "vision_reserved_special_token"),
    *_reserved(0, 8, "reasoning_reserved_special_token"),
    *("<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>"),
)
_END_OF_TEXT = "<|endoftext|>"
_FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")

# By number of ranks.
FAMILIES = {
    50256: Family(name="r50k_base", pattern=_GPT2, special={_END_OF_TEXT: 50256}, eos=_END_OF_TEXT),
    50280: Family(name="p50k_base", pattern=_GPT2, special={_END_OF_TEXT: 50256}, eos=_END_OF_TEXT),
    100256: Family(
        name="cl100k_base",
        pattern=_words(r"\p{N}{1,3}"),
        special=_numbered(100257, _END_OF_TEXT, *_FIM) | {"<|endofprompt|>": 100276},
        eos=_END_OF_TEXT,
    ),
    128000: Family(
        name="Llama 3",
        pattern=_words(r"\p{N}{1,3}"),
        special=_LLAMA3,
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
    ),
    151643: Family(
        name="Qwen",
        pattern=_words(r"\p{N}"),
        special=_numbered(
            151643, _END_OF_TEXT, "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))
        ),
        eos=_END_OF_TEXT,
        nfc=True,
    ),
    199998: Family(
        name="o200k_base",
        pattern=_O200K,
        special={_END_OF_TEXT: 199999, "<|endofprompt|>": 200018},
        eos=_END_OF_TEXT,
    ),
    200000: Family(
        name="Llama 4",
        pattern=_O200K,
        special=_numbered(200000, *_LLAMA4_NAMED, *_reserved(0, 2048 - len(_LLAMA4_NAMED))),
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
    ),
}

# What `tokenizers`' expressions (Oniguruma's) read otherwise than tiktoken's (fancy-regex's): possessive
# counts, and line ends for text ends.
_READ_OTHERWISE = re.compile(r"(?<!\\)(?:[*+?]\+|\{\d+(?:,\d*)?\}\+|\$|(?<!\[)\^)")


def is_tiktoken(data: bytes) -> bool:
    """Whether a file is one of tiktoken's, by its first line."""
    return re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", data[:1024]) is not None


def convert_tiktoken(data: bytes, name: str, config: Mapping[str, Any]) -> Converted:
    """The tokenizer of a tiktoken file. config: its tokenizer_config.json. Raises ConversionError."""
    ranks = checked_ranks(
        [_line(line, i, name) for i, line in enumerate(data.splitlines(), 1) if line.strip()]
    )
    family = _family(len(ranks), name, config)
    specials = {"bos_token": family.bos, "eos_token": family.eos}
    return Converted(
        document=document(
            byte_pair_model(ranks, special={i: text for text, i in family.special.items()}),
            added=[(token_id, text, True) for text, token_id in family.special.items()],
            normalizers=[{"type": "NFC"}] if family.nfc else [],
            pre_tokenizers=[split(family.pattern), byte_level(use_regex=False)],
            decoders=[byte_level(use_regex=False)],
        ),
        config={
            **{key: text for key, text in specials.items() if text is not None},
            "add_bos_token": family.bos is not None,
        },
        reference=reference(family.pattern, ranks, nfc=family.nfc),
    )


def _line(line: bytes, number: int, name: str) -> tuple[bytes, int]:
    try:
        token, rank = line.split()
        return base64.b64decode(token, validate=True), int(rank)
    except (ValueError, binascii.Error) as error:
        raise ConversionError(
            f"{name}: line {number} must be a token in base64 and its rank, found others; copy it again"
        ) from error


def _family(num_ranks: int, name: str, config: Mapping[str, Any]) -> Family:
    if "pat_str" in config:
        pattern = config["pat_str"]
        check_pattern(pattern, "pat_str of tokenizer_config.json")
        special = {token["content"]: i for i, token in added_tokens(config).items() if token.get("special")}
        return Family(name=name, pattern=pattern, special=special)
    if num_ranks not in FAMILIES:
        known = ", ".join(f"{family.name} ({num:,})" for num, family in FAMILIES.items())
        raise ConversionError(
            f"{name}: a tiktoken file does not say how texts are split, and by its number of ranks, "
            f"{num_ranks:,}, it is none of those known here: {known}; say it in tokenizer_config.json beside "
            "the file: pat_str (the regular expression) and added_tokens_decoder (the special tokens)"
        )
    return FAMILIES[num_ranks]


def check_pattern(pattern: Any, where: str) -> None:
    """Raise ConversionError for what is no expression, or that `tokenizers` reads otherwise than tiktoken."""
    if not isinstance(pattern, str):
        raise ConversionError(
            f"{where}: a regular expression is required, found {pattern!r:.60}; write it so"
        )
    try:
        tokenizers.Regex(pattern)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ConversionError(
            f"{where}: a regular expression is required, found {pattern[:60]!r} ({error}); "
            "copy the file again"
        ) from error
    found = _READ_OTHERWISE.search(pattern)
    if found:
        raise ConversionError(
            f"{where}: an expression without possessive counts and without $ and ^ is required, since "
            f"`tokenizers` reads them otherwise, found {found[0]!r} at character {found.start()}; write it so"
        )


def reference(
    pattern: str, ranks: Mapping[bytes, int], *, first_id: int = 0, nfc: bool = False
) -> Callable[[Sequence[str]], list[list[int]]] | None:
    """tiktoken's own encoder, where it is installed."""
    try:
        import tiktoken  # optional
    except ImportError:
        return None
    try:
        encoding = tiktoken.Encoding(
            name="padfree", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={}
        )
    except ValueError as error:  # an expression that its own library does not read
        raise ConversionError(
            f"an expression that tiktoken reads is required, found {pattern[:60]!r} ({error}); write it so"
        ) from error

    def encode(texts: Sequence[str]) -> list[list[int]]:
        texts = [unicodedata.normalize("NFC", text) for text in texts] if nfc else texts
        return [[first_id + i for i in encoding.encode_ordinary(text)] for text in texts]

    return encode
