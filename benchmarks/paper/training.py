"""A model that takes training steps, and the clock around them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paper.batches import Micro
from paper.settings import Shape
from trainer_client import StreamStats, attention


def build_model(architecture: str, config: dict[str, Any], *, dtype: torch.dtype, device: Any) -> Any:
    """A model of random weights, made on the device; the same for the same seed."""
    torch.manual_seed(0)
    made = AutoConfig.for_model(architecture.lower(), **config)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation="sdpa")
    return model.train()


class Trainer:
    """Forward, backward and AdamW (fused, states in the weights' dtype, bf16 on CUDA) on one device."""

    def __init__(self, shape: Shape, *, device: Any, backend: str = "auto") -> None:
        attention.register(backend)
        self.device = torch.device(device)
        # A CPU is slow at bf16.
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = build_model(shape.architecture, shape.config, dtype=dtype, device=device)
        if shape.checkpointing:
            self.model.gradient_checkpointing_enable()
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=fused)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def use(self, implementation: str) -> None:
        self.model.set_attn_implementation(implementation)

    def take(self, micro: Micro) -> torch.Tensor:
        """One micro-batch; returns its loss, still on the device."""
        loss = self.model(**micro.kwargs, num_items_in_batch=micro.num_items).loss
        loss.backward()
        if micro.step_done:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def forget(self) -> None:
        """Give back what a failed or finished measurement holds."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What `num` micro-batches took."""

    num: int
    num_real: int
    num_computed: int
    num_steps: int  # of the optimiser
    seconds: float
    peak_bytes: int
    stall_share: float | None  # of the stream, over the timed micro-batches
    last_loss: float

    @property
    def real_per_s(self) -> float:
        return self.num_real / self.seconds


def measure(
    trainer: Trainer,
    micros: Iterable[Micro],
    *,
    warmup: int,
    num: int,
    stats: Callable[[], StreamStats] | None = None,
) -> Timing:
    """Time `num` micro-batches behind `warmup` others. The host runs at most one ahead of the GPU."""
    source = iter(micros)
    for micro in itertools.islice(source, warmup):
        trainer.take(micro)
    trainer.synchronize()
    if trainer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = stats() if stats else None
    taken, loss, start = [], None, time.perf_counter()
    for micro in itertools.islice(source, num):
        previous, loss = loss, trainer.take(micro)
        taken.append((micro.num_real, micro.num_computed, micro.step_done))
        del micro
        if previous is not None:
            previous.item()
    if loss is None:
        raise RuntimeError(f"no micro-batch is left behind {warmup} to warm up")
    last_loss = loss.item()
    trainer.synchronize()
    seconds = time.perf_counter() - start
    real, computed, steps = (sum(column) for column in zip(*taken, strict=True))
    return Timing(
        num=len(taken),
        num_real=real,
        num_computed=computed,
        num_steps=steps,
        seconds=seconds,
        peak_bytes=torch.cuda.max_memory_allocated() if trainer.device.type == "cuda" else 0,
        stall_share=_stall_share(before, stats()) if before and stats else None,
        last_loss=last_loss,
    )


def _stall_share(before: StreamStats, after: StreamStats) -> float:
    elapsed = after.elapsed_s - before.elapsed_s
    return (after.get_wait_s - before.get_wait_s) / elapsed if elapsed else 0.0
