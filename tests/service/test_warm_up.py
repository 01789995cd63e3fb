"""What a server does before its first request, so that this one need not wait for it."""

import asyncio

import fastapi.routing
import pytest
from packs import build_dataset, numbered_packs

from service import app as service_app
from service.settings import Settings


async def ask(app, path):
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    sent = []

    async def receive():
        await asyncio.sleep(60 if sent else 0)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    await app({**scope, "http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send)
    return sent[0]["status"]


@pytest.mark.parametrize("is_warm", [True, False])
def test_routes_are_ready_before_the_first_request(tmp_path, monkeypatch, is_warm):
    dataset = build_dataset(tmp_path, numbered_packs(4), packs_per_shard=2)
    app = service_app.create_app(Settings.from_environment({}, store=tmp_path), None)
    if is_warm:
        service_app.warm_up(app)
    made = []
    make = fastapi.routing.get_dependant
    monkeypatch.setattr(fastapi.routing, "get_dependant", lambda **of: made.append(of["path"]) or make(**of))
    for path in ("/healthz", "/v1/datasets", f"/v1/datasets/{dataset}/stream"):
        assert asyncio.run(ask(app, path)) == 200
    assert bool(made) != is_warm
