"""What of a dataset is committed: one small file a partition, read in order, never changed.

A commit `datasets/<id>/commits/<partition>.arrow` is written after its shards are durable; a reader
that has seen commits 0..k-1 needs only look whether k is there. Its rows are the row index of the
partition's packs (packer.shard.ROW_INDEX, and `shard`, the shard's place within the partition); its
metadata lists the shards and the partition's part of the report. Both sides of the wire read it:
service and client (folder mode). Errors: ManifestError for a file that is not what it should be.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer.order import step_sizes
from packer.shard import ROW_INDEX
from packer.store import Store, StoreError

# The row index of a dataset: `shard`, and the optimiser step of the pack under strategy "step" (else -1).
ROWS = np.dtype([("shard", "<i4"), ("step", "<i8"), *ROW_INDEX.descr])
_COLUMNS = [(name, ROWS[name]) for name in ROWS.names or ()]

ORIGIN = "origin.json"  # when a dataset was first asked for, and by which request; nothing depends on it

# What each of a dataset's JSON files holds at least.
_NEEDED: dict[str, dict[str, type]] = {
    "spec.json": {"dataset": str, "spec": dict, "inputs": list},
    "plan.json": {"num_partitions": int},
    "finished.json": {"num_partitions": int, "report": dict},
    "failed.json": {"detail": str},
}


class ManifestError(ValueError):
    """A dataset's files in the store do not fit together. shown: the text without a path of this machine."""

    def __init__(self, text: str, *, shown: str = "") -> None:
        super().__init__(text)
        self.shown = shown or text


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One shard as the manifest lists it. `index` is its place in the dataset."""

    index: int
    key: str
    num_packs: int
    num_tokens: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A committed partition: its shards (indices within the partition), row index and counters."""

    partition: int
    shards: tuple[Shard, ...]
    rows: np.ndarray  # (num_packs,) of ROWS
    counters: dict[str, Any]


def dataset_key(dataset: str, name: str = "") -> str:
    """The store key of one of a dataset's files."""
    return f"datasets/{dataset}/{name}" if name else f"datasets/{dataset}"


def commit_key(dataset: str, partition: int) -> str:
    return dataset_key(dataset, f"commits/{partition:06d}.arrow")


def shard_key(dataset: str, partition: int, number: int) -> str:
    return dataset_key(dataset, f"shards/{partition:06d}-{number:03d}.arrow")


def lock_key(dataset: str) -> str:
    """Held by the process that packs the dataset."""
    return f"locks/{dataset}"


def cancelled_key(dataset: str) -> str:
    """The marker of a dataset that is not to be packed, and not to be served.

    Not in the dataset's folder: whoever packs it sweeps that for files left half-written.
    """
    return f"cancelled/{dataset}.json"


def write_origin(store: Store, dataset: str, *, request_id: str | None = None) -> None:
    """Note that a dataset is asked for now. The time of its first request stays, where there is one."""
    created = read_origin(store, dataset).get("created")
    created = created or time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    about = {"created": created, "request_id": request_id}
    try:
        store.put(dataset_key(dataset, ORIGIN), json.dumps(about).encode())
    except StoreError as error:
        if not error.is_lasting:  # else whoever writes what matters fails too, or it is damaged alone
            raise


def read_origin(store: Store, dataset: str) -> dict[str, Any]:
    """`created` (UTC) and `request_id`; empty where that is not known: it is for people alone."""
    try:
        found = json.loads(store.get(dataset_key(dataset, ORIGIN)))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def shard_rows(shard: int, index: np.ndarray, steps: np.ndarray | None = None) -> np.ndarray:
    """The row index of one shard (dtype ROW_INDEX) as rows of a commit (dtype ROWS)."""
    rows = np.empty(len(index), ROWS)
    rows["shard"] = shard
    rows["step"] = -1 if steps is None else steps
    for name in ROW_INDEX.names or ():
        rows[name] = index[name]
    return rows


