"""Counters that add up, from one partition to the whole dataset.

Always: rows_in = rows_packed + rows_empty + rows_overlong + rows_rejected + rows_untrained, and
tokens_in + tokens_padding = tokens_packed + tokens_dropped. `Counters.check` says so.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packer.roles import unlearned_warnings

MAX_LISTED = 100  # rows left out that are listed by place, of each kind; all are counted
_UNPRINTED = {
    "system": "a system message",
    "tool": "tools or their results",
    "other": "messages of another role",
    "reasoning": "reasoning of the assistant",
}
PADDED_BATCH = 8  # mini-batch that `padded_fill` assumes where the spec names none


@dataclass(slots=True, kw_only=True)
class Counters:
    """What became of the rows and tokens of a partition, or of several together."""

    rows_in: int = 0
    rows_packed: int = 0
    rows_empty: int = 0  # no tokens
    rows_overlong: int = 0  # longer than max_tokens, left out by overlong="drop"
    rows_rejected: int = 0  # unreadable or of a wrong type, left out by on_bad_row="skip"
    rows_untrained: int = 0  # no token to train on, before or after a cut (a segment's first is none)
    rows_untrained_by_cut: int = 0  # those of rows_untrained that a cut left with nothing to train
    rows_truncated: int = 0  # packed, but cut
    rows_split: int = 0  # packed in more than one piece
    # Rows with words that the chat template does not print: a system message's, those of tools (schemas or
    # results), of another role, or the assistant's reasoning (reasoning_content and the like).
    rows_system_unprinted: int = 0
    rows_tool_unprinted: int = 0
    rows_other_unprinted: int = 0
    rows_reasoning_unprinted: int = 0
    tokens_in: int = 0  # tokens that were made; of a text far over max_tokens not all are
    bytes_cut: int = 0  # of such texts: the UTF-8 bytes behind, which truncation throws away untokenized
    tokens_packed: int = 0  # padding included
    tokens_dropped: int = 0
    tokens_padding: int = 0
    tokens_trained: int = 0
    num_packs: int = 0
    packs_untrained: int = 0  # packs without a trained token: of pieces of long prompts, say
    num_shards: int = 0
    num_fallbacks: int = 0  # partitions made anew by the reference, since the fast encoder gave other ids
    padded_tokens: int = 0  # what padding each mini-batch to its longest would have computed
    padded_real: int = 0  # the real tokens in them

    def add(self, other: Mapping[str, int]) -> None:
        """Add another's counts; what it does not count, it counts as 0."""
        for item in dataclasses.fields(self):
            setattr(self, item.name, getattr(self, item.name) + int(other.get(item.name, 0)))

    def check(self) -> None:
        """Raise AssertionError where rows or tokens do not add up: a bug, never the user's fault."""
        left = self.rows_empty + self.rows_overlong + self.rows_rejected + self.rows_untrained
        if self.rows_in != self.rows_packed + left:
            raise AssertionError(f"rows do not add up: {self}")
        if self.tokens_in + self.tokens_padding != self.tokens_packed + self.tokens_dropped:
            raise AssertionError(f"tokens do not add up: {self}")


def total(parts: Iterable[Mapping[str, Any]]) -> Counters:
    """The sum of the counters of commits."""
    every = list(parts)
    names = [item.name for item in dataclasses.fields(Counters)]
    return Counters(**{name: int(sum(part.get(name, 0) for part in every)) for name in names})


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if part * 100 >= whole > 0 else "under 1%"


