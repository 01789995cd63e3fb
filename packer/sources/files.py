"""From what a user typed to a list of input files, each identified by its content."""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from packer.sources.hub import resolve_hub
from packer.sources.streams import open_input
from packer.sources.values import MIB, SourceError
from packer.spec import InputFile

READERS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".txt": "txt",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KNOWN = f"{' '.join(READERS)}, each also with {' or '.join(COMPRESSIONS)}"

# Of a folder written by `datasets`: about the data, not data.
_ABOUT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_DIGEST_BLOCK_BYTES = 64 * MIB
_READ_BYTES = MIB


@dataclass(slots=True)
class _Found:
    """Files in order, and those of folders that were left out."""

    roots: tuple[Path, ...] | None
    files: list[Path] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def resolve_inputs(
    paths: Sequence[str], *, roots: Sequence[Path] | None
) -> tuple[tuple[InputFile, ...], tuple[str, ...]]:
    """The files that `paths` (files, folders, globs) name, in order, and the names that were ignored.

    Folders are read with all that lies in them, sorted by name; hidden files and unknown suffixes of a
    folder or glob are ignored and listed. A file named twice is read twice. With `roots` relative
    paths are looked up in each root in turn, and nothing outside the roots is read, not through
    symbolic links either. Raises SourceError.
    """
    found = _Found(roots=None if roots is None else tuple(Path(root).resolve() for root in roots))
    for path in paths:
        before = len(found.files), len(found.ignored)
        _resolve(path, found)
        if len(found.files) == before[0]:
            left_out = found.ignored[before[1] :]
            raise SourceError(
                f"{path}: no input file in it; known are {KNOWN}"
                + (f"; ignored were {_some(left_out)}" if left_out else "")
            )
    return _identify(found.files), tuple(found.ignored)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _resolve(text: str, found: _Found) -> None:
    scheme, separator, _ = text.partition("://")
    if scheme == "hf" and separator:
        found.files += resolve_hub(text, local=found.roots is None)
        return
    if separator:
        raise SourceError(
            f"{text}: {scheme}:// is not supported yet; copy the files to this machine and give their paths"
        )
    if "\0" in text:
        raise SourceError(f"{text!r}: a path cannot hold a NUL character")
    path = Path(text).expanduser() if found.roots is None else Path(text)
    candidates = [path.absolute()] if found.roots is None else [root / path for root in found.roots]
    for candidate in candidates:
        # A name that is there is taken as it is, though it may look like a pattern.
        if os.path.lexists(candidate):
            _check_inside(candidate, found, text)
            if candidate.is_dir():
                _scan(candidate, found, text, frozenset())
            else:
                reader_of(candidate)
                found.files.append(candidate)
            return
    if glob.has_magic(text):
        for candidate in candidates:
            if _resolve_glob(candidate, found, text):
                return
        raise SourceError(
            f"{text}: no file matches this pattern; check it, and quote it if a shell reads it first"
        )
    if found.roots is not None:
        for candidate in candidates:
            _check_inside(candidate, found, text)
    raise SourceError(f"{text}: there is no such file or folder{_hint(candidates[0])}")


def _resolve_glob(pattern: Path, found: _Found, text: str) -> bool:
    matches = sorted(glob.glob(str(pattern), recursive=True), key=lambda match: Path(match).parts)
    for match in map(Path, matches):
        _check_inside(match, found, text)
        if match.is_dir():
            if "**" not in text:  # else its files match on their own
                _scan(match, found, text, frozenset())
        else:
            _take(match, found)
    return bool(matches)


def _hint(path: Path) -> str:
    try:
        near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
    except OSError:
        return "; check the path"
    return f"; did you mean {near[0]!r}?" if near else "; check the path"


def _check_inside(path: Path, found: _Found, text: str) -> None:
    """Judged by where the path really leads, links and ".." followed."""
    if found.roots is None:
        return
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(root) for root in found.roots):
        raise SourceError(
            f"{text}: this leads out of the data folders of the service; "
            "put the file into one of them, or start the service with the folder that holds it"
        )


def _scan(folder: Path, found: _Found, text: str, above: frozenset[tuple[int, int]]) -> None:
    about = folder.stat()
    here = (about.st_dev, about.st_ino)
    if here in above:
        return  # a link back to a folder that is being read
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise SourceError(f"{folder}: cannot be read: {error.strerror}; make it readable") from error
    for name in names:
        path = folder / name
        if name.startswith("."):
            found.ignored.append(str(path))
            continue
        _check_inside(path, found, f"{text}: {name}")
        if path.is_dir():
            _scan(path, found, text, above | {here})
        else:
            _take(path, found)


