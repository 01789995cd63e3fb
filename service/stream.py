"""GET /v1/datasets/{id}/stream: one rank's packs of an epoch as an Arrow IPC stream.

Stateless: which packs follow is a function of the query. A stream waits for steps that are not packed
yet; it ends after the epoch's last step. When it cannot go on it is broken off without an end; the
request that reopens it gets the reason.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from packer import shard
from service import problems
from service.auth import known_parameters_only
from service.epochs import EpochOrder
from service.feeds import Feed, Snapshot
from service.files import ShardMissing, WouldBlock
from service.plan import ChunkReader, StreamRequest, deal, epoch_order
from service.queries import PlainQueries
from service.sending import ChunkedResponse
from service.state import Service, service_of

MEDIA_TYPE = "application/vnd.apache.arrow.stream"

_MAX_MERGED = 4096  # packs that one record batch may hold: a step is put together in memory
_FIRST_CHUNK_BYTES = 64 << 10  # then four times as many each, so that the first step leaves at once

router = APIRouter(prefix="/v1", tags=["stream"], route_class=PlainQueries)


def _blank_is_none(value: Any) -> Any:
    return None if value == "" else value


Count = Annotated[int, Query(ge=0, le=1 << 40)]
Optional = BeforeValidator(_blank_is_none)


@router.get(
    "/datasets/{dataset}/stream",
    response_class=Response,
    responses={
        200: {"content": {MEDIA_TYPE: {}}, "description": "An Arrow IPC stream"},
        **problems.documented(401, 404, 409, 422),
    },
    dependencies=[Depends(known_parameters_only)],
)
async def stream(
    request: Request,
    dataset: str,
    rank: Annotated[int, Query(ge=0, le=1 << 20, description="This rank")] = 0,
    world_size: Annotated[int, Query(ge=1, le=1 << 20, description="Number of ranks")] = 1,
    packs_per_step: Annotated[
        int, Query(ge=1, le=1 << 16, description="Packs of a rank in a step; not used in a step dataset")
    ] = 1,
    epoch: Annotated[int, Query(ge=0, le=99_999_999, description="0: commit order")] = 0,
    start: Annotated[Count, Query(description="The first step to send")] = 0,
    shuffle_seed: Annotated[
        int | None, Optional, Query(description="Order of epochs from 1 on; none: commit order")
    ] = None,
    max_steps: Annotated[
        Annotated[int, Field(ge=1)] | None, Optional, Query(description="At most so many steps")
    ] = None,
    stride: Annotated[int, Query(ge=1, le=1 << 20, description="Send every so-many-th step only")] = 1,
    offset: Annotated[Count, Query(description="Packs of this epoch consumed before step 0")] = 0,
    micro_step: Annotated[
        Count, Query(description="Loop steps taken of the optimiser step that `offset` lies in")
    ] = 0,
    tail: Annotated[Literal["drop", "pad"], Query(description="A last step that is not full")] = "drop",
    batches: Annotated[
        Literal["step", "pack"], Query(description="One record batch a step, or a pack")
    ] = "step",
    balance: Annotated[
        Literal["none", "attention"], Query(description="Even out the ranks' cost within a step")
    ] = "none",
    service: Service = Depends(service_of),  # noqa: B008 - FastAPI's way
) -> Response:
    """This rank's packs, from step `start` to the end of the epoch; starts while packing still runs."""
    since = time.perf_counter()
    wanted = StreamRequest(
        dataset=dataset,
        rank=rank,
        world_size=world_size,
        packs_per_step=packs_per_step,
        epoch=epoch,
        start=start,
        shuffle_seed=shuffle_seed,
        max_steps=max_steps,
        stride=stride,
        offset=offset,
        micro_step=micro_step,
        tail=tail,
        batches=batches,
        balance=balance,
    )
    _check_parameters(wanted)
    feed = await service.feeds.get(dataset)
    snapshot = await feed.fresh()
    one = _Stream(service, feed, wanted, since)
    return ChunkedResponse(
        service,
        one.chunks(snapshot),
        kind="stream",
        what=f"stream of {dataset} (rank {rank} of {world_size}, epoch {epoch}, step {start})",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        media_type=MEDIA_TYPE,
        end=shard.END_OF_STREAM,
        on_end=one.ended,
    )


def _check_parameters(wanted: StreamRequest) -> None:
    if wanted.rank >= wanted.world_size:
        raise problems.bad_parameter(
            "rank",
            f"a rank from 0 to world_size - 1 = {wanted.world_size - 1} is required, found {wanted.rank}",
        )
    if wanted.is_merged and wanted.packs_per_step > _MAX_MERGED:
        raise problems.bad_parameter(
            "packs_per_step",
            f"at most {_MAX_MERGED} with batches=step is required, found {wanted.packs_per_step}; "
            "use batches=pack",
        )


