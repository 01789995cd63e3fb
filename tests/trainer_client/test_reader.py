"""Back-off after faults, as the reader does it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from fake_service import FakeService, Fault
from packs import build_dataset, numbered_packs

from trainer_client import StreamTimeout
from trainer_client.cursor import Split
from trainer_client.errors import Lost
from trainer_client.prefetch import Meter
from trainer_client.reader import Retry
from trainer_client.remote import HttpTransport
from trainer_client.transport import Request


class Waits(threading.Event):
    """Notes how long it was to be waited for, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        return False


def retry_of(timeout_s: float) -> tuple[Retry, list[float | None]]:
    waits = Waits()
    return Retry(what="a stream", timeout_s=timeout_s, cancelled=waits, meter=Meter()), waits.seconds


def test_each_wait_is_twice_the_last_until_a_step_comes() -> None:
    retry, seconds = retry_of(1000)
    for _ in range(8):
        retry.failed(Lost("gone"), "step 3")
    retry.progress()
    retry.failed(Lost("gone"), "step 4")
    assert seconds == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 0.1])
    assert retry.meter.num_retries == 9


def test_no_try_comes_sooner_than_the_server_asks_nor_later_than_the_timeout() -> None:
    retry, seconds = retry_of(10)
    retry.failed(Lost("busy", wait_s=7), "step 3")
    retry.failed(Lost("busy", wait_s=30), "step 3")
    assert seconds == pytest.approx([7, 10], abs=0.5)
    retry, seconds = retry_of(0)
    with pytest.raises(StreamTimeout, match=r"step 3: nothing came for 0 s.*tried 1 times.*busy"):
        retry.failed(Lost("busy"), "step 3")
    assert seconds == []


def test_what_the_server_asks_for_is_read(tmp_path: Path) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(3), packs_per_shard=2)
    with FakeService(tmp_path) as service:
        service.faults = [Fault(status=503, retry_after="7"), Fault(status=429, retry_after="86400")]
        for wait_s in (7, 30):
            with pytest.raises(Lost) as caught:
                next(HttpTransport(service.url, dataset).packs(Request(split=Split(), epoch=0)))
            assert caught.value.wait_s == wait_s
