"""Where tokens lie in a text, from a table of bytes per token: a cumulative sum, and no offsets of the
encoder.

That works where tokens are the text's bytes one to one: in byte-level vocabularies without a normaliser
other than NFC, and in SentencePiece's with bytes for what is no piece, where a space is written as "▁".
Every other thing that may happen to a text (a "▁" of its own, an unknown token, a control word that takes
spaces along) makes the sum of a text smaller than its length, so that it is seen. fastokens gives no
offsets, and they cost the library a fifth to a third more time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from packer.tokenization.prefix import steps

_SPACE = "▁"
_WRITES_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPENDS = {"type": "Prepend", "prepend": _SPACE}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBytes:
    """sizes: (vocab_size,) int64, UTF-8 bytes of each token. byte_level: tokens spell bytes.
    nfc: texts must be in NFC.

    cuts: (vocab_size,) bool, tokens behind which a text begins anew and gets a space before it that is no
    byte of it (the dummy prefix); None where there is no such space.
    """

    sizes: NDArray[np.int64]
    byte_level: bool = False
    nfc: bool = False
    cuts: NDArray[np.bool_] | None = None

    def places(
        self, ids: NDArray[np.int32], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of each token, (N,), in bytes of all texts. offsets: (n + 1,), of texts in ids."""
        sizes = self.sizes[ids]
        if self.cuts is None:
            ends = np.cumsum(sizes)
            return ends - sizes, ends
        cuts = self.cuts[ids]
        first = np.zeros(len(ids), np.bool_)
        first[1:] = cuts[:-1]
        first[offsets[:-1][offsets[:-1] < len(ids)]] = True
        first &= ~cuts
        sizes -= first
        ends = np.cumsum(sizes)
        # A space of no bytes belongs to the character behind it, as in the library's offsets.
        return ends - sizes, ends + (first & (sizes == 0))


def token_bytes(
    document: Mapping[str, Any], vocab: Mapping[str, int], added: Collection[int], vocab_size: int
) -> TokenBytes | None:
    """The table of a tokenizer.json; None where tokens are not bytes. added: ids of its added tokens."""
    normalizers = steps(document.get("normalizer"), "normalizers")
    pre_tokenizers = steps(document.get("pre_tokenizer"), "pretokenizers")
    byte_level = [step for step in pre_tokenizers if step.get("type") == "ByteLevel"]
    sizes = np.full(vocab_size, -(1 << 32), np.int64)  # a hole or an odd token: no total is right
    if byte_level:
        if any(step.get("add_prefix_space") for step in byte_level) or any(
            step.get("type") != "NFC" for step in normalizers
        ):
            return None
        alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        for text, token_id in vocab.items():
            if token_id in added:
                sizes[token_id] = len(text.encode())
            elif alphabet.issuperset(text):
                sizes[token_id] = len(text)
        return TokenBytes(sizes=sizes, byte_level=True, nfc=bool(normalizers))
    model = document["model"]
    prefixed = _PREPENDS in normalizers[:1]
    if (
        (model.get("type"), model.get("byte_fallback")) != ("BPE", True)
        or normalizers[prefixed:] != [_WRITES_SPACES]
        or any(step.get("type") != "Split" or step.get("behavior") == "Removed" for step in pre_tokenizers)
    ):
        return None
    for text, token_id in vocab.items():
        sizes[token_id] = len(text.replace(_SPACE, " ").encode())
    for byte in range(256):
        if f"<0x{byte:02X}>" in vocab:
            sizes[vocab[f"<0x{byte:02X}>"]] = 1
    unknown = vocab.get(model.get("unk_token") or "")
    if unknown is not None:
        sizes[unknown] = -(1 << 32)
    cuts = None
    if prefixed:
        cuts = np.zeros(vocab_size, np.bool_)
        cuts[list(added)] = True
    return TokenBytes(sizes=sizes, cuts=cuts)
