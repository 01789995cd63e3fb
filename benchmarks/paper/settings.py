"""What is compared: model shapes, sources, variants, and how long each is measured. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

ACCUMULATE = 4  # micro-batches an optimiser step, with padding: 4 x 16 = the paper's 64 examples


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model by its shape; weights are random."""

    name: str
    title: str
    architecture: str  # of transformers
    config: dict[str, Any]
    checkpointing: bool  # recompute activations in the backward pass
    batches: int  # mini-batches timed
    packs: int  # full packs timed
    warmup: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file of examples."""

    name: str
    title: str
    file: str
    batch: int  # examples a mini-batch
    max_example: int = 4096  # tokens; the paper's maximum sequence length
    pack_tokens: int = 16384  # of the full packs: the paper's flat rows, 4 x 4,096
    max_rows: int | None = None
    spec: dict[str, Any] = field(default_factory=dict)  # of the spec's `source`


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to make micro-batches of examples."""

    name: str
    title: str
    attention: str  # attn_implementation
    packed: bool  # fed by the stream; else padded, and laid on the GPU beforehand
    boundaries: bool = True


_LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
_MISTRAL_7B = _LLAMA_7B | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}
_GRANITE_8B = _LLAMA_7B | {
    "vocab_size": 49152,
    "intermediate_size": 14336,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
}
_LLAMA_1B = _LLAMA_7B | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
}
_TINY = {
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
}
# The small model that is trained to compare loss curves: 66 million parameters.
LOSS_MODEL = {
    "vocab_size": 8192,
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}
TINY_LOSS_MODEL = _TINY | {"tie_word_embeddings": True}

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="llama-2-7b",
            title="Llama-2-7B",
            architecture="Llama",
            config=_LLAMA_7B,
            checkpointing=True,
            batches=8,
            packs=5,
            warmup=1,
        ),
        Shape(
            name="mistral-7b",
            title="Mistral-7B",
            architecture="Mistral",
            config=_MISTRAL_7B,
            checkpointing=True,
            batches=8,
            packs=5,
            warmup=1,
        ),
        Shape(
            name="granite-8b",
            title="Granite-8B-code",
            architecture="Llama",
            config=_GRANITE_8B,
            checkpointing=True,
            batches=8,
            packs=5,
            warmup=1,
        ),
        Shape(
            name="llama-1b",
            title="1.1B (TinyLlama)",
            architecture="Llama",
            config=_LLAMA_1B,
            checkpointing=False,
            batches=24,
            packs=12,
            warmup=3,
        ),
        Shape(
            name="tiny",
            title="tiny",
            architecture="Llama",
            config=_TINY,
            checkpointing=True,
            batches=2,
            packs=2,
            warmup=1,
        ),
    )
}

SOURCES = {
    source.name: source
    for source in (
        Source(name="flan", title="FLAN-like", file="flan_like.jsonl.gz", batch=16),
        Source(
            name="math",
            title="math",
            file="math.jsonl.gz",
            batch=16,
            spec={"fields": {"prompt": "question", "completion": "answer"}},
        ),
        Source(name="code", title="Python code", file="python_code.jsonl.gz", batch=4),
        # The paper's own mini-batch of 4, to stand beside its figures.
        Source(name="flan4", title="FLAN-like", file="flan_like.jsonl.gz", batch=4),
        Source(
            name="math4",
            title="math",
            file="math.jsonl.gz",
            batch=4,
            spec={"fields": {"prompt": "question", "completion": "answer"}},
        ),
    )
}

# Most telling first: a run that is cut short still says something.
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(
            name="padded_flash",
            title="padding, flash-attn",
            attention="flash_attention_2",
            packed=False,
        ),
        Variant(name="minibatch", title="`minibatch`", attention="padfree", packed=True),
        Variant(name="best_fit", title="`best_fit`", attention="padfree", packed=True),
        Variant(name="padded_sdpa", title="padding, SDPA", attention="sdpa", packed=False),
        Variant(
            name="unaware",
            title="packing without boundaries",
            attention="flash_attention_2",
            packed=True,
            boundaries=False,
        ),
        Variant(name="step", title="`step`", attention="padfree", packed=True),
        Variant(name="sequential", title="`sequential`", attention="padfree", packed=True),
        Variant(name="wrapped", title="`wrapped`", attention="padfree", packed=True),
        Variant(
            name="sorted_flash",
            title="padding, sorted by length, flash-attn",
            attention="flash_attention_2",
            packed=False,
        ),
    )
}


def tiny(source: Source) -> Source:
    """The source with few and short examples, for a dry run."""
    return replace(source, max_example=256, pack_tokens=1024, max_rows=300)


def packings(source: Source) -> dict[str, dict[str, Any]]:
    """`packing` of the spec of each dataset that the variants of a source take."""
    full = {"max_tokens": source.pack_tokens}
    return {
        # So large that no mini-batch is cut.
        "minibatch": {
            "strategy": "minibatch",
            "minibatch_size": source.batch,
            "max_tokens": source.batch * source.max_example,
        },
        "step": {"strategy": "step", "step_size": source.batch * ACCUMULATE, **full},
        "sequential": {"strategy": "sequential", **full},
        "best_fit": {"strategy": "best_fit", **full},
        "wrapped": {"strategy": "wrapped", **full},
        "unaware": {"strategy": "wrapped", "max_tokens": source.max_example},
    }
