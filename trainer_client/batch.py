"""What one rank trains on in one step: packs flattened into one row, with the boundaries of every segment.

A batch holds numpy arrays and needs no torch. `for_transformers()` and its like (trainer_client.adapters)
give what a model wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from packer.shard import PADDING_ID, Pack

if TYPE_CHECKING:
    from trainer_client.device import Upload
    from trainer_client.static import StaticShape


# A token takes so many bytes here (id and mask), and so many on a device (its position too).
_BYTES_HERE, _BYTES_ON_DEVICE = 5, 9


def bytes_here(num_bytes: int, *, on_device: bool) -> int:
    """What arrays take here (`PackedBatch.num_bytes`) that take `num_bytes` where they are used: here, or on
    a device, which has one more."""
    return num_bytes * _BYTES_HERE // _BYTES_ON_DEVICE if on_device else num_bytes


class Place(Protocol):
    """Where a stream stands. Its state is a document that few batches are asked for, so it is made then."""

    def document(self) -> dict[str, Any]:
        """The stream's state, a new one each time."""
        ...


# Not frozen, as other values are: that alone would take two thirds of the time to make one.
@dataclass(slots=True, kw_only=True, eq=False)
class PackedBatch:
    """The packs that one rank trains on in one loop step, laid end to end: packs_per_step of them, or one of
    a "step" dataset."""

    pack: Pack  # all of them as one
    num_packs: int
    epoch: int
    step: int  # loop step within the epoch, counted from 0 over all resumes
    # Trained tokens of the whole optimiser step, over all ranks; 1 where there are none, so that such a
    # step has loss 0 and not 0/0.
    num_items_in_batch: int
    optimizer_step: int = 0  # within the epoch; other than `step` where micro-batches make a step
    step_done: bool = True  # the last micro-batch of its optimiser step
    is_padding: bool = False  # fills up a short last step (tail="pad"): nothing in it is trained
    max_tokens: int | None = None  # that its packs were made for, where that is known
    place: Place | None = field(default=None, repr=False)  # where the stream stands once this batch was taken
    # Of a MixedStream: trained tokens of the whole optimiser step by source, over all ranks; and which of
    # the stream's sources each segment is of, (num_segments,).
    num_items_by_source: dict[str, int] = field(default_factory=dict)
    source_ids: NDArray[np.int16] | None = None
    upload: Upload | None = field(default=None, repr=False)

    @property
    def state(self) -> dict[str, Any]:
        """Of the stream, once this batch was taken: for its load_state_dict."""
        return self.place.document() if self.place is not None else {}

    # Of the whole batch. Arrays may be read-only.

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """(num_tokens,) int32."""
        return self.pack.input_ids

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """Which tokens are trained, (num_tokens,) bool."""
        return self.pack.loss_mask

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """Where segments begin and end, (num_segments + 1,) int32."""
        return self.pack.cu_seqlens

    @property
    def example_ids(self) -> NDArray[np.int64]:
        """The examples' indices in the source, -1 for padding, (num_segments,) int64."""
        return self.pack.example_ids

    @property
    def labels(self) -> NDArray[np.int32]:
        """`input_ids` where trained, else -100; not shifted. (num_tokens,) int32."""
        return self.pack.labels

    @property
    def position_ids(self) -> NDArray[np.int32]:
        """Positions that restart at 0 in every segment, (num_tokens,) int32."""
        return self.pack.position_ids

    @property
    def num_tokens(self) -> int:
        return self.pack.num_tokens

    @property
    def num_segments(self) -> int:
        return self.pack.num_segments

    @property
    def max_seqlen(self) -> int:
        """The longest segment, a plain int."""
        return self.pack.max_seqlen

    @property
    def num_trained(self) -> int:
        """Trained tokens of this rank's batch alone."""
        return self.pack.num_trained

    @property
    def seq_idx(self) -> NDArray[np.int32]:
        """Which segment each token belongs to, (num_tokens,) int32."""
        return np.repeat(np.arange(self.num_segments, dtype=np.int32), np.diff(self.cu_seqlens))

    @property
    def num_bytes(self) -> int:
        """What the arrays take in memory, the loss mask as an array counted."""
        pack = self.pack
        return _BYTES_HERE * len(pack.input_ids) + pack.cu_seqlens.nbytes + pack.example_ids.nbytes

    def with_upload(self, upload: Upload) -> PackedBatch:
        """The same batch, whose arrays are also on a device."""
        return replace(self, upload=upload)

    def for_transformers(
        self, *, device: Any = None, seq_idx: bool = False, static: bool | StaticShape = False
    ) -> dict[str, Any]:
        """Keyword arguments of a transformers model; see trainer_client.adapters.for_transformers."""
        from trainer_client import adapters

        return adapters.for_transformers(self, device=device, seq_idx=seq_idx, static=static)

    def for_flash_attn(self, *, device: Any = None) -> dict[str, Any]:
        """Boundaries as keyword arguments of flash_attn_varlen_func."""
        from trainer_client import adapters

        return adapters.for_flash_attn(self, device=device)

    def for_torch_varlen(self, *, device: Any = None) -> dict[str, Any]:
        """Boundaries as keyword arguments of torch.nn.attention.varlen.varlen_attn."""
        from trainer_client import adapters

        return adapters.for_torch_varlen(self, device=device)

    def for_megatron(self, *, device: Any = None) -> dict[str, Any]:
        """Tokens, shifted labels and the fields of Megatron's PackedSeqParams ("thd")."""
        from trainer_client import adapters

        return adapters.for_megatron(self, device=device)


