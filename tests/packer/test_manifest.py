"""The manifest: commits in order, read as they come, never half."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from packs import build_dataset, commit_partition, finish_dataset, numbered_packs, start_dataset

from packer.manifest import (
    ROWS,
    Commit,
    Manifest,
    ManifestError,
    commit_key,
    dataset_key,
    list_datasets,
    read_commit,
    write_commit,
)
from packer.shard import read_packs
from packer.store import LocalStore


def test_a_dataset_is_read_as_it_grows(tmp_path: Path) -> None:
    store, packs = LocalStore(tmp_path), numbered_packs(9)
    dataset = start_dataset(tmp_path, identity="grows")
    manifest = Manifest(store, dataset)
    assert not manifest.refresh()
    commit_partition(tmp_path, dataset, 0, packs[:5], packs_per_shard=2)
    assert manifest.refresh()
    assert (manifest.num_packs, len(manifest.shards), manifest.finished) == (5, 3, None)
    first_rows = manifest.rows.copy()
    commit_partition(tmp_path, dataset, 1, packs[5:], packs_per_shard=3)
    finish_dataset(tmp_path, dataset, 2, packs)
    assert manifest.refresh()
    assert not manifest.refresh()
    assert np.array_equal(manifest.rows[:5], first_rows)
    assert [shard.index for shard in manifest.shards] == [0, 1, 2, 3, 4]
    assert manifest.rows["shard"].tolist() == [0, 0, 1, 1, 2, 3, 3, 3, 4]
    assert manifest.finished is not None


def test_rows_point_at_their_packs(tmp_path: Path) -> None:
    packs = numbered_packs(7)
    dataset = build_dataset(tmp_path, packs, packs_per_shard=2)
    manifest = Manifest(LocalStore(tmp_path), dataset)
    manifest.refresh()
    found = [pack for shard in manifest.shards for pack in read_packs(manifest.store.get(shard.key))]
    assert found == packs
    assert manifest.rows["num_trained"].tolist() == [pack.num_trained for pack in packs]


def test_a_later_commit_is_not_seen_before_its_turn(tmp_path: Path) -> None:
    dataset = start_dataset(tmp_path, identity="gap")
    commit_partition(tmp_path, dataset, 1, numbered_packs(2), packs_per_shard=2)
    manifest = Manifest(LocalStore(tmp_path), dataset)
    manifest.refresh()
    assert manifest.num_packs == 0


def test_a_damaged_commit_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=2)
    key = commit_key(dataset, 0)
    store.put(key, store.get(key)[:200])
    with pytest.raises(ManifestError, match=r"000000\.arrow of dataset \w+ is damaged"):
        read_commit(store, dataset, 0)


def test_a_missing_commit_of_a_finished_dataset_is_told(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    dataset = build_dataset(tmp_path, numbered_packs(8), packs_per_shard=2)
    store.delete(commit_key(dataset, 1))
    with pytest.raises(ManifestError, match="1 of 2 commits"):
        Manifest(store, dataset).refresh()


def test_datasets_are_listed_once_they_have_a_spec(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert list_datasets(store) == []
    dataset = build_dataset(tmp_path, numbered_packs(1), packs_per_shard=1)
    store.put(dataset_key("f" * 32, "commits/000000.arrow"), b"")
    assert list_datasets(store) == [dataset]


def test_a_partition_without_packs(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    empty = Commit(partition=0, shards=(), rows=np.empty(0, ROWS), counters={"rows_in": 3})
    write_commit(store, "d" * 32, empty)
    found = read_commit(store, "d" * 32, 0)
    assert found is not None
    assert (len(found.rows), found.counters) == (0, {"rows_in": 3})
