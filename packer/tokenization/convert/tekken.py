"""Mistral's tekken.json: ranks of tokens behind special tokens, which have the first ids.

As mistral-common reads it: of the tokens only so many count as the vocabulary's size leaves room for, and
special tokens that are not listed are <SPECIAL_n>. It holds no chat template.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from packer.tokenization.convert.ranks import byte_pair_model, checked_ranks
from packer.tokenization.convert.tiktoken import check_pattern, reference
from packer.tokenization.convert.values import ConversionError, Converted, byte_level, document, split

# Of files up to version 7, which do not list them (id 0 on).
_EARLY = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_MOST_SPECIAL = 1 << 20
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def is_tekken(document: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a tekken.json."""
    config = document.get("config")
    return isinstance(config, Mapping) and "pattern" in config and isinstance(document.get("vocab"), list)


def convert_tekken(source: Mapping[str, Any], name: str) -> Converted:
    """The tokenizer of a tekken.json. Raises ConversionError."""
    if not is_tekken(source):
        raise ConversionError(
            f"{name}: config with a pattern, and vocab are required, found other keys; copy it again"
        )
    try:
        config, vocab = source["config"], source["vocab"]
        size, num_special = int(config["default_vocab_size"]), int(config["default_num_special_tokens"])
        pattern = config["pattern"]
        if not 0 <= num_special <= min(size, _MOST_SPECIAL):
            raise ValueError(f"default_vocab_size {size}, default_num_special_tokens {num_special}")
        ranks = checked_ranks(
            [
                (base64.b64decode(token["token_bytes"]), int(token["rank"]))
                for token in vocab[: size - num_special]
            ]
        )
        listed = source.get("special_tokens")
        special = (
            {int(token["rank"]): str(token["token_str"]) for token in listed}
            if listed is not None
            else dict(enumerate(_EARLY))
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ConversionError):
            raise
        raise ConversionError(f"{name} is not as mistral-common reads it: {error!r}") from error
    whole = len(ranks) == size - num_special and set(ranks.values()) == set(range(len(ranks)))
    if not whole or not set(special) <= set(range(num_special)):
        raise ConversionError(
            f"{name} must hold ranks 0 to {size - num_special - 1:,} and special tokens 0 to "
            f"{num_special - 1:,}, found others; copy the file again"
        )
    check_pattern(pattern, f"pattern of {name}")
    special = {i: f"<SPECIAL_{i}>" for i in range(num_special)} | special
    model = byte_pair_model(ranks, first_id=num_special, special=special)
    known = set(special.values())
    return Converted(
        document=document(
            model,
            added=[(i, text, True) for i, text in special.items()],
            pre_tokenizers=[split(pattern), byte_level(use_regex=False)],
            decoders=[byte_level(use_regex=False)],
        ),
        config={
            **{key: text for key, text in _NAMED.items() if text in known},
            "add_bos_token": "<s>" in known,
        },
        reference=reference(pattern, ranks, first_id=num_special),
    )
