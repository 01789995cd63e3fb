"""Packing ends, well or with a clear failure: what can never be done is not waited for."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packing_job import spec_of, write_rows

from packer.coordinator import Cancelled, PackingFailed, pack
from packer.manifest import Manifest, dataset_key, read_commit, write_commit
from packer.resolve import resolve
from packer.runners import Done, InlineRunner
from packer.sources import partitions
from packer.spec import Job, parse_spec
from packer.store import LocalStore
from packer.verify import verify_store
from packer.view import dataset_view
from packer.window import Window


class Impatient(InlineRunner):
    """Fails where somebody waits again and again."""

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:  # type: ignore[override]
        with super().open() as tasks:
            wait, left = tasks.wait, [50]

            def counted(timeout_s: float) -> list[Done]:
                left[0] -= 1
                assert left[0], "it waits without end"
                return wait(0)

            tasks.wait = counted  # type: ignore[method-assign]
            yield tasks


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LocalStore, Job, int]:
    """A dataset of which the first partition is committed; how many it has."""
    for name in ("first_bytes", "max_bytes"):
        monkeypatch.setitem(partitions.cut.__kwdefaults__, name, 1000)
    rows = [{"input_ids": [n, *range(2, 60)]} for n in range(100)]
    document = spec_of(write_rows(tmp_path / "rows.jsonl", rows), None, packing={"max_tokens": 64})
    store = LocalStore(tmp_path / "store")
    job = resolve(parse_spec(document), store=store)
    cancel = threading.Event()
    with pytest.raises(Cancelled):
        pack(job, store, InlineRunner(), cancel=cancel, on_progress=lambda *_: cancel.set())
    num_partitions = (Manifest(store, job.dataset).read_json("plan.json") or {})["num_partitions"]
    assert num_partitions > 2
    return store, job, num_partitions


def commit_again(store: LocalStore, dataset: str, number: int) -> None:
    """Commit 0 once more, as number `number`."""
    first = read_commit(store, dataset, 0)
    assert first is not None
    write_commit(store, dataset, dataclasses.replace(first, partition=number))


def require_failed(store: LocalStore, dataset: str, text: str) -> None:
    view = dataset_view(store, dataset)
    assert view is not None
    assert view["state"] == "failed"
    assert text in view["error"]["detail"]
    assert not store.exists(dataset_key(dataset, "finished.json"))


@pytest.mark.parametrize("is_known_from_the_start", [True, False])
def test_more_commits_than_the_source_has_partitions_are_a_failure(
    begun: tuple[LocalStore, Job, int], is_known_from_the_start: bool
) -> None:
    store, job, num_partitions = begun
    first = 1 if is_known_from_the_start else num_partitions  # what lies behind a gap shows up late
    for number in range(first, num_partitions + 2):
        commit_again(store, job.dataset, number)
    wanted = rf"{num_partitions + 2} committed partitions.* cut into {num_partitions}, .*post its spec again"
    with pytest.raises(PackingFailed, match=wanted):
        pack(job, store, Impatient())
    require_failed(store, job.dataset, "written by something else")


def test_commits_of_a_job_without_inputs_are_a_failure(begun: tuple[LocalStore, Job, int]) -> None:
    store, job, num_partitions = begun
    with pytest.raises(PackingFailed, match=rf"source into {num_partitions} partitions, this one into 0"):
        pack(dataclasses.replace(job, inputs=()), store, Impatient())
    store.delete(dataset_key(job.dataset, "plan.json"))
    with pytest.raises(PackingFailed, match=r"1 committed partitions, but no plan\.json"):
        pack(dataclasses.replace(job, inputs=()), store, Impatient())


def test_commits_without_a_plan_are_a_failure(begun: tuple[LocalStore, Job, int]) -> None:
    store, job, _ = begun
    store.delete(dataset_key(job.dataset, "plan.json"))
    with pytest.raises(PackingFailed, match=r"1 committed .*no plan\.json.*post its spec again"):
        pack(job, store, Impatient())
    require_failed(store, job.dataset, "no plan.json")
    store.delete(dataset_key(job.dataset))  # as it says
    pack(job, store, Impatient())
    assert verify_store(store).faults == []


def test_work_that_is_never_handed_out_is_a_failure(
    begun: tuple[LocalStore, Job, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, job, num_partitions = begun
    monkeypatch.setattr(Window, "to_start", lambda self: [] if self.committed else [0])
    with pytest.raises(PackingFailed, match=f"nothing runs, and 1 of {num_partitions} are done"):
        pack(job, store, Impatient())