def _listed(parts: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for part in parts:
        rows.extend(part.get(name, [])[: MAX_LISTED - len(rows)])
    return rows


def warnings_of(
    counters: Counters, max_tokens: int, minibatches: str | None = None, *, split: bool = False
) -> list[str]:
    """What should not pass unnoticed though the spec allows it: 1 % of the rows or more.

    `minibatches`: what is to be said of rows that were cut or left out under strategy "minibatch", instead.
    `split`: whether rows are cut into pieces, none of which is lost for its length.
    """
    long = f"are longer than max_tokens={max_tokens} and"
    by_cut = counters.rows_untrained_by_cut
    share = _percent(counters.tokens_dropped, counters.tokens_in)
    dropped = f"{counters.tokens_dropped:,} of {counters.tokens_in:,} tokens ({share}) were dropped"
    ways = "raise packing.max_tokens (--max-tokens)"
    cut = f"{long} were cut"
    if not split:
        ways += ", or set packing.overlong to split (--overlong split)"
    if by_cut and not split:
        ways += " or packing.truncate_side to left (--truncate-side left)"
    if by_cut:
        cut = f"{cut}, {by_cut:,} of them lost all that they train"
    if not counters.rows_truncated:
        cut = f"lost all that they train to a cut at max_tokens={max_tokens}"
    said = {
        f"{cut}, and {dropped}: {ways}": 0 if minibatches else counters.rows_truncated + by_cut,
        f"{long} were left out: raise it, or split (--overlong split)": (
            0 if minibatches else counters.rows_overlong
        ),
        "have nothing to train: not packed": counters.rows_untrained - by_cut,
        "have no tokens and were left out": counters.rows_empty,
        "could not be used and were left out; the report lists the first": counters.rows_rejected,
    }
    found = [minibatches] if minibatches else []
    for text, count in said.items():
        if count and 100 * count >= counters.rows_in:
            found.append(
                f"{count:,} of {counters.rows_in:,} rows ({_percent(count, counters.rows_in)}) {text}"
            )
    found += unprinted_warnings(
        {part: getattr(counters, f"rows_{part}_unprinted") for part in _UNPRINTED},
        counters.rows_in,
    )
    if counters.packs_untrained:
        found.append(
            f"{counters.packs_untrained:,} of {counters.num_packs:,} packs have nothing to train: pieces of "
            "long prompts; a step of such packs alone has loss 0"
        )
    if not counters.num_packs:
        found.append("no row was packed: there is nothing to stream")
    return found


def nothing_to_train(counters: Counters, max_tokens: int, roles: Mapping[str, int]) -> str:
    """Why a dataset is none: no row has anything to train. roles: as of `unlearned`."""
    found = [f"nothing to train: of {counters.rows_in} rows {counters.rows_untrained} have no token to train"]
    if by_cut := counters.rows_untrained_by_cut:
        found.append(
            f"{by_cut} of them lost what they train to a cut at max_tokens={max_tokens}: raise it, or set "
            "overlong to split or truncate_side to left"
        )
    found += unlearned_warnings(roles)
    if by_cut < counters.rows_untrained:
        found.append("look at `loss`, the labels, the roles of the messages and the chat template")
    return "; ".join(found)


def unlearned(parts: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Of commits: turns that train nothing though their role looks like the assistant's, by role."""
    found = Counter[str]()
    for part in parts:
        found.update(part.get("unlearned", {}))
    return dict(found)


def minibatch_warning(counters: Counters, max_tokens: int, minibatch_size: int, largest: int) -> str | None:
    """That mini-batches did not fit into their packs: any lost token breaks "the same loss as padding".

    `largest`: the max_tokens that holds the largest mini-batch uncut; 0 where it is not known.
    """
    by_cut = counters.rows_untrained_by_cut
    count = counters.rows_truncated + counters.rows_overlong + by_cut
    if not count:
        return None
    lost = f", {by_cut:,} of them with all that they train" if by_cut else ""
    # Texts far over max_tokens are not tokenized to their end, so the largest mini-batch takes more yet.
    least = "at least " if counters.bytes_cut else ""
    holds = f"{least}{largest}, which holds the largest" if largest else "what holds the largest"
    rows = f"{count:,} of {counters.rows_in:,} rows ({_percent(count, counters.rows_in)})"
    return (
        f"{rows} were cut or left out{lost}, "
        f"{counters.tokens_dropped:,} of {counters.tokens_in:,} tokens dropped: a mini-batch of "
        f"{minibatch_size} rows is one pack, and not all fit into max_tokens={max_tokens}, so the loss is "
        f"not that of padding. Raise packing.max_tokens to {holds} (packs take no more than they "
        "need), or lower packing.minibatch_size"
    )


def of_capacities(part: Mapping[str, Any], max_tokens: int) -> list[dict[str, int]]:
    """Packs (num_packs) and real tokens (num_tokens) of a commit, by the max_tokens they were made for.

    `max_tokens`: of all packs of a commit that does not say, as those of earlier releases do not.
    """
    if "capacities" in part:
        return list(part["capacities"])
    real = part.get("tokens_packed", 0) - part.get("tokens_padding", 0)
    return [{"max_tokens": max_tokens, "num_packs": part.get("num_packs", 0), "num_tokens": real}]


def _capacities(parts: Sequence[Mapping[str, Any]], capacities: Sequence[int]) -> list[dict[str, Any]]:
    found = {number: {"max_tokens": number, "num_packs": 0, "num_tokens": 0} for number in capacities}
    for part in parts:
        for one in of_capacities(part, capacities[-1]):
            for name in ("num_packs", "num_tokens"):
                found[one["max_tokens"]][name] += one[name]
    return [
        {**one, "fill": one["num_tokens"] / (one["num_packs"] * number) if one["num_packs"] else 0.0}
        for number, one in found.items()
    ]


def unprinted_warnings(counts: Mapping[str, int], num_rows: int) -> list[str]:
    """Warnings of what chat templates leave out, by part (of _UNPRINTED): any row is worth a word."""
    return [
        f"{counts[part]:,} of {num_rows:,} rows have {text} that the chat template does not print: these "
        "words are in no token; give a template that prints them (tokenizer.chat_template), or move them"
        for part, text in _UNPRINTED.items()
        if counts.get(part)
    ]


def beyond_model_warnings(count: int, model_max_length: int | None) -> list[str]:
    """A warning of segments that are longer than the tokenizer says that its model takes."""
    if not count or model_max_length is None:
        return []
    several = count > 1
    return [
        f"{count:,} segment{'s'[:several]} {'are' if several else 'is'} longer than the model takes, as "
        f"its tokenizer says (model_max_length {model_max_length}): it was not made for the positions behind "
        "that. Lower packing.max_tokens (--max-tokens) to it, unless the model was extended"
    ]


def report(
    parts: Sequence[Mapping[str, Any]],
    *,
    capacities: Sequence[int],
    warnings: Sequence[str] = (),
    minibatch_size: int | None = None,
    split: bool = False,
    model_max_length: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The report of a dataset, from the counters of its commits in order.

    `capacities`: max_tokens of the packs that there may be, rising. `warnings`: what was to be said before
    the work; what the counters say is added. `minibatch_size`: under strategy "minibatch". `split`: as of
    `warnings_of`. `model_max_length`: as of a Job.
    """
    counters = total(parts)
    counters.check()
    values = dataclasses.asdict(counters)
    cut = None
    if minibatch_size is not None:
        # Not among the counters: it is no sum. Commits of earlier releases lack it.
        largest = max((part.get("largest_minibatch", 0) for part in parts), default=0)
        cut = minibatch_warning(counters, capacities[-1], minibatch_size, largest)
    padded_tokens, padded_real = values.pop("padded_tokens"), values.pop("padded_real")
    real = counters.tokens_packed - counters.tokens_padding
    each = _capacities(parts, capacities)
    room = sum(one["num_packs"] * one["max_tokens"] for one in each)
    return {
        **values,
        "fill": real / room if room else 0.0,
        "lower_bound_packs": sum(-(-one["num_tokens"] // one["max_tokens"]) for one in each),
        "capacities": each,  # max_tokens, num_packs, num_tokens (real), fill
        "padded_fill": padded_real / padded_tokens if padded_tokens else 0.0,
        "rejected": _listed(parts, "rejected"),  # file, line, unit, reason
        "overlong": _listed(parts, "overlong"),  # file, line, unit, example, num_tokens
        "fallbacks": _listed(parts, "fallbacks"),  # partition, reason
        "warnings": [
            *warnings,
            *warnings_of(counters, capacities[-1], cut, split=split),
            *unlearned_warnings(unlearned(parts)),
            *beyond_model_warnings(sum(part.get("beyond_model", 0) for part in parts), model_max_length),
        ],
        **more,
    }
