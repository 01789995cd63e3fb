"""Loss curves of one small model on real data: padding, `minibatch`, and packing without boundaries.

Every run takes the same mini-batches in the same order from the same start; what differs is how they are
laid out. The other padded runs (rows reversed, two halves added up, another kernel, the very same once more)
show how far rounding alone drives two runs apart.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from paper.batches import Example, examples_of, one_row, padded
from paper.speed import Data
from paper.training import build_model
from trainer_client import PackedBatch, attention

HELD_OUT = 40  # mini-batches at the end of the epoch, for validation
_EVERY = 25  # steps between validations
_WARMUP = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way to lay out the mini-batches."""

    name: str
    title: str
    attention: str
    layout: str  # padded, reversed, halves, packed, unaware


RUNS = (
    Run(name="padded", title="padding", attention="flash_attention_2", layout="padded"),
    Run(name="minibatch", title="`minibatch`", attention="padfree", layout="packed"),
    Run(name="unaware", title="without boundaries", attention="flash_attention_2", layout="unaware"),
    Run(name="reversed", title="padding, rows reversed", attention="flash_attention_2", layout="reversed"),
    Run(name="halves", title="padding, two halves", attention="flash_attention_2", layout="halves"),
    Run(name="again", title="padding, once more", attention="flash_attention_2", layout="padded"),
    Run(name="padded_sdpa", title="padding, SDPA", attention="sdpa", layout="padded"),
)


def train(
    run: Run,
    data: Data,
    config: dict[str, Any],
    *,
    num_steps: int,
    learning_rate: float,
    device: Any,
    attention_name: str,
) -> dict[str, Any]:
    """Train on the first `num_steps` mini-batches and validate on the last ones of the epoch."""
    attention.register()
    kind = torch.device(device).type
    # float32 weights, bf16 arithmetic: differences between runs are those of bf16 alone.
    model = build_model("Llama", config, dtype=torch.float32, device=device)
    model.set_attn_implementation(attention_name)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=kind == "cuda"
    )
    num_batches = data.views["minibatch"]["report"]["num_packs"]
    held = _held_out(data, num_batches)
    losses: list[float] = []
    validation: list[tuple[int, float]] = []
    start = time.perf_counter()
    with data.stream("minibatch", device=device) as stream:
        for step, batch in enumerate(itertools.islice(stream, num_steps)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min(1.0, (step + 1) / _WARMUP)
            total = 0.0
            for kwargs in _layout(run, batch, device):
                with torch.autocast(kind, dtype=torch.bfloat16):
                    loss = model(**kwargs, num_items_in_batch=batch.num_items_in_batch).loss
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(total)
            if (step + 1) % _EVERY == 0 or step + 1 == num_steps:
                model.set_attn_implementation("sdpa")  # the same kernel for every run
                validation.append((step + 1, _validate(model, held, device)))
                model.set_attn_implementation(attention_name)
    return {
        "part": "convergence",
        "run": run.name,
        "title": run.title,
        "attention": attention_name,
        "source": data.source.name,
        "batch": data.source.batch,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_steps": len(losses),
        "learning_rate": learning_rate,
        "losses": losses,
        "validation": validation,
        "seconds": time.perf_counter() - start,
    }


def _layout(run: Run, batch: PackedBatch, device: Any) -> list[dict[str, Any]]:
    """One mini-batch as one micro-batch, or two of which the gradients add up."""
    if run.layout in ("packed", "unaware"):
        return [one_row(batch, boundaries=run.layout == "packed")]
    rows = examples_of(batch)
    if run.layout == "reversed":
        rows = rows[::-1]
    half = len(rows) // 2 if run.layout == "halves" else 0
    parts = [part for part in (rows[:half], rows[half:]) if part]
    return [padded(part, device=device, step_done=True).kwargs for part in parts]


def _held_out(data: Data, num_batches: int) -> list[list[Example]]:
    size = data.source.batch
    first = max(0, num_batches - HELD_OUT) * size
    kept = sorted(data.examples[first:], key=lambda example: len(example.ids))
    return [kept[at : at + 4 * size] for at in range(0, len(kept), 4 * size)]


@torch.no_grad()
def _validate(model: Any, held: Iterable[list[Example]], device: Any) -> float:
    """Loss a token of the held-out examples, padded."""
    model.eval()
    total, items = torch.zeros((), device=device), 0
    for rows in held:
        micro = padded(rows, device=device, step_done=True)
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            total += model(**micro.kwargs, num_items_in_batch=1).loss.float()
        items += micro.num_items
    model.train()
    return float(total) / items
