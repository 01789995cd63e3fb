"""What clients report of their training loops: metrics by dataset and rank, in a bounded number of series."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

_MOST_RANKS = 1000  # (dataset, rank) with series of their own at the same time
_FORGET_S = 3600.0  # without a report, where others need the place
_OTHER = "other"


class ClientMetrics:
    """Counters by (dataset, rank).

    Beyond `most` pairs further ranks of a dataset are counted together, as rank "other"; a pair that was
    not heard of for an hour gives its place up. So a sum over ranks stays right, and Prometheus is never
    flooded, however many trainers there are.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        most: int = _MOST_RANKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._clock = most, clock
        self._heard: dict[tuple[str, str], float] = {}  # oldest first
        self._counters = {
            name: Counter(f"padfree_client_{name}_total", text, ["dataset", "rank"], registry=registry)
            for name, text in (
                ("steps", "Reported by clients: batches that the training loop took"),
                ("seconds", "Reported by clients: time from the first batch on"),
                ("stall_seconds", "Reported by clients: time of these that the loop waited for a batch"),
                ("retries", "Reported by clients: times that a stream was opened again after a fault"),
            )
        }

    def expect(self, dataset: str, rank: int) -> None:
        """A rank begins to stream: its counters begin at 0, or what it reports first would be no increase."""
        self.add(dataset, rank, steps=0, elapsed_s=0.0, stall_s=0.0, retries=0)

    def add(
        self, dataset: str, rank: int, *, steps: int, elapsed_s: float, stall_s: float, retries: int
    ) -> None:
        """Count one report."""
        labels = self._place(dataset, str(rank))
        counts = {"steps": steps, "seconds": elapsed_s, "stall_seconds": stall_s, "retries": retries}
        for name, count in counts.items():
            self._counters[name].labels(*labels).inc(count)

    def _place(self, dataset: str, rank: str) -> tuple[str, str]:
        """The labels under which a report is counted."""
        for pair, most in (((dataset, rank), self._most), ((dataset, _OTHER), self._most + self._most // 10)):
            if self._heard.pop(pair, None) is not None or len(self._heard) < most or self._make_room():
                self._heard[pair] = self._clock()
                return pair
        return _OTHER, _OTHER

    def _make_room(self) -> bool:
        oldest = next(iter(self._heard))
        if self._clock() - self._heard[oldest] < _FORGET_S:
            return False
        del self._heard[oldest]
        for counter in self._counters.values():
            counter.remove(*oldest)
        return True
