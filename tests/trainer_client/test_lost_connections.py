"""Every way a connection can fail: no step lost, none twice, no wrong byte in a batch."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_service import FakeService, Fault
from packs import (
    build_dataset,
    commit_partition,
    finish_dataset,
    numbered_packs,
    pack_of,
    start_dataset,
    taken,
)
from reading_ahead import readers, until

from packer.manifest import Manifest, remove_dataset
from packer.shard import schema_message
from packer.store import LocalStore
from trainer_client import DataDamaged, PackedStream, StreamRefused, StreamTimeout, UnknownDataset
from trainer_client.portion import Portion

pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    return build_dataset(tmp_path, numbered_packs(20, length=50), packs_per_shard=6)


FAULTS = {
    "f39-cut-in-a-message": Fault(cut_after=3000),
    "cut-in-the-schema": Fault(cut_after=100),
    "cut-before-the-first-byte": Fault(cut_after=0),
    "cut-in-a-prefix": Fault(cut_after=1004),
    "reset": Fault(cut_after=5000, reset=True),
    "503": Fault(status=503),
    "503-with-retry-after": Fault(status=503, retry_after="0"),
    "500": Fault(status=500),
    "429": Fault(status=429),
    "silent": Fault(stall_after=4000, stall_s=30),
    "silent-at-once": Fault(stall_after=0, stall_s=30),
    "slow": Fault(stall_after=4000, stall_s=0.1),
    "flipped-in-a-body": Fault(flip_byte=2500),
    "flipped-in-the-schema": Fault(flip_byte=30),
    "ended-too-early": Fault(end_after_steps=3),
}


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_loses_and_doubles_nothing(tmp_path: Path, dataset: str, fault: str, chunked: bool) -> None:
    with FakeService(tmp_path, chunked=chunked) as service:
        # Twice in a row, and once in the second epoch.
        service.faults = [FAULTS[fault], FAULTS[fault], replace(FAULTS[fault], epoch=1)]
        undisturbed = PackedStream(tmp_path, dataset=dataset, epochs=2, packs_per_step=2)
        timeout_s = 3 if "silent" in fault else 60  # a tenth of it is how long a silence is borne
        stream = PackedStream(service.url, dataset=dataset, epochs=2, packs_per_step=2, timeout_s=timeout_s)
        batches = list(stream)
        assert [b.example_ids.tolist() for b in batches] == [b.example_ids.tolist() for b in undisturbed]
        assert [b.step for b in batches] == 2 * list(range(10))
        # No request asks for a step that is there already.
        starts = [(int(q["epoch"]), int(q["start"])) for q in service.requests]
        assert starts == sorted(starts)
        num_retries = stream.stats().num_retries
        if "silent" in fault:
            # After a silence the next answer is of one step, which ends before the second fault. More are
            # silent on a machine that stands still for so long.
            assert num_retries >= (2 if fault == "silent" else 3)
        else:
            assert num_retries == (0 if fault == "slow" else 3)


def within_the_second_pack(root: Path, dataset: str) -> int:
    """A byte of the stream's body."""
    manifest = Manifest(LocalStore(root), dataset)
    manifest.refresh()
    sizes = manifest.rows["header_bytes"] + manifest.rows["body_bytes"]
    return len(schema_message(dataset)) + int(sizes[0] + sizes[1] // 2)


def collect(stream: PackedStream, into: list[int]) -> None:
    for batch in stream:
        assert batch.input_ids[0] == batch.example_ids[0]
        into += batch.example_ids.tolist()


def test_f39_cut_off_for_ever_ends_with_what_was_tried(tmp_path: Path, dataset: str) -> None:
    at = within_the_second_pack(tmp_path, dataset)
    seen: list[int] = []
    with FakeService(tmp_path) as service:
        # The first try gives pack 0 and cuts pack 1; the next ones come no further than that.
        service.faults = [Fault(cut_after=at)]
        service.always = Fault(cut_after=at // 2)
        stream = PackedStream(service.url, dataset=dataset, timeout_s=0.5)
        stream._transport._portion = Portion()  # no silence on a slow machine is taken for a fault
        with pytest.raises(StreamTimeout) as caught:
            collect(stream, seen)
    assert seen == [0]
    text = str(caught.value)
    for part in (
        dataset,
        service.url,
        "epoch 0, step 1",
        "0.5 s (timeout_s)",
        "tried",
        "closed the stream after",
    ):
        assert part in text
    assert re.search(r"after \d+ of \d+ bytes of a pack", text)


def test_bytes_that_stay_wrong_are_an_error(tmp_path: Path, dataset: str) -> None:
    seen: list[int] = []
    with FakeService(tmp_path) as service:
        service.faults = [Fault(flip_byte=within_the_second_pack(tmp_path, dataset))]
        service.always = Fault(flip_byte=within_the_second_pack(tmp_path, dataset) // 2)
        with pytest.raises(DataDamaged, match="5 times in a row"):
            collect(PackedStream(service.url, dataset=dataset), seen)
        assert len(service.requests) == 5
    assert seen == [0]


def test_a_damaged_shard_in_a_folder_is_named(tmp_path: Path, dataset: str) -> None:
    shard = sorted((tmp_path / "datasets" / dataset / "shards").iterdir())[1]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(data)
    seen: list[int] = []
    with pytest.raises(DataDamaged, match=rf"{shard.name}.*--remove {dataset}.*pack it again"):
        collect(PackedStream(tmp_path, dataset=dataset), seen)
    assert seen == list(range(len(seen)))
    assert 6 <= len(seen) < 12


def test_shards_in_each_others_place_are_damage(tmp_path: Path) -> None:
    """Each is whole, and no checksum of a pack says where it belongs. But tokens of other texts compress to
    other lengths, so that other packs do not lie where the row index says."""
    rng = np.random.default_rng(0)
    packs = [pack_of([[i, *np.minimum(rng.zipf(1.2, 512), 30_000)]], [i]) for i in range(32)]
    dataset = build_dataset(tmp_path, packs, packs_per_shard=8)
    one, two = sorted((tmp_path / "datasets" / dataset / "shards").iterdir())[1:3]
    one.rename(kept := tmp_path / "kept")
    two.rename(one)
    kept.rename(two)
    seen: list[int] = []
    with pytest.raises(DataDamaged, match=rf"{one.name}.*pack it again"):
        collect(PackedStream(tmp_path, dataset=dataset), seen)
    assert seen == list(range(8))


def test_a_folder_in_the_place_of_a_file_is_damage(tmp_path: Path, dataset: str) -> None:
    """Not a store that stumbles, which would be asked until the timeout."""
    shard = sorted((tmp_path / "datasets" / dataset / "shards").iterdir())[1]
    shard.unlink()
    shard.mkdir()
    seen: list[int] = []
    with pytest.raises(DataDamaged, match=rf"{shard.name}.*pack it again"):
        collect(PackedStream(tmp_path, dataset=dataset, timeout_s=5), seen)
    assert seen == list(range(6))
    spec = tmp_path / "datasets" / dataset / "spec.json"
    spec.unlink()
    spec.mkdir()
    with pytest.raises(DataDamaged, match=r"spec\.json"):
        collect(PackedStream(tmp_path, dataset=dataset, timeout_s=5), seen)


@pytest.mark.parametrize("num_gone", [1, 2, 3, 4])
def test_a_folder_stream_that_meets_a_removal_is_told_so(
    tmp_path: Path, dataset: str, num_gone: int, monkeypatch: Any
) -> None:
    """However far the removal has come."""
    batches = iter(PackedStream(tmp_path, dataset=dataset, prefetch_steps=1))
    assert next(batches).example_ids[0] == 0
    removed: list[str] = []
    delete = LocalStore.delete

    def some(store: LocalStore, key: str) -> None:
        if len(removed) < num_gone:
            removed.append(key)
            delete(store, key)

    monkeypatch.setattr(LocalStore, "delete", some)
    remove_dataset(LocalStore(tmp_path), dataset)
    if num_gone < 3:  # the shards are there still
        assert len(list(batches)) == 19
    else:
        with pytest.raises(UnknownDataset, match=rf"{dataset} was removed from the store {tmp_path}"):
            list(batches)


def test_f43_restarts_of_the_server_change_nothing(tmp_path: Path) -> None:
    """Twenty restarts in an epoch of 100 packs."""
    dataset = build_dataset(tmp_path, numbered_packs(100, length=300), packs_per_shard=30)
    with FakeService(tmp_path) as service:
        stream = PackedStream(service.url, dataset=dataset, prefetch_steps=1, timeout_s=30)
        seen: list[int] = []
        for batch in stream:
            seen += batch.example_ids.tolist()
            if len(seen) % 5 == 2:
                service.stop()
                service.start()
        assert seen == list(range(100))
        assert stream.state_dict()["epoch"] == 1


def test_a_service_that_starts_late_is_waited_for(tmp_path: Path, dataset: str, caplog: Any) -> None:
    service = FakeService(tmp_path).start()
    service.stop()
    timer = threading.Timer(0.4, service.start)
    timer.start()
    try:
        with caplog.at_level(logging.WARNING, logger="trainer_client"):
            assert taken(PackedStream(service.url, dataset=dataset)) == list(range(20))
        told = [record.message for record in caplog.records]
        assert len(told) <= 2  # once when it is lost, once when it is found: not with every try
        assert "trying again for up to 600 s" in told[0]
    finally:
        timer.join()
        service.stop()


def test_an_unreachable_service_is_an_error_in_the_end(tmp_path: Path) -> None:
    service = FakeService(tmp_path).start()
    service.stop()
    with pytest.raises(StreamTimeout, match=rf"{service.url}.*refused"):
        next(iter(PackedStream(service.url, dataset="x", timeout_s=0.4)))


def test_a_name_that_cannot_be_looked_up_is_told_at_once(tmp_path: Path, caplog: Any) -> None:
    service = FakeService(tmp_path).start()
    service.stop()
    with (
        caplog.at_level(logging.WARNING, logger="trainer_client"),
        pytest.raises(StreamTimeout, match="refused"),
    ):
        PackedStream(service.url, dataset="caps", timeout_s=0.5)
    told = [record.message for record in caplog.records]
    assert len(told) == 1  # once, not with every try
    assert re.search(r"'caps'.*refused; trying again for up to 0\.5 s", told[0])


@pytest.mark.parametrize("dataset", ["caps", "0" * 32])
def test_a_url_without_its_scheme_is_no_folder(dataset: str) -> None:
    with pytest.raises(ValueError, match="http://localhost:8000, or a store's folder"):
        PackedStream("localhost:8000", dataset=dataset)


def test_silence_while_packing_is_no_fault(tmp_path: Path) -> None:
    """Longer than the silence after which a connection is given up, and than timeout_s."""
    packs = numbered_packs(4)
    dataset = start_dataset(tmp_path, identity="slow")
    commit_partition(tmp_path, dataset, 0, packs[:2], packs_per_shard=3)
    with FakeService(tmp_path) as service:
        stream = PackedStream(service.url, dataset=dataset, timeout_s=1)

        def finish() -> None:
            until(lambda: len(service.requests) > 5)  # each after a silence of a quarter of a second
            commit_partition(tmp_path, dataset, 1, packs[2:], packs_per_shard=3)
            finish_dataset(tmp_path, dataset, 2, packs)

        packing = threading.Thread(target=finish)
        packing.start()
        assert taken(stream) == [0, 1, 2, 3]
        packing.join()


def test_what_will_not_get_better_is_not_tried_again(tmp_path: Path, dataset: str) -> None:
    with FakeService(tmp_path) as service:
        problem = {"type": "urn:padfree:problem:bad-parameter", "detail": "no such thing", "field": "tail"}
        service.problem = (422, problem)
        with pytest.raises(StreamRefused, match=r"422 \(tail\): no such thing"):
            next(iter(PackedStream(service.url, dataset=dataset)))
        assert len(service.requests) == 1
        with pytest.raises(StreamRefused, match="is this the url of a padfree service"):
            next(iter(PackedStream(f"{service.url}/elsewhere", dataset=dataset)))


def test_a_stream_of_another_dataset_is_refused(tmp_path: Path, dataset: str) -> None:
    with FakeService(tmp_path) as service:
        service.names = "another"
        with pytest.raises(DataDamaged, match=rf"another schema than that of dataset {dataset}.*one release"):
            next(iter(PackedStream(service.url, dataset=dataset)))
        assert len(service.requests) == 5


def test_any_damage_to_the_schema_is_tried_again(tmp_path: Path, dataset: str) -> None:
    seen = []
    with FakeService(tmp_path) as service:
        for place in range(0, len(schema_message(dataset)), 3):
            service.faults = [Fault(flip_byte=place)]
            stream = PackedStream(service.url, dataset=dataset, timeout_s=3)
            seen.append(next(iter(stream)).example_ids.tolist())
            stream.close()
    assert seen == [[0]] * len(seen)


# ------------------------------------------------------------------ the end of a process


def program(source: str, dataset: str, body: str) -> list[str]:
    text = (
        "import sys, threading\n"
        "from trainer_client import PackedStream\n"
        "stream = PackedStream(sys.argv[1], dataset=sys.argv[2], epochs=None, prefetch_steps=2)\n"
        f"{body}\n"
    )
    return [sys.executable, "-c", text, source, dataset]


ENDINGS = {
    "break": ("for batch in stream: break\n", 0),
    "kept-iterator": ("iterator = iter(stream); next(iterator)\n", 0),
    "exit": ("for batch in stream: sys.exit(3)\n", 3),
    "error": ("for batch in stream: raise ValueError('in the loop')\n", 1),
    "never-asked": ("iterator = iter(stream)\n", 0),
    "closed": ("with stream:\n    next(iter(stream))\nassert threading.active_count() == 1\n", 0),
    "threads-end": (
        "for i, batch in enumerate(stream):\n    if i == 3: break\n"
        "del batch\nassert threading.active_count() == 1, threading.enumerate()\n",
        0,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_however_its_loop_ends(source: str, tmp_path: Path, dataset: str, ending: str) -> None:
    body, status = ENDINGS[ending]
    done = subprocess.run(
        program(source, dataset, body), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == status, done.stderr
    wanted = "in the loop" if ending == "error" else ""
    assert wanted in done.stderr
    assert "Fatal" not in done.stderr


def test_a_reader_that_waits_for_a_silent_server_is_woken(tmp_path: Path, dataset: str) -> None:
    others = readers()
    with FakeService(tmp_path) as service:
        service.always = Fault(stall_after=3000, stall_s=120)
        stream = PackedStream(service.url, dataset=dataset)
        next(iter(stream))
        stream.close()
        assert readers() <= others  # it would have waited for the silence of 60 s


def test_f37_killed_clients_leave_nothing_that_stops_the_next(
    source: str, tmp_path: Path, dataset: str
) -> None:
    body = (
        "for i, batch in enumerate(stream):\n"
        "    print(i, flush=True)\n"
        "    if i == 2: threading.Event().wait()\n"
    )
    for _ in range(2):
        clients = [
            subprocess.Popen(program(source, dataset, body), stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        for client in clients:
            assert client.stdout is not None
            assert [client.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
            # Nothing of it lies in memory that outlives it.
            assert "/dev/shm/" not in Path(f"/proc/{client.pid}/maps").read_text()
        for client in clients:
            os.kill(client.pid, signal.SIGKILL)
            client.wait()
            client.stdout.close()
    assert taken(PackedStream(source, dataset=dataset)) == list(range(20))


def test_a_killed_client_goes_on_from_its_last_saved_state(source: str, tmp_path: Path, dataset: str) -> None:
    """The sequence that is trained on is that of an undisturbed run."""
    whole = taken(PackedStream(tmp_path, dataset=dataset, epochs=3))
    body = (
        "import json, pathlib\n"
        "place = pathlib.Path(sys.argv[3])\n"
        "if place.exists(): stream.load_state_dict(json.loads(place.read_text()))\n"
        "for i, batch in enumerate(stream):\n"
        "    if i == 7: print('waiting', flush=True); threading.Event().wait()\n"
        "    with open(sys.argv[4], 'a') as log: log.write(f'{batch.example_ids[0]}\\n')\n"
        "    fresh = place.with_suffix('.new'); fresh.write_text(json.dumps(stream.state_dict()))\n"
        "    fresh.rename(place)\n"
    )
    log = tmp_path / "log"
    for _ in range(6):
        command = [*program(source, dataset, body), str(tmp_path / "state"), str(log)]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        assert client.stdout.readline() == "waiting\n"
        os.kill(client.pid, signal.SIGKILL)
        client.wait()
        client.stdout.close()
    assert [int(line) for line in log.read_text().split()] == whole[:42]
    assert json.loads((tmp_path / "state").read_text())["epoch"] == 2
