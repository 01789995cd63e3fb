"""Paths may name a dataset by its name, or by the beginning of its id: /v1/datasets/gsm8k-8k/stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from packer.names import AmbiguousName, UnknownName, is_id
from service import problems

_PREFIX = "/v1/datasets/"


class DatasetNames:
    """Puts the id in place of what a path calls a dataset, so that every route knows ids alone.

    What nobody is called is left as it is: the route answers that it is unknown.
    """

    def __init__(
        self, app: ASGIApp, *, find: Callable[[str], Awaitable[str]], routes: Sequence[BaseRoute]
    ) -> None:
        self._app, self._find, self._routes = app, find, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_PREFIX):
            given, slash, rest = scope["path"].removeprefix(_PREFIX).partition("/")
            # What is posted right below /v1/datasets is no dataset: /v1/datasets/preview.
            is_dataset = bool(given) and (slash or scope["method"] != "POST")
            if is_dataset and not is_id(given):
                try:
                    scope["path"] = f"{_PREFIX}{await self._find(given)}{slash}{rest}"
                except UnknownName:
                    pass
                except AmbiguousName as error:
                    self._note_route(scope)
                    await problems.ambiguous_dataset(str(error)).response()(scope, receive, send)
                    return
                except OSError as error:
                    self._note_route(scope)
                    await problems.from_store_error(error).response()(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _note_route(self, scope: Scope) -> None:
        """Tell which route the request was for, to be counted under: it is answered before it gets there."""
        for route in self._routes:
            if route.matches(scope)[0] is Match.FULL:
                scope["route"] = route
                return
