"""Whose turn it is: work handed out in order, tried again, and taken back in order. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_TRIES = 3  # of one partition, or one input, when its worker dies or the store stumbles


@dataclass(slots=True)
class Window:
    """Which partitions run, wait for their turn, or failed. (Inputs that are indexed are handed out so, too.)

    At most `size` partitions are out or waiting at any time, so a slow one holds back the rest: that
    is the back-pressure. A failure counts only when all before it are committed, so that the same
    input always fails for the same reason. Raises ValueError for more that is committed than there is, and
    for no room where there is work: neither would ever be done.
    """

    total: int
    size: int
    committed: int = 0  # partitions 0 .. committed-1 are in the manifest
    _handed_out: int = field(default=-1)
    _results: dict[int, Any] = field(default_factory=dict)
    _failures: dict[int, BaseException] = field(default_factory=dict)
    _tries: dict[int, int] = field(default_factory=dict)
    _again: list[int] = field(default_factory=list)
    retries: int = 0

    def __post_init__(self) -> None:
        if self.committed > self.total:
            raise ValueError(f"at most {self.total} committed are required, found {self.committed}")
        if self.size < min(1, self.total):
            raise ValueError(f"room for one at least is required, found {self.size}")
        self._handed_out = self.committed

    @property
    def done(self) -> bool:
        return self.committed == self.total

    def to_start(self) -> list[int]:
        """Partitions to hand out now."""
        again, self._again = self._again, []
        if self._failures:  # what comes after the first failure would be thrown away
            return [p for p in again if p < min(self._failures)]
        end = min(self.total, self.committed + self.size)
        fresh = list(range(self._handed_out, end))
        self._handed_out = max(self._handed_out, end)
        return again + fresh

    def succeeded(self, partition: int, result: Any) -> None:
        self._results[partition] = result

    def stumbled(self, partition: int, error: BaseException) -> bool:
        """A transient failure. Returns whether the partition gets another try."""
        self._tries[partition] = self._tries.get(partition, 0) + 1
        if self._tries[partition] >= MAX_TRIES:
            self.failed(partition, error)
            return False
        self.retries += 1
        self._again.append(partition)
        return True

    def failed(self, partition: int, error: BaseException) -> None:
        self._failures[partition] = error

    def failure(self) -> BaseException | None:
        """The error that ends the job, once every partition before it is committed."""
        return self._failures.get(self.committed)

    def to_commit(self) -> list[tuple[int, Any]]:
        """Results whose turn has come, in order. They count as committed from here on."""
        ready = []
        while self.committed in self._results:
            ready.append((self.committed, self._results.pop(self.committed)))
            self.committed += 1
        return ready
