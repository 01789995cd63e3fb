"""Batches on a device: pinned buffers, a copy stream of their own, and no buffer reused too early.

On CUDA, `Uploader.upload` (called in the reader's thread) copies a batch's arrays into one pinned
buffer and from there to the GPU in one asynchronous copy on a stream of its own:

    pinned slot:  input_ids | position_ids | cu_seqlens | loss_mask      (int32, int32, int32, bool)

A slot is filled again only when the event behind its last copy has passed. The training stream waits
for the copy on the device (`Upload.tensors`), never on the host, and tells the allocator that it uses
the memory (record_stream), so that the next upload cannot be given the same bytes while kernels still
read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer_client.batch import PackedBatch
from trainer_client.needs import needs_torch

with needs_torch("a batch as tensors (batch.for_…(), a stream's device)"):
    import torch

_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """input_ids, position_ids (num_tokens,) int32; cu_seqlens (num_segments + 1,) int32; loss_mask
    (num_tokens,) bool."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    loss_mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A batch's arrays on a device; on CUDA perhaps still on their way."""

    buffer: torch.Tensor  # (num_bytes,) uint8, behind all the views
    views: Tensors
    ready: Any = None  # torch.cuda.Event

    def tensors(self) -> Tensors:
        """The arrays, safe to use on the current stream."""
        if self.ready is not None:
            current = torch.cuda.current_stream(self.buffer.device)
            current.wait_event(self.ready)
            self.buffer.record_stream(current)
        return self.views


def meant(device: Any) -> torch.device:
    """The device that is meant here and now: "cuda" without a number is this thread's current one; threads
    have one each."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def to_device(array: np.ndarray, device: Any) -> torch.Tensor:
    """A tensor that owns its values. Arrow's arrays are read-only, torch's must not be: copied once."""
    return torch.from_numpy(np.array(array, copy=True)).to(device, non_blocking=True)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """(n,) moved one place to the left, with a zero at the end."""
    return torch.cat([tensor[1:], tensor.new_zeros(1)])


def tensors(batch: PackedBatch, device: Any = None) -> Tensors:
    """The batch's arrays as tensors: where they are already, or on `device` (default: the CPU)."""
    if batch.upload is not None:
        there = batch.upload.tensors()
        if device is None or meant(device) == there.input_ids.device:
            return there
    target = torch.device("cpu" if device is None else device)
    return Tensors(
        input_ids=to_device(batch.input_ids, target),
        position_ids=to_device(batch.position_ids, target),
        cu_seqlens=to_device(batch.cu_seqlens, target),
        loss_mask=to_device(batch.loss_mask, target),
    )


class _Slot:
    """One pinned buffer, and the event behind the last copy out of it."""

    def __init__(self) -> None:
        self.pinned = torch.empty(0, dtype=torch.uint8)
        self.copied: Any = None

    def take(self, num_bytes: int) -> torch.Tensor:
        """The buffer, once nothing reads from it any more; grown where it is too small."""
        if self.copied is not None:
            self.copied.synchronize()
        if len(self.pinned) < num_bytes:
            self.pinned = torch.empty(num_bytes * 5 // 4, dtype=torch.uint8, pin_memory=True)
        return self.pinned[:num_bytes]


class Uploader:
    """Copies batches to one device. Made in the training loop's thread, whose current one "cuda" is; used by
    one thread at a time."""

    def __init__(self, device: Any, *, num_slots: int = 2) -> None:
        self.device = meant(device)
        self._slots = [_Slot() for _ in range(num_slots)]
        self._next = 0
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def upload(self, batch: PackedBatch) -> Upload:
        """Start the copy of a batch's arrays."""
        arrays = (batch.input_ids, batch.position_ids, batch.cu_seqlens, batch.loss_mask)
        offsets, num_bytes = _layout(arrays)
        if self._stream is None:
            host = torch.empty(num_bytes, dtype=torch.uint8)
            _fill(host, arrays, offsets)
            buffer = host.to(self.device)
            return Upload(buffer=buffer, views=_views(buffer, arrays, offsets))
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        # The reader's thread has the first device as its own. To go back to that makes a context on it: half
        # a gigabyte there for each rank of a machine.
        with torch.cuda.device(self.device):
            pinned = slot.take(num_bytes)
            _fill(pinned, arrays, offsets)
            with torch.cuda.stream(self._stream):
                buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
                buffer.copy_(pinned, non_blocking=True)
                slot.copied = torch.cuda.Event()
                slot.copied.record(self._stream)
        return Upload(buffer=buffer, views=_views(buffer, arrays, offsets), ready=slot.copied)


def _layout(arrays: tuple[np.ndarray, ...]) -> tuple[list[int], int]:
    """Aligned offsets of the arrays in one buffer, and its size in bytes."""
    offsets, at = [], 0
    for array in arrays:
        offsets.append(at)
        at += -(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return offsets, at


def _fill(host: torch.Tensor, arrays: tuple[np.ndarray, ...], offsets: list[int]) -> None:
    raw = host.numpy()
    for array, at in zip(arrays, offsets, strict=True):
        raw[at : at + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)


def _views(buffer: torch.Tensor, arrays: tuple[np.ndarray, ...], offsets: list[int]) -> Tensors:
    def view(index: int, dtype: torch.dtype) -> torch.Tensor:
        at = offsets[index]
        return buffer[at : at + arrays[index].nbytes].view(dtype)

    return Tensors(
        input_ids=view(0, torch.int32),
        position_ids=view(1, torch.int32),
        cu_seqlens=view(2, torch.int32),
        loss_mask=view(3, torch.bool),
    )
