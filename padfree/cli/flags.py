"""Fields of a spec as the command line's user knows them: errors name the field, and the option beside it."""

from __future__ import annotations

import re

FLAGS = {
    "source.paths": "SOURCE",
    "source.format": "--format",
    "source.fields": "--field",
    "source.on_bad_row": "--on-bad-row",
    "tokenizer.path": "--tokenizer",
    "tokenizer.chat_template": "--chat-template",
    "tokenizer.add_bos": "--add-bos",
    "tokenizer.add_eos": "--add-eos",
    "packing.strategy": "--strategy",
    "packing.max_tokens": "--max-tokens",
    "packing.overlong": "--overlong",
    "packing.truncate_side": "--truncate-side",
    "packing.min_piece": "--min-piece",
    "packing.scope": "--scope",
    "packing.balance": "--balance",
    "packing.minibatch_size": "--minibatch-size",
    "packing.step_size": "--step-size",
    "packing.segment_multiple": "--segment-multiple",
    "packing.pack_multiple": "--pack-multiple",
    "loss": "--loss",
    "shuffle_seed": "--shuffle-seed",
    "name": "--name",
}

_DOTTED = "|".join(re.escape(field) for field in FLAGS if "." in field)
_PLAIN = "|".join(field for field in FLAGS if "." not in field)
# A dotted name anywhere but in a path; a plain one, which is a word like others, only as what is to blame.
_FIELD = re.compile(rf"(?<![\w./-])(?:{_DOTTED})(?!\w|\.\w)|^(?:{_PLAIN})(?=: )")


def with_flags(text: str) -> str:
    """The text with its option behind each field of a spec, where that is named first and has none yet."""
    told: set[str] = set()

    def shown(match: re.Match[str]) -> str:
        field = match[0]
        if field in told:
            return field
        told.add(field)
        behind = text[match.end() :]
        if behind.startswith((f" ({FLAGS[field]}", f", {FLAGS[field]}")):
            return field
        return f"{field} ({FLAGS[field]})"

    return _FIELD.sub(shown, text)
