"""What a service's answers mean: an error status, and a dataset's view in words."""

from __future__ import annotations

import contextlib
import http.client
import json
from dataclasses import dataclass
from typing import Any

from trainer_client import strangers
from trainer_client.errors import DatasetFailed, Lost, StreamRefused, UnknownDataset

_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked for: at which service, of which dataset, under which request id, with a token or not."""

    url: str
    dataset: str
    request_id: str
    has_token: bool


def error_of(response: http.client.HTTPResponse, body: bytes, asked: Asked) -> Exception:
    """What an error status means, as the exception to raise. It names the request."""
    problem: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        found = json.loads(body)
        problem = found if isinstance(found, dict) else {}
    kind = str(problem.get("type", "")).rpartition(":")[2]
    detail = str(problem.get("detail") or strangers.first_words(body, response.status) or response.reason)
    detail += f" (request {asked.request_id})"
    if kind == "unknown-dataset":
        return UnknownDataset(f"{asked.url}, dataset {asked.dataset[:80]!r}: {detail}")
    if kind in ("dataset-failed", "dataset-cancelled"):
        return DatasetFailed(asked.dataset, detail)
    if kind == "dataset-too-small":
        return Lost(detail)  # asked again, the dataset says how many packs it has, and that is the error
    answered = f"{asked.url} answered {response.status}"
    if kind == "dataset-damaged":
        return Lost(f"{answered}: {detail}", damaged=True)
    if response.status in _TRANSIENT:
        wait = response.getheader("Retry-After", "")
        return Lost(f"{answered}: {detail}", wait_s=min(float(wait), 30.0) if wait.isdigit() else 0.0)
    to = response.getheader("Location")
    field = f" ({problem['field']})" if problem.get("field") else ""
    return StreamRefused(f"{answered}{field}: {detail}{_hint(response.status, asked, bool(problem), to)}")


def _hint(status: int, asked: Asked, is_problem: bool, redirects_to: str | None) -> str:
    """What to do about a refusal, where that is known."""
    if status == 401:
        if asked.has_token:
            return "; the token that was given (token=, or PADFREE_TOKEN) is none of the service's"
        return (
            "; give token=, or set PADFREE_TOKEN in the trainer's environment, to one of the service's tokens"
        )
    if redirects_to and 300 <= status < 400:
        to = redirects_to.partition("/v1/")[0]
        return f"; it redirects to {to[:200]}, which is not followed: give the url of the service itself"
    if status == 404 and (hint := strangers.without_v1(asked.url)):
        return f"; {hint}"
    return "" if is_problem else "; is this the url of a padfree service?"


def strategy_of(view: dict[str, Any]) -> str | None:
    """The packing strategy in a dataset's view."""
    return ((view.get("spec") or {}).get("packing") or {}).get("strategy")


def reason_of(view: dict[str, Any]) -> str:
    """Why the dataset of a view failed."""
    error = view.get("error")
    if isinstance(error, dict):
        error = error.get("detail") or error.get("title")
    return str(error or view.get("state"))
