"""`fastokens`, where it is installed: some fifty times as fast as `tokenizers` with byte-pair tokenizers.

It is optional (extra `fast`) and young, and the bytes of a dataset must not depend on it: its ids have to
be those of `tokenizers`, the reference. So they are compared twice. A tokenizer is checked when it is loaded,
on texts made to find differences (`trial_texts`); and of every batch some texts (`sample`) are encoded by
both. Where they differ, the reference is used from there on; the pipeline makes the partition anew by it, and
the report counts and tells that.

Errors: Unusable, which says why the reference is used; it does not leave CheckedEncoder.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Flat = tuple[NDArray[np.int32], NDArray[np.int64]]  # ids (N,), offsets (n + 1,)

log = logging.getLogger("padfree.packer")

SWITCH = "PADFREE_FAST"  # environment: "0" leaves fastokens alone

# Loading takes as long as the reference takes for some 2 MB; so little is left to the reference.
_WARM_CHARACTERS = 1 << 18
_SAMPLED_ROWS = 512  # one row in so many is encoded by both, at most _SAMPLED_CHARACTERS of it
_SAMPLED_CHARACTERS = 2048

_NUM_TRIALS = 1000
# What pre-tokenizers and normalisers treat each in its own way, and what stands at their borders.
_PIECES = (
    *"aZé ßſİıǆﬁ0٣५Ⅷ²½_-.,;:!?'’\"`~@#$%^&*()[]{}<>|/\\+=°€",
    *(" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n", "\n ", "\r", "\v", "\f", "\x1c", "\x1f", "\x85"),
    *("\xa0", "\u1680", "\u2003", "\u2028", "\u2029", "\u202f", "\u3000", "\ufeff", "\u200b", "\u180e"),
    *("\0", "\x01", "\x7f", "\x9f", "\xad", "\ufffd", "\ufffe", "\U0010ffff", "\ue000", "\U000e0041"),
    *("e\u0301", "\u0301", "\u0301\u0327", "\u212b", "\u1e9b\u0323", "\u0344", "\u1100\u1161\u11a8", "각"),
    *(
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\U0001f1e9\U0001f1ea",
        "1\ufe0f\u20e3",
        "\U0001f44d\U0001f3fd",
    ),
    *("日本語", "漢", "\U00020000", "ไทย", "नमस्ते", "العربية", "\u200fעברית", "ქართული", "ǅ", "\U0001d400"),
    *("'s", "'S", "'ll", "'LL", "'re", "’ve", "'ſ", "don't", "I'M", "camelCase", "HTTPServer", "snake_case"),
    *("1", "12", "123", "1234", "12345", "3.14", "1,000,000", "0x1F", "1e-9", "第3章", "x²", "١٢٣"),
    *("the", " the", " The", "hello", " world", "ing", "def f(x):\n", "    return", "</div>", "```", "://"),
    *(
        "a" * 40,
        " " * 33,
        "\n" * 9,
        "=" * 64,
        "ab" * 20,
        "\U0001f600" * 5,
        "０１２",
        "Ａ",
        "▁",
        "Ġ",
        "<0x0A>",
    ),
)


class Unusable(RuntimeError):
    """fastokens cannot stand in for the reference here; the text says why."""


class FastEncoder:
    """fastokens with one tokenizer, given as the JSON text of `tokenizers`. Raises Unusable."""

    def __init__(self, tokenizer_json: str) -> None:
        if os.environ.get(SWITCH) == "0":
            raise Unusable(f"{SWITCH}=0")
        # One core a worker. Read when its threads start, so only at the first use in a process.
        os.environ.setdefault("RAYON_NUM_THREADS", "1")
        try:
            import fastokens  # optional
        except ImportError:
            raise Unusable("fastokens is not installed (extra fast)") from None
        try:
            self._backend = fastokens.Tokenizer.from_json_str(tokenizer_json)
        except Exception as error:  # ValueError for what is not byte-pair encoding
            raise Unusable(f"fastokens does not take this tokenizer: {error}") from error
        self.name = f"fastokens {importlib.metadata.version('fastokens')}"

    def encode(self, texts: Sequence[str], *, plain: bool) -> Flat:
        """Ids, none added; control words in the texts are plain text, or else control tokens.

        Raises Unusable, whatever went wrong.
        """
        try:
            ids, offsets = self._backend.encode_batch_flat(
                list(texts), add_special_tokens=False, split_special_tokens=plain
            )
            return np.frombuffer(ids, np.int32), np.frombuffer(offsets, np.int64)
        except Exception as error:
            raise Unusable(f"fastokens failed: {type(error).__name__}: {error}") from error


class CheckedEncoder:
    """The fast encoder where it is there and gives the reference's ids, else the reference.

    reference: encodes texts, with control words as plain text or not. tokenizer_json: gives the reference as
    `tokenizers` writes it. words: its added tokens. Safe to use from several threads.
    """

    def __init__(
        self,
        reference: Callable[[Sequence[str], bool], Flat],
        tokenizer_json: Callable[[], str],
        words: Iterable[str],
    ) -> None:
        self._reference, self._tokenizer_json, self._words = reference, tokenizer_json, words
        self._lock = threading.Lock()
        self._fast: FastEncoder | None = None
        self._settled = False
        self._num_characters = 0  # encoded before the fast encoder is loaded
        self.faults: list[str] = []  # what went wrong at work: at most one, for then the reference is used

    @property
    def name(self) -> str:
        """What encodes now, with its version."""
        return self._fast.name if self._fast else f"tokenizers {importlib.metadata.version('tokenizers')}"

    def encode(self, texts: Sequence[str], *, plain: bool) -> Flat:
        """Ids (N,) int32 of the texts, text after text, and offsets (n + 1,) int64."""
        fast = self._fast if self._settled else self._settle(texts)
        if fast is None:
            return self._reference(texts, plain)
        try:
            found = fast.encode(texts, plain=plain)
            _compare(fast.encode, self._reference, sample(texts), plain)
        except Unusable as fault:
            with self._lock:
                self._fast = None
                self.faults.append(str(fault))
            log.warning("tokens are made by the reference from here on: %s", fault)
            return self._reference(texts, plain)
        return found

    def _settle(self, texts: Sequence[str]) -> FastEncoder | None:
        """Load and check the fast encoder once there is enough to do."""
        with self._lock:
            self._num_characters += sum(map(len, texts))
            if self._settled or self._num_characters < _WARM_CHARACTERS:
                return self._fast
            try:
                fast = FastEncoder(self._tokenizer_json())
                trials = trial_texts(self._words)
                for plain in (True, False):
                    _compare(fast.encode, self._reference, trials, plain)
                self._fast = fast
            except Unusable as reason:
                log.info("tokens are made by the reference: %s", reason)
            self._settled = True
            return self._fast


def _compare(
    fast: Callable[..., Flat], reference: Callable[[Sequence[str], bool], Flat], texts: list[str], plain: bool
) -> None:
    """Raise Unusable for the first text that the two encode differently."""
    ids, offsets = fast(texts, plain=plain)
    true_ids, true_offsets = reference(texts, plain)
    if np.array_equal(ids, true_ids) and np.array_equal(offsets, true_offsets):
        return
    for i, text in enumerate(texts):
        mine, true = ids[offsets[i] : offsets[i + 1]], true_ids[true_offsets[i] : true_offsets[i + 1]]
        if not np.array_equal(mine, true):
            at = next(
                (k for k, (a, b) in enumerate(zip(mine, true, strict=False)) if a != b),
                min(len(mine), len(true)),
            )
            raise Unusable(
                f"fastokens gives other ids than tokenizers for {text[:80]!r}: token {at} of {len(true)}, "
                f"{mine[at : at + 4].tolist()} instead of {true[at : at + 4].tolist()}"
            )
    raise Unusable("fastokens gives other offsets than tokenizers")


def sample(texts: Sequence[str]) -> list[str]:
    """The texts of a batch that both encoders encode: evenly spread, a function of the batch alone."""
    count = -(-len(texts) // _SAMPLED_ROWS)
    if not count:
        return []
    stride = len(texts) // count
    # Not always the first: its place comes from the batch.
    first = (len(texts[0]) + len(texts[-1])) % stride
    return [text[:_SAMPLED_CHARACTERS] for text in texts[first::stride]]


def trial_texts(words: Iterable[str]) -> list[str]:
    """Texts that show differences, from _PIECES and from `words` (added tokens: control words and others)."""
    chosen = sorted(words)
    if len(chosen) > 200:  # some tokenizers hold thousands that are unused
        chosen = chosen[:100] + chosen[-100:]
    texts = [*_PIECES, *chosen, "".join(_PIECES), ""]
    texts += [
        text
        for word in chosen
        for text in (f"a{word}b", f" {word} ", f"\n{word}{word}", word[:-1], word.upper())
    ]
    draw = random.Random(0)
    pool = [*_PIECES, *draw.choices(chosen, k=20)] if chosen else [*_PIECES]
    texts += ["".join(draw.choices(pool, k=draw.randint(2, 24))) for _ in range(_NUM_TRIALS)]
    # Characters from everywhere: new ones enter Unicode each year, and libraries follow at their own pace.
    blocks = [
        (0x20, 0x7F),
        (0xA0, 0x2FF),
        (0x300, 0x1FFF),
        (0x2000, 0x33FF),
        (0x3400, 0xD7FF),
        (0xE000, 0x323AF),
    ]
    for _ in range(_NUM_TRIALS):
        low, high = draw.choice(blocks)
        texts.append("".join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 12))))
    return texts
