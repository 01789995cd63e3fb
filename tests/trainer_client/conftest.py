"""A way to a dataset for tests that hold over HTTP and from a folder alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_service import FakeService

from trainer_client import PackedBatch, reader


@pytest.fixture(params=["folder", "http"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The store in tmp_path, as a folder and through a server."""
    if request.param == "folder":
        yield str(tmp_path)
    else:
        with FakeService(tmp_path) as service:
            yield service.url


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    with FakeService(tmp_path) as service:
        yield service


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is followed by the next try at once. (How long is waited is tested in test_reader.py.)"""
    monkeypatch.setattr(reader, "_FIRST_DELAY_S", 0.005)
    monkeypatch.setitem(reader.Retry.__init__.__kwdefaults__, "delay_s", 0.005)


@pytest.fixture
def numbers() -> Callable[[PackedBatch], list[int]]:
    """The example ids of a batch of numbered packs: which packs it holds."""
    return lambda batch: batch.example_ids.tolist()
