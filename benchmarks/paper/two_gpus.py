"""Two GPUs (DDP, NCCL) fed by one service: useful tokens a second, packs dealt evenly and by cost."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from paper.batches import packed
from paper.settings import Shape
from paper.training import Trainer, measure
from trainer_client import PackedStream

_BALANCES: tuple[Literal["none", "attention"], ...] = ("none", "attention")
Job = tuple[str, str, str]  # source, url, dataset


def compare(
    shape: Shape, jobs: Sequence[Job], *, kind: str, attention: str, world_size: int, folder: Path
) -> list[dict[str, Any]]:
    """Train on `world_size` devices of `kind`, each a process; results of all jobs and balances."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rendezvous").unlink(missing_ok=True)
    torch.multiprocessing.spawn(
        _rank, args=(world_size, shape, list(jobs), kind, attention, str(folder)), nprocs=world_size
    )
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    return [_together(shape, list(of_ranks)) for of_ranks in zip(*ranks, strict=True)]


def _together(shape: Shape, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = max(rank["seconds"] for rank in ranks)
    real = sum(rank["num_real"] for rank in ranks)
    return {
        "part": "two_gpus",
        "model": shape.name,
        "source": ranks[0]["source"],
        "packing": ranks[0]["balance"],
        "balance": ranks[0]["balance"],
        "world_size": len(ranks),
        "num": ranks[0]["num"],
        "real_per_s": real / seconds,
        "num_real": [rank["num_real"] for rank in ranks],
        "stall_share": max(rank["stall_share"] for rank in ranks),
    }


def _rank(
    rank: int, world_size: int, shape: Shape, jobs: list[Job], kind: str, attention: str, folder: str
) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
    )
    trainer = Trainer(shape, device=device)
    trainer.use(attention)
    trainer.model = DistributedDataParallel(trainer.model, device_ids=[rank] if kind == "cuda" else None)
    results = []
    for source, url, dataset in jobs:
        for balance in _BALANCES:
            with PackedStream(
                url,
                dataset=dataset,
                rank=rank,
                world_size=world_size,
                balance=balance,
                epochs=None,
                device=device if kind == "cuda" else None,
            ) as stream:
                distributed.barrier()
                timing = measure(
                    trainer, packed(stream), warmup=shape.warmup, num=shape.packs, stats=stream.stats
                )
            results.append({"source": source, "balance": balance, **asdict(timing)})
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    distributed.barrier()
    os._exit(0)  # without tearing anything down: DDP and gloo were seen to wait for each other there
