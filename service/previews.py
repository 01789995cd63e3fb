"""POST /v1/datasets/preview: the first examples as they would be trained, before any work."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from packer.spec import Spec
from packer.store import LocalStore, Store
from service import problems, specs
from service.auth import known_parameters_only
from service.requests import read_body
from service.schemas import PreviewSpecModel, PreviewView
from service.state import Service, service_of

MAX_EXAMPLES = 100
_EXAMPLES = 5

router = APIRouter(prefix="/v1", tags=["datasets"])


@router.post(
    "/datasets/preview",
    response_model=PreviewView,
    responses=problems.documented(400, 401, 405, 413, 422, 507),
    dependencies=[Depends(known_parameters_only)],
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": PreviewSpecModel.model_json_schema()}},
        }
    },
)
async def post_preview(
    request: Request,
    service: Service = Depends(service_of),  # noqa: B008
) -> Response:
    """The first examples of a spec, token by token, and what a careful colleague would say of it.

    Packs nothing and reads no more than the first rows.
    """
    if service.scheduler is None:
        raise problems.read_only()
    document = specs.json_of(await read_body(request, service.settings.max_spec_bytes))
    num_examples = _take_examples(document)
    spec = specs.parsed(document)
    async with service.preview_turns:
        found = await service.long_in_thread(_preview, spec, service, num_examples)
    return JSONResponse(found)


def _take_examples(document: Any) -> int:
    """Take `examples` out of the document; what is left is the spec."""
    count = document.pop("examples", _EXAMPLES) if isinstance(document, dict) else _EXAMPLES
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_EXAMPLES:
        raise problems.bad_spec(
            "examples", f"a whole number from 1 to {MAX_EXAMPLES} is required, found {count!r:.60}"
        )
    return count


def _preview(spec: Spec, service: Service, num_examples: int) -> dict[str, Any]:
    from packer.preview import preview  # as in specs: not for replicas that only serve

    with _scratch(spec, service) as store:
        job = specs.resolved(spec, service, store, identify=False)
        try:
            return dataclasses.asdict(preview(job, store, num_examples))
        except ValueError as error:  # of reading and rendering
            raise problems.bad_spec("source", str(error)) from error


@contextlib.contextmanager
def _scratch(spec: Spec, service: Service) -> Iterator[Store]:
    """A store that is gone afterwards; of a packed dataset the one that holds it: nothing is written then."""
    from packer.sources import names_dataset

    if names_dataset(spec.source.paths):
        yield service.store
        return
    with tempfile.TemporaryDirectory(prefix="padfree-preview-") as folder:
        yield LocalStore(folder)
