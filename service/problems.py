"""Every error answer: application/problem+json (RFC 9457), in one place.

Problem is the only error that handlers raise on purpose; `install` turns it, and whatever the
framework raises, into the one form. `detail` says what was required, what was found and what to do.
"""

from __future__ import annotations

import http
import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Mount

from packer.logs import request_id
from packer.manifest import repair
from packer.store import NoSpaceLeft, StoreError
from service.schemas import ProblemModel

log = logging.getLogger("padfree.service")

_URN = "urn:padfree:problem:"


class Problem(Exception):
    """An answer that is an error. `type` is one of the names of this module."""

    def __init__(
        self,
        type: str,
        status: int,
        title: str,
        detail: str,
        *,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.type, self.status, self.title, self.detail = type, status, title, detail
        self.field, self.headers = field, dict(headers or {})

    def response(self) -> Response:
        body = {"type": _URN + self.type, "title": self.title, "status": self.status, "detail": self.detail}
        if self.field:
            body["field"] = self.field
        if name := request_id.get():
            body["request_id"] = name
        return JSONResponse(
            body, status_code=self.status, headers=self.headers, media_type="application/problem+json"
        )


# ------------------------------------------------------------------ the catalogue


def unknown_dataset(dataset: str) -> Problem:
    detail = f"there is no dataset {dataset}; GET /v1/datasets lists those that are there"
    return Problem("unknown-dataset", 404, "Unknown dataset", detail)


def dataset_removed(dataset: str) -> Problem:
    detail = f"dataset {dataset} was removed; POST its spec again to pack it: the same spec gives the same id"
    return Problem("unknown-dataset", 404, "The dataset was removed", detail)


def unknown_name(name: str) -> Problem:
    # As Python writes it, and its beginning alone: it may be anything.
    detail = (
        f"there is no dataset {name[:80]!a}: an id (32 hexadecimal digits), the beginning of one (4 or more) "
        "or a name is required; GET /v1/datasets lists those that are there"
    )
    return Problem("unknown-dataset", 404, "Unknown dataset", detail)


def ambiguous_dataset(detail: str) -> Problem:
    return Problem("ambiguous-dataset", 409, "Several datasets are called so", detail)


def unknown_shard(dataset: str, detail: str) -> Problem:
    return Problem("unknown-shard", 404, "Unknown shard", f"dataset {dataset}: {detail}")


def bad_parameter(field: str, detail: str) -> Problem:
    return Problem("bad-parameter", 422, "Wrong parameter", f"{field}: {detail}", field=field)


def bad_spec(field: str | None, detail: str) -> Problem:
    if named := re.match(
        r"(tokenizer\.\w+): ", detail
    ):  # said by the error itself, better than by its caller
        field, detail = named[1], detail[named.end() :]
    return Problem("bad-spec", 422, "Wrong spec", detail, field=field)


def malformed_json(detail: str) -> Problem:
    return Problem("malformed-json", 400, "The body is not JSON", detail)


def too_large(required: int) -> Problem:
    detail = f"a body of at most {required} bytes is required, found a longer one"
    return Problem("too-large", 413, "Body too large", detail)


def upload_too_large(max_bytes: int) -> Problem:
    detail = f"at most {max_bytes} bytes may be uploaded at once (PADFREE_MAX_UPLOAD_BYTES); split the file"
    return Problem("too-large", 413, "Body too large", detail)


def incomplete_body(num_bytes: int) -> Problem:
    detail = f"the connection ended after {num_bytes} bytes of the body; send it again"
    return Problem("incomplete-body", 400, "The body is not complete", detail)


def dataset_failed(dataset: str, reason: str, field: str | None = None) -> Problem:
    detail = f"packing of dataset {dataset} failed: {reason}"
    return Problem("dataset-failed", 409, "The dataset failed", detail, field=field)


def dataset_cancelled(dataset: str) -> Problem:
    detail = f"dataset {dataset} was cancelled, or is being removed; POST its spec again to pack it"
    return Problem("dataset-cancelled", 409, "The dataset was cancelled", detail)


def dataset_too_small(dataset: str, *, num_packs: int, packs_a_step: int) -> Problem:
    detail = (
        f"dataset {dataset} has {num_packs} packs, one step of all ranks needs {packs_a_step}: use fewer "
        'ranks or packs_per_step, a smaller max_tokens, or tail="pad"'
    )
    return Problem("dataset-too-small", 409, "The dataset is smaller than one step", detail)


def damaged(dataset: str, what: str) -> Problem:
    detail = f"dataset {dataset} is damaged: {what}; {repair(dataset)}"
    return Problem("dataset-damaged", 500, "The dataset is damaged", detail)


def unauthorized() -> Problem:
    return Problem(
        "unauthorized",
        401,
        "Not authorized",
        "this service requires `Authorization: Bearer TOKEN` with one of its tokens (PADFREE_TOKENS)",
        headers={"WWW-Authenticate": "Bearer"},
    )


def transient(detail: str, *, retry_after_s: int = 2) -> Problem:
    return Problem("transient", 503, "Try again", detail, headers={"Retry-After": str(retry_after_s)})


def service_stops() -> Problem:
    return transient("the service stops; send the request again in a moment")


def no_space(detail: str) -> Problem:
    return Problem("no-space", 507, "No space left", detail)


def store_unusable() -> Problem:
    detail = (
        "the store must be a folder or a bucket that the service may read and write, with nothing but "
        "padfree's own in it; found is one where it may not, or a file in a folder's place, which does not "
        "pass by itself: whoever runs the service must put that right, or start it with another store "
        "(--store, PADFREE_STORE); its log names the file"
    )
    return Problem("store-unusable", 500, "The store cannot be used", detail)


def unsatisfiable_range(num_bytes: int, headers: Mapping[str, str]) -> Problem:
    return Problem(
        "range-not-satisfiable",
        416,
        "Range not satisfiable",
        f"a byte range within 0-{num_bytes - 1} is required; the Range header selects none of the file",
        headers={**headers, "Content-Range": f"bytes */{num_bytes}"},
    )


def internal() -> Problem:
    detail = "the service met an error of its own; its log has the traceback under this request_id"
    return Problem("internal", 500, "Internal error", detail)


def read_only() -> Problem:
    detail = "this replica only serves what is packed (PADFREE_PACKING=0); ask one that packs"
    return Problem("read-only", 405, "This replica does not pack", detail)


# ------------------------------------------------------------------ handlers


def from_store_error(error: OSError) -> Problem:
    """A store that cannot be read or written, as an answer without a path of this machine; logged with it."""
    log.error("the store failed: %s", error)
    if isinstance(error, NoSpaceLeft):
        return no_space("no space is left in the store: make room there and send the request again")
    if isinstance(error, StoreError) and error.is_lasting:
        return store_unusable()
    return transient("the store cannot be read or written now; the service's log says why")


async def _problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response()


async def _store_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    return from_store_error(error).response()


async def _framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    title = http.HTTPStatus(error.status_code).phrase
    kind = title.lower().replace(" ", "-")
    detail, headers = str(error.detail), dict(error.headers or {})
    if error.status_code == 404:
        detail = "nothing is at this address; /docs lists what there is"
    elif error.status_code == 405:
        headers["Allow"] = ", ".join(_possible_methods(request))
        detail = f"{request.method} is not possible here; possible: {headers['Allow']}"
    return Problem(kind, error.status_code, title, detail, headers=headers).response()


def _possible_methods(request: Request) -> list[str]:
    """Methods of all routes at this address; the framework names those of the first alone."""
    routes = [route for route in request.app.routes if not isinstance(route, Mount)]
    return [
        method
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ] or ["GET", "HEAD"]  # of files


async def _validation(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    found = repr(first.get("input"))
    found = found if len(found) <= 60 else f"{found[:57]}..."
    if first["type"] == "missing":
        return bad_parameter(
            name, f"this parameter is required and was not given; add ?{name}=… to the url"
        ).response()
    text = str(first["msg"])
    return bad_parameter(name, f"{text[:1].lower()}{text[1:]}, found {found}").response()


def install(app: FastAPI) -> None:
    """Answer every error of `app` as a problem; those of our own are service.requests' matter."""
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(StoreError, _store_error)
    app.add_exception_handler(HTTPException, _framework)
    app.add_exception_handler(RequestValidationError, _validation)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for OpenAPI."""
    return {
        status: {
            "description": http.HTTPStatus(status).phrase,
            "content": {"application/problem+json": {"schema": ProblemModel.model_json_schema()}},
        }
        for status in statuses
    }
