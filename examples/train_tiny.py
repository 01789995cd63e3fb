"""Train a small Llama-shaped model (random weights, on the CPU or a GPU) from a padfree stream.

    python examples/train_tiny.py --url http://localhost:8000 --dataset ID --steps 30

The loop is the one of any trainer: `for batch in stream`, `model(**batch.for_transformers())`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer_client import PackedStream, attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a short run showed."""

    steps: int
    first_loss: float
    last_loss: float
    first_batch_s: float  # from opening the stream to the first batch
    tokens: int
    seconds: float


def tiny_model(vocab_size: int) -> LlamaForCausalLM:
    """About two million parameters, with attention that never crosses segments.

    Raises ValueError for a batch with ids that are not in its vocabulary.
    """
    attention.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        attn_implementation="padfree",
    )
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.register_forward_pre_hook(require_known)
    return model


def require_known(embedding: torch.nn.Embedding, inputs: tuple[torch.Tensor, ...]) -> None:
    """Raise where a batch holds ids that the model does not know: torch would not say which, nor why."""
    largest = int(inputs[0].max())
    if largest >= embedding.num_embeddings:
        raise ValueError(
            f"--vocab-size: more than the dataset's largest token id is required, so at least {largest + 1}, "
            f"found {embedding.num_embeddings}; give the size of the tokenizer it was packed with"
        )


def train(
    stream: PackedStream,
    model: LlamaForCausalLM,
    steps: int,
    learning_rate: float = 3e-3,
    on_first_batch: Callable[[], None] | None = None,
) -> Result:
    """Take `steps` optimiser steps on the stream's batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses: list[float] = []
    tokens, first_batch_s, start = 0, 0.0, time.perf_counter()
    model.train()
    for batch in stream:
        if not losses:
            first_batch_s = time.perf_counter() - start
            if on_first_batch is not None:
                on_first_batch()
        # The loss is the sum over the step's trained tokens, divided by their number over all ranks.
        loss = model(**batch.for_transformers(), num_items_in_batch=batch.num_items_in_batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens += batch.num_tokens
        if len(losses) == steps:
            break
    return Result(
        steps=len(losses),
        # A mean of five: single packs differ.
        first_loss=losses[0],
        last_loss=sum(losses[-5:]) / len(losses[-5:]),
        first_batch_s=first_batch_s,
        tokens=tokens,
        seconds=time.perf_counter() - start,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://localhost:8000", help="a service, or a store folder")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--device", help="for example cuda; default: the CPU")
    args = parser.parse_args()
    model = tiny_model(args.vocab_size).to(args.device or "cpu")
    attention.check(model)  # not every model keeps the examples of a pack apart; this one does
    with PackedStream(args.url, dataset=args.dataset, device=args.device) as stream:
        result = train(stream, model, args.steps)
    print(f"{result.steps} steps, loss {result.first_loss:.3f} -> {result.last_loss:.3f}")


if __name__ == "__main__":
    main()
