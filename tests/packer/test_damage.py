"""Files of a dataset that are not as they were written: found, named, and the way out told."""

from __future__ import annotations

from pathlib import Path

import pytest
from packing_job import pack_document, spec_of, write_rows
from packs import build_dataset, numbered_packs, random_packs

from packer.coordinator import PackingFailed, pack
from packer.manifest import Manifest, ManifestError, commit_key, dataset_key
from packer.resolve import resolve
from packer.runners import InlineRunner
from packer.spec import parse_spec
from packer.store import LocalStore
from packer.verify import verify_store
from padfree.cli import main


def test_every_flipped_bit_of_a_commit_is_found(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    dataset = build_dataset(tmp_path, random_packs(6), packs_per_shard=3)
    key = commit_key(dataset, 0)
    clean = store.get(key)
    whole = Manifest(store, dataset)
    whole.refresh()
    unseen = 0
    for at in range(0, len(clean), 5):
        damaged = bytearray(clean)
        damaged[at] ^= 4
        store.put(key, bytes(damaged))
        manifest = Manifest(store, dataset)
        try:
            manifest.refresh()
        except ManifestError:
            continue
        # What was not found may lie in padding between Arrow's buffers, but changes nothing.
        unseen += 1
        assert manifest.rows.tolist() == whole.rows.tolist()
        assert manifest.shards == whole.shards
        assert manifest.counters == whole.counters
    assert unseen < len(clean) // 5


@pytest.mark.parametrize("name", ["spec.json", "plan.json", "finished.json", "commits/000000.arrow"])
def test_a_cut_off_file_is_a_finding_not_a_crash(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}] * 4)
    packed = pack_document(tmp_path / "store", spec_of(source, None, packing={"max_tokens": 8}))
    store = LocalStore(tmp_path / "store")
    key = dataset_key(packed.job.dataset, name)
    store.put(key, store.get(key)[:-40])
    (fault,) = verify_store(store).faults
    assert Path(name).name in fault
    assert "and pack it again: the same spec gives the same packs" in fault
    for verb in (["verify", str(store.root)], ["inspect", packed.job.dataset, "--store", str(store.root)]):
        assert main(verb) == 1
    assert "Traceback" not in capsys.readouterr().err
    store.delete(dataset_key(packed.job.dataset))
    again = pack_document(tmp_path / "store", spec_of(source, None, packing={"max_tokens": 8}))
    assert again.digests == packed.digests


@pytest.mark.parametrize("how", ["copied", "swapped", "of another dataset"])
def test_a_commit_in_the_place_of_another_is_found(tmp_path: Path, how: str) -> None:
    """Its checksums hold all the same: without a look at whose it is, packs would be lost and doubled."""
    store = LocalStore(tmp_path)
    dataset = build_dataset(tmp_path, numbered_packs(12), packs_per_shard=2)
    other = build_dataset(tmp_path, random_packs(12), packs_per_shard=2)
    first, second = (store.get(commit_key(dataset, number)) for number in (0, 1))
    foreign = store.get(commit_key(other, 1))
    store.put(commit_key(dataset, 1), foreign if how == "of another dataset" else first)
    if how == "swapped":
        store.put(commit_key(dataset, 0), second)
    here, there = (f"datasets/{one}/shards/" for one in (dataset, other))
    found = f"shards of {here} are required, found {there}000001-000.arrow"
    if how != "of another dataset":
        number = 1 if how == "copied" else 0
        found = f"the commit of partition {number} is required, found that of {1 - number}"
    with pytest.raises(ManifestError, match=rf"{found}.*; remove it .* and pack it again"):
        Manifest(store, dataset).refresh()
    faults = verify_store(store, dataset=dataset).faults
    assert len(faults) == 1
    assert found in faults[0]
    assert verify_store(store, dataset=other).faults == []


def test_an_empty_shard_is_a_finding(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    dataset = build_dataset(tmp_path, numbered_packs(2), packs_per_shard=2)
    manifest = Manifest(store, dataset)
    manifest.refresh()
    store.put(manifest.shards[0].key, b"")
    (fault,) = verify_store(store).faults
    assert "0 bytes" in fault


def test_a_damaged_commit_of_an_unfinished_dataset_fails_it(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}] * 4)
    store = LocalStore(tmp_path / "store")
    job = resolve(parse_spec(spec_of(source, None, packing={"max_tokens": 8})), store=store)
    pack(job, store, InlineRunner())
    store.delete(dataset_key(job.dataset, "finished.json"))
    key = commit_key(job.dataset, 0)
    store.put(key, store.get(key)[:-40])
    with pytest.raises(PackingFailed, match="is damaged"):
        pack(job, store, InlineRunner())
    failed = Manifest(store, job.dataset).failed()
    assert failed is not None
    assert "is damaged" in failed["detail"]
