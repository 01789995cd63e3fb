"""Batches and what adapters make of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from packing_job import STRATEGIES, pack_document, packing_of, spec_of, write_rows
from packs import pack_of, random_packs
from transformers import DataCollatorWithFlattening

from packer.shard import Pack, padding_pack
from trainer_client import PackedStream
from trainer_client.batch import PackedBatch, flatten, join, padded_boundaries


def batch_of(packs: list[Pack], *, padding: list[bool] | None = None) -> PackedBatch:
    return flatten(
        packs,
        padding=padding or [False] * len(packs),
        epoch=0,
        step=0,
        num_items=sum(pack.num_trained for pack in packs),
        step_done=True,
    )


def examples(batch: PackedBatch) -> list[dict[str, list[int]]]:
    """The batch's examples as a collator wants them."""
    return [
        {"input_ids": batch.input_ids[a:b].tolist(), "labels": batch.labels[a:b].tolist()}
        for a, b in itertools.pairwise(batch.cu_seqlens.tolist())
    ]


def batch_from(tmp_path: Path, rows: list[list[int]], strategy: str, max_tokens: int) -> PackedBatch:
    """All packs of these rows of ready ids, packed by `strategy`, as a client's one batch."""
    group = 2 if strategy == "minibatch" else len(rows)
    source = write_rows(tmp_path / "rows.jsonl", [{"input_ids": ids} for ids in rows])
    packing = packing_of(strategy, max_tokens, group=group)
    packed = pack_document(tmp_path / "store", spec_of(source, None, packing=packing))
    stream = PackedStream(tmp_path / "store", dataset=packed.job.dataset, packs_per_step=len(packed.packs))
    return join(list(stream))  # of a "step" dataset there are several, of one pack each


