"""POST /v1/uploads: a file's content, kept in the store, to be named in `source.paths`.

An upload is named by its content and the ending of its name (`upload://<32 hex digits>.jsonl.gz`), so
sending the same file twice keeps it once. It is visible when it is whole: written under a temporary
name, made durable, renamed. The body is never held in memory and never in a temporary folder.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from packer.store import Staged, Store, is_url
from service import problems
from service.auth import known_parameters_only
from service.schemas import UploadView
from service.state import Service, service_of

SCHEME = "upload://"

_FOLDER = "uploads"
_ENDINGS = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".txt")
_ENDING = re.compile(rf"(?:{'|'.join(re.escape(e) for e in _ENDINGS)})(?:\.gz|\.zst)?$", re.IGNORECASE)
_NAME = re.compile(rf"[0-9a-f]{{32}}(?:{'|'.join(re.escape(e) for e in _ENDINGS)})(?:\.gz|\.zst)?")
_PIECE_BYTES = 1 << 20
_STALE_S = 24 * 3600.0

router = APIRouter(prefix="/v1", tags=["uploads"])


@router.post(
    "/uploads",
    status_code=201,
    response_model=UploadView,
    responses=problems.documented(400, 401, 413, 422, 507),
    dependencies=[Depends(known_parameters_only)],
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {}}}},
)
async def post_upload(
    request: Request,
    name: Annotated[str, Query(description="The file's name; its ending tells the format")],
    service: Service = Depends(service_of),  # noqa: B008
) -> Response:
    """Store the body, a file, and give the name under which a spec may use it."""
    ending = _ENDING.search(name)
    if ending is None:
        raise problems.bad_parameter(
            "name", f"a name that ends in {', '.join(_ENDINGS)} (or these with .gz or .zst) is required"
        )
    announced = request.headers.get("content-length", "")
    _check_size(service, int(announced) if announced.isdigit() else 0)
    upload = _Upload(service.store)
    try:
        await service.in_thread(upload.open)
        await _receive(request, upload, service)
        # To an object store the whole file goes only now.
        stored = await service.long_in_thread(upload.finish, ending.group().lower())
    except OSError as error:
        raise _storage_problem(error) from error
    except ClientDisconnect as error:
        raise problems.incomplete_body(upload.num_bytes) from error
    finally:
        # Shielded: a request that is cancelled leaves nothing behind either.
        await asyncio.shield(service.in_thread(upload.close))
    view = {"upload": SCHEME + stored, "num_bytes": upload.num_bytes, "sha256": upload.sha256}
    return JSONResponse(view, status_code=201)


async def _receive(request: Request, upload: _Upload, service: Service) -> None:
    pieces: list[bytes] = []
    held = 0
    async for piece in request.stream():
        pieces.append(piece)
        held += len(piece)
        if held >= _PIECE_BYTES:
            _check_size(service, upload.num_bytes + held)
            await service.in_thread(upload.write, b"".join(pieces))
            pieces, held = [], 0
    _check_size(service, upload.num_bytes + held)
    await service.in_thread(upload.write, b"".join(pieces))


def _check_size(service: Service, num_bytes: int) -> None:
    if num_bytes > service.settings.max_upload_bytes:
        raise problems.upload_too_large(service.settings.max_upload_bytes)


def _storage_problem(error: OSError) -> problems.Problem:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return problems.no_space("no space is left in the store for this upload: make room and send it again")
    return problems.from_store_error(error)


class _Upload:
    """A file on its way into the store. Its methods block; `close` may be called at any time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._staged: Staged | None = None
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def open(self) -> None:
        self._staged = self._store.stage(_FOLDER)

    def write(self, data: bytes) -> None:
        assert self._staged is not None
        self._digest.update(data)
        self._staged.write(data)
        self.num_bytes += len(data)

    def finish(self, ending: str) -> str:
        """Make the file part of the store; returns its name there."""
        assert self._staged is not None
        name = f"{self.sha256[:32]}{ending}"
        self._staged.publish(f"{_FOLDER}/{name}")
        return name

    def close(self) -> None:
        """Let go of the file; it is gone where it is not finished."""
        if self._staged is not None:
            self._staged.close()


def local_paths(paths: Sequence[str], store: Store) -> tuple[str, ...]:
    """`paths` with uploads as the files that they are. Raises the Problem of one that is not there."""
    found = []
    for path in paths:
        if path.startswith(SCHEME):
            name = path.removeprefix(SCHEME)
            key = f"{_FOLDER}/{name}"
            if not _NAME.fullmatch(name) or not store.exists(key):
                raise problems.bad_spec(
                    "source.paths",
                    f"there is no upload {path[:80]!r}: send the file to POST /v1/uploads and use its answer",
                )
            path = store.where(key)
        found.append(path)
    return tuple(found)


def roots(store: Store) -> tuple[Path, ...]:
    """The folders of uploads, that sources may be read from; none where they are in an object store."""
    place = store.where(_FOLDER)
    return () if is_url(place) else (Path(place),)


def sweep(store: Store) -> int:
    """Remove what killed services left half-written a day ago or longer. Returns how many files.

    Not sooner: another replica may be writing.
    """
    return store.sweep(_FOLDER, older_than_s=_STALE_S)
