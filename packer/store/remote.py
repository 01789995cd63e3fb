"""pyarrow's file systems of object stores, and what their errors mean.

Credentials, region and endpoint come from where the store's own tools look for them (for S3:
AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL, an instance role), never from a url:
whoever names an object cannot send our credentials elsewhere.
"""

from __future__ import annotations

import errno
import functools
from typing import Any

import pyarrow as pa
from pyarrow import fs


@functools.lru_cache(maxsize=64)
def filesystem(scheme: str, bucket: str) -> fs.FileSystem:
    """The file system of a bucket. Raises OSError or ValueError."""
    # Small objects are then written with one call instead of three; pyarrow before 21 does not know it.
    delays = scheme == "s3" and int(pa.__version__.partition(".")[0]) >= 21
    options = "?allow_delayed_open=true" if delays else ""
    return fs.FileSystem.from_uri(f"{scheme}://{bucket}{options}")[0]


def content_tag(file: Any) -> str | None:
    """What the store calls the content of an opened object: its etag, or its generation."""
    about = {_text(name).lower(): _text(value) for name, value in (file.metadata() or {}).items()}
    tag = about.get("etag") or about.get("generation")
    return tag.strip('"') if tag else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


_REFUSED = ("ACCESS_DENIED", "AccessDenied")

_ADVICE = (
    (("NO_SUCH_BUCKET", "NoSuchBucket"), "there is no such bucket: make it, or correct the url"),
    (
        (
            *_REFUSED,
            "InvalidAccessKeyId",
            "SIGNATURE",
            "Signature",
            "INVALID_ACCESS_KEY",
        ),
        "the store refuses these credentials: it must allow them to list, read, write and delete there",
    ),
    (
        ("NETWORK_CONNECTION", "Could not resolve", "credentials"),
        "is the endpoint (AWS_ENDPOINT_URL) right and up, and are there credentials?",
    ),
)


def advice(error: BaseException) -> str:
    """What to do about an error of an object store."""
    text = str(error)
    found = (told for marks, told in _ADVICE if any(mark in text for mark in marks))
    return next(found, "check the url, the credentials and the endpoint")


def is_refused(error: OSError) -> bool:
    """Whether an object store says that we may not do this: that stays so until someone allows it.

    Google's errors have a number, those of S3 a text. What has run out (ExpiredToken) is renewed by itself.
    """
    return error.errno == errno.EACCES or any(mark in str(error) for mark in _REFUSED)
