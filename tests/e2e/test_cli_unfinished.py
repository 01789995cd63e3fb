"""What the command line says of a dataset at a service that is not ready."""

from __future__ import annotations

from typing import Any

import pytest

from padfree.cli import common, main, pack

DATASET = "82" * 16
SPEC = {
    "tokenizer": None,
    "source": {"paths": ["rows.jsonl"], "format": "text"},
    "loss": "all",
    "shuffle_seed": 0,
    "packing": {"max_tokens": 8},
}


def view(state: str, error: Any = None) -> dict[str, Any]:
    at = {"partitions_committed": 1, "num_partitions": 4, "num_packs": 1200}
    return {"id": DATASET, "state": state, "progress": at, "report": None, "error": error, "spec": SPEC}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            view("failed", {"title": "BadRow", "detail": "rows.jsonl, line 3: no text", "field": None}),
            f"dataset {DATASET} failed: rows.jsonl, line 3: no text",
        ),
        (view("packing"), f"dataset {DATASET} is packing: 1 of 4 partitions, 1,200 packs"),
    ],
)
def test_inspect_says_in_words_why_a_dataset_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(common, "request", lambda *_, **__: found)
    assert main(["inspect", DATASET, "--url", "http://localhost:1"]) == 0  # it was asked, and it answers
    assert capsys.readouterr().out.splitlines()[0] == said


def test_who_stops_waiting_is_told_that_the_service_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(common, "request", lambda *_, **__: view("packing"))
    monkeypatch.setattr(pack.time, "sleep", interrupted)
    assert main(["pack", "rows.jsonl", "--url", "http://localhost:1"]) == 130
    said = capsys.readouterr().err
    assert f"the service goes on packing dataset {DATASET}" in said
    assert f"--remove {DATASET}" in said
