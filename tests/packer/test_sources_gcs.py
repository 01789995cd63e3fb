"""gs:// inputs, read by pyarrow's client from a server of Google's protocol that the test starts."""

from __future__ import annotations

import datetime
import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from gcs import gcs_server
from pyarrow import fs
from reading import lines, parquet, read_source

from packer.sources import SourceError, index_input, remote, resolve_inputs
from packer.store import LocalStore


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of what the server holds in gs://data; tests may change it."""
    objects = {
        "in/a.jsonl": lines("a", "b"),
        "in/sub/b.jsonl.gz": gzip.compress(lines("c")),
        "in/sub/c.parquet": parquet("d", "e"),
        "in/README.md": b"read me",
        "other/d.csv": b"text\nf\n",
        "other/empty.txt": b"",
    }
    root = tmp_path / "gcs"
    for name, content in objects.items():
        path = root / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    with gcs_server(root) as address:
        system = fs.GcsFileSystem(
            anonymous=True,
            scheme="http",
            endpoint_override=address,
            retry_time_limit=datetime.timedelta(seconds=1),
        )
        # Where the real one is, and who we are there, the client finds out by itself.
        monkeypatch.setattr(remote, "filesystem", lambda scheme, bucket: system)
        yield root / "data"


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(
    ("paths", "texts"),
    [
        (["gs://data/in/a.jsonl"], ["a", "b"]),
        (["gs://data/in/"], ["a", "b", "c", "d", "e"]),
        (["gs://data/**/*.parquet", "gs://data/other"], ["d", "e", "f", ""]),
    ],
)
def test_objects_folders_and_patterns(
    tmp_path: Path, bucket: Path, paths: list[str], texts: list[str], seed: int | None
) -> None:
    out = read_source(paths, tmp_path / "store", seed=seed)
    assert [text for _, text in sorted(zip(out.ids, out.texts, strict=True))] == texts
    assert not out.errors
    assert all(at.file.startswith("gs://data/") for at in out.locations)
    assert set(out.ignored) <= {"gs://data/in/README.md"}


def test_an_object_is_told_by_its_etag_or_generation(tmp_path: Path, bucket: Path) -> None:
    def input() -> tuple[int, str]:
        (one,), _ = resolve_inputs(["gs://data/in/a.jsonl"], roots=None)
        return one.num_bytes, one.digest

    before = input()
    assert before == input()
    (resolved,), _ = resolve_inputs(["gs://data/in/a.jsonl"], roots=None)
    (bucket / "in" / "a.jsonl").write_bytes(lines("a", "x"))
    assert input()[0] == before[0]
    assert input()[1] != before[1]
    with pytest.raises(SourceError, match="changed"):
        index_input(
            resolved,
            store=LocalStore(tmp_path / "store"),
            work_key="w",
            random_access=False,
            fields={"text": "text"},
        )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gs://data/in/none.jsonl", "no such object"),
        ("gs://none/in/a.jsonl", "no such object"),
        ("gs://data/none/*.jsonl", "no input file"),
        ("gs:///a.jsonl", "BUCKET"),
    ],
)
def test_what_is_not_there_is_refused_by_its_url(bucket: Path, path: str, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        resolve_inputs([path], roots=None)
    assert path in str(caught.value)
