"""Copies of remote objects on this machine: fetched once, the least recently used ones removed.

One folder serves all processes of a machine. An entry is born by rename and named by place and
content, so it is complete and never stale; whoever has it open keeps it, whoever removes it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from packer.store.base import NoSpaceLeft, StoreError

log = logging.getLogger("padfree.packer")

_TEMPORARY = ".tmp-"
_STALE_S = 24 * 3600.0  # a fetch takes less
_LEAVE = 0.9  # of the limit, so that not every fetch has to make room
_ENTRY_CHARACTERS = 40
_TRIES = 3


class Cache:
    """A folder of at most about `max_bytes`; the entry that was added last stays, however large."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._lock = threading.Lock()
        self._fetching: dict[str, threading.Lock] = {}  # entry: held by the thread that fetches it
        self._swept = False

    def entry(self, *identity: str) -> str:
        """The name of the entry for a place and its content."""
        return hashlib.sha256("\0".join(identity).encode()).hexdigest()[:_ENTRY_CHARACTERS]

    def open(self, entry: str, fetch: Callable[[BinaryIO], None]) -> BinaryIO:
        """The entry, opened for reading, unbuffered; `fetch` writes its content where it is not there.

        Threads that want the same entry wait for one fetch; processes may fetch it twice. Raises
        NoSpaceLeft, and what `fetch` raises: then nothing is kept. A folder that is cleaned meanwhile costs
        the copy alone: what was fetched is handed out, and fetched again by who wants it next.
        """
        if file := self._opened(entry):
            return file
        with self._alone(entry):
            if file := self._opened(entry):
                return file
            with self.new_file() as (path, file):
                # Not opened by name: others may remove the file, or the folder, at any time.
                reader = os.fdopen(os.dup(file.fileno()), "rb", buffering=0)
                try:
                    self._write(fetch, file)
                    self._keep(path, entry)
                except BaseException:
                    reader.close()
                    raise
            reader.seek(0)
            return reader

    def drop(self, entry: str) -> bool:
        """Remove an entry. Whether it was there."""
        try:
            os.unlink(self.folder / entry)
        except FileNotFoundError:
            return False
        log.warning("a damaged copy was removed from the cache: %s", self.folder / entry)
        return True

    def add(self, path: Path, entry: str) -> None:
        """Take over a finished file that lies in the folder."""
        self._keep(path, entry)

    @contextlib.contextmanager
    def new_file(self) -> Iterator[tuple[Path, BinaryIO]]:
        """A file in the folder that is no entry yet; removed unless it became one."""
        path, file = self._created()
        try:
            with file:
                yield path, file
        finally:
            path.unlink(missing_ok=True)

    def _created(self) -> tuple[Path, BinaryIO]:
        for _ in range(_TRIES):
            path = self.temporary()
            try:
                return path, open(path, "w+b")  # handed out
            except FileNotFoundError:  # the folder was removed since it was made
                continue
            except OSError as error:
                raise self.unusable(error) from error
        raise StoreError(
            f"the cache folder {self.folder} is removed as soon as it is made; leave it alone, or set "
            "PADFREE_CACHE_DIR to another"
        )

    def temporary(self) -> Path:
        """A name for a file that is no entry yet. What killed processes left is removed a day later."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self.unusable(error) from error
        if not self._swept:
            self._swept = True
            before_s = time.time() - _STALE_S
            for left in self.folder.glob(f"{_TEMPORARY}*"):
                with contextlib.suppress(OSError):
                    if left.stat().st_mtime < before_s:
                        left.unlink()
        return self.folder / f"{_TEMPORARY}{uuid.uuid4().hex}"

    def _opened(self, entry: str) -> BinaryIO | None:
        try:
            file = open(self.folder / entry, "rb", buffering=0)  # noqa: SIM115  # handed out
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self.unusable(error) from error
        with contextlib.suppress(OSError):
            os.utime(file.fileno())  # when it was used last
        return file

    def unusable(self, error: OSError) -> StoreError:
        """Of this machine's folder, never of the object: nobody is to take that for damaged."""
        if error.errno == errno.ENOSPC:
            return self._no_space()
        return StoreError(
            f"cannot use the cache folder {self.folder}: {error.strerror}; set PADFREE_CACHE_DIR to one that "
            "this user may write"
        )

    def _no_space(self) -> NoSpaceLeft:
        return NoSpaceLeft(
            errno.ENOSPC,
            f"no space left in the cache folder {self.folder}: make room, or set PADFREE_CACHE_DIR to a "
            "larger disk; then post the dataset again",
        )

    @contextlib.contextmanager
    def _alone(self, entry: str) -> Iterator[None]:
        with self._lock:
            mine = self._fetching.setdefault(entry, threading.Lock())
        with mine:
            try:
                yield
            finally:
                with self._lock:
                    self._fetching.pop(entry, None)

    def _write(self, fetch: Callable[[BinaryIO], None], file: BinaryIO) -> None:
        """Fetch into `file`; on a full disk once more, with room made. Raises NoSpaceLeft."""
        for has_made_room in (False, True):
            try:
                fetch(file)
                file.flush()
                return
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                if has_made_room:
                    raise self._no_space() from error
            self._make_room(None)
            file.seek(0)
            file.truncate()

    def _keep(self, path: Path, entry: str) -> None:
        try:
            os.replace(path, self.folder / entry)
        except FileNotFoundError:  # somebody cleaned the folder: there is no copy, then
            pass
        except OSError as error:
            raise self.unusable(error) from error
        self._make_room(self.max_bytes, spared=entry)

    def _make_room(self, limit_bytes: int | None, *, spared: str = "") -> None:
        """Remove what was used longest ago until at most `limit_bytes` are there, or half of what is."""
        found = []  # (used, bytes, path)
        with contextlib.suppress(OSError), os.scandir(self.folder) as items:
            for item in items:
                with contextlib.suppress(OSError):  # removed meanwhile
                    if len(item.name) == _ENTRY_CHARACTERS:
                        about = item.stat()
                        found.append((about.st_mtime, about.st_size, item.path))
        total = sum(size for _, size, _ in found)
        if limit_bytes is None:
            limit_bytes = total // 2
        if total <= limit_bytes:
            return
        for _, size, path in sorted(found):
            if total <= limit_bytes * _LEAVE:
                break
            if os.path.basename(path) != spared:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                total -= size
