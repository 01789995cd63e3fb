"""Batches on a GPU: the right bytes, no buffer reused too early, no wait on the host."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from packs import build_dataset, random_packs

from trainer_client import PackedStream
from trainer_client.device import Uploader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_stream_with_a_device_gives_the_same_tensors_there(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, random_packs(40), packs_per_shard=7)
    here = list(PackedStream(tmp_path, dataset=dataset, packs_per_step=3))
    there = list(PackedStream(tmp_path, dataset=dataset, packs_per_step=3, device="cuda"))
    assert len(here) == len(there) == 13
    for one, two in zip(here, there, strict=True):
        kwargs = two.for_transformers(seq_idx=True)
        for name, value in one.for_transformers(seq_idx=True).items():
            if isinstance(value, torch.Tensor):
                assert kwargs[name].device.type == "cuda", name
                assert torch.equal(kwargs[name].cpu(), value), name
                assert kwargs[name].dtype == value.dtype
            else:
                assert kwargs[name] == value
        assert two.for_transformers(device="cpu")["input_ids"].device.type == "cpu"


def test_no_buffer_is_reused_before_its_copy_is_done() -> None:
    """The copy stream is kept busy, so that every copy is still to come when the next batch is filled."""
    uploader = Uploader("cuda", num_slots=2)
    batches = [pack_batch(seed) for seed in range(24)]
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    uploads = []
    for batch in batches:
        with torch.cuda.stream(uploader._stream):
            busy = busy @ busy
            busy /= busy.norm()
        uploads.append(uploader.upload(batch))
    for batch, upload in zip(batches, uploads, strict=True):
        assert np.array_equal(upload.tensors().input_ids.cpu().numpy(), batch.input_ids)


def test_memory_is_not_given_away_while_the_training_stream_reads_it() -> None:
    """The race of a side stream: a batch is dropped while a slow kernel has yet to read it."""
    uploader = Uploader("cuda", num_slots=2)
    slow = torch.randn(8192, 8192, device="cuda")
    wanted, sums = [], []
    for seed in range(40):
        batch = pack_batch(seed)
        wanted.append(int(batch.input_ids.astype(np.int64).sum()))
        ids = uploader.upload(batch).tensors().input_ids
        slow = slow @ slow
        slow /= slow.norm()
        sums.append(ids.long().sum())  # runs long after the next uploads were asked for
        del ids, batch
    assert [int(value) for value in sums] == wanted


def test_device_memory_that_lies_ready_is_bounded(tmp_path: Path) -> None:
    """By prefetch_bytes, and one batch more: the allocator's count says so while the loop stands still."""
    dataset = build_dataset(tmp_path, random_packs(600, max_tokens=4096), packs_per_shard=100)
    bound = 4 << 20
    before = torch.cuda.memory_allocated()
    with PackedStream(
        tmp_path, dataset=dataset, packs_per_step=20, prefetch_steps=1000, prefetch_bytes=bound, device="cuda"
    ) as stream:
        batch = next(iter(stream_batches := iter(stream)))
        of_one = batch.upload.buffer.nbytes
        for _ in range(200):  # until the reader has read as far as it may
            before_wait = torch.cuda.memory_allocated()
            time.sleep(0.05)
            if torch.cuda.memory_allocated() == before_wait:
                break
        held = torch.cuda.memory_allocated() - before
        assert of_one < bound < held < bound + 5 * of_one
        del batch, stream_batches


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_cuda_is_the_current_device_of_the_loops_thread(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, random_packs(40), packs_per_shard=7)
    torch.cuda.set_device(1)
    try:
        before = torch.cuda.memory_allocated(0)
        for batch in PackedStream(tmp_path, dataset=dataset, device="cuda"):
            for kwargs in (batch.for_transformers(), batch.for_transformers(device="cuda")):
                assert kwargs["input_ids"].device == torch.device("cuda", 1)
        assert torch.cuda.memory_allocated(0) == before
    finally:
        torch.cuda.set_device(0)


USED = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_rank_of_another_device_takes_no_memory_of_the_first(tmp_path: Path) -> None:
    """Not even a context, of half a gigabyte: the reader's thread begins with the first device as its own."""
    dataset = build_dataset(tmp_path, random_packs(40), packs_per_shard=7)
    program = (
        "import subprocess, sys, torch; from trainer_client import PackedStream\n"
        "torch.cuda.set_device(1)\n"
        "stream = PackedStream(sys.argv[1], dataset=sys.argv[2], device='cuda')\n"
        "for batch in stream: batch.for_transformers()\n"
        "print(subprocess.check_output(sys.argv[3:], text=True))"
    )
    before = int(subprocess.check_output(USED, text=True))
    command = [sys.executable, "-c", program, str(tmp_path), dataset, *USED]
    within = int(subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout)
    assert within - before < 100  # MiB


def pack_batch(seed: int):
    from trainer_client.batch import flatten

    packs = random_packs(200, max_tokens=512, seed=seed)
    return flatten(packs, padding=[False] * 200, epoch=0, step=0, num_items=1, step_done=True)


def test_taking_a_batch_waits_for_nothing_on_the_host(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, random_packs(40), packs_per_shard=7)
    batches = list(PackedStream(tmp_path, dataset=dataset, packs_per_step=3, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            batch.for_transformers()
            batch.for_flash_attn()
    finally:
        torch.cuda.set_sync_debug_mode("default")
