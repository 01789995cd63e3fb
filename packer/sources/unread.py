"""Words that would be left out: fields of usual names, beside those in use, that are not read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from packer.sources.parse import JOIN, roots
from packer.spec import Format

_SYSTEM = ("system", "system_prompt")
# What belongs to a question or an answer, by the names that data sets give it.
_PROMPTS = ("context", "passage", "instruction", "question", "query", "problem", "input")
_COMPLETIONS = ("completion", "response", "output", "answer", "solution")


def unread_warning(
    sample: Sequence[Mapping[str, Any]], format: Format, fields: Mapping[str, str], given: Collection[str]
) -> str | None:
    """What to tell where the first records hold words that nobody asked to leave out; None where they do not.

    A name has to say that it matters: ids, urls and the like are left out as they should be. fields: ours to
    theirs. given: those of ours that the user named, who has settled them.
    """
    known: list[str] = []
    if format == "messages":
        known += _SYSTEM
    if format == "prompt_completion" and "prompt" not in given:
        known += [*_SYSTEM, *_PROMPTS]
    if format == "prompt_completion" and "completion" not in given:
        known += _COMPLETIONS
    used = roots(fields)
    found = [name for name in known if name not in used and any(_words(name, record) for record in sample)]
    if not found:
        return None
    told = f"not read, though there are words in the first records: {', '.join(map(repr, found))}"
    if format == "messages":
        return f"{told}; if the model is to see them, put them into {fields['messages']!r} as a first message"
    ours = "completion" if found[0] in _COMPLETIONS else "prompt"
    whole = f"{ours}={found[0]}{JOIN}{fields[ours]}"
    return (
        f"{told}; the prompt is {fields['prompt']!r}, the completion {fields['completion']!r}. Name both in "
        f"source.fields, as they are or with what belongs to them, for example {whole} (--field {whole})"
    )


def _words(name: str, record: Mapping[str, Any]) -> bool:
    value = record.get(name)
    return isinstance(value, str) and bool(value.strip())
