"""examples/transformers_trainer.py: what a Trainer receives, its losses beside padding's, its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from packs import commit_partition, numbered_packs, start_dataset
from training import (
    LEARNING_RATE,
    MINIBATCH,
    STEP_SIZE,
    STEPS,
    VOCAB_SIZE,
    assert_same_weights,
    joined,
    on_ranks,
    pack_rows,
    padded,
    padded_losses,
    rows_of,
    tiny,
)
from transformers import (
    DataCollatorWithFlattening,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers_trainer import PackedTrainer

from trainer_client import PackedStream
from trainer_client.attention import ExamplesMeet


class Observed(PackedTrainer):
    """Notes what reaches the model, with the number of items of its step, and the Trainer's own count."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.received: list[tuple[dict[str, Any], int]] = []
        self.own_counts: list[int] = []
        self.shares: list[float] = []  # of a step, that each batch's mean counts for
        super().__init__(*args, **kwargs)

    def get_batch_samples(self, *args: Any) -> Any:
        inputs, num_items = super().get_batch_samples(*args)
        if "labels" in inputs[0]:
            self.own_counts.append(int(Trainer._get_num_items_in_batch(self, inputs, self.args.device)))
        return inputs, num_items

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None
    ):
        if model.training:
            self.received.append((dict(inputs), int(num_items_in_batch)))
            self.shares.append(1 / self.current_gradient_accumulation_steps)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.state.log_history if "loss" in entry]

    @property
    def ids(self) -> list[list[int]]:
        return [inputs["input_ids"][0].tolist() for inputs, _ in self.received]


def arguments(output: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(output),
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", **options},
    )


def trainer_of(
    store: Path, dataset: str, *, stream: dict[str, Any] | None = None, **options: Any
) -> Observed:
    given = {"source": store, "dataset": dataset, **(stream or {})}
    return Observed(model=tiny(), args=arguments(store / "output", **options), stream=given)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trains_as_padding_does(tmp_path: Path, accumulation: int) -> None:
    rows = rows_of(4 * MINIBATCH)
    dataset = pack_rows(tmp_path, rows)
    trainer = trainer_of(tmp_path, dataset, num_train_epochs=1, gradient_accumulation_steps=accumulation)
    trainer.train()
    wanted, weights = padded_losses(rows, rows_per_step=accumulation * MINIBATCH)
    assert trainer.losses == pytest.approx(wanted, abs=1e-5)
    assert_same_weights(trainer.model.state_dict(), weights)
    assert trainer.state.epoch == 1
    # What reached the model is what the stream gave: no key more or less, no other shape, no mask.
    for (inputs, _), batch in zip(trainer.received, PackedStream(tmp_path, dataset=dataset), strict=True):
        alone = batch.for_transformers()
        assert inputs.keys() == alone.keys()
        assert all(
            torch.equal(value, alone[key]) if isinstance(value, torch.Tensor) else value == alone[key]
            for key, value in inputs.items()
        )
    assert [num_items for _, num_items in trainer.received[::accumulation]] == trainer.own_counts


def test_a_step_dataset_trains_as_padding_does(tmp_path: Path) -> None:
    rows = rows_of(4 * STEP_SIZE)
    dataset = pack_rows(tmp_path, rows, **STEPS)
    trainer = trainer_of(tmp_path, dataset, max_steps=4, include_num_input_tokens_seen="all")
    trainer.train()
    wanted, weights = padded_losses(rows, rows_per_step=STEP_SIZE)
    assert trainer.state.num_input_tokens_seen == sum(len(row["input_ids"]) for row in rows)
    assert trainer.state.total_flos > 0
    assert len(trainer.received) > 4
    assert sum(trainer.shares) == pytest.approx(4)
    assert trainer.losses == pytest.approx(wanted, abs=1e-5)
    assert_same_weights(trainer.model.state_dict(), weights)
    assert trainer.state.epoch == 1
    assert trainer_of(tmp_path, dataset, num_train_epochs=2).args.max_steps == 8


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    dataset = pack_rows(tmp_path, rows_of(4 * MINIBATCH))
    whole = trainer_of(tmp_path, dataset, max_steps=7, gradient_accumulation_steps=2)  # 2 steps an epoch
    whole.train()
    output = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    parts = []
    for max_steps in (3, 6, 7):  # the second ends with an epoch
        parts.append(trainer_of(tmp_path, dataset, max_steps=max_steps, **output))
        parts[-1].train(resume_from_checkpoint=None if max_steps == 3 else True)
    assert joined(part.ids for part in parts) == whole.ids
    assert parts[-1].losses == pytest.approx(whole.losses, abs=1e-5)  # log_history is part of a checkpoint
    assert parts[-1].state.epoch == whole.state.epoch == 3.5


