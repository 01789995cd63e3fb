"""Sizes of the models that tests make: a decoder that takes milliseconds, named as transformers does."""

from __future__ import annotations

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