def _take(path: Path, found: _Found) -> None:
    """Take a file that was met rather than named: what is no source is listed as ignored."""
    known = _reader_of(path) is not None and path.is_file()
    if known and not path.name.startswith(".") and path.name not in _ABOUT_DATA:
        found.files.append(path)
    else:
        found.ignored.append(str(path))


def _reader_of(path: Path) -> tuple[str, str | None] | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    reader = READERS.get(suffixes[-1]) if suffixes else None
    return (reader, compression) if reader else None


def reader_of(path: Path) -> tuple[str, str | None]:
    """How a file is read and unpacked, by its name. Raises SourceError for an unknown suffix."""
    found = _reader_of(path)
    if found is None:
        raise SourceError(
            f"{path}: the suffix says how a file is read; known are {KNOWN}; rename or convert it"
        )
    return found


# ------------------------------------------------------------------ identity


def _identify(paths: Sequence[Path]) -> tuple[InputFile, ...]:
    """Size, digest and modification time of each file; and whether it is what its name says."""
    about = []
    for path in paths:
        if not path.is_file():
            raise SourceError(f"{path}: a regular file is required, found something else or a broken link")
        reader, compression = reader_of(path)
        check_magic(path, reader, compression)
        about.append((path, reader, compression, path.stat()))
    digests = content_digests([(path, stat.st_size) for path, _, _, stat in about])
    return tuple(
        InputFile(
            path=str(path),
            num_bytes=stat.st_size,
            digest=digest,
            reader=reader,
            compression=compression,
            mtime_ns=stat.st_mtime_ns,
        )
        for (path, reader, compression, stat), digest in zip(about, digests, strict=True)
    )


def content_digests(files: Sequence[tuple[Path, int]]) -> list[str]:
    """The content digest of each (path, num_bytes), 64 hex digits.

    It is the sha256 over the sha256 digests (32 bytes each, in order) of the file's blocks of 64 MiB:
    not the file's plain sha256, so that the blocks of one large file, too, are hashed by several
    threads (hashlib lets go of the interpreter's lock).
    """
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        # One list for all files, so that many small ones keep the threads as busy as one large one.
        digests = pool.map(lambda block: _block_digest(*block), list(_blocks_of(files)))
        wholes = []
        for _, num_bytes in files:
            whole = hashlib.sha256()
            for _ in range(-(-num_bytes // _DIGEST_BLOCK_BYTES)):
                whole.update(next(digests))
            wholes.append(whole.hexdigest())
    return wholes


def _blocks_of(files: Sequence[tuple[Path, int]]) -> Iterator[tuple[Path, int, int]]:
    for path, num_bytes in files:
        for start in range(0, num_bytes, _DIGEST_BLOCK_BYTES):
            yield path, start, min(_DIGEST_BLOCK_BYTES, num_bytes - start)


def _block_digest(path: Path, start: int, num_bytes: int) -> bytes:
    digest = hashlib.sha256()
    with open_input(path) as file:
        file.seek(start)
        while num_bytes:
            block = file.read(min(_READ_BYTES, num_bytes))
            if not block:
                raise SourceError(
                    f"{path}: the file shrank while it was read; leave inputs alone and try again"
                )
            digest.update(block)
            num_bytes -= len(block)
    return digest.digest()


# ------------------------------------------------------------------ magic numbers

_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}
_WANTED = {"gzip": "gzip", "zstd": "zstd", "parquet": "Parquet", "arrow": "Arrow"}


def check_magic(path: Path, reader: str, compression: str | None) -> None:
    """Raise SourceError where the first bytes of a file are not what its name says."""
    with open_input(path) as file:
        head = file.read(8)
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 4))
        tail = file.read(4)
    is_really = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)
    wanted = _WANTED.get(compression or reader)
    if wanted == "zstd" and head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50:
        is_really = "zstd"  # begins with a skippable frame
    if wanted == "Arrow" and is_really is None and _is_arrow_stream(head):
        is_really = "Arrow"
    if wanted == "Parquet" and is_really == "Parquet" and (end < 12 or tail != b"PAR1"):
        raise SourceError(
            f"{path}: a Parquet file is required, found one that is cut off; fetch or write it again"
        )
    if is_really == wanted:
        return
    found = is_really or (f"{end} bytes that are not" if end else "an empty file")
    if wanted:
        raise SourceError(
            f"{path}: its name says {wanted}, found {found}; rename it, or fetch or write it again"
        )
    advice = "convert it to UTF-8" if is_really == "UTF-16 text" else "name it by what it is, or convert it"
    raise SourceError(f"{path}: text is required by its name, found {found}; {advice}")


def _is_arrow_stream(head: bytes) -> bool:
    # A message begins with a continuation mark and its length; before Arrow 0.15 with the length.
    return head[:4] == b"\xff\xff\xff\xff" or (
        len(head) == 8 and 0 < int.from_bytes(head[:4], "little") < MIB
    )
