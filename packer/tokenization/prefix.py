"""The first tokens of a long text without tokenizing the rest, exactly: where a text may be cut in two.

Byte-pair tokenizers split a text before they merge, by a regular expression that is run from left to right.
Between a letter and " x" (ASCII; a space and one more letter) every expression in _SPLITS ends one piece
and begins the next: none has a piece that holds a letter and then a space, no attempt at a piece that starts
before looks further than that space, and at the space " x…" is what matches. NFC leaves it alone, too. So the
tokens of a text that is cut there are those of its parts, end to end. Texts of other tokenizers are not cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_CUT = re.compile("[A-Za-z] [A-Za-z]")

_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = [
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*",
]
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
# Of GPT-4, Llama 3, Qwen; of GPT-4o; of Mistral's tekken; of DeepSeek (after digits and CJK are split off).
_SPLITS = {
    *(f"{_CONTRACTION}{_WORDS}{digits}{_SIGNS}{_END}" for digits in (r"\p{N}", r"\p{N}{1,3}")),
    "|".join([*(f"{cased}{_CONTRACTION}?" for cased in _CASED), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"])
    + _END,
    "|".join([*_CASED, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"]) + _END,
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
}
_LOCAL_SPLITS = {r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+"}  # pieces without letters and spaces of ASCII


def can_cut(document: Mapping[str, Any], added: Iterable[Any], control_words: Iterable[str]) -> bool:
    """Whether texts of this tokenizer may be cut at `next_cut`.

    document: its tokenizer.json. added: its tokens of that kind (tokenizers.AddedToken), which are looked for
    before anything else. control_words: what no piece of text may turn out to be, in a part that is not read.
    """
    model = document["model"]
    normalizers = {step.get("type") for step in steps(document.get("normalizer"), "normalizers")}
    if model.get("type") != "BPE" or model.get("dropout") or normalizers - {"NFC"}:
        return False
    if not _splits_at_words(steps(document.get("pre_tokenizer"), "pretokenizers")):
        return False
    if any(t.lstrip or t.rstrip or t.single_word or re.search("[A-Za-z] ", t.content) for t in added):
        return False
    known = {word for word in control_words if word in model["vocab"]}
    if not known or model.get("ignore_merges"):
        return not known
    merged = ("".join(pair) if isinstance(pair, list) else pair.replace(" ", "") for pair in model["merges"])
    return known.isdisjoint(merged) and all(len(word) > 1 for word in known)


def _splits_at_words(pre_tokenizers: list[dict[str, Any]]) -> bool:
    splits = 0
    for step in pre_tokenizers:
        if step.get("type") == "ByteLevel" and not step.get("add_prefix_space"):
            splits += bool(step.get("use_regex", True))  # GPT-2's
            continue
        pattern = step.get("pattern")
        expression = pattern.get("Regex") if isinstance(pattern, dict) else None
        if step.get("type") != "Split" or step.get("behavior") != "Isolated" or step.get("invert"):
            return False
        if expression in _SPLITS:
            splits += 1
        elif expression not in _LOCAL_SPLITS:
            return False
    return splits > 0


def steps(step: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a normaliser or pre-tokenizer, sequences laid flat."""
    if not isinstance(step, dict):
        return []
    if step.get("type") == "Sequence":
        return [inner for part in step[key] for inner in steps(part, key)]
    return [step]


def next_cut(text: str, at: int) -> int:
    """The first place from `at` on where `text` may be cut, in characters; its end where there is none."""
    found = _CUT.search(text, at) if at < len(text) else None
    return found.start() + 1 if found else len(text)
