"""Every query of the dashboard and every alert, by a real Prometheus that scrapes a real service.

Ray's own metrics (`ray_…`) are asked for too, but only tests/deploy/test_compose.py has a cluster that
exports them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from serving import Server, free_port, running, wait_for

from packer.runners import InlineRunner
from trainer_client import PackedStream

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/padfree.json").read_text())

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no `prometheus` command"),
]


class Prometheus:
    """A running one, by its HTTP API."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, what: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.loads(answer.read())
        assert found["status"] == "success"
        return found["data"]

    def value(self, query: str) -> float | None:
        result = self.ask("query", query=query)["result"]
        return float(result[0]["value"][1]) if result else None

    def wait_for_scrapes(self) -> None:
        """What the service counts now was scraped, twice."""
        scrapes = "count_over_time(up[10m])"
        seen = self.value(scrapes) or 0
        wait_for(lambda: (self.value(scrapes) or 0) >= seen + 3)  # the first may have begun before


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """deploy/prometheus with one target, quicker."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    config["scrape_configs"] = [{"job_name": "padfree", "static_configs": [{"targets": [target]}]}]
    path, port = folder / "prometheus.yml", free_port()
    path.write_text(yaml.safe_dump(config))
    command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        server = Prometheus(port)
        wait_for(lambda: process.poll() is not None or _scrapes(server))
        assert process.poll() is None
        yield server
    finally:
        process.terminate()
        process.wait(30)


def _scrapes(server: Prometheus) -> bool:
    try:
        return server.value('up{job="padfree"}') == 1
    except OSError:
        return False


def _queries() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for one in panel.get("targets", []):
            yield panel["title"], one["expr"].replace("$__rate_interval", "1m")


def _pack(server: Server, folder: Path, name: str) -> str:
    row = json.dumps({"input_ids": [1, 2, *name.encode()]})  # the same content would be the same dataset
    (folder / f"{name}.jsonl").write_text(f"{row}\n" * 500 + '{"input_ids": []}\n')
    spec = {"name": name, "source": {"paths": [f"{name}.jsonl"]}, "packing": {"max_tokens": 64}}
    answer = server.post_spec(spec)
    assert answer.status == 202, answer.body
    dataset: str = answer.json["id"]
    server.wait_for_state(dataset, "ready")
    return dataset


def test_dashboard_and_alerts_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where sources are looked for
    with (
        running(tmp_path / "store", runner=InlineRunner(), data_roots=(tmp_path,)) as server,
        prometheus(tmp_path, f"127.0.0.1:{server.port}") as asked,
    ):
        first = _pack(server, tmp_path, "first")
        with PackedStream(server.url, dataset=first, epochs=None, report_s=0.2) as stream:
            batches = iter(stream)
            # All is done twice: a rate needs a value to rise from.
            for name in ("second", "third"):
                for _ in range(50):
                    next(batches)
                _pack(server, tmp_path, name)
                server.get("/v1/datasets/none")
                asked.wait_for_scrapes()
            empty = [
                (title, query)
                for title, query in _queries()
                if "ray_" not in query and not asked.ask("query", query=query)["result"]
            ]
            assert empty == []
        for what in (
            "sum(rate(padfree_packed_tokens_total[1m]))",
            "sum(rate(padfree_packed_bytes_total[1m]))",
            "sum(rate(padfree_served_bytes_total[1m]))",
            "sum(rate(padfree_client_steps_total[5m]))",
            "sum(rate(padfree_client_seconds_total[5m]))",
        ):
            assert (asked.value(what) or 0.0) > 0, what
        for _, query in _queries():
            asked.ask("query", query=query)  # Ray's too: they are well formed
        rules = [rule for group in asked.ask("rules")["groups"] for rule in group["rules"]]
        assert len(rules) > 10
        assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
