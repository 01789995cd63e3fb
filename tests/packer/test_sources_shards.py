"""Shards of a packed dataset are no source: each pack would be taken for one example."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packing_job import spec_of, write_rows
from packs import build_dataset, numbered_packs
from reading import read_source

from packer.manifest import Manifest
from packer.resolve import resolve
from packer.sources import SourceError
from packer.spec import parse_spec
from packer.store import LocalStore

ROWS = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]


def a_shard(tmp_path: Path) -> tuple[Path, str]:
    """The first shard of a dataset, and the dataset's id."""
    dataset = build_dataset(tmp_path / "store", numbered_packs(6), packs_per_shard=3)
    manifest = Manifest(LocalStore(tmp_path / "store"), dataset)
    manifest.refresh()
    return tmp_path / "store" / manifest.shards[0].key, dataset


def as_it_lies(shard: Path, place: Path) -> Path:
    return shard


def copied(shard: Path, place: Path) -> Path:
    return Path(shutil.copy(shard, place / "mine.arrow"))


def in_a_folder(shard: Path, place: Path) -> Path:
    write_rows(place / "a.jsonl", ROWS)
    shutil.copy(shard, place / "b.arrow")
    return place


def by_a_pattern(shard: Path, place: Path) -> Path:
    return in_a_folder(shard, place) / "*"


def the_datasets_folder(shard: Path, place: Path) -> Path:
    return shard.parent.parent


def compressed(shard: Path, place: Path) -> Path:
    (place / "mine.arrow.gz").write_bytes(gzip.compress(shard.read_bytes()))
    return place


def as_a_stream(shard: Path, place: Path) -> Path:
    table = pa.ipc.open_file(str(shard)).read_all()
    with pa.ipc.new_stream(str(place / "mine.arrow"), table.schema) as out:
        out.write_table(table)
    return place


def as_parquet(shard: Path, place: Path) -> Path:
    pq.write_table(pa.ipc.open_file(str(shard)).read_all(), place / "mine.parquet")
    return place


@pytest.mark.parametrize(
    "given",
    [as_it_lies, copied, in_a_folder, by_a_pattern, the_datasets_folder, compressed, as_a_stream, as_parquet],
)
def test_a_shard_is_refused(tmp_path: Path, given: Callable[[Path, Path], Path]) -> None:
    shard, dataset = a_shard(tmp_path)
    (tmp_path / "files").mkdir()
    source = given(shard, tmp_path / "files")
    with pytest.raises(SourceError) as raised:
        resolve(
            parse_spec(spec_of(source, None, source={"on_bad_row": "skip"})),
            store=LocalStore(tmp_path / "other"),
        )
    told = str(raised.value)
    assert f"found a shard of the packed dataset {dataset}" in told
    assert f"dataset://{dataset}" in told
    assert "/files/" in told or "/shards/" in told


def test_a_shard_that_was_not_looked_at_before_is_refused_when_it_is_read(tmp_path: Path) -> None:
    """Compressed files behind the first are not opened before the work."""
    shard, dataset = a_shard(tmp_path)
    write_rows(tmp_path / "files" / "a.jsonl", ROWS)
    compressed(shard, tmp_path / "files")
    with pytest.raises(SourceError, match=f"packed dataset {dataset}"):
        read_source(tmp_path / "files", tmp_path / "work")


def test_other_arrow_files_are_read(tmp_path: Path) -> None:
    """Also one whose rows were made of a shard's segments, and kept its metadata."""
    shard, _ = a_shard(tmp_path)
    metadata = pa.ipc.open_file(str(shard)).schema.metadata
    table = pa.table({"input_ids": [[1, 2, 3], [4, 5]], "note": ["padfree.dataset", None]})
    for number, one in enumerate((table, table.replace_schema_metadata(metadata))):
        with pa.ipc.new_file(str(tmp_path / f"{number}.arrow"), one.schema) as out:
            out.write_table(one)
        found = read_source(tmp_path / f"{number}.arrow", tmp_path / "work")
        assert [row["input_ids"] for row in found.rows] == [[1, 2, 3], [4, 5]]
