"""POST /v1/datasets/{id}/streams: what clients tell of how their training loops fare, for /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from service import problems
from service.auth import known_parameters_only
from service.requests import read_body
from service.state import Service, service_of

_MAX_BYTES = 4096
_MAX_S = 86_400.0
_SLACK_S = 1.0  # a client reads its two clocks one after the other

router = APIRouter(prefix="/v1", tags=["stream"])


class StreamReport(BaseModel):
    """What one rank's loop counted since its last report that arrived."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    rank: int = Field(ge=0, le=1 << 20)
    steps: int = Field(ge=0, le=1 << 32, description="Batches taken")
    elapsed_s: float = Field(ge=0, le=_MAX_S, description="Seconds from the first batch to the last")
    stall_s: float = Field(
        ge=0, le=_MAX_S, description="Seconds of these in which the loop waited for a batch"
    )
    retries: int = Field(
        0, ge=0, le=1 << 32, description="Times that the stream was opened again after a fault"
    )


@router.post(
    "/datasets/{dataset}/streams",
    status_code=204,
    response_class=Response,
    responses=problems.documented(401, 404, 409, 413, 422),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": StreamReport.model_json_schema()}},
        }
    },
    dependencies=[Depends(known_parameters_only)],
)
async def report_stream(
    request: Request,
    dataset: str,
    service: Service = Depends(service_of),  # noqa: B008
) -> Response:
    """A client's report; it is counted in /metrics and kept nowhere."""
    await service.feeds.get(dataset)
    body = await read_body(request, _MAX_BYTES)
    try:
        report = StreamReport.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "body"
        raise problems.bad_parameter(name, str(first["msg"]).lower()) from error
    if report.stall_s > report.elapsed_s + _SLACK_S:
        raise problems.bad_parameter(
            "stall_s",
            f"seconds of elapsed_s ({report.elapsed_s:g}) are required, found {report.stall_s:g}: more",
        )
    service.metrics.clients.add(
        dataset,
        report.rank,
        steps=report.steps,
        elapsed_s=report.elapsed_s,
        stall_s=report.stall_s,
        retries=report.retries,
    )
    return Response(status_code=204)
