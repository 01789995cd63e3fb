"""What a pack is, the schema of shards, and the rules that every pack keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

FORMAT_VERSION = 1
IGNORE_INDEX = -100
PADDING_ID = -1  # example id of a padding segment


FIELDS = [
    pa.field("input_ids", pa.list_(pa.int32())),
    pa.field("position_ids", pa.list_(pa.int32())),
    pa.field("loss_mask", pa.list_(pa.bool_())),
    pa.field("cu_seqlens", pa.list_(pa.int32())),
    pa.field("max_seqlen", pa.int32()),
    pa.field("example_ids", pa.list_(pa.int64())),
]

# One row a pack, in the order of the shard. Offsets are from the start of the shard's file.
ROW_INDEX = np.dtype(
    [
        ("offset", "<i8"),  # first byte of the record batch message
        ("header_bytes", "<i4"),  # prefix and metadata
        ("body_bytes", "<i4"),
        ("num_tokens", "<i4"),
        ("num_trained", "<i4"),
        ("num_segments", "<i4"),
        ("max_seqlen", "<i4"),
        ("sum_squares", "<i8"),  # of segment lengths: what attention costs
    ]
)


class ShardError(ValueError):
    """Bytes that are not a shard of this format, or break one of its rules."""


def schema(dataset: str) -> pa.Schema:
    """The one schema of every shard of `dataset`."""
    return pa.schema(
        FIELDS, metadata={"padfree.format_version": str(FORMAT_VERSION), "padfree.dataset": dataset}
    )


def position_ids(cu_seqlens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Positions that restart at 0 in every segment, (num_tokens,) int32."""
    starts = cu_seqlens[:-1]
    out = starts.repeat(cu_seqlens[1:] - starts)
    return np.subtract(_ramp(len(out)), out, out=out)


_counted = np.arange(1 << 13, dtype=np.int32)  # replaced by a longer one, never changed


def _ramp(length: int) -> NDArray[np.int32]:
    """0, 1, 2, …: (length,) int32, read only; counted once, not for each pack."""
    global _counted
    if length > len(_counted):
        _counted = np.arange(2 * length, dtype=np.int32)
    return _counted[:length]


def labels(input_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> NDArray[np.int32]:
    """`input_ids` where trained, else -100; not shifted. (num_tokens,) int32."""
    out = input_ids.copy()
    out[~loss_mask] = IGNORE_INDEX
    return out


class Bits(NamedTuple):
    """A loss mask as Arrow stores it: (ceil(num_tokens / 8),) uint8, the first token the lowest bit."""

    bits: NDArray[np.uint8]
    num_tokens: int

    def unpacked(self) -> NDArray[np.bool_]:
        """(num_tokens,) bool."""
        return np.unpackbits(self.bits, None, self.num_tokens, "little").view(np.bool_)

    def labels(self, input_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """`labels`, in two thirds of the time: the most that each label can be, eight looked up at once."""
        most = _MOST.take(self.bits, axis=0).reshape(-1)[: self.num_tokens]
        return np.minimum(input_ids, most, out=most)


# Of each byte of bits the most that its eight labels can be: no token's id is as large, none negative.
_EVERY_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_MOST = np.where(_EVERY_BYTE, np.iinfo(np.int32).max, IGNORE_INDEX).astype(np.int32)


class Pack:
    """Segments laid end to end. Its arrays are not to be replaced.

    input_ids: (num_tokens,) int32, none negative. loss_mask: (num_tokens,) bool, made when it is first asked
    for where it is given as Arrow's bits. cu_seqlens: (num_segments + 1,) int32. example_ids: (num_segments,)
    int64.
    """

    __slots__ = ("_mask", "cu_seqlens", "example_ids", "input_ids")

    def __init__(
        self,
        *,
        input_ids: NDArray[np.int32],
        loss_mask: NDArray[np.bool_] | Bits,
        cu_seqlens: NDArray[np.int32],
        example_ids: NDArray[np.int64],
    ) -> None:
        self.input_ids, self._mask = input_ids, loss_mask
        self.cu_seqlens, self.example_ids = cu_seqlens, example_ids

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        mask = self._mask
        if isinstance(mask, Bits):
            mask = self._mask = mask.unpacked()
        return mask

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_segments(self) -> int:
        return len(self.example_ids)

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def max_seqlen(self) -> int:
        return int(np.diff(self.cu_seqlens).max())

    @property
    def position_ids(self) -> NDArray[np.int32]:
        return position_ids(self.cu_seqlens)

    @property
    def labels(self) -> NDArray[np.int32]:
        """`input_ids` where trained, else -100; not shifted. (num_tokens,) int32."""
        mask = self._mask  # once it was handed out as an array, it may have been written to
        return mask.labels(self.input_ids) if isinstance(mask, Bits) else labels(self.input_ids, mask)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pack) and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("input_ids", "loss_mask", "cu_seqlens", "example_ids")
        )

    __hash__ = None  # type: ignore[assignment]  # holds arrays: equal by value, not hashable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packs:
    """Several packs as one set of flat arrays: what a shard is written from.

    input_ids: (N,) int32 and loss_mask: (N,) bool, all tokens end to end. lengths: (S,) int64, tokens of each
    segment. example_ids: (S,) int64. pack_offsets: (P + 1,) int64; pack p holds the segments
    [pack_offsets[p], pack_offsets[p + 1]).
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    example_ids: NDArray[np.int64]
    pack_offsets: NDArray[np.int64]

    @property
    def token_offsets(self) -> NDArray[np.int64]:
        """Where each pack's tokens begin and end, (P + 1,) int64."""
        return np.concatenate([[0], np.cumsum(self.lengths)])[self.pack_offsets]

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """cu_seqlens of all packs end to end, (S + P,) int32; pack p's is [pack_offsets[p] + p, …)."""
        of_segment = np.repeat(np.arange(len(self.pack_offsets) - 1), np.diff(self.pack_offsets))
        cu = np.zeros(len(self.lengths) + len(self.pack_offsets) - 1, np.int32)
        ends = np.cumsum(self.lengths) - self.token_offsets[of_segment]
        cu[np.arange(len(self.lengths)) + of_segment + 1] = ends
        return cu

    def __len__(self) -> int:
        return len(self.pack_offsets) - 1

    def __iter__(self) -> Iterator[Pack]:
        """The packs, as views."""
        tokens, cu = self.token_offsets, self.cu_seqlens
        for p in range(len(self)):
            first, last = self.pack_offsets[p : p + 2]
            yield Pack(
                input_ids=self.input_ids[tokens[p] : tokens[p + 1]],
                loss_mask=self.loss_mask[tokens[p] : tokens[p + 1]],
                cu_seqlens=cu[first + p : last + p + 1],
                example_ids=self.example_ids[first:last],
            )

    @classmethod
    def of(cls, packs: Sequence[Pack]) -> Packs:
        """Packs that were made one by one."""

        def flat(arrays: list[Any], dtype: type) -> Any:
            return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)

        return cls(
            input_ids=flat([pack.input_ids for pack in packs], np.int32),
            loss_mask=flat([pack.loss_mask for pack in packs], np.bool_),
            lengths=flat([np.diff(pack.cu_seqlens) for pack in packs], np.int64),
            example_ids=flat([pack.example_ids for pack in packs], np.int64),
            pack_offsets=np.cumsum([0, *(pack.num_segments for pack in packs)]),
        )


