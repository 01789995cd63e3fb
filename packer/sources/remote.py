"""Files of an object store (s3://, gs://) through pyarrow's file systems (packer.store.remote)."""

from __future__ import annotations

import re
from typing import Any, BinaryIO, cast

from pyarrow import fs

from packer.sources.values import SourceError
from packer.store.remote import advice, content_tag, filesystem

SCHEMES = ("s3", "gs")


def is_remote(path: str) -> bool:
    """Whether a path is the url of an object store."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme in SCHEMES


def _split(url: str) -> tuple[Any, str]:
    """The file system of a url, and the path there (bucket/key)."""
    scheme, _, path = url.partition("://")
    bucket = path.split("/")[0]
    if not re.fullmatch(r"[A-Za-z0-9._-]+", bucket):
        raise SourceError(f"{url}: {scheme}://BUCKET/KEY is required, found no bucket's name")
    try:
        return filesystem(scheme, bucket), path
    except (OSError, ValueError) as error:
        raise _unreadable(url, error) from error


def _unreadable(url: str, error: Exception) -> SourceError:
    return SourceError(f"{url}: cannot be read ({error}); {advice(error)}")


def open_remote(url: str) -> BinaryIO:
    """Open an object for reading and seeking. Raises SourceError."""
    system, path = _split(url)
    try:
        return cast(BinaryIO, system.open_input_file(path))
    except OSError as error:
        raise _unreadable(url, error) from error


def remote_identity(url: str) -> tuple[int, str]:
    """Size in bytes, and what the store calls this content: its etag. Raises SourceError."""
    system, path = _split(url)
    try:
        info = system.get_file_info(path)
        if info.type != fs.FileType.File:
            raise SourceError(f"{url}: there is no such object; check the url")
        with system.open_input_stream(path) as stream:
            tag = content_tag(stream)
    except OSError as error:
        raise _unreadable(url, error) from error
    if tag is None:
        raise SourceError(
            f"{url}: the store tells no etag, so a change could not be seen; copy it to this machine"
        )
    return int(info.size), "etag:" + tag


def list_remote(url: str) -> tuple[list[str], bool]:
    """The urls that `url` names, sorted, and whether it names one object itself (no folder or pattern).

    `*` and `?` stand for characters within a name, `**` for any folders. Raises SourceError.
    """
    system, path = _split(url)
    scheme = url.partition("://")[0]
    try:
        if not any(mark in path for mark in "*?"):
            kind = system.get_file_info(path).type
            if kind == fs.FileType.File:
                return [url], True
            if kind != fs.FileType.Directory:
                raise SourceError(f"{url}: there is no such object or folder; check the url")
            folder, wanted = path.rstrip("/"), re.compile(".*", re.DOTALL)
        else:
            folder, wanted = re.split(r"[*?]", path)[0].rpartition("/")[0], _pattern(path)
        selector = fs.FileSelector(folder, recursive=True, allow_not_found=True)
        found = [i.path for i in system.get_file_info(selector) if i.type == fs.FileType.File]
    except OSError as error:
        raise _unreadable(url, error) from error
    names = sorted((name for name in found if wanted.fullmatch(name)), key=lambda name: name.split("/"))
    return [f"{scheme}://{name}" for name in names], False


def _pattern(path: str) -> re.Pattern[str]:
    pieces = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", path)
    return re.compile("".join(pieces.get(part, re.escape(part)) for part in parts), re.DOTALL)