def of_rows(batch: PackedBatch) -> dict[int, list[int]]:
    """The ids of each segment by example id; positions restart in each."""
    found = {}
    for example, a, b in zip(
        batch.example_ids.tolist(), batch.cu_seqlens, batch.cu_seqlens[1:], strict=False
    ):
        assert batch.position_ids[a:b].tolist() == list(range(b - a))
        found[example] = batch.input_ids[a:b].tolist()
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_f01_boundaries_of_every_pack_survive_under_every_strategy(tmp_path: Path, strategy: str) -> None:
    rows = [[11, 12, 13], [14, 15], [16, 17, 18, 19]]
    batch = batch_from(tmp_path, rows, strategy, max_tokens=5)
    assert batch.num_packs == (3 if strategy == "padded" else 2)
    assert (batch.num_segments, batch.num_tokens, batch.max_seqlen) == (3, 9, 4)
    assert batch.cu_seqlens[[0, -1]].tolist() == [0, 9]
    assert (np.diff(batch.cu_seqlens) > 0).all()
    assert of_rows(batch) == dict(enumerate(rows))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_f02_all_four_varlen_arguments_are_there_under_every_strategy(tmp_path: Path, strategy: str) -> None:
    rows = [[11, 12, 13], [14, 15], [16, 17, 18, 19]]
    batch = batch_from(tmp_path, rows, strategy, max_tokens=9)
    kwargs = batch.for_transformers()
    assert sorted(kwargs["cu_seq_lens_q"].diff().tolist()) == [2, 3, 4]
    assert torch.equal(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
    assert kwargs["cu_seq_lens_q"].dtype == torch.int32
    assert [type(kwargs[name]) for name in ("max_length_q", "max_length_k")] == [int, int]
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == 4


def test_f01_boundaries_are_shifted_when_a_batch_holds_two_packs() -> None:
    a = pack_of([[1, 2, 3], [4, 5]], [0, 1])
    b = pack_of([[6, 7, 8, 9]], [2])
    batch = batch_of([a, b])
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert batch.cu_seqlens.dtype == np.int32
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert batch.max_seqlen == 4
    assert (batch.num_segments, batch.num_tokens, batch.num_packs) == (3, 9, 2)
    assert batch.example_ids.tolist() == [0, 1, 2]


def test_f02_all_four_varlen_arguments_are_there() -> None:
    kwargs = batch_of([pack_of([[1, 2, 3], [4, 5], [6, 7, 8, 9]], [0, 1, 2])]).for_transformers()
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert kwargs[name].tolist() == [0, 3, 5, 9]
        assert kwargs[name].dtype == torch.int32
    for name in ("max_length_q", "max_length_k"):
        assert type(kwargs[name]) is int
        assert kwargs[name] == 4
    assert kwargs["use_cache"] is False
    assert "attention_mask" not in kwargs


def test_the_worked_example() -> None:
    """Lengths 4, 8, 5, 11: padding-free training's own example."""
    lengths = [4, 8, 5, 11]
    batch = batch_of([pack_of([range(100 * i, 100 * i + n) for i, n in enumerate(lengths)], [0, 1, 2, 3])])
    kwargs = batch.for_transformers()
    assert kwargs["input_ids"].shape == (1, 28)
    assert (kwargs["position_ids"][0] == 0).nonzero().flatten().tolist() == [0, 4, 12, 17]
    assert kwargs["cu_seq_lens_q"].tolist() == [0, 4, 12, 17, 28]
    assert kwargs["max_length_q"] == 11
    assert (kwargs["labels"][0] == -100).nonzero().flatten().tolist() == [0, 4, 12, 17]
    assert batch.num_items_in_batch == batch.num_trained == 24


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_packs", [1, 3])
def test_equal_to_the_collator_of_transformers(seed: int, num_packs: int) -> None:
    batch = batch_of(random_packs(num_packs, max_tokens=60, seed=seed))
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    wanted = collator(examples(batch), return_tensors="pt")
    found = batch.for_transformers(seq_idx=True)
    assert found.pop("use_cache") is False
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
            assert found[name].dtype == value.dtype, name
            assert found[name].shape == value.shape, name
        else:
            assert (found[name], type(found[name])) == (value, type(value)), name


def test_tensors_own_their_values() -> None:
    batch = batch_of(random_packs(1))
    before = batch.input_ids.copy()
    batch.for_transformers()["input_ids"].zero_()
    batch.for_transformers()["cu_seq_lens_q"].zero_()
    assert np.array_equal(batch.input_ids, before)
    assert batch.cu_seqlens[-1] == batch.num_tokens


def test_arguments_of_the_varlen_kernels() -> None:
    batch = batch_of([pack_of([[1, 2, 3], [4, 5]], [0, 1])])
    flash, varlen = batch.for_flash_attn(), batch.for_torch_varlen()
    assert flash["cu_seqlens_q"].tolist() == flash["cu_seqlens_k"].tolist() == [0, 3, 5]
    assert flash["cu_seqlens_q"].dtype == torch.int32
    assert (flash["max_seqlen_q"], flash["max_seqlen_k"], flash["causal"]) == (3, 3, True)
    assert varlen["cu_seq_q"].tolist() == varlen["cu_seq_k"].tolist() == [0, 3, 5]
    assert (varlen["max_q"], varlen["max_k"], varlen["window_size"]) == (3, 3, (-1, 0))


def padded_pack() -> Pack:
    """Segments of 3 and 2 tokens, each padded to a multiple of 4, and the pack padded by 4 more."""
    ids = [[1, 2, 3], [0], [4, 5], [0, 0], [0, 0, 0, 0]]
    pack = pack_of(ids, [7, -1, 8, -1, -1])
    return Pack(
        input_ids=pack.input_ids,
        loss_mask=pack.loss_mask & np.repeat(pack.example_ids != -1, [len(i) for i in ids]),
        cu_seqlens=pack.cu_seqlens,
        example_ids=pack.example_ids,
    )


def test_megatron_gets_real_and_padded_boundaries() -> None:
    batch = batch_of([padded_pack(), pack_of([[9, 10]], [9])])
    real, where = padded_boundaries(batch)
    assert real.tolist() == [0, 3, 5, 7]
    assert where.tolist() == [0, 4, 12, 14]
    found = batch.for_megatron()
    params = found["packed_seq_params"]
    assert params["qkv_format"] == "thd"
    assert params["cu_seqlens_q"].tolist() == params["cu_seqlens_kv"].tolist() == [0, 3, 5, 7]
    assert params["cu_seqlens_q_padded"].tolist() == [0, 4, 12, 14]
    assert params["cu_seqlens_q"].dtype == params["cu_seqlens_kv_padded"].dtype == torch.int32
    assert params["max_seqlen_q"] == 8
    # Shifted: at t they speak of token t + 1, and never of the next segment's first token.
    trained = found["loss_mask"][0].nonzero().flatten()
    assert trained.tolist() == [0, 1, 4, 12]
    assert found["labels"][0, trained].tolist() == [2, 3, 5, 10]
    assert found["labels"].shape == found["tokens"].shape == found["position_ids"].shape == (1, 14)
    assert found["loss_mask"].dtype == torch.float32


def test_boundaries_of_a_batch_of_padding_alone() -> None:
    real, where = padded_boundaries(batch_of([padding_pack()], padding=[True]))
    assert real.tolist() == where.tolist() == [0, 1]


def test_fillers_are_left_out_unless_there_is_nothing_else() -> None:
    pack = pack_of([[1, 2, 3]], [0])
    mixed = batch_of([pack, padding_pack(), padding_pack()], padding=[False, True, True])
    assert (mixed.num_packs, mixed.num_tokens, mixed.is_padding) == (1, 3, False)
    alone = batch_of([padding_pack(), padding_pack()], padding=[True, True])
    assert (alone.num_packs, alone.num_tokens, alone.is_padding) == (0, 1, True)
    assert alone.for_transformers()["labels"].tolist() == [[-100]]
    assert alone.num_items_in_batch == 1  # what the loss is divided by: 0 and not 0/0


def test_a_device_other_than_cuda_gives_the_same_tensors() -> None:
    from trainer_client.device import Uploader

    batch = batch_of(random_packs(2))
    uploaded = batch.with_upload(Uploader("cpu").upload(batch))
    for name, value in batch.for_transformers().items():
        other = uploaded.for_transformers()[name]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name
