"""Rows to token ids with a loss mask, in batches on flat arrays.

    text                [BOS] words [EOS]                 all trained
    prompt_completion   [BOS] prompt completion [EOS]     completion and EOS trained (loss completion)
    messages            what the chat template prints     the assistant's turns trained (loss assistant), or
                                                          the last of them (loss last_assistant)
    tokens              the ids as they are               as the labels say

Prompt and completion are encoded apart: the border is a border of tokens, as it is at inference. Words
never make control tokens; only templates, BOS and EOS do. A row that cannot be rendered becomes an
entry of `errors` and has length 0; an empty one has length 0 as well.

Errors: RenderError (a ValueError) where the job itself cannot be rendered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.render.chats import Chat, Chats
from packer.render.conversations import told
from packer.render.places import covered, in_bytes, num_bytes
from packer.render.ready import ready_rows
from packer.render.templates import RenderError, RowProblem
from packer.tokenization import Located, Tokenizer, TokenizerError

__all__ = ["LOSSES", "RenderError", "Rendered", "Renderer"]

# What "auto" is, first, and what else goes with each format.
LOSSES = {
    "text": ("all",),
    "prompt_completion": ("completion", "all"),
    "messages": ("assistant", "last_assistant", "all"),
    "tokens": ("labels", "all"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rendered:
    """The rows of a batch as tokens, row after row.

    input_ids: (N,) int32. loss_mask: (N,) bool, what the source wants trained (first tokens of
    segments are left out when packing). lengths: (k,) int64, tokens of each row. errors: position in
    the batch and reason of each row that could not be rendered. bytes_cut: UTF-8 bytes of text behind the
    tokens that were asked for, which were not tokenized. unlearned: turns that train nothing though their
    role looks like the assistant's, by role. unprinted: rows in which words of a part (system,
    tool, other, reasoning) are missing, since the chat template does not print them.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    errors: list[tuple[int, str]]
    bytes_cut: int = 0
    unprinted: Mapping[str, int] = field(default_factory=dict)
    unlearned: Mapping[str, int] = field(default_factory=dict)


