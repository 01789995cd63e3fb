"""What all tests share."""

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shared machine is slow at times; what a test shows does not depend on how long it takes. Nor on chance:
# every run tries the same examples, so that none fails for what was not changed. To look for more:
# pytest --hypothesis-profile=explore
slow = [HealthCheck.too_slow]
settings.register_profile("padfree", deadline=None, suppress_health_check=slow, derandomize=True)
settings.register_profile("explore", deadline=None, suppress_health_check=slow, print_blob=True)
settings.load_profile("padfree")


@pytest.fixture(autouse=True, scope="session")
def _no_disk_is_waited_for() -> Iterator[None]:
    """No test cuts the power, which alone takes what was written but not synced: and that takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder for Ray, whose sockets lie below it: their paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="pf") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def _loggers_are_left_as_they_were() -> Iterator[None]:
    """What a test has them write to is closed when it ends: later ones would be told so in their output."""
    loggers = {name: logging.getLogger(name) for name in ("padfree", "uvicorn")}
    before = {name: one.__dict__ | {"handlers": list(one.handlers)} for name, one in loggers.items()}
    yield
    for name, attributes in before.items():
        logging.getLogger(name).__dict__.update(attributes)
        logging.getLogger(name).setLevel(attributes["level"])  # forgets what was kept of it
