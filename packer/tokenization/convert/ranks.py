"""Byte-pair encodings given by ranks (tiktoken's form) as merges, exactly.

tiktoken merges, again and again, the leftmost of the adjacent pairs whose bytes together have the lowest
rank. `tokenizers` merges pairs from a list. If two tokens lie side by side at work and no merge has crossed
their outer borders, then the merges inside were those that the bytes of the two alone would have had. So a
token is only ever made from one pair: the last that its own bytes come to. `merges_of` plays that for each
token, and the list of these pairs in order of rank merges as tiktoken does. A token that its own bytes do
not come to is never made by merging; both libraries give it for a whole piece alone (`ignore_merges`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from packer.tokenization.convert.values import ConversionError, bpe

Text = TypeVar("Text", str, bytes)


def merged(parts: list[Text], rank_of: Callable[[Text, Text], float | None], stop_at: int = 1) -> list[Text]:
    """`parts` after byte-pair encoding, or when `stop_at` parts are left.

    rank_of: the rank of what a pair makes, None where it makes nothing. Takes O(n^2): tokens are short.
    """
    parts = list(parts)
    while len(parts) > stop_at:
        best, at = None, -1
        for i, (left, right) in enumerate(pairwise(parts)):
            rank = rank_of(left, right)
            if rank is not None and (best is None or rank < best):
                best, at = rank, i
        if best is None:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def last_pair(parts: list[Text], ranks: Mapping[Text, float]) -> tuple[Text, Text] | None:
    """The pair that byte-pair encoding of a token's `parts` (two at least) joins last; None where it gets "
    "stuck."""
    rest = merged(parts, lambda left, right: ranks.get(left + right), stop_at=2)
    return (rest[0], rest[1]) if len(rest) == 2 else None


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs that byte-pair encoding by `ranks` joins, the first to be joined first."""
    pairs = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            pair = last_pair([token[i : i + 1] for i in range(len(token))], ranks)
            if pair is not None:
                pairs.append(pair)
    return pairs


def byte_characters() -> list[str]:
    """The character that byte-level vocabularies spell each byte with (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    rest = (byte for byte in range(256) if byte not in table)
    table |= {byte: chr(256 + i) for i, byte in enumerate([*rest])}
    return [table[byte] for byte in range(256)]


def byte_pair_model(
    ranks: Mapping[bytes, int], *, first_id: int = 0, special: Mapping[int, str]
) -> dict[str, Any]:
    """The model of a tokenizer.json that merges as tiktoken does.

    first_id: the id of rank 0. special: the special tokens by id. Raises ConversionError where a byte has no
    rank (tiktoken fails on texts that hold it), and where ids or texts are there twice.
    """
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConversionError(
            f"each of the 256 bytes must have a rank, found none for {len(missing)} of them "
            f"(0x{missing[0]:02X}, …); copy the file again"
        )
    table = str.maketrans(dict(enumerate(byte_characters())))

    def spelled(token: bytes) -> str:
        return token.decode("latin-1").translate(table)

    vocab = {
        spelled(token): first_id + rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    }
    ids = set(vocab.values())
    for token_id, text in sorted(special.items()):
        if token_id in ids or text in vocab:
            raise ConversionError(
                f"a special token must have an id and a text of its own, found {text!r} ({token_id}) among "
                "the "
                "ranks too; give the special tokens that belong to this file"
            )
    # `tokenizers` numbers added tokens on from the model's vocabulary; where theirs are others, they are put
    # into it. (It never makes them of words: no pair of merges gives them, and no expression leaves one
    # whole.)
    if list(range(len(vocab), len(vocab) + len(special))) != sorted(special):
        vocab = {text: i for i, text in sorted(special.items())} | vocab
    pairs = [(spelled(left), spelled(right)) for left, right in merges_of(ranks)]
    return bpe(vocab, pairs, ignore_merges=True)


def checked_ranks(pairs: Sequence[tuple[bytes, int]]) -> dict[bytes, int]:
    """Ranks by token. Raises ConversionError for what is there twice."""
    ranks = dict(pairs)
    if len(ranks) != len(pairs) or len(set(ranks.values())) != len(pairs):
        raise ConversionError("each token and each rank must be there once, found some twice")
    return ranks
