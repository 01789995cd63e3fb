"""From what a user types to files: order, what is ignored, what is refused, and what may be read."""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packer.sources import SourceError, identity, resolve_inputs


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b'{"text":"a"}\n')


def names(paths: list[Path | str], folder: Path, roots: list[Path] | None = None) -> list[str]:
    inputs, _ = resolve_inputs([str(path) for path in paths], roots=roots)
    return [str(Path(one.path).relative_to(folder)) for one in inputs]


def test_order_is_that_of_the_paths_and_within_a_folder_of_the_names(tmp_path: Path) -> None:
    touch(tmp_path, "z.jsonl", "b/2.jsonl", "b/10.jsonl", "b/a/x.jsonl", "b/c.JSONL", "a.jsonl")
    assert names([tmp_path / "z.jsonl", tmp_path / "b", tmp_path / "*.jsonl"], tmp_path) == [
        "z.jsonl",
        "b/10.jsonl",
        "b/2.jsonl",
        "b/a/x.jsonl",
        "b/c.JSONL",
        "a.jsonl",
        "z.jsonl",
    ]


def test_globs(tmp_path: Path) -> None:
    touch(tmp_path, "x/1.jsonl", "x/y/2.jsonl", "x/y/3.md", "w/4.jsonl", "[5].jsonl")
    assert names([tmp_path / "**" / "*.jsonl"], tmp_path) == [
        "[5].jsonl",
        "w/4.jsonl",
        "x/1.jsonl",
        "x/y/2.jsonl",
    ]
    assert names([tmp_path / "x" / "**"], tmp_path) == ["x/1.jsonl", "x/y/2.jsonl"]
    assert names([tmp_path / "[wx]"], tmp_path) == ["w/4.jsonl", "x/1.jsonl", "x/y/2.jsonl"]
    # A name that is there is no pattern.
    assert names([tmp_path / "[5].jsonl"], tmp_path) == ["[5].jsonl"]


