"""A way to a dataset for tests that hold over HTTP and from a folder alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_service import FakeService
from reading_ahead import tried_again_soon

from trainer_client import PackedBatch


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
def soon() -> Iterator[None]:
    with tried_again_soon():
        yield


@pytest.fixture
def numbers() -> Callable[[PackedBatch], list[int]]:
    """The example ids of a batch of numbered packs: which packs it holds."""
    return lambda batch: batch.example_ids.tolist()
