"""What a way to a dataset must do, whether it leads over HTTP or into a folder."""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from packer import names, shard
from packer.shard import Pack, ShardError, Stamp
from packer.store import is_url, open_store
from trainer_client.course import Layout
from trainer_client.cursor import Split
from trainer_client.errors import Lost, StreamRefused, StreamTimeout
from trainer_client.options import token_of

log = logging.getLogger("trainer_client")

_HOST_PORT = re.compile(r"[\w.-]+:\d{1,5}(/.*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A run of loop steps of one epoch: start, start + stride, … Steps are counted from pack `offset`.

    micro_step: of a "step" dataset, loop steps of the optimiser step at `offset` that were taken before it.
    """

    split: Split
    epoch: int
    offset: int = 0
    micro_step: int = 0
    start: int = 0
    stride: int = 1
    max_steps: int | None = None  # None: to the end of the epoch


class Received(NamedTuple):
    """One verified pack and what its message says of the step: `stamp.step` counts from the offset."""

    pack: Pack
    stamp: Stamp
    num_bytes: int  # on the way, compressed


@dataclass(slots=True, kw_only=True)
class RequestIds:
    """The ids under which a service logs one stream's requests: the stream's own, and a number each.

    traceparent: of the span that the training program was in when it began to iterate, if it traces itself.
    """

    stream: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    traceparent: str | None = None
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False)

    def next(self) -> str:
        return f"{self.stream}.{next(self._numbers)}"


class Transport(Protocol):
    """Brings packs from where they lie. One thread reads; `layout` and `close` may come from another."""

    dataset: str
    hears_reports: bool  # whether somebody is there to tell how the loop fares
    label: str  # for messages: the dataset, and the stream's id where a service logs it

    def layout(self) -> Layout:
        """What is known of the dataset's size now. Asks no more once it is finished.

        Raises UnknownDataset, DatasetFailed; Lost where it cannot be told just now.
        """
        ...

    def known(self) -> Layout:
        """What `layout` found last. Asks nobody."""
        ...

    def spec(self) -> dict[str, Any]:
        """The dataset's resolved spec. Raises as `layout` does."""
        ...

    def idle_shares(self, split: Split, epoch: int, max_steps: int) -> dict[str, float]:
        """Share of all ranks' time spent waiting for a step's slowest, by value of `balance`."""
        ...

    def packs(self, request: Request) -> Generator[Received, None, None]:
        """This rank's packs of each step, waiting for those not packed yet: packs_per_step of them, or one
        of a "step" dataset.

        Ends when the steps asked for, or the epoch's, are over. Raises Lost where it broke off;
        all else is permanent.
        """
        ...

    def still_packing(self) -> bool:
        """Whether a silent stream only waits for packs that are being made."""
        ...

    def report(self, figures: dict[str, Any]) -> bool:
        """Tell the service how the loop fares. Whether it arrived; raises nothing, waits seconds at most."""
        ...

    def fresh(self) -> Transport:
        """Another one for the same dataset, not closed, that knows what this one knows."""
        ...

    def close(self) -> None:
        """Let go, and wake a reader that waits in another thread (it then raises Lost)."""
        ...


def capacities_of(spec: Any) -> tuple[int, ...] | None:
    """`packing.max_tokens` of a spec document, rising: what its packs may hold. None: it does not say."""
    try:
        found = spec["packing"]["max_tokens"]
        return tuple(int(one) for one in (found if isinstance(found, list) else [found]))
    except (KeyError, TypeError):
        return None


def decode(message: memoryview, header_bytes: int) -> Pack:
    """The pack of a whole message, checked; no array is a view of it. Raises Lost for bytes that are not as
    written."""
    try:
        shard.check_message(message, header_bytes)
        return shard.decode_pack(message, header_bytes)
    except ShardError as error:
        raise Lost(str(error), damaged=True) from error


def find_dataset(source: str | os.PathLike[str], text: str, *, token: str | None, timeout_s: float) -> str:
    """The id of the dataset that `text` means at `source`: an id, the beginning of one, or a name.

    A whole id is taken as it is and connects to nothing. token: PADFREE_TOKEN where None. Raises
    UnknownDataset; StreamRefused for a name of several; StreamTimeout where a service does not answer;
    ValueError for an url without its scheme, and where no dataset is named.
    """
    if _HOST_PORT.fullmatch(str(source)) and not os.path.exists(source):
        raise ValueError(
            f"source: the url of a service begins with http:// or https://, found {str(source)!r}; give "
            f"http://{source}, or a store's folder that is there"
        )
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"dataset: an id, the beginning of one or a name is required, found {text!r}; `padfree datasets` "
            "lists them"
        )
    if names.is_id(text):
        return text
    if not is_service(source):
        try:
            return names.find_dataset(open_store(source), text)
        except names.UnknownName:
            return text  # what reads it says so, and where it looked
        except names.AmbiguousName as error:
            raise StreamRefused(f"{source}: {error}") from None
    from trainer_client.remote import HttpTransport

    transport, delay_s = HttpTransport(str(source), text, token=token_of(token)), 0.1
    until, is_told = time.monotonic() + timeout_s, False
    while True:
        try:
            return transport.find()
        except Lost as error:
            if time.monotonic() >= until:
                raise StreamTimeout(f"asking for dataset {text!r} for {timeout_s:g} s: {error}") from error
            if not is_told:  # once, as the stream does of its own tries
                log.warning("dataset %r: %s; trying again for up to %g s", text, error, timeout_s)
                is_told = True
            time.sleep(max(delay_s, error.wait_s))
            delay_s = min(2 * delay_s, 5.0)


def is_service(source: str | os.PathLike[str]) -> bool:
    """Whether a source is the url of a service rather than a store."""
    return str(source).startswith(("http://", "https://"))


def open_transport(
    source: str | os.PathLike[str],
    dataset: str,
    *,
    token: str | None,
    timeout_s: float,
    ids: RequestIds | None = None,
) -> Transport:
    """The way to `source`. Connects to nothing yet. token: PADFREE_TOKEN where None. ids: of the stream that
    it is for."""
    from trainer_client.folder import FolderTransport
    from trainer_client.portion import Portion
    from trainer_client.remote import HttpTransport

    if is_service(source):
        # Long enough to be no trouble, short enough for several tries before the timeout.
        portion = Portion(silence_s=max(0.25, min(60.0, timeout_s / 10)), longest_s=timeout_s / 2)
        return HttpTransport(str(source), dataset, token=token_of(token), portion=portion, ids=ids)
    if "://" in str(source) and not is_url(source):
        raise ValueError(
            f"source: an http(s) url, or a store's folder or s3:// url is required, found {str(source)!r}"
        )
    return FolderTransport(source, dataset, timeout_s=timeout_s)


def query_of(request: Request) -> dict[str, Any]:
    """The query of GET /v1/datasets/{id}/stream."""
    split = request.split
    query: dict[str, Any] = {
        "rank": split.rank,
        "world_size": split.world_size,
        "packs_per_step": split.packs_per_step,
        "epoch": request.epoch,
        "start": request.start,
        "offset": request.offset,
        "tail": split.tail,
        "batches": "pack",
    }
    if request.stride != 1:
        query["stride"] = request.stride
    if split.balance != "none":
        query["balance"] = split.balance
    given = {"shuffle_seed": split.shuffle_seed, "max_steps": request.max_steps}
    given["micro_step"] = request.micro_step or None
    return query | {name: value for name, value in given.items() if value is not None}
