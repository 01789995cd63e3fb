"""Which bytes a stream has: the plan against a plain reading of the rules, step by step."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packs import build_dataset, random_packs
from serving import messages

from packer import order, shard
from packer.manifest import Manifest
from packer.store import LocalStore
from service import epochs
from service.buffers import Buffers
from service.epochs import BlockCache, EpochOrder
from service.feeds import Snapshot
from service.files import ShardFiles
from service.plan import ChunkReader, StreamRequest

PACKS = random_packs(37)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    dataset = build_dataset(root, PACKS, packs_per_shard=4)
    manifest = Manifest(LocalStore(root), dataset)
    manifest.refresh()
    snapshot = Snapshot(
        rows=manifest.rows,
        trained_ends=np.concatenate([[0], np.cumsum(manifest.rows["num_trained"])]),
        shards=manifest.shards,
        num_shards=len(manifest.shards),
        finished=True,
    )
    files = ShardFiles(LocalStore(root))
    yield dataset, snapshot, files
    files.close()


def total_steps(request: StreamRequest) -> int:
    return order.num_steps(
        len(PACKS), world_size=request.world_size, packs_per_step=request.packs_per_step,
        tail=request.tail, offset=request.offset,
    )  # fmt: skip


def expected(request: StreamRequest) -> list[tuple[int, int, list[int]]]:
    """(step, trained tokens of the step, packs with -1 for a filler), by the rules alone."""
    positions = np.arange(len(PACKS))
    at = order.pack_at(
        positions, num_packs=len(PACKS), epoch=request.epoch, shuffle_seed=request.shuffle_seed
    ).tolist()
    steps = []
    for step in range(request.start, total_steps(request), request.stride):
        first = request.offset + step * request.world_size * request.packs_per_step
        of_all = at[first : first + request.world_size * request.packs_per_step]
        mine = first + request.rank * request.packs_per_step
        own = [at[p] if p < len(at) else -1 for p in range(mine, mine + request.packs_per_step)]
        steps.append((step, sum(PACKS[i].num_trained for i in of_all), own))
    return steps


@st.composite
def requests(draw):
    world_size = draw(st.integers(1, 9))
    return StreamRequest(
        dataset="d",
        world_size=world_size,
        rank=draw(st.integers(0, world_size - 1)),
        packs_per_step=draw(st.integers(1, 9)),
        epoch=draw(st.integers(0, 3)),
        start=draw(st.integers(0, 6)),
        stride=draw(st.integers(1, 4)),
        shuffle_seed=draw(st.none() | st.integers(0, 5)),
        offset=draw(st.integers(0, len(PACKS))),
        tail=draw(st.sampled_from(["drop", "pad"])),
        batches=draw(st.sampled_from(["step", "pack"])),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(
    request=requests(), block=st.sampled_from([3, 8, 1 << 14]), max_bytes=st.sampled_from([1, 5000, 1 << 20])
)
def test_a_stream_holds_the_packs_of_the_rules(place, request, block, max_bytes):
    dataset, snapshot, files = place
    before, epochs.BLOCK = epochs.BLOCK, block
    try:
        epoch = EpochOrder(
            dataset=dataset,
            snapshot=snapshot,
            epoch=request.epoch,
            shuffle_seed=request.shuffle_seed,
            blocks=BlockCache(max_blocks=2),
        )
        stop = request.num_sent(total_steps(request))
        reader = ChunkReader(request, epoch, files, Buffers(1 << 20), first=0, stop=stop)
        chunks = []
        while (chunk := reader.read(max_bytes)) is not None:
            chunks.append(bytes(chunk))
    finally:
        epochs.BLOCK = before
    body = shard.schema_message(dataset) + b"".join(chunks) + shard.END_OF_STREAM
    found = messages(body)
    wanted = expected(request)
    size = request.packs_per_step if request.is_merged else 1
    assert len(found) == len(wanted) * request.packs_per_step // size
    flat = [(step, items, pack, i) for step, items, own in wanted for i, pack in enumerate(own)]
    for number, message in enumerate(found):
        part = flat[number * size : (number + 1) * size]
        assert message.stamp.epoch == request.epoch
        assert {(message.stamp.step, message.stamp.num_items)} == {
            (step, items) for step, items, _, _ in part
        }
        assert message.stamp.step_done == (part[-1][3] == request.packs_per_step - 1)
        assert message.stamp.padding == all(pack == -1 for _, _, pack, _ in part)
        assert message.packs == [PACKS[p] if p >= 0 else shard.padding_pack() for _, _, p, _ in part]


def test_steps_larger_than_the_planning_window(place, monkeypatch):
    dataset, snapshot, files = place
    monkeypatch.setattr("service.plan._FIRST_WINDOW", 4)
    request = StreamRequest(dataset=dataset, packs_per_step=9, batches="pack", tail="pad")
    epoch = EpochOrder(dataset=dataset, snapshot=snapshot, epoch=0, shuffle_seed=None, blocks=BlockCache())
    reader = ChunkReader(request, epoch, files, Buffers(1 << 20), first=0, stop=total_steps(request))
    body = b"".join(bytes(chunk) for chunk in iter(lambda: reader.read(1 << 20), None))
    found = messages(shard.schema_message(dataset) + body + shard.END_OF_STREAM)
    assert [pack for message in found for pack in message.packs] == PACKS + [shard.padding_pack()] * 8
    assert [message.stamp.step_done for message in found] == ([False] * 8 + [True]) * 5
