"""Files of an object store (s3://, gs://) through pyarrow's file systems.

Credentials, region and endpoint come from where the store's own tools look for them (for S3:
AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL, an instance role), never from the url:
whoever names an object cannot send our credentials elsewhere.
"""

from __future__ import annotations

import functools
import re
from typing import Any, BinaryIO, cast

from pyarrow import fs

from packer.sources.values import SourceError

SCHEMES = ("s3", "gs")


def is_remote(path: str) -> bool:
    """Whether a path is the url of an object store."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme in SCHEMES


@functools.lru_cache(maxsize=64)
def _filesystem(scheme: str, bucket: str) -> fs.FileSystem:
    return fs.FileSystem.from_uri(f"{scheme}://{bucket}")[0]


def _split(url: str) -> tuple[Any, str]:
    """The file system of a url, and the path there (bucket/key)."""
    scheme, _, path = url.partition("://")
    bucket = path.split("/")[0]
    if not re.fullmatch(r"[A-Za-z0-9._-]+", bucket):
        raise SourceError(f"{url}: {scheme}://BUCKET/KEY is required, found no bucket's name")
    try:
        return _filesystem(scheme, bucket), path
    except (OSError, ValueError) as error:
        raise _unreadable(url, error) from error


def _unreadable(url: str, error: Exception) -> SourceError:
    return SourceError(f"{url}: cannot be read ({error}); check the url, the credentials and the endpoint")


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
            about = {_text(name).lower(): _text(value) for name, value in (stream.metadata() or {}).items()}
    except OSError as error:
        raise _unreadable(url, error) from error
    etag = about.get("etag") or about.get("generation")
    if not etag:
        raise SourceError(
            f"{url}: the store tells no etag, so a change could not be seen; copy it to this machine"
        )
    return int(info.size), "etag:" + etag.strip('"')


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


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
