"""Locks in an object store: a lease that its holder renews, and that others see run out.

An object says who holds the lock and how often it was renewed. Whoever looks at it notes when it first
saw this content, on its own clock; content that did not change for LEASE_S has no holder any more. No
two machines' clocks are compared (the leader election of Kubernetes works like this). Nothing here is
an atomic test-and-set: two that take a free lock at the same instant both write, wait, and the one
whose content remained has it. A holder that could not renew in time, or finds another's content, has
lost it and says so (`check`). docs/decisions/object-stores.md has why that is enough.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Protocol

from packer.store.base import LockLost

log = logging.getLogger("padfree.store")

LEASE_S = 20.0  # from the last renewal to the moment when another may take over
_RENEW_S = 4.0
_HOLD_S = 14.0  # a holder stops after this long without a renewal: before others take over
_LOOK_S = 0.5  # between two looks at another's lease
_SETTLE_S = 0.5  # longer than from reading that a lock is free to having written one's own name


class Objects(Protocol):
    """What a lease needs of a store."""

    def get(self, key: str) -> bytes: ...

    def put(self, key: str, data: bytes | memoryview) -> None: ...

    def delete(self, key: str) -> None: ...


class Leases:
    """The leases of one store: those that are held here, and those seen of others. Safe for threads."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._seen: dict[str, tuple[bytes, float]] = {}  # key: content, time.monotonic when first seen

    @contextlib.contextmanager
    def hold(self, key: str) -> Iterator[bool]:
        """Hold `key` while the block runs; yields False where another holds it.

        A holder that lives is recognised by its next renewal; one that died is waited for, LEASE_S.
        """
        if self._is_alive(key):
            yield False
            return
        held = _Held(self._objects, key)
        held.write()
        time.sleep(_SETTLE_S)
        if not held.is_in(self._content(key)):
            yield False
            return
        with self._lock:
            self._held[key] = held
        held.start()
        try:
            yield True
        finally:
            held.stop()
            with self._lock:
                self._held.pop(key, None)

    def is_held(self, key: str) -> bool:
        """Whether somebody holds `key`: a lease that was not seen to stand still for LEASE_S."""
        content, now_s = self._content(key), time.monotonic()
        with self._lock:
            if content is None:
                self._seen.pop(key, None)
                return False
            before = self._seen.get(key)
            if before is None or before[0] != content:
                self._seen[key] = (content, now_s)
                return True
            return now_s - before[1] < LEASE_S

    def _is_alive(self, key: str) -> bool:
        """`is_held`, after having watched it for long enough."""
        first = self._content(key)
        while self.is_held(key):
            if self._content(key) != first:
                return True
            time.sleep(_LOOK_S)
        return False

    def check(self, key: str) -> None:
        """Raise LockLost where a lease that was held here is not surely held any more."""
        with self._lock:
            held = self._held.get(key)
        if held is None or held.is_lost:
            raise LockLost(
                f"the lock {key} could not be renewed for {_HOLD_S:g} s, or another process took it over: it "
                "is up to that one now"
            )

    def _content(self, key: str) -> bytes | None:
        try:
            return self._objects.get(key)
        except FileNotFoundError:
            return None


class _Held:
    """A lease of this process, and the thread that renews it."""

    def __init__(self, objects: Objects, key: str) -> None:
        self._objects, self._key = objects, key
        self._owner = uuid.uuid4().hex
        self._beat = 0
        self._renewed_s = 0.0
        self._taken = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lease {key}", daemon=True)

    @property
    def is_lost(self) -> bool:
        return self._taken or time.monotonic() - self._renewed_s > _HOLD_S

    def is_in(self, content: bytes | None) -> bool:
        """Whether a lock's content names this lease."""
        return content is not None and self._owner.encode() in content

    def write(self) -> None:
        self._beat += 1
        about = {"owner": self._owner, "beat": self._beat, "host": socket.gethostname(), "pid": os.getpid()}
        asked_s = time.monotonic()  # before: others count from when they can see it
        self._objects.put(self._key, json.dumps(about).encode())
        self._renewed_s = asked_s

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Give the lock back, if it is still ours."""
        self._end.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # then it runs out
            if not self.is_lost and self.is_in(self._objects.get(self._key)):
                self._objects.delete(self._key)

    def _renew(self) -> None:
        while not self._end.wait(_RENEW_S):
            try:
                self._taken = not self.is_in(self._objects.get(self._key))
                if self._taken:
                    log.warning("the lock %s was taken over by another process", self._key)
                    return
                self.write()
            except FileNotFoundError:  # somebody removed it: as good as taken
                self._taken = True
                return
            except OSError as error:
                log.warning("the lock %s could not be renewed, it is tried again: %s", self._key, error)
