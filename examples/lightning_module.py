"""Train with Lightning on a padfree stream.

    python examples/lightning_module.py --url http://localhost:8000 --dataset ID --steps 30

`PackedData` is a DataModule for any LightningModule: its batches are PackedBatch, on the device, and its
place is part of Lightning's checkpoints. `Module` shows what a training step does with them.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytorch_lightning as lightning
import torch
from torch.nn.parallel import DistributedDataParallel

from trainer_client import PackedBatch, PackedStream, attention


class PackedData(lightning.LightningDataModule):
    """The training batches of this rank. `stream`: what PackedStream takes, less rank and world size."""

    def __init__(self, **stream: Any) -> None:
        super().__init__()
        self._options = stream
        self._loader: _Loader | None = None

    def train_dataloader(self) -> _Loader:
        trainer = self.trainer
        options = {"rank": trainer.global_rank, "world_size": trainer.world_size, **self._options}
        if trainer.strategy.root_device.type == "cuda":
            options.setdefault("device", trainer.strategy.root_device)
        self._loader = _Loader(PackedStream(options.pop("source"), **options))
        return self._loader

    def transfer_batch_to_device(
        self, batch: PackedBatch, device: torch.device, dataloader_idx: int
    ) -> PackedBatch:
        # Called right before the batch is trained. It is on its device already.
        assert self._loader is not None
        self._loader.trained = batch.state
        return batch


class _Loader:
    """The stream as Lightning iterates it. Its state is that of the batch that was trained last: where the
    number of batches is not known, Lightning takes one ahead."""

    def __init__(self, stream: PackedStream) -> None:
        self.stream = stream
        self.trained = stream.state_dict()

    def __iter__(self) -> Iterator[PackedBatch]:
        self.stream.set_epoch(self.stream.epoch)  # how many epochs there are is Lightning's to say
        return iter(self.stream)

    def __len__(self) -> int:
        return len(self.stream)

    def state_dict(self) -> dict[str, Any]:
        return self.trained

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stream.load_state_dict(state)
        self.trained = dict(state)


class Module(lightning.LightningModule):
    """A causal language model on packed batches.

    Optimised by hand: a `step` dataset has several micro-batches a step, and accumulate_grad_batches
    would take the mean of their means.
    """

    def __init__(self, model: torch.nn.Module, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.learning_rate = learning_rate

    def training_step(self, batch: PackedBatch, index: int) -> torch.Tensor:
        apart = isinstance(self.trainer.model, DistributedDataParallel) and not batch.step_done
        with self.trainer.model.no_sync() if apart else contextlib.nullcontext():
            out = self.model(**batch.for_transformers(), num_items_in_batch=batch.num_items_in_batch)
            # Of all ranks' tokens; gradients are averaged over ranks, times their number makes it a sum.
            self.manual_backward(out.loss * self.trainer.world_size)
        if batch.step_done:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", out.loss.detach(), sync_dist=True, reduce_fx="sum", batch_size=1, prog_bar=True)
        return out.loss.detach()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.0)


def main() -> None:
    from train_tiny import tiny_model  # here, so that this file may be copied without that one

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://localhost:8000", help="a service, or a store folder")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument(
        "--checkpoints", metavar="DIR", help="where Lightning keeps checkpoints; none without"
    )
    parser.add_argument("--resume", help="a checkpoint of Lightning")
    args = parser.parse_args()
    trainer = lightning.Trainer(
        max_steps=args.steps,
        max_epochs=-1,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=args.checkpoints is not None,  # else they would go into the working folder
        default_root_dir=args.checkpoints,
    )
    data = PackedData(source=args.url, dataset=args.dataset)
    model = tiny_model(args.vocab_size)
    attention.check(model)  # not every model keeps the examples of a pack apart; this one does
    trainer.fit(Module(model), data, ckpt_path=args.resume)


if __name__ == "__main__":
    main()