def test_what_a_folder_holds_besides_is_ignored_and_listed(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "README.md", ".git/x.jsonl", "noname", "dataset_info.json", "b.jsonl.bak")
    os.symlink(tmp_path / "gone", tmp_path / "broken.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    inputs, ignored = resolve_inputs([str(tmp_path)], roots=None)
    assert [Path(one.path).name for one in inputs] == ["a.jsonl"]
    assert sorted(Path(name).name for name in ignored) == [
        ".git",
        "README.md",
        "b.jsonl.bak",
        "broken.jsonl",
        "dataset_info.json",
        "noname",
        "pipe.jsonl",
    ]


def test_a_link_back_to_a_folder_above_is_followed_once(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.jsonl")
    os.symlink(tmp_path / "a", tmp_path / "a" / "again")
    os.symlink(tmp_path, tmp_path / "a" / "above")
    assert names([tmp_path / "a"], tmp_path) == ["a/x.jsonl"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.jsonl", "gone.jsonl: there is no such file or folder"),
        ("a.jsnol", "did you mean 'a.jsonl'"),
        ("*.parquet", "no file matches"),
        ("empty", "empty: no input file in it"),
        ("other", r"other: no input file in it.*ignored were .*x\.md"),
        ("other/x.md", r"x\.md: the suffix"),
        ("hf://?split=train", "found no repo"),
        ("hf://gsm8k?spilt=train", "found spilt"),
        ("hf://gsm8k?split=train[:10]", "found the slice"),
        ("ftp://host/a.jsonl", "ftp:// is not known here"),
        (f"upload://{'0' * 32}.jsonl", "packed by the service that took it"),
        ("s3://", "found no bucket"),
        ("a\0b", "NUL"),
        ("pipe.jsonl", "regular file"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, path: str, message: str) -> None:
    touch(tmp_path, "a.jsonl", "other/x.md")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(SourceError, match=message):
        resolve_inputs([path if "://" in path else str(tmp_path / path)], roots=None)


GZIP = gzip.compress(b'{"text":"a"}\n', mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", b'{"text":"a"}\n', "its name says gzip"),
        ("a.jsonl.gz", b"", "its name says gzip, found an empty file"),
        ("a.jsonl.zst", GZIP, "its name says zstd, found gzip"),
        ("a.parquet", b'{"text":"a"}\n', "its name says Parquet"),
        ("a.parquet", b"PAR1" + b"x" * 100, "cut off"),
        ("a.arrow", b'{"text":"a"}\n', "its name says Arrow"),
        ("a.jsonl", GZIP, "found gzip"),
        ("a.json", b"PAR1" + b"x" * 100 + b"PAR1", "found Parquet"),
        ("a.csv", b"PK\x03\x04" + b"x" * 100, "found zip"),
        ("a.txt", "text\n".encode("utf-16"), "found UTF-16 text; convert it to UTF-8"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message) as caught:
        resolve_inputs([str(tmp_path / name)], roots=None)
    assert name in str(caught.value)


def test_files_that_are_what_their_names_say(tmp_path: Path) -> None:
    table = pa.table({"text": ["a"]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(str(tmp_path / "b.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_stream(str(tmp_path / "c.arrow"), table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "d.jsonl.zst").write_bytes(b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + b"\x28\xb5\x2f\xfd")
    (tmp_path / "e.jsonl").write_bytes(b"")
    assert len(names([tmp_path], tmp_path)) == 5


# ------------------------------------------------------------------ roots


def test_relative_paths_are_looked_up_in_the_roots(tmp_path: Path) -> None:
    touch(tmp_path, "one/a.jsonl", "two/b.jsonl", "two/a.jsonl")
    roots = [tmp_path / "one", tmp_path / "two"]
    assert names(["a.jsonl", "b.jsonl", "*.jsonl"], tmp_path, roots) == [
        "one/a.jsonl",
        "two/b.jsonl",
        "one/a.jsonl",
    ]
    assert names([tmp_path / "two" / "a.jsonl"], tmp_path, roots) == ["two/a.jsonl"]
    assert names(["../two/b.jsonl"], tmp_path, roots)  # leads back into a root


@pytest.mark.parametrize(
    "path",
    [
        "../out/secret.jsonl",
        "../out",
        "../out/*.jsonl",
        "../*/secret.jsonl",
        "link.jsonl",
        "linked",
        "linked/secret.jsonl",
        "holds-a-link",
        "*.jsonl",
        "{out}/secret.jsonl",
        "{out}/gone.jsonl",
        "sub/../../out/secret.jsonl",
        "/etc/passwd",
        "/proc/self/environ",
    ],
)
def test_nothing_outside_the_roots_is_read(tmp_path: Path, path: str) -> None:
    touch(tmp_path, "out/secret.jsonl", "in/sub/a.jsonl", "in/holds-a-link/b.jsonl")
    root = tmp_path / "in"
    os.symlink(tmp_path / "out" / "secret.jsonl", root / "link.jsonl")
    os.symlink(tmp_path / "out", root / "linked")
    os.symlink(tmp_path / "out" / "secret.jsonl", root / "holds-a-link" / "c.jsonl")
    with pytest.raises(
        SourceError,
        match=r"leads out of the data folders of the service \(it has 1, by --data-root or PADFREE",
    ):
        resolve_inputs([path.format(out=tmp_path / "out")], roots=[root])


def test_a_root_may_itself_be_a_link(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.jsonl")
    os.symlink(tmp_path / "in", tmp_path / "root")
    assert names(["a.jsonl"], tmp_path, [tmp_path / "root"]) == ["in/a.jsonl"]


# ------------------------------------------------------------------ identity


def test_digest_is_sha256_over_the_sha256_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_DIGEST_BLOCK_BYTES", 1000)
    contents = [os.urandom(size) for size in (0, 1, 999, 1000, 1001, 5500)]
    paths = []
    for number, content in enumerate(contents):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(content)
        paths.append((str(path), len(content)))
    wanted = [
        hashlib.sha256(
            b"".join(hashlib.sha256(content[i : i + 1000]).digest() for i in range(0, len(content), 1000))
        ).hexdigest()
        for content in contents
    ]
    assert identity.content_digests(paths) == wanted


def test_an_input_is_told_by_its_content_not_its_place(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "b.jsonl")
    (tmp_path / "c.jsonl").write_bytes(b'{"text":"b"}\n')
    a, b, c = resolve_inputs([str(tmp_path)], roots=None)[0]
    assert a.digest == b.digest != c.digest
    assert (a.num_bytes, a.reader, a.compression) == (13, "jsonl", None)