def padding_pack(token_id: int = 0) -> Pack:
    """A pack without trained tokens, for a rank that has none left in the last step."""
    return Pack(
        input_ids=np.array([token_id], np.int32),
        loss_mask=np.zeros(1, np.bool_),
        cu_seqlens=np.array([0, 1], np.int32),
        example_ids=np.array([PADDING_ID], np.int64),
    )


def check_all(packs: Packs) -> None:
    """`check` every pack, all at once. Raises ShardError for the first that breaks a rule, naming it."""
    lengths, ids, mask = packs.lengths, packs.input_ids, packs.loss_mask
    starts = np.cumsum(lengths) - lengths
    padding = np.repeat(packs.example_ids == PADDING_ID, lengths) if PADDING_ID in packs.example_ids else None
    if (
        (lengths <= 0).any()
        or (np.diff(packs.pack_offsets) <= 0).any()
        or not len(ids) == len(mask) == lengths.sum()
        or mask[starts].any()
        or (padding is not None and mask[padding].any())
        or (len(ids) and ids.min() < 0)
    ):
        for number, pack in enumerate(packs):
            try:
                check(pack)
            except ShardError as error:
                raise ShardError(f"pack {number}: {error}") from None
        raise ShardError("the packs do not hold all the tokens that are there")


def check(pack: Pack) -> None:
    """Raise ShardError for the first rule of the format that `pack` breaks."""
    cu, total = pack.cu_seqlens, pack.num_tokens
    if len(cu) < 2 or cu[0] != 0 or cu[-1] != total:
        found = cu[[0, -1]].tolist() if len(cu) else "nothing"
        raise ShardError(f"cu_seqlens must start at 0 and end at num_tokens={total}, found {found}")
    if np.any(cu[1:] <= cu[:-1]):
        raise ShardError("cu_seqlens must strictly increase: there is a segment without tokens")
    if len(pack.loss_mask) != total:
        raise ShardError(f"loss_mask has {len(pack.loss_mask)} values for {total} tokens")
    if len(pack.example_ids) != len(cu) - 1:
        raise ShardError(f"{len(pack.example_ids)} example_ids for {len(cu) - 1} segments")
    if np.any(pack.loss_mask[cu[:-1]]):
        raise ShardError("loss_mask must be false on the first token of every segment")
    padding = np.flatnonzero(pack.example_ids == PADDING_ID)
    if len(padding) and any(pack.loss_mask[cu[i] : cu[i + 1]].any() for i in padding):
        raise ShardError("loss_mask must be false in padding (example id -1)")
    if np.any(pack.input_ids < 0):
        raise ShardError("input_ids must not be negative")
