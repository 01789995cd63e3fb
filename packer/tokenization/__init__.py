"""Texts to token ids: a tokenizer's files as a value (bundle.py), and that value at work (tokenizer.py).

convert/ makes of other files of tokenizers what `tokenizers` reads, exactly; pieces.py encodes with
SentencePiece itself where that cannot be; fast.py is the fast path, checked against the reference.
"""

from packer.tokenization.bundle import Bundle, TokenizerError
from packer.tokenization.tokenizer import Located, Tokenizer

__all__ = ["Bundle", "Located", "Tokenizer", "TokenizerError"]
