"""The end of an epoch that is read in lanes and portions: every step comes once, and nothing is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fake_service import FakeService, Fault
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packs import commit_partition, finish_dataset, numbered_packs, start_dataset
from reading_ahead import tried_again_soon
from serving import running

from trainer_client import PackedStream
from trainer_client.course import Layout
from trainer_client.portion import Portion
from trainer_client.reader import Lane
from trainer_client.remote import HttpTransport

cases = {
    "num_steps": st.integers(1, 24),
    "count": st.integers(1, 6),
    "portion": st.integers(1, 8),
    "finishes": st.sampled_from(["before", "once asked for", "within"]),
}
whole_portions = {"num_steps": 12, "count": 4, "portion": 3}  # each lane ends with its first portion


def check_lanes(
    root: Path, url: str, *, num_steps: int, count: int, portion: int, finishes: str, hurt: Any = None
) -> None:
    """Read one epoch as `count` lanes do. finishes: when packing does, seen from each lane: before it is
    read, once the lane has asked for the size, or behind the lane's first batch. hurt: called before each."""
    packs = numbered_packs(num_steps)
    found: list[int] = []
    for index in range(count):
        dataset = start_dataset(root, identity=f"{finishes}-{index}")
        commit_partition(root, dataset, 0, packs, packs_per_shard=5)
        finish = once(lambda dataset=dataset: finish_dataset(root, dataset, 1, packs))
        if finishes == "before":
            finish()
        if hurt is not None:
            hurt()
        stream = PackedStream(url, dataset=dataset, timeout_s=20, report_s=None)
        stream._lane = Lane(index=index, count=count)
        stream._transport._portion = Portion(num_steps=portion)
        with asked(finish if finishes == "once asked for" else lambda: None):
            batches = iter(stream)
            for batch in batches if index < num_steps else ending(batches, finish):
                finish()
                found.append(batch.step)
    assert sorted(found) == list(range(num_steps))


def ending(batches: Iterator[Any], finish: Callable[[], None]) -> Iterator[Any]:
    """Of a lane without a step: it ends once packing does."""
    finish()
    return batches


def once(act: Callable[[], Any]) -> Callable[[], None]:
    left = [act]
    return lambda: left.pop()() if left else None


def asked(act: Callable[[], None]) -> Any:
    """Act as soon as the size of a dataset was asked for."""
    layout = HttpTransport.layout

    def then_act(transport: HttpTransport) -> Layout:
        found = layout(transport)
        act()
        return found

    return mock.patch.object(HttpTransport, "layout", then_act)


@settings(max_examples=15, deadline=None)
@given(faults=st.lists(st.sampled_from([Fault(status=503), Fault(cut_after=3000)]), max_size=1), **cases)
@example(faults=[], finishes="before", **whole_portions)
@example(faults=[], finishes="within", **whole_portions)
@example(faults=[], finishes="once asked for", num_steps=1, count=4, portion=1)
@example(faults=[Fault(status=503)], finishes="before", num_steps=6, count=2, portion=64)  # 1 and 2 steps
def test_lanes_end_with_the_epoch(faults: list[Fault], **case: Any) -> None:
    with tempfile.TemporaryDirectory() as root, FakeService(Path(root)) as service, tried_again_soon():
        check_lanes(Path(root), service.url, hurt=lambda: service.faults.extend(faults), **case)


@settings(max_examples=6, deadline=None)
@given(**cases)
@example(finishes="before", **whole_portions)
@example(finishes="within", **whole_portions)
@example(finishes="once asked for", num_steps=1, count=4, portion=1)
def test_lanes_end_with_the_epoch_of_the_service(**case: Any) -> None:
    with tempfile.TemporaryDirectory() as root, running(Path(root)) as server:
        check_lanes(Path(root), server.url, **case)


def test_a_finished_epoch_is_asked_for_no_further_than_it_goes(tmp_path: Path) -> None:
    packs = numbered_packs(10)
    dataset = start_dataset(tmp_path, identity="whole")
    commit_partition(tmp_path, dataset, 0, packs, packs_per_shard=5)
    finish_dataset(tmp_path, dataset, 1, packs)
    with FakeService(tmp_path) as service:
        for index in range(3):
            service.requests.clear()
            stream = PackedStream(service.url, dataset=dataset, report_s=None)
            stream._lane = Lane(index=index, count=3)
            stream._transport._portion = Portion(num_steps=2, growth=1)
            assert [batch.step for batch in stream] == list(range(index, 10, 3))
            expected = [str(start) for start in range(index, 10, 6)]
            assert [query["start"] for query in service.requests] == expected


@pytest.mark.parametrize(("start", "status"), [(4, 200), (9, 200), (11, 200), (12, 422), (13, 422)])
def test_a_stream_that_begins_less_than_a_stride_behind_the_end_is_empty(
    tmp_path: Path, start: int, status: int
) -> None:
    packs = numbered_packs(8)
    dataset = start_dataset(tmp_path, identity="whole")
    commit_partition(tmp_path, dataset, 0, packs, packs_per_shard=5)
    finish_dataset(tmp_path, dataset, 1, packs)
    with running(tmp_path) as server:
        answer = server.stream(dataset, start=start, stride=4)
    assert answer.status == status
