"""From what a user typed to a list of input files, each identified by its content."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from packer.sources.hub import parse_hub, prepare
from packer.sources.hubstream import resolve_stream
from packer.sources.identity import identify
from packer.sources.remote import is_remote, list_remote
from packer.sources.values import SourceError
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


@dataclass(slots=True)
class _Found:
    """Files (inputs, where they are identified already) in order, and those of folders that were left out."""

    roots: tuple[Path, ...] | None
    files: list[str | InputFile] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def resolve_inputs(
    paths: Sequence[str], *, roots: Sequence[Path] | None, digests: bool = True
) -> tuple[tuple[InputFile, ...], tuple[str, ...]]:
    """The files that `paths` (files, folders, globs, urls) name, in order, and the names that were ignored.

    Folders are read with all that lies in them, sorted by name; hidden files and unknown suffixes of a
    folder or glob are ignored and listed. A file named twice is read twice. With `roots` relative
    paths are looked up in each root in turn, and nothing outside the roots is read, not through
    symbolic links either. `digests`: as of `identify`. Raises SourceError.
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
    files = [(path, *reader_of(path)) for path in found.files if isinstance(path, str)]
    named = iter(identify(files, digests=digests))
    inputs = tuple(next(named) if isinstance(file, str) else file for file in found.files)
    return inputs, tuple(found.ignored)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _resolve(text: str, found: _Found) -> None:
    scheme, separator, _ = text.partition("://")
    if scheme == "hf" and separator:
        name, local = parse_hub(text, local=found.roots is None), found.roots is None
        found.files += (
            resolve_stream(name, local=local) if name.streaming else map(str, prepare(name, local=local))
        )
        return
    if is_remote(text):
        urls, named = list_remote(text)
        for url in urls:
            if named:
                reader_of(url)
                found.files.append(url)
            else:
                _take(url, found)
        return
    if separator and scheme == "upload":
        raise SourceError(
            f"{text}: an upload is packed by the service that took it (--url, POST /v1/datasets); "
            "here, give the file itself"
        )
    if separator:
        raise SourceError(
            f"{text}: {scheme}:// is not known here; known are hf://, s3://, gs:// and local paths"
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
                reader_of(str(candidate))
                found.files.append(str(candidate))
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
            _take(str(match), found)
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
            f"{text}: this leads out of the data folders of the service (it has {len(found.roots)}, by "
            "--data-root or PADFREE_DATA_ROOTS; its log names them when it starts); put the file into one of "
            "them, send it with POST /v1/uploads?name=FILE, or start the "
            "service with --data-root and the folder that holds it"
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
            _take(str(path), found)


def _take(path: str, found: _Found) -> None:
    """Take a file that was met rather than named: what is no source is listed as ignored."""
    name = path.rpartition("/")[2]
    known = _reader_of(path) is not None and (is_remote(path) or os.path.isfile(path))
    if known and not name.startswith(".") and name not in _ABOUT_DATA:
        found.files.append(path)
    else:
        found.ignored.append(path)


def _reader_of(path: str) -> tuple[str, str | None] | None:
    suffixes = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    reader = READERS.get(suffixes[-1]) if suffixes else None
    return (reader, compression) if reader else None


def reader_of(path: str) -> tuple[str, str | None]:
    """How a file is read and unpacked, by its name. Raises SourceError for an unknown suffix."""
    found = _reader_of(path)
    if found is None:
        raise SourceError(
            f"{path}: the suffix says how a file is read; known are {KNOWN}; rename or convert it"
        )
    return found
