"""Run the service: the one place where settings, runner, application and server are put together."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from packer.runners import InlineRunner, Runner
from packer.store import NoSpaceLeft, StoreError, is_url, open_store
from service import logs
from service.app import create_app, warm_up
from service.settings import Settings, SettingsError
from service.state import Service
from service.wire import with_wires

log = logging.getLogger("padfree.service")

_STUCK_S = 1.0  # for threads that read the store, once all else has ended
_FLUSH_S = 1.0  # for a stream that was cut off to leave the socket's buffer


def runner_for(settings: Settings) -> Runner | Callable[[], Runner] | None:
    """The runner that the settings ask for; Ray is started later, in the background."""
    if not settings.packing:
        return None
    if settings.workers == 0 and settings.ray_address is None:
        return InlineRunner()

    if settings.ray_address is not None:
        from packer.runners.apart import Cluster

        return Cluster(settings.ray_address)

    def ray() -> Runner:
        from packer.runners.ray import RayRunner

        log.info("Ray starts, which takes some seconds; datasets that are posted meanwhile wait for it")
        return RayRunner(num_cpus=settings.workers)

    return ray


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status. Open streams are cut off then.

    Where a store does not answer even then, the process ends here: Python would wait for whoever asks it.
    """
    before = set(threading.enumerate())
    logs.configure(settings)
    if missing := [str(root) for root in settings.data_roots if not root.is_dir()]:
        raise SettingsError(f"PADFREE_DATA_ROOTS (--data-root): no such folder: {', '.join(missing)}")
    listener = bind(settings)  # first: a port that is taken leaves no store behind
    try:
        check_store(settings)
    except SettingsError:
        listener.close()
        raise
    app = create_app(settings, runner_for(settings))
    warm_up(app)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.info("serving %s at http://%s:%d", settings.store, shown, port)
    if settings.packing:  # answers to clients do not name them
        log.info("sources may lie in %s", ", ".join(map(str, settings.data_roots)))
    gc.collect()
    gc.freeze()  # what was imported stays; to go through it again took a fifth of the time of 64 streams
    with _signals_end_in_order():
        server_for(app, settings).run(sockets=[listener])
    stuck = _left_after(_STUCK_S, set(threading.enumerate()) - before)
    if stuck:
        log.warning("stopped, without an answer from the store to: %s", ", ".join(stuck))
        logging.shutdown()
        os._exit(0)
    log.info("stopped")
    return 0


def _left_after(seconds: float, threads: Iterable[threading.Thread]) -> list[str]:
    """Names of those threads that Python waits for at its end, and that have not ended by then."""
    until = time.monotonic() + seconds
    awaited = [one for one in threads if not one.daemon]
    for one in awaited:
        one.join(max(0.0, until - time.monotonic()))
    return sorted(one.name for one in awaited if one.is_alive())


def check_store(settings: Settings) -> None:
    """Raise SettingsError for a folder that can never be this service's store, or an object store's cache.

    What may yet come does not keep it from starting: an object store, room on a disk, the folder of a
    replica that only serves. /readyz tells of those.
    """
    if is_url(settings.store):
        _check_cache(settings.store)
        return
    required = "PADFREE_STORE (--store): a folder that this user may " + (
        "write" if settings.packing else "read"
    )
    root = Path(settings.store)
    if settings.packing:
        try:
            open_store(root).probe()
        except StoreError as error:
            if error.is_lasting:
                why = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
                raise SettingsError(f"{required} is required, found {root} ({why}); name another") from error
            log.warning("the store cannot be written now: %s", error)
    elif os.path.lexists(root) and not (root.is_dir() and os.access(root, os.R_OK | os.X_OK)):
        raise SettingsError(f"{required} is required, found {root}; name another")


def _check_cache(url: str) -> None:
    """Raise SettingsError where copies of the store's objects cannot be kept."""
    try:
        open_store(url).stage("work").close()
    except NoSpaceLeft as error:
        log.warning("%s", error)
    except StoreError as error:
        raise SettingsError(f"PADFREE_STORE (--store) {url}: {error}") from error


def server_for(app: FastAPI, settings: Settings) -> uvicorn.Server:
    """The server of an application made by `create_app`; run it with a socket from `bind`."""
    config = uvicorn.Config(
        with_wires(app),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_s)),
    )
    return _Server(config, app.state.padfree)


def bind(settings: Settings) -> socket.socket:
    """A socket on the address of the settings. Raises SettingsError where it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); "
            "choose another --host or --port"
        ) from error


class _Server(uvicorn.Server):
    """Tells the service to end its streams before it waits for them."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.begin_shutdown()
        asyncio.get_running_loop().call_later(_FLUSH_S, self._abort_cut_off)
        await super().shutdown(sockets)

    def _abort_cut_off(self) -> None:
        """Let go of readers that do not take what was sent before their stream was cut off."""
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None and transport.is_closing():
                transport.abort()


@contextlib.contextmanager
def _signals_end_in_order() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more when all is done; that must not kill us."""

    def ignore(number: int, frame: Any) -> None:
        pass

    before = {number: signal.signal(number, ignore) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
