"""Who may call: bearer tokens. And that a call's query holds nothing unknown."""

from __future__ import annotations

import difflib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service import problems


class BearerTokens:
    """Lets requests to /v1 through that carry one of the tokens. Others get 401 before anything is read."""

    def __init__(self, app: ASGIApp, *, tokens: Sequence[str]) -> None:
        self._app = app
        self._tokens = [token.encode() for token in tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or not self._tokens or not _is_guarded(scope["path"])
        if is_open or self._is_known(Headers(scope=scope).get("authorization", "")):
            await self._app(scope, receive, send)
        else:
            await problems.unauthorized().response()(scope, receive, send)

    def _is_known(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return False
        # All are compared, each in constant time: the time tells nothing about any of them.
        known = [hmac.compare_digest(given.strip().encode(), token) for token in self._tokens]
        return any(known)


def _is_guarded(path: str) -> bool:
    return path == "/v1" or path.startswith("/v1/")


async def known_parameters_only(request: Request) -> None:
    """Refuse a query parameter that the route does not have, or has twice (a FastAPI dependency).

    A misspelt `world_size` that was passed over would give every rank all of the data.
    """
    known = [one.alias for one in request.scope["route"].dependant.query_params]
    seen: set[str] = set()
    for name in (name for name, _ in request.query_params.multi_items()):
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
            raise problems.bad_parameter(name[:60], f"there is no such parameter; {hint}")
        if name in seen:
            raise problems.bad_parameter(name, "one value is required, found several")
        seen.add(name)
