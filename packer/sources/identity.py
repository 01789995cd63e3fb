"""What identifies an input: its size and content; and whether it is what its name says."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from packer.sources.remote import is_remote, remote_identity
from packer.sources.streams import changed, open_input, size_of
from packer.sources.tabular import check_examples
from packer.sources.values import MIB, SourceError
from packer.spec import InputFile

_DIGEST_BLOCK_BYTES = 64 * MIB
_READ_BYTES = MIB


def identify(files: Sequence[tuple[str, str, str | None]], *, digests: bool = True) -> tuple[InputFile, ...]:
    """Each (path, reader, compression) with its size, digest and time of change. Raises SourceError.

    Of an object store the etag stands for the digest: the content is not read. Without `digests` that of
    files is "": for those who look at a few records and go.
    """
    local: dict[str, os.stat_result] = {}
    for path, reader, compression in files:
        if not is_remote(path):
            if not os.path.isfile(path):
                raise SourceError(
                    f"{path}: a regular file is required, found something else or a broken link"
                )
            local[path] = os.stat(path)
        check_magic(path, reader, compression)
    sizes = [(path, stat.st_size) for path, stat in local.items()]
    found = content_digests(sizes) if digests else [""] * len(sizes)
    by_path = dict(zip(local, found, strict=True))
    inputs = []
    for path, reader, compression in files:
        mtime_ns = local[path].st_mtime_ns if path in local else None
        num_bytes, digest = (local[path].st_size, by_path[path]) if path in local else remote_identity(path)
        inputs.append(
            InputFile(
                path=path,
                num_bytes=num_bytes,
                digest=digest,
                reader=reader,
                compression=compression,
                mtime_ns=mtime_ns,
            )
        )
    return tuple(inputs)


def check_identity(input: InputFile) -> int:
    """The time (ns) of an input's last change, once its content is known to be what was resolved.

    Raises SourceError where it is not. Of an object store the time is 0: the etag says all.
    """
    if is_remote(input.path):
        if remote_identity(input.path) != (input.num_bytes, input.digest):
            raise changed(input, "its size or etag is another than when the dataset was posted")
        return 0
    with open_input(input.path) as file:
        now = os.fstat(file.fileno())
    if now.st_size != input.num_bytes:
        raise changed(input, f"{input.num_bytes} bytes when the dataset was posted, {now.st_size} now")
    # Another time need not mean other content: a copy or a touch leaves the dataset what it was.
    if now.st_mtime_ns == input.mtime_ns:
        return now.st_mtime_ns
    if content_digests([(input.path, input.num_bytes)]) != [input.digest]:
        raise changed(input, "other content than when the dataset was posted")
    return now.st_mtime_ns


def content_digests(files: Sequence[tuple[str, int]]) -> list[str]:
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


def _blocks_of(files: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int, int]]:
    for path, num_bytes in files:
        for start in range(0, num_bytes, _DIGEST_BLOCK_BYTES):
            yield path, start, min(_DIGEST_BLOCK_BYTES, num_bytes - start)


def _block_digest(path: str, start: int, num_bytes: int) -> bytes:
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


def check_magic(path: str, reader: str, compression: str | None) -> None:
    """Raise SourceError where the first bytes of a file are not what its name says."""
    with open_input(path) as file:
        end = size_of(file)
        head = file.read(8)
        tail = b""
        if end >= 4:
            file.seek(end - 4)
            tail = file.read(4)
        if (reader, compression) == ("arrow", None):
            check_examples(path, file)
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
