"""A real service that is stopped or killed twenty times during an epoch, and what the trainer sees of it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from packs import build_dataset, numbered_packs
from serving import free_port, spawned

from trainer_client import PackedStream

NUM_PACKS = 105


@pytest.mark.slow
def test_f43_twenty_restarts_of_the_service_change_nothing_that_is_trained(tmp_path: Path) -> None:
    """By turns SIGTERM (streams are cut in order) and SIGKILL. Packs too large to be all on their way."""
    dataset = build_dataset(tmp_path, numbered_packs(NUM_PACKS, length=100_000), packs_per_shard=30)
    port, num_restarts = free_port(), 0
    seen: list[int] = []
    with contextlib.ExitStack() as servers:
        server = servers.enter_context(spawned(tmp_path, port=port))
        stream = PackedStream(server.url, dataset=dataset, prefetch_steps=1, timeout_s=60)
        for batch in stream:
            seen += batch.example_ids.tolist()
            assert (batch.step, batch.num_tokens) == (len(seen) - 1, 100_000)
            if len(seen) % 5 == 3 and num_restarts < 20:
                assert server.process is not None
                os.kill(server.process.pid, signal.SIGTERM if num_restarts % 2 else signal.SIGKILL)
                server.process.wait(60)
                server = servers.enter_context(spawned(tmp_path, port=port))
                num_restarts += 1
    assert num_restarts == 20
    assert seen == list(range(NUM_PACKS))
    assert stream.state_dict()["epoch"] == 1
    assert stream.stats().num_retries >= 10
