"""Texts to token ids, in batches and on flat arrays.

A Tokenizer is a bundle (packer.tokenization.bundle) at work:
`encode` for words (control words in them stay plain text), `encode_chats` for rendered
conversations (control words are the template's control tokens) with each token's place in the text.

A *control word* is the text of an added token marked special: `<|im_end|>`, `</s>`. Added tokens that
are not special (`<think>`) are words of the vocabulary like others, in whoever's mouth.

Errors: TokenizerError (a ValueError), permanent.
"""

from __future__ import annotations

import itertools
import os
import threading
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from packer.tokenization.bundle import Bundle, TokenizerError
from packer.tokenization.convert.values import MODEL_NAME, ConversionError, added_tokens, token_ids
from packer.tokenization.fast import CheckedEncoder
from packer.tokenization.pieces import MissingLibrary, PieceEncoder
from packer.tokenization.prefix import can_cut, next_cut
from packer.tokenization.token_bytes import TokenBytes, token_bytes

__all__ = ["Bundle", "Located", "Tokenizer", "TokenizerError"]

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# One call of `tokenizers` holds some 150 bytes a token until its ids are taken out.
_CALL_CHARACTERS = 1 << 20
# More than most texts have, so that one look at a text's beginning is enough.
_CHARACTERS_PER_TOKEN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Token ids of a batch of texts, and where each token lies.

    ids: (N,) int32, text after text. offsets: (n + 1,) int64, text i is ids[offsets[i]:offsets[i + 1]].
    starts, ends: (N,) int64, bytes in the UTF-8 of all texts laid end to end.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class Tokenizer:
    """A Hugging Face `tokenizers` tokenizer (or a SentencePiece model: pieces.py), with its settings.

    bos_id, eos_id, pad_id: None where unknown. adds_bos: the tokenizer itself puts BOS before a text.
    Safe to use from several threads, and in children made by fork or spawn.
    """

    def __init__(self, bundle: Bundle) -> None:
        # Its thread pool does not survive a fork, and padfree runs one worker a core.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.bundle = bundle
        self._lock = threading.Lock()
        self._pieces: PieceEncoder | None = None
        if MODEL_NAME in bundle.files:
            try:
                self._pieces = PieceEncoder(bundle.files[MODEL_NAME])
            except MissingLibrary as error:
                raise TokenizerError(f"tokenizer.path: {error}") from error
        self._config = bundle.document("tokenizer_config.json")
        try:
            self._backend = tokenizers.Tokenizer.from_str(bundle.files["tokenizer.json"].decode())
        except Exception as error:  # `tokenizers` raises bare Exception
            raise TokenizerError(
                f"tokenizer.path: tokenizer.json must be one of the `tokenizers` library: {error}; "
                "save it again with a current release"
            ) from error
        # Both may be baked into the file, and would cut or fill every text.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens = self._named_tokens()
        self._add_tokens()
        added = self._backend.get_added_tokens_decoder()
        self.control_words: dict[str, int] = {t.content: i for i, t in sorted(added.items()) if t.special}
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        before, after = self._frame()
        self.bos_id = self._id("bos_token", before)
        self.eos_id = self._id("eos_token", after)
        self.pad_id = self._id("pad_token", None)
        configured = self._config.get("add_bos_token")
        adds = configured if isinstance(configured, bool) else before is not None and before == self.bos_id
        self.adds_bos: bool = adds and self.bos_id is not None
        # (vocab_size,) bool: ids that words must never give. The unknown word's is what words may give.
        self.is_control = np.zeros(max(self.vocab_size, 1), np.bool_)
        document = bundle.document("tokenizer.json")
        unknown = self.special_tokens.get("unk_token") or document["model"].get("unk_token")
        self.is_control[[i for word, i in self.control_words.items() if word != unknown]] = True
        # Whether texts may be cut before they are encoded (packer.tokenization.prefix).
        words = [word for word, i in self.control_words.items() if self.is_control[i]]
        self._can_cut = can_cut(document, added.values(), words)
        self._plain_words: dict[str, NDArray[np.int32]] = {}
        self._encoder = CheckedEncoder(
            self._encode_slowly, self._backend.to_str, [token.content for token in added.values()]
        )

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[Bundle]]:
        return Tokenizer, (self.bundle,)  # a spawned child starts its own

    def _named_tokens(self) -> dict[str, str]:
        """Named special tokens, {"eos_token": "</s>", …}: what a chat template may print."""
        named: dict[str, str] = {}
        for document in (self.bundle.document("special_tokens_map.json"), self._config):
            extra = document.get("extra_special_tokens")
            pairs = {name: document.get(name) for name in _NAMED_TOKENS}
            if isinstance(extra, Mapping):
                pairs |= extra
            for name, value in pairs.items():
                text = _token_text(value)
                if text is not None:
                    named[name] = text
        return named

    def _add_tokens(self) -> None:
        """Tokens that only the configuration files know, or know to be special."""
        wanted: dict[int, tokenizers.AddedToken] = {}
        try:
            numbered = token_ids(self.bundle.document("added_tokens.json"), "added_tokens.json")
            decoder = added_tokens(self._config)
        except ConversionError as error:
            raise TokenizerError(f"tokenizer.path: {error}") from error
        wanted |= {i: tokenizers.AddedToken(text, normalized=False) for text, i in numbered.items()}
        for token_id, value in decoder.items():
            options = {k: v for k, v in value.items() if k not in ("content", "__type")}
            try:
                wanted[token_id] = tokenizers.AddedToken(value["content"], **options)
            except TypeError as error:
                raise TokenizerError(
                    f"tokenizer.path: tokenizer_config.json: added_tokens_decoder: token {token_id} must be "
                    f"as the `tokenizers` library writes it ({error}); copy the file again"
                ) from error
        for token_id, token in sorted(wanted.items()):
            known = self._backend.token_to_id(token.content)
            if known is None or (token.special and not self._is_special(known)):
                add = self._backend.add_special_tokens if token.special else self._backend.add_tokens
                add([token])
            if self._backend.token_to_id(token.content) != token_id:
                raise TokenizerError(
                    f"tokenizer.path: the configuration gives {token.content!r} the id {token_id}, "
                    f"tokenizer.json gives it {self._backend.token_to_id(token.content)}; "
                    "take both files from one tokenizer"
                )
        more = [*self.special_tokens.values()]
        for document in (self.bundle.document("special_tokens_map.json"), self._config):
            for name in ("additional_special_tokens", "extra_special_tokens"):
                listed = document.get(name)
                more += [t for t in map(_token_text, listed) if t] if isinstance(listed, list) else []
        for text in more:
            known = self._backend.token_to_id(text)
            if known is None or not self._is_special(known):
                self._backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False)])

    def _is_special(self, token_id: int) -> bool:
        token = self._backend.get_added_tokens_decoder().get(token_id)
        return token is not None and token.special

    def _frame(self) -> tuple[int | None, int | None]:
        """What the post-processor puts before and after a text; None where nothing or several."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        framed = self._backend.encode("a").ids
        extra = len(framed) - len(bare)
        for num_before in range(extra + 1):
            if framed[num_before : num_before + len(bare)] == bare:
                before, after = framed[:num_before], framed[num_before + len(bare) :]
                return (
                    before[0] if len(before) == 1 else None,
                    after[0] if len(after) == 1 else None,
                )
        return None, None

    def _id(self, name: str, default: int | None) -> int | None:
        text = self.special_tokens.get(name)
        return self._backend.token_to_id(text) if text is not None else default

    @property
    def model_max_length(self) -> int | None:
        """The tokens that the model takes at most, as tokenizer_config.json says; None where it says nothing.

        transformers writes 1e30 for that.
        """
        length = self._config.get("model_max_length")
        if not isinstance(length, int | float) or isinstance(length, bool) or not 0 < length < 1 << 31:
            return None
        return int(length)

    def token(self, token_id: int) -> str:
        """The text of a token, as the vocabulary spells it."""
        return str(self._backend.id_to_token(token_id))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control words shown."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    @property
    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name; the usual one is "default". {} where there is none."""
        if "chat_template.jinja" in self.bundle.files:
            return {"default": self.bundle.files["chat_template.jinja"].decode()}
        own = self.bundle.document("chat_template.json").get("chat_template")
        own = own or self._config.get("chat_template")
        if isinstance(own, str):
            return {"default": own}
        if isinstance(own, list):
            return {str(entry["name"]): str(entry["template"]) for entry in own}
        return {}

    # -------------------------------------------------------------- encode

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Words to ids: none added, and none of them a control token, whatever the words are.

        Returns ids (N,) int32, text after text, and offsets (n + 1,) int64.
        """
        return self._encoder.encode(texts, plain=True)

    def encode_starts(
        self, texts: Sequence[str], num_tokens: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
        """The first ids of each text as `encode` gives them: `num_tokens` of them or more, or all it has.

        Returns ids and offsets, and how many bytes of UTF-8 were not looked at; 0 where the tokenizer does
        not allow it.
        """
        piece = num_tokens * _CHARACTERS_PER_TOKEN
        if not self._can_cut or all(len(text) <= piece for text in texts):
            return (*self.encode(texts), 0)
        ends = np.zeros(len(texts), np.int64)  # how much of each text is encoded
        counts = np.zeros(len(texts), np.int64)
        parts: list[list[NDArray[np.int32]]] = [[] for _ in texts]
        todo = list(range(len(texts)))
        while todo:
            starts = ends[todo].tolist()
            stops = [next_cut(texts[i], start + piece) for i, start in zip(todo, starts, strict=True)]
            ids, offsets = self.encode(
                [texts[i][start:stop] for i, start, stop in zip(todo, starts, stops, strict=True)]
            )
            for i, first, last in zip(todo, offsets.tolist(), offsets[1:].tolist(), strict=False):
                parts[i].append(ids[first:last])
            ends[todo] = stops
            counts[todo] += np.diff(offsets)
            todo = [i for i in todo if counts[i] < num_tokens and ends[i] < len(texts[i])]
        left = sum(len(text[end:].encode()) for text, end in zip(texts, ends.tolist(), strict=True))
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return np.concatenate([part for row in parts for part in row]), offsets, left

    @property
    def encoder_name(self) -> str:
        """What makes the ids now (the reference or the fast encoder), with its version."""
        return self._encoder.name if self._pieces is None else self._pieces.name

    @property
    def encoder_faults(self) -> tuple[str, ...]:
        """Why the fast encoder was given up at work; empty in all but strange cases."""
        return tuple(self._encoder.faults)

    def encode_chats(self, texts: Sequence[str]) -> Located:
        """Rendered chats to ids (none added; control words are control tokens), each with its place."""
        sizes = np.array([len(text) if text.isascii() else len(text.encode()) for text in texts], np.int64)
        bases = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        table = self._token_bytes
        if table is None:
            return _located(self._located_rows(texts), bases)
        ids, offsets = self._encoder.encode(texts, plain=False)
        starts, ends = table.places(ids, offsets)
        exact = np.diff(np.concatenate([[0], ends])[offsets]) == sizes
        for i in np.flatnonzero(exact).tolist() if table.nfc else []:
            exact[i] = texts[i].isascii() or unicodedata.is_normalized("NFC", texts[i])
        if exact.all():
            return Located(ids=ids, offsets=offsets, starts=starts, ends=ends)
        odd = iter(self._located_rows([texts[i] for i in np.flatnonzero(~exact).tolist()]))
        rows = []
        for i, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
            row = slice(start, stop)
            base = starts[start] if start < stop else 0
            rows.append((ids[row], starts[row] - base, ends[row] - base) if exact[i] else next(odd))
        return _located(rows, bases)

    def encode_plain_word(self, word: str) -> NDArray[np.int32]:
        """A control word as plain text inside a chat, (n,) int32. Raises TokenizerError if it cannot be."""
        if word not in self._plain_words:
            ids = self.encode([word])[0]
            if self._token_bytes is None or not self._token_bytes.byte_level:
                # SentencePiece puts a space before the first word of a text; behind a line break it does not.
                line_break, behind = self.encode(["\n"])[0], self.encode([f"\n{word}"])[0]
                if np.array_equal(behind[: len(line_break)], line_break):
                    ids = behind[len(line_break) :]
            if self.is_control[ids].any():
                raise TokenizerError(f"the tokenizer makes the control token {word!r} out of plain text too")
            self._plain_words[word] = ids
        return self._plain_words[word]

    def _encode_slowly(
        self, texts: Sequence[str], plain: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """As the reference encodes: `tokenizers`, or sentencepiece."""
        if self._pieces is not None:
            return _flat(self._pieces.encode_batch(texts, self._cutting(plain)))
        ids: list[NDArray[np.int32]] = []
        for encodings in self._encodings(texts, plain=plain, fast=True):
            ids += [np.array(encoding.ids, np.int32) for encoding in encodings]
        return _flat(ids)

    def _cutting(self, plain: bool) -> dict[str, int]:
        """Added tokens that are cut out of a text: control words not of plain text."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if not (plain and token.special)}

    def _encodings(self, texts: Sequence[str], *, plain: bool, fast: bool) -> Iterator[list[Any]]:
        for batch in _calls(texts):
            with self._lock:  # the mode below belongs to the call
                self._backend.encode_special_tokens = plain
                encode = self._backend.encode_batch_fast if fast else self._backend.encode_batch
                encodings = encode(batch, add_special_tokens=False)
            yield encodings

    def _located_rows(
        self, texts: Sequence[str]
    ) -> list[tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]]:
        """(ids, starts, ends) of each text, in bytes, by the library's own character offsets."""
        if self._pieces is not None:
            return [self._pieces.encode(text, self._cutting(False)) for text in texts]
        rows = []
        encodings = itertools.chain.from_iterable(self._encodings(texts, plain=False, fast=False))
        for text, encoding in zip(texts, encodings, strict=True):
            places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            if not text.isascii():
                sizes = [len(character.encode()) for character in text]
                places = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])[places]
            rows.append((np.array(encoding.ids, np.int32), places[:, 0], places[:, 1]))
        return rows

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        added = self._backend.get_added_tokens_decoder()
        vocab = self._backend.get_vocab(with_added_tokens=True)
        return token_bytes(self.bundle.document("tokenizer.json"), vocab, added, self.vocab_size)


def _token_text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _calls(texts: Sequence[str]) -> Iterator[list[str]]:
    """Cut a batch so that one call of the library holds a bounded number of characters."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        if batch and characters + len(text) > _CALL_CHARACTERS:
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += len(text)
    if batch:
        yield batch


def _flat(parts: list[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)])
    flat = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return flat, offsets.astype(np.int64)


def _located(
    rows: list[tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]], bases: NDArray[np.int64]
) -> Located:
    """Rows of (ids, starts, ends) as one; `bases`: where each text begins, in bytes of all of them."""
    ids, offsets = _flat([row[0] for row in rows])
    base = np.repeat(bases[:-1], np.diff(offsets))
    nothing = [np.zeros(0, np.int64)]
    return Located(
        ids=ids,
        offsets=offsets,
        starts=np.concatenate(nothing + [row[1] for row in rows]) + base,
        ends=np.concatenate(nothing + [row[2] for row in rows]) + base,
    )
