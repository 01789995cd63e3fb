"""What the handlers of one service share. Made by create_app, closed when the application ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.requests import Request

from packer.names import find_dataset
from packer.store import Store, open_store
from service.buffers import Buffers
from service.daemon import run_in_daemon
from service.epochs import BlockCache, StepsCache
from service.feeds import Feeds
from service.files import ShardFiles
from service.metrics import Metrics
from service.settings import Settings

if TYPE_CHECKING:
    from service.scheduler import Scheduler

T = TypeVar("T")


class OpenStream(Protocol):
    @property
    def lag(self) -> tuple[str, int, int]:
        """(dataset, rank, steps that could be sent and are not)."""
        ...


_PREVIEWS_AT_ONCE = 2  # each takes a core for some seconds
_NUM_ASKING = 8  # threads that ask the store
_NUM_READERS = 8  # threads that read shards; longer work has threads of its own


class Service:
    """Store, caches, scheduler and metrics of one process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store: Store = open_store(settings.store)
        self.metrics = Metrics()
        self.executor = ThreadPoolExecutor(_NUM_ASKING, thread_name_prefix="store")
        self.readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="shards")
        self.feeds = Feeds(self.store, self.executor)
        self.files = ShardFiles(self.store)
        self.buffers = Buffers(settings.max_chunk_bytes)
        self.names: dict[str, str | None] = {}  # of datasets by id, as far as anybody asked for names
        self.blocks, self.steps = BlockCache(), StepsCache()
        self.scheduler: Scheduler | None = None  # None: this replica does not pack
        self.stopping = asyncio.Event()  # open streams are to be cut
        self.preview_turns = asyncio.Semaphore(_PREVIEWS_AT_ONCE)
        self.num_streams = 0
        self.streams: set[OpenStream] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_by_s = 0.0
        self.count_again_s = 0.0  # time.monotonic when datasets are counted again, for /metrics

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Short work on the store, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *args)

    async def read_in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """What reads shards, off the event loop: to fetch one from an object store may take minutes, in which
        nobody else is to wait, /readyz least of all."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, function, *args)

    async def find_dataset(self, text: str) -> str:
        """The id that a name, or the beginning of an id, means. Raises UnknownName, AmbiguousName."""
        return await self.in_thread(find_dataset, self.store, text, self.names)

    async def long_in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Work that may take minutes; it holds up neither short work nor the end of the process."""
        return await run_in_daemon(function, *args)

    def chunk_bytes(self) -> int:
        """How much of a stream to hold at once. Slow readers hold two chunks each."""
        share = self.settings.max_buffer_bytes // (2 * max(1, self.num_streams))
        most = max(64 << 10, min(self.settings.max_chunk_bytes, share))
        return 1 << (most.bit_length() - 1)  # a size that `buffers` has: it lends no more than is asked for

    async def start(self) -> None:
        """Begin to work, in the event loop that will handle the requests."""
        self._loop = asyncio.get_running_loop()
        if self.scheduler is not None:
            self.scheduler.start()

    def committed(self, dataset: str) -> None:
        """A dataset has more packs, or a new state: wake those who wait. From any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                self._loop.call_soon_threadsafe(self.feeds.nudge, dataset)

    def begin_shutdown(self) -> None:
        """Cut off open streams and stop packing, without waiting."""
        if not self.stopping.is_set():
            self._stop_by_s = time.monotonic() + self.settings.shutdown_s
            self.stopping.set()
        if self.scheduler is not None:
            self.scheduler.stop_soon()

    async def stop(self) -> None:
        """End all work; what is left of `shutdown_s`, but at least a second, is waited for it."""
        self.begin_shutdown()
        if self.scheduler is not None:
            left_s = max(1.0, self._stop_by_s - time.monotonic())
            await self.long_in_thread(self.scheduler.stop, left_s)
        self.feeds.close()
        self.files.close()
        for threads in (self.executor, self.readers):
            threads.shutdown(wait=False, cancel_futures=True)


async def service_of(request: Request) -> Service:
    """The Service of the application that handles `request` (a FastAPI dependency; were it no coroutine, each
    request would wait for a thread)."""
    return request.app.state.padfree