class Renderer:
    """Renders rows of one format for one job.

    tokenizer: None for ready ids that bring no tokenizer. fields: our name to the source's name, for
    messages about rows. loss, add_bos, add_eos: as in the spec. first_tokens: of a text only so many are
    of use, and what comes after them may be left out (not so in the other formats).
    Raises RenderError or TokenizerError where they do not go together.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        format: str,
        fields: Mapping[str, str],
        loss: str = "auto",
        add_bos: str | bool = "auto",
        add_eos: str | bool = "auto",
        first_tokens: int | None = None,
    ) -> None:
        if format not in LOSSES:
            raise RenderError(f"source.format: one of {', '.join(LOSSES)} is required, found {format!r}")
        allowed = LOSSES[format]
        if loss != "auto" and loss not in allowed:
            raise RenderError(
                f"loss: format {format} goes with auto or {' or '.join(allowed)}, found {loss!r}; "
                "change loss or source.format"
            )
        self._given = tokenizer
        self._vocab_size = tokenizer.vocab_size if tokenizer is not None else 1 << 31
        self._format = format
        self._fields = dict(fields)
        self._first_tokens = first_tokens
        self._loss = allowed[0] if loss == "auto" else loss
        words = format in ("text", "prompt_completion")
        if tokenizer is None and (format != "tokens" or True in (add_bos, add_eos)):
            raise RenderError("tokenizer.path: a tokenizer is required for all but ready ids, found none")
        adds_bos, bos_id = (tokenizer.adds_bos, tokenizer.bos_id) if tokenizer else (False, None)
        eos_id = tokenizer.eos_id if tokenizer else None
        self._bos = _settled("bos", add_bos, adds_bos and words, bos_id, format)
        self._eos = _settled("eos", add_eos, eos_id is not None and words, eos_id, format)
        self._warnings: list[str] = []
        self._chats: Chats | None = None
        if format == "messages":
            self._chats = Chats(
                self._tokenizer,
                masked=self._loss != "all",
                last_only=self._loss == "last_assistant",
                names=self._fields,
            )
            self._warnings += self._chats.warnings
        elif words and self._eos is None and add_eos == "auto":
            self._warnings.append(
                "the tokenizer names no EOS token, so none ends an example: a model trained on this does not "
                "learn to stop; give the tokenizer's whole folder, with tokenizer_config.json"
            )

    @property
    def _tokenizer(self) -> Tokenizer:
        assert self._given is not None  # checked when made: only ready ids do without
        return self._given

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What encodes; None for ready ids that bring none."""
        return self._given

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a careful colleague would say of this job, before any row is read."""
        return tuple(self._warnings)

    def render(self, rows: Sequence[Mapping[str, Any]]) -> Rendered:
        """Render a batch (some thousand rows at most: all its tokens are in memory)."""
        errors: list[tuple[int, str]] = []
        bytes_cut, unprinted, unlearned = 0, Counter[str](), Counter[str]()
        if self._format == "text":
            ids, mask, lengths, bytes_cut = self._texts(rows, errors)
        elif self._format == "messages":
            ids, mask, lengths = self._messages(rows, errors, unprinted, unlearned)
        elif self._format == "tokens":
            ids, mask, lengths = self._tokens(rows, errors)
        else:
            ids, mask, lengths = self._prompt_completions(rows, errors)
        return Rendered(
            input_ids=ids,
            loss_mask=mask,
            lengths=lengths,
            errors=sorted(errors),
            bytes_cut=bytes_cut,
            unprinted=dict(unprinted),
            unlearned=dict(unlearned),
        )

    # -------------------------------------------------------------- text

    def _all_words(
        self, rows: Sequence[Mapping[str, Any]], fields: Sequence[str], errors: list[tuple[int, str]]
    ) -> list[str]:
        """The texts of each row, row after row; empty ones for a row with an error."""
        texts: list[Any] = [row.get(field) for row in rows for field in fields]
        if set(map(type, texts)) <= {str} and all(_is_valid(text) for text in texts):
            return texts  # as almost always
        texts = []
        for position, row in enumerate(rows):
            try:
                texts += [self._words(row, field) for field in fields]
            except RowProblem as problem:
                errors.append((position, str(problem)))
                texts += [""] * len(fields)
        return texts

    def _words(self, row: Mapping[str, Any], field: str) -> str:
        value = row.get(field)
        name = self._fields.get(field, field)
        if not isinstance(value, str):
            found = told(value) if field in row else "no such field in the row"
            raise RowProblem(f"field {name}: a text is required, found {found}")
        return _valid(value, name)

    def _checked(
        self,
        ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        errors: list[tuple[int, str]],
        texts_per_row: int,
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids and lengths (rows, texts_per_row), without rows whose words make control tokens."""
        lengths = np.diff(offsets).reshape(-1, texts_per_row)
        forged = self._tokenizer.is_control[ids]
        if forged.any():
            bad = (
                np.unique(np.searchsorted(offsets, np.flatnonzero(forged), side="right") - 1) // texts_per_row
            )
            reason = "the tokenizer makes control tokens out of these plain words"
            errors += [(int(row), reason) for row in np.unique(bad)]
            keep = np.repeat(~np.isin(np.arange(len(lengths)), bad), lengths.sum(axis=1))
            ids, lengths = ids[keep], lengths.copy()
            lengths[bad] = 0
        return ids, lengths

    def _texts(
        self, rows: Sequence[Mapping[str, Any]], errors: list[tuple[int, str]]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64], int]:
        texts = self._all_words(rows, ["text"], errors)
        if self._first_tokens is None:
            (ids, offsets), bytes_cut = self._tokenizer.encode(texts), 0
        else:
            ids, offsets, bytes_cut = self._tokenizer.encode_starts(texts, self._first_tokens)
        ids, lengths = self._checked(ids, offsets, errors, 1)
        lengths = lengths[:, 0]
        mask = np.ones(len(ids), np.bool_)
        return (*self._framed(ids, mask, lengths, lengths > 0, bos_trained=True), bytes_cut)

    def _prompt_completions(
        self, rows: Sequence[Mapping[str, Any]], errors: list[tuple[int, str]]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]:
        texts = self._all_words(rows, ["prompt", "completion"], errors)
        ids, lengths = self._checked(*self._tokenizer.encode(texts), errors, 2)
        everything = self._loss == "all"
        mask = np.repeat(np.tile([everything, True], len(rows)), lengths.ravel())
        total = lengths.sum(axis=1)
        return self._framed(ids, mask, total, total > 0, bos_trained=everything)

    def _framed(
        self,
        ids: NDArray[np.int32],
        mask: NDArray[np.bool_],
        lengths: NDArray[np.int64],
        framed: NDArray[np.bool_],
        *,
        bos_trained: bool,
        eos_trained: NDArray[np.bool_] | None = None,
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]:
        """BOS and EOS around the rows in `framed` (k,), unless the row has them already."""
        if self._bos is None and self._eos is None:
            return ids, mask, lengths
        stops = np.cumsum(lengths)
        before = framed & (self._bos is not None)
        after = framed & (self._eos is not None)
        full = lengths > 0
        if self._format in ("messages", "tokens") and len(ids):  # they may be there already
            before &= ~full | (ids[np.where(full, stops - lengths, 0)] != self._bos)
            after &= ~full | (ids[np.where(full, stops - 1, 0)] != self._eos)
        total = lengths + before + after
        ends = np.cumsum(total)
        first, last = (ends - total)[before], (ends - 1)[after]
        inside = np.ones(int(ends[-1]) if len(ends) else 0, np.bool_)
        inside[first] = inside[last] = False
        new_ids, new_mask = np.empty(len(inside), np.int32), np.empty(len(inside), np.bool_)
        new_ids[inside], new_mask[inside] = ids, mask
        new_ids[first], new_mask[first] = self._bos or 0, bos_trained
        new_ids[last], new_mask[last] = self._eos or 0, True if eos_trained is None else eos_trained[after]
        return new_ids, new_mask, total

    # -------------------------------------------------------------- messages

    def _messages(
        self,
        rows: Sequence[Mapping[str, Any]],
        errors: list[tuple[int, str]],
        unprinted: Counter[str],
        unlearned: Counter[str],
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]:
        assert self._chats is not None
        chats: list[Chat] = []
        for position, row in enumerate(rows):
            try:
                chat = self._chats.chat(row)
                _valid(chat.text, self._fields.get("messages", "messages"))
                chats.append(chat)
                unprinted.update(chat.unprinted)
                unlearned.update(chat.unlearned)
            except RowProblem as problem:
                errors.append((position, str(problem)))
                chats.append(Chat(text="", trained=[], words=[], ends_with_assistant=False))
        located = self._tokenizer.encode_chats([chat.text for chat in chats])
        base = np.concatenate([[0], np.cumsum([num_bytes(chat.text) for chat in chats], dtype=np.int64)])
        if any(chat.words for chat in chats):
            located = self._plain_words(located, chats, base, errors)
        lengths = np.diff(located.offsets)
        if self._loss == "all":
            mask = np.ones(len(located.ids), np.bool_)
        else:
            spans = [
                (base[i] + start, base[i] + stop)
                for i, chat in enumerate(chats)
                for start, stop in in_bytes(chat.text, chat.trained)
            ]
            mask = covered(located, np.array(spans, np.int64).reshape(-1, 2))
        answered = np.array([chat.ends_with_assistant for chat in chats], np.bool_)
        everything = self._loss == "all"
        return self._framed(
            located.ids,
            mask,
            lengths,
            lengths > 0,
            bos_trained=everything,
            eos_trained=answered | everything,
        )

    def _plain_words(
        self, located: Located, chats: list[Chat], base: NDArray[np.int64], errors: list[tuple[int, str]]
    ) -> Located:
        """Put plain tokens in the place of control tokens that someone's words have made."""
        ids, starts, ends = [], [], []
        for i, chat in enumerate(chats):
            row = slice(located.offsets[i], located.offsets[i + 1])
            parts = (located.ids[row], located.starts[row], located.ends[row])
            if chat.words:
                try:
                    parts = self._without_forged(chat, parts, int(base[i]))
                except TokenizerError as error:
                    errors.append((i, str(error)))
                    parts = (parts[0][:0], parts[1][:0], parts[2][:0])
            ids.append(parts[0])
            starts.append(parts[1])
            ends.append(parts[2])
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids], dtype=np.int64)])
        return Located(
            ids=np.concatenate(ids), offsets=offsets, starts=np.concatenate(starts), ends=np.concatenate(ends)
        )

    def _without_forged(
        self, chat: Chat, parts: tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]], base: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        ids, starts, ends = parts
        data = chat.text.encode()
        control = self._tokenizer.is_control[ids]
        forged = np.zeros(len(ids), np.bool_)
        for start, stop in in_bytes(chat.text, chat.words):
            forged |= control & (starts < base + stop) & (ends > base + start)
        words = [
            self._tokenizer.encode_plain_word(data[starts[at] - base : ends[at] - base].decode())
            for at in np.flatnonzero(forged)
        ]
        if not words:
            return parts
        counts = np.ones(len(ids), np.int64)
        counts[forged] = [len(word) for word in words]
        origin = np.repeat(np.arange(len(ids)), counts)  # the old token that each new one comes from
        new_ids = ids[origin]
        new_ids[forged[origin]] = np.concatenate(words)
        return new_ids, starts[origin], ends[origin]

    # -------------------------------------------------------------- tokens

    def _tokens(
        self, rows: Sequence[Mapping[str, Any]], errors: list[tuple[int, str]]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]:
        flat, mask, lengths, problems = ready_rows(
            rows, self._vocab_size, self._fields, trains_all=self._loss == "all"
        )
        errors += problems
        return self._framed(flat, mask, lengths, lengths > 0, bos_trained=self._loss == "all")


def _settled(name: str, wanted: str | bool, auto: bool, known: int | None, format: str) -> int | None:
    if wanted is True and known is None:
        raise TokenizerError(
            f"tokenizer.add_{name}: true requires a tokenizer that names its {name.upper()} token, this one "
            f"names none; give its whole folder (tokenizer_config.json says {name}_token), or set auto"
        )
    return known if (auto if wanted == "auto" else wanted) else None


def _is_valid(text: str) -> bool:
    """Whether it is a Unicode text, without lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _valid(text: str, name: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowProblem(
                f"field {name}: a text of Unicode characters is required, found a lone surrogate "
                f"(U+{ord(text[error.start]):04X}) at character {error.start}"
            ) from error
    return text
