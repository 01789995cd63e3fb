"""Queries read without FastAPI: the same values, and what is wrong with one is still told by FastAPI."""

import asyncio
import functools
import json
import urllib.parse

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute, APIRouter
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from service import problems
from service.auth import known_parameters_only
from service.queries import PlainQueries, query_reader
from service.stream import stream

READ = query_reader(stream)
NAMES = [*READ([]), "rnak", "service", "dataset"]
TEXTS = [
    "0",
    "1",
    "64",
    "-1",
    "",
    " 3",
    "3.0",
    "x",
    "drop",
    "pad",
    "step",
    "pack",
    "none",
    "attention",
    "1_0",
]
TEXTS += [str(1 << 16), str(1 << 20), str((1 << 20) + 1), str(1 << 40), str((1 << 40) + 1), "99999999", "٣"]


@functools.wraps(stream)
async def told(request, dataset, service, **values):
    return JSONResponse({"dataset": dataset, "service": service, **values})


def app_with(route_class):
    router = APIRouter(route_class=route_class)
    router.get("/{dataset}/stream", dependencies=[Depends(known_parameters_only)])(told)
    app = FastAPI()
    app.state.padfree = "the service"
    app.include_router(router)
    problems.install(app)
    return app


async def call(app, pairs):
    query = urllib.parse.urlencode(pairs).encode()
    scope = {"type": "http", "method": "GET", "path": "/d1/stream", "query_string": query, "headers": []}
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    await app({**scope, "http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send)
    return sent[0]["status"], json.loads(b"".join(part.get("body", b"") for part in sent[1:]))


BY_FASTAPI, PLAIN = app_with(APIRoute), app_with(PlainQueries)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(TEXTS)), max_size=3))
def test_every_query_is_answered_as_fastapi_would(pairs):
    async def both():
        return await call(BY_FASTAPI, pairs), await call(PLAIN, pairs)

    by_fastapi, plain = asyncio.run(both())
    assert plain == by_fastapi
    assert (READ(pairs) is None) == (plain[0] != 200)  # what is in order never takes FastAPI's way


def test_what_a_client_asks_takes_the_short_way():
    pairs = [("rank", "3"), ("world_size", "64"), ("shuffle_seed", ""), ("batches", "pack")]
    found = READ(pairs)
    assert found == READ([]) | {"rank": 3, "world_size": 64, "shuffle_seed": None, "batches": "pack"}
