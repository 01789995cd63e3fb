"""SentencePiece itself as the encoder, for models that `tokenizers` cannot stand in for exactly.

Those of type unigram, and those whose normaliser changes characters (convert/sentencepiece.py says why).
The library is optional; whoever gives such a model installs it.

Errors: MissingLibrary (a ValueError), permanent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.tokenization.convert.proto import read_text

Row = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]  # ids, starts and ends in bytes


class MissingLibrary(ValueError):
    """sentencepiece is needed and not installed."""


class PieceEncoder:
    """A SentencePiece model at work. Safe to use from several threads."""

    def __init__(self, model: bytes) -> None:
        try:
            import sentencepiece  # optional
        except ImportError:
            raise MissingLibrary(
                "a SentencePiece model of type unigram, or whose normaliser changes characters, requires the "
                "sentencepiece library, which is not installed; pip install sentencepiece (also where Ray's "
                "workers "
                "run), or save the tokenizer as tokenizer.json with transformers"
            ) from None
        self.name = f"sentencepiece {sentencepiece.__version__}"
        self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)

    def encode(self, text: str, added: Mapping[str, int]) -> Row:
        """Ids of a text and their places. added: tokens that cut it; what is between is a text of its own."""
        rows: list[Row] = []
        at, num_bytes = 0, 0
        for word, first, last in [*_found(text, added), ("", len(text), len(text))]:
            if at < first:
                pieces = read_text(self._processor.encode(text[at:first], out_type="serialized_proto")).pieces
                places = np.array([(piece.begin, piece.end) for piece in pieces], np.int64).reshape(-1, 2)
                rows.append(
                    (
                        np.array([piece.id for piece in pieces], np.int32),
                        num_bytes + places[:, 0],
                        num_bytes + _widened(places),
                    )
                )
                num_bytes += len(text[at:first].encode())
            if word:
                size = len(word.encode())
                whole = np.array([num_bytes], np.int64)
                rows.append((np.array([added[word]], np.int32), whole, whole + size))
                num_bytes += size
            at = last
        if not rows:
            return np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64)
        ids, starts, ends = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        return ids, starts, ends

    def encode_batch(self, texts: Sequence[str], added: Mapping[str, int]) -> list[NDArray[np.int32]]:
        """Ids of each text."""
        if not any(True for text in texts for _ in _found(text, added)):
            return [np.array(ids, np.int32) for ids in self._processor.encode(list(texts), out_type=int)]
        return [self.encode(text, added)[0] for text in texts]


def _found(text: str, added: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """The added tokens in a text, the leftmost first and the longest of these; start and end in "
    "characters."""
    if not added:
        return []
    pattern = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
    return [(match[0], *match.span()) for match in re.finditer(pattern, text)]


def _widened(places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ends, where tokens of no bytes share those of the token behind.

    So the library gives the first bytes of a character that is no piece, and the space before a text.
    """
    ends = places[:, 1].copy()
    for i in range(len(ends) - 2, -1, -1):
        if ends[i] == places[i, 0]:
            ends[i] = ends[i + 1]
    return ends
