"""PackedDataset: a PackedStream as a torch IterableDataset, for those who want a DataLoader.

    loader = PackedDataset(url, dataset="…").loader(num_workers=2)

With workers, worker w of n reads steps w, w + n, w + 2n, …; a DataLoader asks its workers in turn, so the
batches come out in the order of the stream, as many as without workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from trainer_client.batch import PackedBatch
from trainer_client.cursor import count_of
from trainer_client.errors import StateMismatch
from trainer_client.needs import needs_torch
from trainer_client.reader import Lane
from trainer_client.stream import PackedStream

with needs_torch("PackedDataset"):
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
    from torch.utils.data._utils.collate import default_collate_fn_map


class PackedDataset(IterableDataset):
    """Takes what PackedStream takes, and `transform`, applied to each batch (for example
    PackedBatch.for_transformers where the loop wants a dict).

    Iterate it by `loader()`: then the main process knows what the loop has taken, also with workers. Its
    `state_dict` counts that, on any number of workers, and the next `for` goes on behind it, be it the rest
    of an epoch or the next one.

    A DataLoader of your own over it reads in other processes, of which this one sees nothing: with workers
    call `set_epoch` before each epoch but the first, as with torch's DistributedSampler, and save
    `batch.state` of the last batch taken; or use torchdata's StatefulDataLoader, which collects each
    worker's state (load it with as many workers).
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        dataset: str,
        transform: Callable[[PackedBatch], Any] | None = None,
        **options: Any,
    ) -> None:
        self._stream = PackedStream(source, dataset=dataset, **options)
        self._transform = transform
        # Of the running iteration, in a worker: where it began and how many steps this worker gave.
        self._began: dict[str, Any] | None = None
        self._num_given = 0
        self._is_under_way = False

    def loader(self, **options: Any) -> DataLoader:
        """A DataLoader over this dataset, one batch at a time, that keeps the dataset where the loop is, and
        that accelerator.prepare() hands through as it is. options: of DataLoader, for example num_workers."""
        _require_loader_options(options)
        self._refuse_workers(options.get("num_workers", 0))
        return _Loader(_WithStates(self), **{**options, "batch_size": None})

    def __iter__(self) -> Iterator[Any]:
        self._refuse_a_second_deal()
        return map(self._transformed, self._batches())

    def _batches(self) -> Iterator[PackedBatch]:
        info = get_worker_info()
        return iter(self._stream) if info is None else self._lane(info.id, info.num_workers)

    def _transformed(self, batch: PackedBatch) -> Any:
        return batch if self._transform is None else self._transform(batch)

    def _refuse_a_second_deal(self) -> None:
        """Raise where a loader of Accelerate's would deal out this rank's packs to all ranks once more."""
        state = sys.modules.get("accelerate.state")
        if self._stream.world_size == 1 or state is None or not state.GradientState._shared_state:
            return
        loader = state.GradientState().active_dataloader  # the one that is being iterated
        read = getattr(loader, "dataset", None)
        if loader is not None and (read is self or getattr(read, "dataset", None) is self):
            raise RuntimeError(
                f"this PackedDataset is rank {self._stream.rank} of {self._stream.world_size}, its part of "
                "the packs already; a DataLoader over it that went through accelerator.prepare() would be "
                "dealt out to all ranks once more, and most packs never be trained: leave the loader out of "
                "prepare(), or make it with PackedDataset.loader(), which prepare() hands through as it is"
            )

    def _refuse_workers(self, num_workers: int) -> None:
        """Raise where workers cannot do what the stream was asked for."""
        if num_workers and self._stream._device is not None:
            raise ValueError(
                "device: None is required with num_workers > 0 (workers must not touch it), found "
                f"{self._stream._device}; use num_workers=0, the stream reads ahead by itself"
            )
        if num_workers > 1 and self._stream._split.micro_batches > 1:
            raise ValueError(
                f"micro_batches: 1 is required with {num_workers} workers, which take turns by steps, "
                f"found {self._stream._split.micro_batches}; use one worker, or none: the stream reads ahead "
                "by itself"
            )

    def _lane(self, worker: int, num_workers: int) -> Iterator[PackedBatch]:
        self._refuse_workers(num_workers)
        if self._is_under_way:
            raise RuntimeError(
                "the last iteration was broken off, and persistent workers have read on since, nobody knows "
                "how far: their batches would be lost; iterate by PackedDataset.loader(), or use "
                "persistent_workers=False"
            )
        if self._began is None:
            self._stream._go_on()
            self._began = self._stream.state_dict()
        self._stream.load_state_dict({name: self._began[name] for name in self._began if name != "lane"})
        self._stream._lane = Lane(index=worker, count=num_workers, skip=self._num_given)
        self._began["lane"] = {"worker": worker, "num_workers": num_workers}
        self._is_under_way = True
        for batch in self._stream:
            self._num_given += 1
            yield batch
        self._began, self._num_given, self._is_under_way = None, 0, False

    def __len__(self) -> int:
        return len(self._stream)

    def set_epoch(self, epoch: int) -> None:
        """Go on to the start of `epoch`, as PackedStream.set_epoch does: never back, so that a framework
        that counts from 0 again after a resume repeats nothing."""
        self._refuse_a_second_deal()  # a loader of Accelerate's calls this on every rank
        self._stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands: the stream's state, or in a worker that of its own steps."""
        if self._began is None:
            return self._stream.state_dict()
        return {**self._began, "lane": {**self._began["lane"], "num_given": self._num_given}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises StateMismatch and ValueError as PackedStream does, and
        StateMismatch where a worker's state is loaded with another number of workers."""
        if not isinstance(state, Mapping) or "lane" not in state:
            self._stream.load_state_dict(state)
            self._began, self._num_given, self._is_under_way = None, 0, False
            return
        lane = _lane_in(state["lane"])
        info = get_worker_info()
        here = (info.id, info.num_workers) if info is not None else (0, 0)
        if here != (lane["worker"], lane["num_workers"]):
            raise StateMismatch(
                "worker of num_workers",
                wanted=here,
                found=(lane["worker"], lane["num_workers"]),
                hint="resume with as many workers, or load `batch.state` of the last batch taken",
            )
        self._stream.load_state_dict({name: value for name, value in state.items() if name != "lane"})
        self._began = {**state, "lane": {"worker": here[0], "num_workers": here[1]}}
        self._num_given, self._is_under_way = lane["num_given"], False

    @property
    def stream(self) -> PackedStream:
        """The stream underneath (for its stats)."""
        return self._stream


def _lane_in(found: Any) -> dict[str, int]:
    """Which worker's state it is and how many batches that gave. Raises ValueError."""
    if not isinstance(found, Mapping):
        raise ValueError(
            f"lane of the state: worker, num_workers, num_given are required, found {found!r:.80}"
        )
    names = ("worker", "num_workers", "num_given")
    return {name: count_of(f"{name} in the lane of the state", found.get(name)) for name in names}


def _require_loader_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options of DataLoader that batches made beforehand leave no room for."""
    instead = {
        "batch_size": "each item is a whole batch; packs_per_step of the dataset says how many packs it has",
        "collate_fn": "nothing is collated; `transform` of the dataset is applied to each batch",
        "shuffle": "shuffle_seed of the dataset gives each epoch its order",
        "sampler": "rank and world_size of the dataset say which packs are this rank's",
        "batch_sampler": "rank, world_size and packs_per_step of the dataset say what a batch holds",
    }
    for name, hint in instead.items():
        if options.get(name) not in (None, False):
            raise ValueError(f"{name}: nothing, or None, is required, found {options[name]!r}: {hint}")
    if not options.get("in_order", True):
        raise ValueError(
            f"in_order: nothing, or True, is required, found {options['in_order']!r}: a state says that all "
            "batches before the last one were taken, so batches that overtake others would leave those "
            "untrained after a resume; leave it out, and give more workers or prefetch_factor instead"
        )


def _refuse_to_collate(batch: Any, **_: Any) -> NoReturn:
    raise TypeError(
        "a PackedBatch is a whole batch, and cannot be collated: give the DataLoader batch_size=None, or use "
        "PackedDataset.loader()"
    )


# Where torch lets a type say how it is collated. A DataLoader without batch_size=None comes here.
default_collate_fn_map[PackedBatch] = _refuse_to_collate


class _WithStates(IterableDataset):
    """A PackedDataset's items, each with the stream's state once it was taken."""

    def __init__(self, packed: PackedDataset) -> None:
        self.packed = packed

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        return ((self.packed._transformed(batch), batch.state) for batch in self.packed._batches())

    def __len__(self) -> int:
        return len(self.packed)


class _Loader(DataLoader):
    """Hands out the items, and keeps the main process's stream where the loop is."""

    _iterator: Any  # DataLoader's own, of persistent workers
    _is_accelerate_prepared = True
    _workers_at: Any = None  # where persistent workers go on by themselves; None: where the loop is not

    def __iter__(self) -> Iterator[Any]:
        stream = self.dataset.packed.stream
        if self.num_workers:
            stream._go_on()
        if self._iterator is not None and self._workers_at != _place(stream):
            # Broken off, or another state, epoch or skip: persistent workers know nothing of it, new ones do.
            self._iterator._shutdown_workers()
            self._iterator = None
        self._workers_at = None
        for item, state in super().__iter__():
            if self.num_workers:
                stream._follow(state)
            yield item
        if self.num_workers:
            stream._came_to_the_end()
            self._workers_at = _place(stream)


def _place(stream: PackedStream) -> Any:
    """What decides which batches are next, for an iteration that begins now."""
    term = stream._term.with_epoch(stream._cursor.epoch) if stream._ended else stream._term
    return stream._cursor, stream._skips, term