def write_commit(store: Store, dataset: str, commit: Commit) -> None:
    """Make a partition part of the dataset. Its shards must be durable by now."""
    about = {
        "partition": commit.partition,
        "shards": [asdict(shard) for shard in commit.shards],
        "counters": commit.counters,
    }
    about["sha256"] = _digest([commit.rows[name] for name in ROWS.names or ()], about)
    columns = {name: _column(commit.rows[name]) for name in ROWS.names or ()}
    table = pa.table(columns).replace_schema_metadata({"padfree.commit": json.dumps(about)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    store.put(commit_key(dataset, commit.partition), memoryview(sink.getvalue()))


def _column(values: np.ndarray) -> pa.Array:
    """As pa.array, which (like to_numpy) imports pandas where that is there: half a second of a process."""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _digest(columns: Iterable[np.ndarray], about: dict[str, Any]) -> str:
    """Of all that a commit says: nothing in it may change unseen. columns: of the rows, in order."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for column in columns:
        digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()


def repair(dataset: str) -> str:
    """What to do about a dataset that is damaged."""
    return (
        f"remove it (`padfree datasets --remove {dataset}`, or DELETE) and pack it again: the same spec "
        "gives the same packs"
    )


def damaged(store: Store, dataset: str, key: str, error: BaseException | str) -> ManifestError:
    """What to raise for a file of a dataset that is not as it was written."""
    told = f"of dataset {dataset} is damaged ({error}); {repair(dataset)}"
    return ManifestError(f"{store.where(key)} {told}", shown=f"{key} {told}")


def _read(store: Store, dataset: str, key: str) -> bytes | None:
    """The bytes of one of a dataset's files; None where there is none.

    Raises ManifestError where something is there that can never be read as it is (a folder, a file that this
    user may not read), StoreError where the store stumbles.
    """
    try:
        return store.get(key)
    except FileNotFoundError:
        return None
    except StoreError as error:
        if not error.is_lasting:
            raise
        raise damaged(store, dataset, key, error.shown) from error


def _is_there(store: Store, key: str) -> bool:
    """Whether a file is there, if only as one that nobody may look at."""
    try:
        return store.exists(key)
    except StoreError as error:
        if error.is_lasting:
            return True
        raise


def _values(array: pa.Array, dtype: np.dtype) -> np.ndarray:
    """The inverse of `_column`."""
    if array.type != pa.from_numpy_dtype(dtype):
        raise TypeError(f"a column of {dtype} is required, found {array.type}")
    return np.frombuffer(array.buffers()[1], dtype)[array.offset : array.offset + len(array)]


def _together(parts: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])


def _require_its_own(dataset: str, partition: int, about: dict[str, Any]) -> None:
    """Raise ValueError for what another commit says: its file was copied here, each checksum in it holds."""
    if about["partition"] != partition:
        raise ValueError(
            f"the commit of partition {partition} is required, found that of {about['partition']}"
        )
    folder = dataset_key(dataset, "shards/")
    for shard in about["shards"]:  # one may be listed more than once
        if not shard["key"].startswith(folder):
            raise ValueError(f"shards of {folder} are required, found {shard['key']}")


def read_commit(store: Store, dataset: str, partition: int) -> Commit | None:
    """Commit number `partition`, None where it is not there yet. Raises ManifestError, also for another."""
    key = commit_key(dataset, partition)
    if (data := _read(store, dataset, key)) is None:
        return None
    try:
        with pa.ipc.open_file(pa.py_buffer(data)) as reader:
            about = json.loads(reader.schema.metadata[b"padfree.commit"])
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        columns = [_together([_values(one.column(name), of) for one in batches], of) for name, of in _COLUMNS]
        if about.pop("sha256") != _digest(columns, about):
            raise ValueError("its checksum does not hold")
        _require_its_own(dataset, partition, about)
        rows = np.empty(len(columns[0]), ROWS)
        for (name, _), column in zip(_COLUMNS, columns, strict=True):
            rows[name] = column
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise damaged(store, dataset, key, error) from error
    return Commit(
        partition=about["partition"],
        shards=tuple(Shard(**shard) for shard in about["shards"]),
        rows=rows,
        counters=about["counters"],
    )


@dataclass(slots=True)
class Manifest:
    """A dataset's committed packs, as far as they were read. `refresh` reads on.

    `rows` is the row index of the whole dataset: (num_packs,) of ROWS with `shard` counted over the
    dataset. Grows only; what was read never changes.
    """

    store: Store
    dataset: str
    shards: list[Shard] = field(default_factory=list)
    counters: list[dict[str, Any]] = field(default_factory=list)
    finished: dict[str, Any] | None = None  # {"report": …} once all is committed
    _rows: np.ndarray = field(default_factory=lambda: np.empty(0, ROWS))
    _trained_ends: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    _num_packs: int = 0
    _has_finished: bool = False  # finished.json was seen

    @property
    def num_commits(self) -> int:
        return len(self.counters)

    @property
    def num_packs(self) -> int:
        return self._num_packs

    @property
    def rows(self) -> np.ndarray:
        num_packs = self._num_packs  # first: another thread may read on, which never changes what was read
        return self._rows[:num_packs]

    @property
    def trained_ends(self) -> NDArray[np.int64]:
        """Trained tokens before each pack, and of all, (num_packs + 1,)."""
        num_packs = self._num_packs
        return self._trained_ends[: num_packs + 1]

    def step_sizes(self) -> NDArray[np.int64] | None:
        """Packs of each optimiser step in commit order, (n,) int64, of a "step" dataset.

        None for any other, and where nothing is committed yet. A step is committed whole.
        """
        return step_sizes_of(self.rows, self.dataset)

    def refresh(self) -> bool:
        """Read what was committed since. Returns whether there was anything new."""
        if self.finished is not None:
            return False
        # Looked at before the commits, so that all of them are read when it is there.
        finished = self.read_json("finished.json")
        before = self.num_commits
        self._read_on()
        if finished is not None:
            self._has_finished = True
            if finished["num_partitions"] != self.num_commits:
                raise ManifestError(
                    f"dataset {self.dataset} has {self.num_commits} of {finished['num_partitions']} commits; "
                    f"{repair(self.dataset)}"
                )
            self.finished = finished
        return self.num_commits > before or finished is not None

    def failed(self) -> dict[str, Any] | None:
        """Why packing stopped, or None."""
        return self.read_json("failed.json")

    def is_removed(self) -> bool:
        """Whether the dataset was removed since it was read, or is being so: what is not there is then no
        damage. `remove_dataset` takes these before any shard."""
        keys = [dataset_key(self.dataset, "spec.json")]
        keys += [dataset_key(self.dataset, "finished.json")] if self._has_finished else []
        keys += [commit_key(self.dataset, 0)] if self.counters else []
        return not all(_is_there(self.store, key) for key in keys)

    def spec(self) -> dict[str, Any] | None:
        return self.read_json("spec.json")

    def read_json(self, name: str) -> dict[str, Any] | None:
        key = dataset_key(self.dataset, name)
        if (data := _read(self.store, self.dataset, key)) is None:
            return None
        try:
            document = json.loads(data)
            for needed, kind in _NEEDED.get(name, {}).items():
                if not isinstance(found := document[needed], kind):
                    raise TypeError(f"{needed}: {kind.__name__} is required, found {type(found).__name__}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(self.store, self.dataset, key, error) from error
        return document

    def _read_on(self) -> None:
        """Append the commits that are new, as far as they can be read."""
        new: list[Commit] = []
        try:
            while (commit := read_commit(self.store, self.dataset, self.num_commits + len(new))) is not None:
                new.append(commit)
        finally:
            self._make_room(sum(len(commit.rows) for commit in new))
            for commit in new:
                self._append(commit)

    def _make_room(self, num_rows: int) -> None:
        """Room for so many more. At least doubled where there is none, so that appending costs O(1) a row."""
        before, end = self._num_packs, self._num_packs + num_rows
        if end > len(self._rows):
            room = max(end, 2 * len(self._rows), 1024)
            rows, ends = np.empty(room, ROWS), np.empty(room + 1, np.int64)
            rows[:before], ends[: before + 1] = self.rows, self.trained_ends
            self._rows, self._trained_ends = rows, ends

    def _append(self, commit: Commit) -> None:
        first = len(self.shards)
        self.shards.extend(replace(shard, index=first + shard.index) for shard in commit.shards)
        before, end = self._num_packs, self._num_packs + len(commit.rows)
        rows, ends = self._rows[before:end], self._trained_ends[before : end + 1]
        rows[:] = commit.rows
        rows["shard"] += first
        np.cumsum(commit.rows["num_trained"], dtype=np.int64, out=ends[1:])
        ends[1:] += ends[0]
        self._num_packs = end
        self.counters.append(commit.counters)


def step_sizes_of(rows: np.ndarray, dataset: str) -> NDArray[np.int64] | None:
    """`Manifest.step_sizes` of a row index. Raises ManifestError where steps are torn apart."""
    if len(rows) == 0 or rows["step"][0] < 0:
        return None
    try:
        return step_sizes(rows["step"])
    except ValueError as error:
        raise ManifestError(f"dataset {dataset}: {error}; {repair(dataset)}") from error


def remove_dataset(store: Store, dataset: str) -> None:
    """Remove a dataset's files. Whoever calls holds its lock.

    In this order, so that a removal that is killed half-way leaves a dataset without commits, never commits
    without shards, and that readers can tell it from damage.
    """
    for name in ("finished.json", "commits", "shards", "work", "spec.json", ""):
        store.delete(dataset_key(dataset, name))


def is_known(store: Store, dataset: str) -> bool:
    """Whether a store has a dataset: its spec is there, as it should be or not."""
    return _is_there(store, dataset_key(dataset, "spec.json"))


def list_datasets(store: Store) -> Sequence[str]:
    """Ids of the datasets in a store, sorted; those that are damaged, too."""
    return [name for name in store.list("datasets") if is_known(store, name)]