def test_callbacks_restored_by_the_trainer_know_the_stream(tmp_path: Path) -> None:
    dataset = pack_rows(tmp_path, rows_of(4 * MINIBATCH))
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    trainer_of(tmp_path, dataset, max_steps=3, **options).train()
    resumed = trainer_of(
        tmp_path, dataset, max_steps=4, restore_callback_states_from_checkpoint=True, **options
    )
    resumed.train(resume_from_checkpoint=True)
    (last,) = list(PackedStream(tmp_path, dataset=dataset))[3:]
    assert resumed.ids == [last.input_ids.tolist()]


def test_it_evaluates_rows_while_it_trains(tmp_path: Path) -> None:
    dataset, rows = pack_rows(tmp_path, rows_of(4 * MINIBATCH)), rows_of(4, seed=1)
    evaluating = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    trainer = Observed(
        model=tiny(),
        args=arguments(tmp_path / "output", max_steps=4, **evaluating),
        stream={"source": tmp_path, "dataset": dataset},
        eval_dataset=rows,
        data_collator=DataCollatorWithFlattening(),
    )
    trainer.train()
    model = trainer.model.eval()
    with torch.no_grad():
        wanted = model(**{**padded(rows), "attention_mask": None, "use_cache": False}).loss.item()
    found = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(found) == 2
    assert found[-1] == pytest.approx(wanted, abs=1e-5)  # causal: padding behind an example changes nothing
    assert trainer.ids == [batch.input_ids.tolist() for batch in PackedStream(tmp_path, dataset=dataset)]


def test_arguments_may_be_used_for_another_dataset(tmp_path: Path) -> None:
    given = arguments(tmp_path / "output", num_train_epochs=1)
    for num_steps in (2, 4):
        store = tmp_path / str(num_steps)
        dataset = pack_rows(store, rows_of(num_steps * MINIBATCH))
        trainer = Observed(model=tiny(), args=given, stream={"source": store, "dataset": dataset})
        trainer.train()
        assert trainer.state.global_step == num_steps
    assert given.max_steps == -1


def test_while_packing_runs_max_steps_is_required(tmp_path: Path) -> None:
    dataset = start_dataset(tmp_path, identity="growing")
    commit_partition(tmp_path, dataset, 0, numbered_packs(3), packs_per_shard=2)
    with pytest.raises(ValueError, match="still being packed"):
        trainer_of(tmp_path, dataset, num_train_epochs=1)
    trainer = trainer_of(tmp_path, dataset, max_steps=2)
    trainer.train()
    assert [ids[0] for ids in trainer.ids] == [0, 1]
    trainer.stream.close()


def test_a_checkpoint_without_a_stream_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = pack_rows(tmp_path, rows_of(4 * MINIBATCH))
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    Trainer(
        model=tiny(), args=arguments(tmp_path / "output", max_steps=2, **options),
        train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}] * 4,
    ).train()  # fmt: skip
    trainer = trainer_of(tmp_path, dataset, max_steps=3, **options)
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint of step 2 holds no place of a stream" in caplog.text
    assert trainer.ids == [next(iter(PackedStream(tmp_path, dataset=dataset))).input_ids.tolist()]


def test_what_would_train_another_loss_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = pack_rows(tmp_path, rows_of(2 * MINIBATCH))
    with pytest.raises(ValueError, match="no epochs are required, found 2"):
        trainer_of(tmp_path, dataset, max_steps=1, stream={"epochs": 2})
    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "accepts_loss_kwargs", False, raising=False)
        with pytest.raises(ValueError, match="compute_loss_func: required for LlamaForCausalLM"):
            trainer_of(tmp_path, dataset, max_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingArguments, "n_gpu", 4)
        with pytest.raises(ValueError, match="one GPU a process is required, found 4"):
            trainer_of(tmp_path, dataset, max_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "get_tp_size", lambda self: 2)
        with pytest.raises(ValueError, match="rank and world_size of data parallelism are required"):
            trainer_of(tmp_path, dataset, max_steps=1)
        trainer_of(tmp_path, dataset, max_steps=1, stream={"rank": 0, "world_size": 1}).stream.close()


