"""One rank of a data-parallel training run, for tests: started in a process of its own.

Weights are float32 and the model is tiny, so that runs of other world sizes can be compared closely.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from trainer_client import PackedStream, attention


def train(
    rank: int, world_size: int, source: str, dataset: str, packs_per_step: int, out: str, options: Any
) -> None:
    """Train an epoch and save losses, steps taken and weights to `out`/<rank>.pt."""
    kind = options.get("kind", "cpu")
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{out}/rendezvous",
        rank=rank,
        world_size=world_size,
    )
    attention.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation="padfree",
    )
    model = DistributedDataParallel(
        LlamaForCausalLM(config).to(device), device_ids=[rank] if kind == "cuda" else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, examples = [], []
    stream = PackedStream(
        source,
        dataset=dataset,
        rank=rank,
        world_size=world_size,
        packs_per_step=packs_per_step,
        device=device if kind == "cuda" else None,
        **options.get("stream", {}),
    )
    for batch in stream:
        kwargs = batch.for_transformers()
        # A sum over the step's trained tokens; DDP takes the mean over ranks, hence the factor.
        loss = model(**kwargs, num_items_in_batch=batch.num_items_in_batch).loss * world_size
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / world_size
        distributed.all_reduce(total)
        losses.append(total.item())
        examples.append(batch.example_ids.tolist())
    weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    torch.save({"losses": losses, "examples": examples, "weights": weights}, Path(out) / f"{rank}.pt")
    distributed.barrier()
    # Without tearing anything down: gloo's threads and DDP were seen to wait for each other there for ever.
    os._exit(0)


def run(folder: Path, world_size: int, *args: Any) -> list[dict[str, Any]]:
    """Train on `world_size` ranks; what each saved."""
    folder.mkdir()
    source, dataset, packs_per_step, options = args
    torch.multiprocessing.spawn(
        train,
        args=(world_size, source, dataset, packs_per_step, str(folder), options),
        nprocs=world_size,
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]