def check_servable(wanted: StreamRequest, snapshot: Snapshot, total_steps: int | None) -> None:
    """Raise the Problem of a dataset that cannot be streamed as wanted, as far as it is known yet.

    total_steps: of the rest of the epoch from `offset`, once the dataset is finished.
    """
    snapshot.raise_if_stopped(wanted.dataset)
    if total_steps is None:
        return
    num_packs, packs_a_step = snapshot.num_packs, wanted.packs_a_step
    needs_full = wanted.tail == "drop" and snapshot.step_sizes is None
    if num_packs == 0 or (needs_full and num_packs < packs_a_step):
        raise problems.dataset_too_small(wanted.dataset, num_packs=num_packs, packs_a_step=packs_a_step)
    if wanted.offset > num_packs:
        raise problems.bad_parameter(
            "offset", f"at most the {num_packs} packs of the epoch is required, found {wanted.offset}"
        )
    # Who reads every stride-th step may stand so far behind the last one: there is nothing more to send.
    if wanted.start >= total_steps + wanted.stride:
        raise problems.bad_parameter(
            "start", f"at most the {total_steps} steps of the epoch is required, found {wanted.start}"
        )


class _Stream:
    """One open stream."""

    def __init__(self, service: Service, feed: Feed, wanted: StreamRequest, since: float) -> None:
        self._service, self._feed, self._wanted, self._since = service, feed, wanted, since
        self._sent = self._ready = 0  # steps that were sent; that could have been
        service.num_streams += 1
        service.streams.add(self)
        service.metrics.streams_open.inc()
        service.metrics.clients.expect(wanted.dataset, wanted.rank)

    def ended(self, how: str) -> None:
        self._service.num_streams -= 1
        self._service.streams.discard(self)
        self._service.metrics.streams_open.dec()
        self._service.metrics.streams_ended.labels(how).inc()

    @property
    def lag(self) -> tuple[str, int, int]:
        """(dataset, rank, steps that could be sent and are not)."""
        return self._wanted.dataset, self._wanted.rank, max(0, self._ready - self._sent)

    async def chunks(self, snapshot: Snapshot) -> AsyncIterator[bytes | memoryview]:
        """The bytes of the stream, but for its end. Raises Problems."""
        head = shard.schema_message(self._wanted.dataset)
        try:
            async for part in self._parts(snapshot):
                # An empty part: it has to wait. The head goes out, so that the reader knows.
                yield b"".join((head, part)) if head else part
                head = b""
        except (ShardMissing, ValueError) as error:  # ShardError is one
            problem = await self._feed.damage(str(error))
            self._service.feeds.drop(self._wanted.dataset)
            raise problem from error
        except OSError as error:
            raise problems.from_store_error(error) from error
        if head:  # of no steps
            yield head

    async def _parts(self, snapshot: Snapshot) -> AsyncIterator[bytes | memoryview]:
        """Chunks of messages; b"" before each wait for packs."""
        service, sent = self._service, 0
        size = _FIRST_CHUNK_BYTES
        first = service.metrics.first_batch_seconds.labels("ready" if snapshot.finished else "packing")
        while True:
            wanted = self._wanted.of(snapshot)
            epoch, steps = await self._known(wanted, snapshot)
            check_servable(wanted, snapshot, steps if snapshot.finished else None)
            stop = self._ready = wanted.num_sent(steps)
            if stop > sent:
                if not sent:
                    first.observe(time.perf_counter() - self._since)
                reader = ChunkReader(wanted, epoch, service.files, service.buffers, first=sent, stop=stop)
                while (data := await self._read(reader, size)) is not None:
                    yield data
                    size = min(4 * size, service.chunk_bytes())
                    self._sent = reader.num_sent
                sent = stop
            if sent == wanted.max_steps or snapshot.finished:
                return
            yield b""
            since = time.perf_counter()
            snapshot = await self._feed.after(snapshot)
            service.metrics.wait_seconds.labels("packing").inc(time.perf_counter() - since)

    async def _known(self, wanted: StreamRequest, snapshot: Snapshot) -> tuple[EpochOrder, int]:
        """The epoch's order and how many steps of it can be sent now, all packs of all ranks committed."""
        snapshot.raise_if_stopped(wanted.dataset)
        service = self._service

        def order_and_steps() -> tuple[EpochOrder, int]:
            epoch = epoch_order(wanted, snapshot, service.blocks, service.steps)
            return epoch, deal(wanted, epoch).num_steps

        if snapshot.step_sizes is None:
            epoch, steps = order_and_steps()
        else:  # of many packs, this takes a while
            epoch, steps = await service.in_thread(order_and_steps)
        if wanted.epoch > 0 and not snapshot.finished:
            steps = 0  # the order of a later epoch needs the number of packs
        return epoch, steps

    async def _read(self, reader: ChunkReader, size: int) -> memoryview | None:
        """What is in memory is read here at once: a thread costs as much as the read itself."""
        try:
            return reader.read(size, wait=False)
        except WouldBlock:
            return await self._service.read_in_thread(reader.read, size)
