"""Train with transformers' Trainer: its batches come from a padfree stream, one optimiser step at a time.

    python examples/transformers_trainer.py --url http://localhost:8000 --dataset ID --steps 30
    torchrun --nproc-per-node 8 examples/transformers_trainer.py …

`PackedBatches` goes before any kind of Trainer (examples/trl_sft.py puts it before TRL's).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from trainer_client import PackedBatch, PackedStream, attention

log = logging.getLogger(__name__)


class PackedBatches:
    """A Trainer that trains on a PackedStream as it comes.

    `stream`: what PackedStream takes, less rank and world size, which the Trainer knows. The stream has no
    end, so that a step never spans less than it should: `max_steps` says how long to train, or
    num_train_epochs where the dataset is finished.

    Nothing else touches the batches: no DataLoader, so no sharding by Accelerate on top of the stream's
    own, no collation and no removed columns. num_items_in_batch comes with the batches, counted over all
    ranks. The stream's state is part of each checkpoint (in trainer_state.json). A model that does not keep
    the examples of a batch apart is refused.
    """

    # What batch.for_transformers is given: {"seq_idx": True} for models that take it, {"static": True} with
    # torch_compile. For a subclass to say.
    batch_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, *args: Any, stream: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A copy: what is set below is of this dataset, and the caller may use theirs for another.
        self.args = given = copy.copy(self.args)
        self._require_whole_losses(stream)
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):  # there the model may be in parts already
            with self.accelerator.autocast():  # as in training: some kernels take half precision alone
                attention.check(self.model, **self.batch_options)  # refused, where examples would meet
        options = {"rank": given.process_index, "world_size": given.world_size, "epochs": None, **stream}
        if given.device.type == "cuda":
            options.setdefault("device", given.device)
        loop_steps, optimizer_steps = _steps_of_an_epoch(options)
        if given.max_steps <= 0:
            if optimizer_steps is None:
                raise ValueError("max_steps: required while the dataset is still being packed")
            updates = optimizer_steps / given.gradient_accumulation_steps
            given.max_steps = math.ceil(given.num_train_epochs * updates)
        self.stream = PackedStream(options.pop("source"), **options)
        # The stream goes on where it stood by itself: nothing is to be read and thrown away.
        given.ignore_data_skip = True
        self.add_callback(StreamPosition(loop_steps))

    def _require_whole_losses(self, stream: dict[str, Any]) -> None:
        """ValueError where this training would take other batches, or another loss, than the stream says."""
        given: TrainingArguments = self.args
        if not given.average_tokens_across_devices:
            raise ValueError(
                "average_tokens_across_devices: True is required, losses are of all ranks together"
            )
        if given.n_gpu > 1:
            raise ValueError(
                f"one GPU a process is required, found {given.n_gpu}: torch's DataParallel would cut the "
                f"boundaries of a batch apart; start with torchrun --nproc-per-node {given.n_gpu}, or set "
                "CUDA_VISIBLE_DEVICES=0"
            )
        if not self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            raise ValueError(
                f"compute_loss_func: required for {type(self.model).__name__}, which takes no "
                "num_items_in_batch and gives the mean of each batch, where packs differ in trained tokens; "
                "give one that divides the sum by it, as transformers.loss.loss_utils.ForCausalLMLoss does"
            )
        if stream.get("epochs") is not None:
            raise ValueError(
                f"stream: no epochs are required, found {stream['epochs']}; num_train_epochs or max_steps "
                "says how long to train"
            )
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        alike = self.get_tp_size() if parallelism is None else parallelism.non_data_parallel_size
        if alike > 1 and not {"rank", "world_size"} <= stream.keys():
            raise ValueError(
                f"stream: rank and world_size of data parallelism are required, since {alike} ranks each are "
                f"for the same batches: world_size={given.world_size // alike}, one rank for all {alike}"
            )

    def get_train_dataloader(self) -> PackedStream:
        return self.stream

    def get_batch_samples(
        self, epoch_iterator: Iterator[PackedBatch], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor]:
        """The inputs of one optimiser step, `num_batches` steps of the stream, and its trained tokens."""
        steps = [_step(epoch_iterator) for _ in range(num_batches)]
        num_items = sum(step[-1].num_items_in_batch for step in steps)
        inputs = [self._inputs(step[0]) if len(step) == 1 else _several(step) for step in steps]
        return inputs, torch.tensor(num_items, device=device)

    def _inputs(self, batch: PackedBatch) -> dict[str, Any]:
        return batch.for_transformers(**self.batch_options)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        """Of a `step` dataset: forward and backward for each micro-batch; else as ever."""
        if "micro_batches" not in inputs:
            return super().training_step(model, inputs, num_items_in_batch)
        losses = []
        # What is a mean of each batch (a router's auxiliary loss, in TRL) is divided by their number.
        self.current_gradient_accumulation_steps *= len(inputs["micro_batches"])
        for batch in inputs["micro_batches"]:
            with contextlib.nullcontext() if batch.step_done else self.accelerator.no_sync(model):
                losses.append(super().training_step(model, self._inputs(batch), num_items_in_batch))
        self.current_gradient_accumulation_steps //= len(inputs["micro_batches"])
        return torch.stack(losses).sum()


class StreamPosition(TrainerCallback, ExportableState):
    """Keeps the stream's state in the Trainer's: saved with each checkpoint, loaded on resume."""

    def __init__(self, steps_per_epoch: int | None = None) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.stream: PackedStream | None = None

    def state(self) -> dict[str, Any]:
        position = self.stream.state_dict() if self.stream is not None else None
        return {"args": {"steps_per_epoch": self.steps_per_epoch}, "attributes": {"position": position}}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        train_dataloader: PackedStream,
        **_: Any,
    ) -> None:
        self.stream = train_dataloader
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is not None and saved["attributes"]["position"] is not None:
            self.stream.load_state_dict(saved["attributes"]["position"])
            return
        state.stateful_callbacks[type(self).__name__] = self.state()  # the Trainer only renews what is there
        if state.global_step > 0:
            log.warning(
                "this checkpoint of step %d holds no place of a stream: training goes on from where the "
                "stream stands, step %d of epoch %d",
                state.global_step,
                self.stream.state_dict()["step"],
                self.stream.epoch,
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # The Trainer takes its whole run for one epoch, the stream having no end.
        if self.stream is not None and self.steps_per_epoch is not None:
            position = self.stream.state_dict()
            state.epoch = position["epoch"] + position["step"] / self.steps_per_epoch


def _step(batches: Iterator[PackedBatch]) -> list[PackedBatch]:
    """The micro-batches of one step: one, save in a `step` dataset."""
    step = [next(batches)]
    while not step[-1].step_done:
        step.append(next(batches))
    return step


def _several(step: list[PackedBatch]) -> dict[str, Any]:
    """Several micro-batches as the inputs of one training step; input_ids is what the Trainer counts."""
    ids = np.concatenate([batch.input_ids for batch in step])
    return {"micro_batches": step, "input_ids": torch.tensor(ids)[None]}


def _steps_of_an_epoch(options: dict[str, Any]) -> tuple[int, int] | tuple[None, None]:
    """Loop steps and optimiser steps; None while the dataset is still being packed."""
    given = {**options, "epochs": 1, "device": None}
    with PackedStream(given.pop("source"), **given) as stream:
        try:
            return len(stream), stream.num_optimizer_steps
        except TypeError:
            return None, None


class PackedTrainer(PackedBatches, Trainer):
    """transformers' Trainer on a stream."""


def main() -> None:
    from train_tiny import tiny_model  # here, so that this file may be copied without that one

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://localhost:8000", help="a service, or a store folder")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--output", default="trainer-output")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in --output")
    args = parser.parse_args()
    trainer = PackedTrainer(
        model=tiny_model(args.vocab_size),
        args=TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            save_steps=10,
            logging_steps=1,
            learning_rate=1e-3,
            report_to="none",
        ),
        stream={"source": args.url, "dataset": args.dataset},
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.stream.close()


if __name__ == "__main__":
    main()
