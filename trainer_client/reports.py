"""Tells the service now and then how the training loop fares, so that operators see who waits for data.

A thread of its own sends a few numbers. It holds up neither the loop nor the reader; a report that fails
is let go, and its numbers go with the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from trainer_client.prefetch import Meter
from trainer_client.transport import Transport

_LAST_S = 1.0  # what the end of an iteration waits for its last report; else it goes on by itself


class Reporter:
    """Sends what `meter` has counted since the last report that arrived, every `every_s` seconds.

    None, or a transport that has nobody to tell (a folder): no reports.
    """

    def __init__(self, meter: Meter, *, rank: int, every_s: float | None) -> None:
        if every_s is not None and every_s <= 0:
            raise ValueError(
                f"report_s: seconds above 0 are required (or None for no reports), found {every_s}"
            )
        self._meter, self._rank, self._every_s = meter, rank, every_s
        self._told = dict.fromkeys(_figures(meter), 0)
        self._sending = threading.Lock()  # the last of one iteration, the first of the next

    def start(self, transport: Transport, ended: threading.Event) -> Callable[[], None]:
        """Report from now on, and once more when `ended` is set. Gives the wait for that last one."""
        if self._every_s is None or not transport.hears_reports:
            return lambda: None
        thread = threading.Thread(
            target=self._run, args=(transport, ended, self._every_s), name="padfree-reports", daemon=True
        )
        thread.start()

        def wait() -> None:
            if thread is not threading.current_thread():
                thread.join(_LAST_S)

        return wait

    def _run(self, transport: Transport, ended: threading.Event, every_s: float) -> None:
        while not ended.wait(every_s):
            self.report(transport)
        self.report(transport)

    def report(self, transport: Transport) -> None:
        """Send one report, if there is anything to tell."""
        with self._sending:
            now = _figures(self._meter)
            since = {name: max(0, value - self._told[name]) for name, value in now.items()}
            if any(since.values()) and transport.report({"rank": self._rank, **since}):
                self._told = {name: max(value, self._told[name]) for name, value in now.items()}


def _figures(meter: Meter) -> dict[str, Any]:
    """Totals so far. A wait that goes on counts up to now: a loop that stands still is not to be silent."""
    since = meter.waiting_since
    waiting_s = 0.0 if since is None else time.monotonic() - since
    return {
        "steps": meter.num_batches,
        "elapsed_s": meter.elapsed_s + waiting_s,
        "stall_s": meter.get_wait_s + waiting_s,
        "retries": meter.num_retries,
    }
