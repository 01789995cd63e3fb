"""s3:// inputs, read from a server of the S3 protocol that the test starts."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from reading import lines, parquet, read_source
from s3 import Objects, s3_server, use

from packer.sources import SourceError, cut, index_input, read_partition, resolve_inputs
from packer.store import LocalStore


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """What the server holds; tests may change it."""
    objects: Objects = {
        "data/in/a.jsonl": lines("a", "b"),
        "data/in/sub dir/b.jsonl.gz": gzip.compress(lines("c")),
        "data/in/sub dir/c.parquet": parquet("d", "e"),
        "data/in/README.md": b"read me",
        "data/in/.hidden.jsonl": lines("h"),
        "data/other/d.txt": b"f",
        "data/other/e.json": b'[{"text": "g"}]',
        "data/other/f.csv": b"text\nh\n",
    }
    with s3_server(objects) as url, use(url, monkeypatch):
        yield objects


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(
    ("paths", "texts"),
    [
        (["s3://data/in/a.jsonl"], ["a", "b"]),
        (["s3://data/in"], ["a", "b", "c", "d", "e"]),
        (["s3://data/in/"], ["a", "b", "c", "d", "e"]),
        (["s3://data/*/*.jsonl", "s3://data/other"], ["a", "b", "f", "g", "h"]),
        (["s3://data/**/*.parquet", "s3://data/in/sub dir/b.jsonl.gz"], ["d", "e", "c"]),
    ],
)
def test_objects_folders_and_patterns(
    tmp_path: Path, objects: Objects, paths: list[str], texts: list[str], seed: int | None
) -> None:
    out = read_source(paths, tmp_path / "store", seed=seed, roots=[tmp_path])
    assert [out.texts[out.ids.index(i)] for i in range(len(texts))] == texts
    assert out.errors == []


def test_what_is_ignored_is_listed_and_rows_are_named_by_url(tmp_path: Path, objects: Objects) -> None:
    objects["data/in/a.jsonl"] = b'{"text": "a"}\nbad\n'
    out = read_source("s3://data/in", tmp_path / "store")
    assert out.ignored == ("s3://data/in/.hidden.jsonl", "s3://data/in/README.md")
    assert [error.location for error in out.errors] == ["s3://data/in/a.jsonl, line 2"]


def test_an_object_is_identified_by_its_etag(objects: Objects) -> None:
    (first,), _ = resolve_inputs(["s3://data/in/a.jsonl"], roots=None)
    assert first.digest.startswith("etag:")
    assert (first.num_bytes, first.reader) == (len(objects["data/in/a.jsonl"]), "jsonl")
    objects["data/in/a.jsonl"] = lines("a", "B")
    (second,), _ = resolve_inputs(["s3://data/in/a.jsonl"], roots=None)
    assert first.num_bytes == second.num_bytes
    assert first.digest != second.digest


def test_an_object_that_changes_is_an_error_until_it_is_spooled(tmp_path: Path, objects: Objects) -> None:
    (one,), _ = resolve_inputs(["s3://data/in/a.jsonl"], roots=None)
    store, fields = LocalStore(tmp_path), {"text": "text"}
    index = index_input(one, store=store, work_key="w", random_access=False, fields=fields)
    objects["data/in/a.jsonl"] = lines("a", "B")
    with pytest.raises(SourceError, match=r"s3://data/in/a\.jsonl: the file changed"):
        index_input(one, store=store, work_key="w", random_access=False, fields=fields)
    # Workers read the copy that was indexed.
    (partition,) = cut([index], shuffle_seed=None)
    (records,) = read_partition(partition, store=store, fields=fields)
    assert [row["text"] for row in records.rows] == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://data/in/gone.jsonl", r"s3://data/in/gone\.jsonl: there is no such object"),
        ("s3://nowhere/a.jsonl", r"s3://nowhere/a\.jsonl: "),
        ("s3://data/in/*.csv", "no input file"),
        ("s3://data/in/README.md", "suffix"),
        ("s3://data/bad.parquet", "its name says Parquet"),
        ("s3:///in/a.jsonl", "no bucket"),
        ("s3://da ta/in/a.jsonl?endpoint_override=x", "no bucket"),
    ],
)
def test_what_is_not_there_is_refused_by_its_url(objects: Objects, path: str, message: str) -> None:
    objects["data/bad.parquet"] = b"no parquet at all"
    with pytest.raises(SourceError, match=message):
        resolve_inputs([path], roots=None)
