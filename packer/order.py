"""The order of packs: pure functions shared by service and client, and the seeded shuffle.

Everything here is a function of its arguments: no state, no clock, no generator whose stream could
change with a library's version.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_MASK64 = (1 << 64) - 1


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), elementwise."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derive_seed(*parts: int) -> int:
    """One 64-bit seed from several numbers, for example (shuffle_seed, epoch)."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = _mix(state ^ np.uint64(part & _MASK64))
    return int(state[0])


def permute(index: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """Where each of `index` stands in a seeded permutation of range(n). (k,) int64 to (k,) int64.

    A bijection of [0, n) computed elementwise, so any part of a permutation of any size costs O(part)
    time and memory and no table: a Feistel network (Luby and Rackoff 1988) over the next power of
    four, cycle-walked into range (Black and Rogaway 2002).
    """
    if n < 0 or (len(index) and (index.min() < 0 or index.max() >= n)):
        raise ValueError(f"indices must lie in [0, {n})")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = [np.uint64(derive_seed(seed, round_)) for round_ in range(_ROUNDS)]
    out = index.astype(np.uint64)
    todo = np.arange(len(index))
    while len(todo):
        x = out[todo]
        left, right = x >> shift, x & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        x = (left << shift) | right
        out[todo] = x
        todo = todo[x >= np.uint64(n)]
    return out.astype(np.int64)


def pack_at(
    positions: NDArray[np.int64], *, num_packs: int, epoch: int, shuffle_seed: int | None
) -> NDArray[np.int64]:
    """Which packs stand at `positions` of an epoch.

    Epoch 0 is commit order, so that it can be streamed while packing runs; later epochs are a
    permutation by (shuffle_seed, epoch); without a seed every epoch is commit order.
    """
    if epoch == 0 or shuffle_seed is None:
        return positions
    return permute(positions, num_packs, derive_seed(shuffle_seed, epoch))


def rank_positions(
    step: int, *, rank: int, world_size: int, packs_per_step: int, offset: int = 0
) -> tuple[int, int]:
    """The half-open range of positions that `rank` takes in `step`, counted from pack `offset`."""
    start = offset + (step * world_size + rank) * packs_per_step
    return start, start + packs_per_step


def num_steps(num_packs: int, *, world_size: int, packs_per_step: int, tail: str, offset: int = 0) -> int:
    """Steps that every rank takes from pack `offset` to the end of an epoch.

    tail="drop" leaves out a last step that not every rank can fill; "pad" fills it up.
    """
    left, step = max(0, num_packs - offset), world_size * packs_per_step
    return -(-left // step) if tail == "pad" else left // step
