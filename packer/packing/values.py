"""What the parts of the packing engine hand to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


class PackingError(ValueError):
    """Lengths that cannot be packed as asked, or options that contradict each other.

    Where a mini-batch is to blame, `minibatch` is its number and `examples` its first and last example, as
    places in `lengths`; `at(place)` is the text for whoever knows a better name of it.
    """

    _PLACE = "{mini-batch}"

    def __init__(
        self, text: str, *, minibatch: int | None = None, examples: tuple[int, int] | None = None
    ) -> None:
        self._text, self.minibatch, self.examples = text, minibatch, examples
        first, last = examples or (0, 0)
        super().__init__(self.at(f"mini-batch {minibatch} (examples {first} to {last})"))

    def at(self, place: str) -> str:
        return self._text.replace(self._PLACE, place)


def require_count(name: str, value: object) -> None:
    """Raise PackingError unless `value` is a whole number of 1 or more."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise PackingError(f"{name} must be a whole number of 1 or more, found {value!r}; set it")


class Layout(NamedTuple):
    """What an engine answers: which pieces stand in which pack.

    order: (num_pieces,) int64, a permutation of the pieces, pack after pack. offsets: (num_packs + 1,)
    int64, where each pack begins in `order`.
    """

    order: Int64
    offsets: Int64

    @property
    def num_packs(self) -> int:
        return len(self.offsets) - 1

    def of(self, pieces: Int64) -> Layout:
        """The same packs, of pieces that are some of all: piece i of this layout is number pieces[i]."""
        return Layout(pieces[self.order], self.offsets)


def joined(layouts: Sequence[Layout]) -> Layout:
    """The packs of all, one after the other."""
    none = np.zeros(0, np.int64)
    counts = np.concatenate([none, *(np.diff(layout.offsets) for layout in layouts)])
    order = np.concatenate([none, *(layout.order for layout in layouts)])
    return Layout(order, np.concatenate([[0], np.cumsum(counts)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How much a pack holds once padding is counted.

    A segment of `length` tokens takes `length` rounded up to segment_multiple; a pack is rounded up to
    pack_multiple and stays within max_tokens. Raises PackingError where nothing fits.
    """

    max_tokens: int
    segment_multiple: int = 1
    pack_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("max_tokens", "segment_multiple", "pack_multiple"):
            require_count(name, getattr(self, name))
        if self.segment < 1:
            raise PackingError(
                f"max_tokens must be at least segment_multiple and pack_multiple, found {self.max_tokens} "
                f"with {self.segment_multiple} and {self.pack_multiple}; raise max_tokens"
            )

    @property
    def pack(self) -> int:
        """Tokens of segments, their padding counted, that a pack can hold."""
        return self.max_tokens // self.pack_multiple * self.pack_multiple

    @property
    def segment(self) -> int:
        """The longest segment that can stand in a pack, in real tokens."""
        return self.pack // self.segment_multiple * self.segment_multiple

    def padded(self, lengths: Int64) -> Int64:
        """What segments of `lengths` tokens take in a pack."""
        multiple = self.segment_multiple
        return lengths if multiple == 1 else -(-lengths // multiple) * multiple


def capacities_of(
    max_tokens: int | Sequence[int], *, segment_multiple: int = 1, pack_multiple: int = 1
) -> tuple[Capacity, ...]:
    """The capacities that packs may have, rising, each once; one number is one of them.

    Raises PackingError where there is none, one is no whole number, or one of them holds nothing.
    """
    several = isinstance(max_tokens, Sequence) and not isinstance(max_tokens, str | bytes)
    given: list[Any] = [*max_tokens] if isinstance(max_tokens, Sequence) and several else [max_tokens]
    if not given:
        raise PackingError("max_tokens must be a number or a list of them, found an empty list; set one")
    options = {"segment_multiple": segment_multiple, "pack_multiple": pack_multiple}
    for name, value in [*(("max_tokens", each) for each in given), *options.items()]:
        require_count(name, value)
    # numpy's numbers too, which lack what Python's have and overflow.
    multiples = {name: int(value) for name, value in options.items()}
    return tuple(Capacity(max_tokens=number, **multiples) for number in sorted({int(each) for each in given}))


def smallest_that_holds(lengths: Int64, capacities: tuple[Capacity, ...]) -> Int64:
    """Which of the capacities, rising, is the smallest that holds a segment of each length. (n,) int64.

    No length may be over what the largest holds.
    """
    return np.searchsorted(np.array([capacity.segment for capacity in capacities]), lengths)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """What is left of the examples after `overlong`, in stream order. No piece is empty.

    example, start, length: (num_pieces,) int64. truncated, dropped: ids of examples that lost tokens.
    """

    example: Int64
    start: Int64
    length: Int64
    truncated: Int64
    dropped: Int64