@pytest.mark.parametrize("packing", [{}, STEPS])
def test_batch_options_reach_the_model_and_change_no_loss(tmp_path: Path, packing: dict[str, Any]) -> None:
    class Static(Observed):
        batch_options: ClassVar[dict[str, Any]] = {"static": True, "seq_idx": True}

    dataset = pack_rows(tmp_path, rows_of(4 * MINIBATCH), **packing)
    plain = trainer_of(tmp_path, dataset, max_steps=2)
    given = {"source": tmp_path, "dataset": dataset}
    static = Static(model=tiny(), args=arguments(tmp_path / "output", max_steps=2), stream=given)
    for trainer in (plain, static):
        trainer.train()
    assert static.losses == pytest.approx(plain.losses, abs=1e-5)
    assert len({len(ids) for ids in static.ids}) == 1
    assert all("seq_idx" in inputs for inputs, _ in static.received)


def test_the_model_is_checked_in_the_precision_of_the_training(tmp_path: Path) -> None:
    """Kernels such as flash-attn's refuse float32, which the weights are in."""
    dataset, model, found = pack_rows(tmp_path, rows_of(2 * MINIBATCH)), tiny(), []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *given: found.append(given[-1].dtype))
    given = {"source": tmp_path, "dataset": dataset}
    args = arguments(tmp_path / "output", max_steps=1, bf16=True)
    PackedTrainer(model=model, args=args, stream=given).stream.close()
    assert set(found) == {torch.bfloat16}


def test_a_model_that_lets_examples_meet_is_refused(tmp_path: Path) -> None:
    dataset = pack_rows(tmp_path, rows_of(2 * MINIBATCH))
    sizes = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    config = Mamba2Config(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=1, **sizes)
    with pytest.raises(ExamplesMeet, match="Mamba2Mixer"):
        Observed(
            model=Mamba2ForCausalLM(config),
            args=arguments(tmp_path / "output", max_steps=1),
            stream={"source": tmp_path, "dataset": dataset},
        )


# ------------------------------------------------------------------ two ranks


def train(store: Path, phases: list[dict[str, Any]]) -> list[tuple]:
    found = []
    for options in phases:
        resume = options.pop("resume", None)
        trainer = trainer_of(store, **options)
        trainer.train(resume_from_checkpoint=resume)
        counts = [num_items for _, num_items in trainer.received]
        found.append((trainer.losses, trainer.ids, counts, trainer.own_counts, trainer.model.state_dict()))
    return found


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    rows = rows_of(8 * MINIBATCH)
    dataset, of_steps = pack_rows(tmp_path, rows), pack_rows(tmp_path, rows, **STEPS)
    saving = {"save_strategy": "steps", "save_steps": 2}
    phases = [
        {"dataset": dataset, "max_steps": 4},
        {"dataset": dataset, "max_steps": 2, **saving},
        {"dataset": dataset, "max_steps": 4, **saving, "resume": True},
        {"dataset": of_steps, "max_steps": 4},
    ]
    ranks = on_ranks(2, train, tmp_path, phases)
    wanted, weights = padded_losses(rows, rows_per_step=2 * MINIBATCH)
    assert ranks[0][3][0] == pytest.approx(wanted, abs=1e-5)
    assert_same_weights(ranks[1][3][4], weights)
    assert len(ranks[0][3][1]) == len(ranks[1][3][1]) > 4
    assert ranks[0][0][0] == pytest.approx(wanted, abs=1e-5)
    assert ranks[0][2][0] == pytest.approx(wanted, abs=1e-5)
    for rank, (whole, before, after, _) in enumerate(ranks):
        assert_same_weights(whole[4], weights)
        stream = PackedStream(tmp_path, dataset=dataset, rank=rank, world_size=2)
        batches = list(stream)
        assert whole[1] == before[1] + after[1] == [batch.input_ids.tolist() for batch in batches]
        # The stream's count, the Trainer's own over both ranks, and the number that the loss is divided by.
        assert whole[2] == whole[3] == [batch.num_items_in_batch for batch in batches]
