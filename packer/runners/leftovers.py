"""What an embedded Ray of a killed process left behind, and its end.

Ray's processes end with the one that started them, but two of its agents outlive a SIGKILL, and so does
its folder. Each embedded Ray therefore has a folder that names its owner and an environment variable
that names the folder. Its owner ends what is left of it when it exits; where it could not, since it
was killed, the next start does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

_PREFIX = "padfree-ray-"
_VARIABLE = "PADFREE_RAY_FOLDER"
_PATIENCE_S = 10.0


def make_folder() -> str:
    """A folder for an embedded Ray of this process; what it starts from here on carries its mark.

    Short, since the paths of sockets are limited to 107 bytes.
    """
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    os.environ[_VARIABLE] = folder
    atexit.register(remove, folder)  # for an exit while Ray still starts: nobody closes it then
    return folder


def remove(folder: str) -> None:
    """End what carries the mark of this process's folder, and remove it. Again: nothing happens."""
    until = time.monotonic() + _PATIENCE_S
    while os.path.isdir(folder):
        _end(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > until:
            break
        # A Ray that is still starting writes into it meanwhile, and may have begun one more process.
        time.sleep(0.05)
    atexit.unregister(remove)


def sweep() -> None:
    """End processes and remove folders whose owner is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = re.match(rf"{_PREFIX}(\d+)-", folder.name)
        if owner is None or Path("/proc", owner[1]).exists():
            continue
        _end(str(folder))
        shutil.rmtree(folder, ignore_errors=True)


def _end(folder: str) -> None:
    """End the processes that carry the folder's mark. Not its owner: that set it after its own start."""
    mark = f"{_VARIABLE}={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone by now, or another user's
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