def flatten(
    packs: Sequence[Pack],
    *,
    padding: list[bool],
    epoch: int,
    step: int,
    num_items: int,
    step_done: bool,
    place: Place | None = None,
    optimizer_step: int | None = None,
    max_tokens: int | None = None,
) -> PackedBatch:
    """One batch of the packs of one rank's step. `padding[i]`: pack i only fills up the step.

    Boundaries of each pack are shifted by the tokens before it. Fillers are left out, unless there is
    nothing else.
    """
    num_real = padding.count(False)
    if 0 < num_real < len(packs):
        packs = [pack for pack, fills in zip(packs, padding, strict=True) if not fills]
    one = packs[0] if len(packs) == 1 or not num_real else _joined(packs)
    return PackedBatch(
        pack=one,
        num_packs=num_real,
        epoch=epoch,
        step=step,
        optimizer_step=step if optimizer_step is None else optimizer_step,
        num_items_in_batch=max(1, num_items),
        step_done=step_done,
        is_padding=not num_real,
        max_tokens=max_tokens,
        place=place,
    )


def join(batches: Sequence[PackedBatch], **changed: Any) -> PackedBatch:
    """Batches laid end to end as one; those that only fill up are left out, unless there is nothing else.

    `changed`: fields of the result. Others are those of the last batch, counts are added up.
    """
    used = [batch for batch in batches if not batch.is_padding] or list(batches[:1])
    most = [batch.max_tokens for batch in batches]
    return replace(
        batches[-1],
        pack=used[0].pack if len(used) == 1 else _joined([batch.pack for batch in used]),
        source_ids=_concat([_sources(batch) for batch in used]),
        num_packs=sum(batch.num_packs for batch in used),
        num_items_in_batch=sum(batch.num_items_in_batch for batch in batches),
        max_tokens=None if None in most else len(most) * max(one for one in most if one is not None),
        is_padding=used[0].is_padding,
        upload=used[0].upload if len(used) == 1 else None,
        **changed,
    )


def _joined(packs: Sequence[Pack]) -> Pack:
    return Pack(
        input_ids=_concat([pack.input_ids for pack in packs]),
        loss_mask=_concat([pack.loss_mask for pack in packs]),
        cu_seqlens=_joined_boundaries([pack.cu_seqlens for pack in packs]),
        example_ids=_concat([pack.example_ids for pack in packs]),
    )


def _sources(batch: PackedBatch) -> NDArray[np.int16]:
    return np.zeros(batch.num_segments, np.int16) if batch.source_ids is None else batch.source_ids


def _concat(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _joined_boundaries(each: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    if len(each) == 1:
        return each[0]
    shifts = np.cumsum([0, *(int(cu[-1]) for cu in each[:-1])])
    parts = [cu[1:] + np.int32(shift) for cu, shift in zip(each, shifts, strict=True)]
    return np.concatenate([np.zeros(1, np.int32), *parts]).astype(np.int32, copy=False)


def padded_boundaries(batch: PackedBatch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Boundaries of real segments without and with the padding behind them, both (n + 1,) int32.

    A padding segment (example id -1) belongs to the segment before it; one with none before it stands
    for itself. The first array counts real tokens only, the second says where segments lie.
    """
    lengths = np.diff(batch.cu_seqlens)
    starts_one = batch.example_ids != PADDING_ID
    starts_one[0] = True
    real = np.concatenate([[0], np.cumsum(lengths[starts_one])]).astype(np.int32)
    where = np.concatenate([batch.cu_seqlens[:-1][starts_one], batch.cu_seqlens[-1:]]).astype(np.int32)
    return real, where
