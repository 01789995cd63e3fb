"""A service leaves the datasets alone that benchmarks/stream.py makes in its store."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from packs import numbered_packs
from serving import running, wait_for

from packer.runners import InlineRunner
from packer.store import LocalStore

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("build", ["build", "build_many"])
def test_a_service_does_not_pack_what_a_benchmark_is_making(
    build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    data = importlib.import_module("loaders.data")
    monkeypatch.setattr(data, "real_packs", lambda max_tokens: numbered_packs(4))
    commit, looks = data.write_commit, []
    with running(tmp_path, runner=InlineRunner()) as server:
        assert server.service is not None
        scheduler = server.service.scheduler
        assert scheduler is not None

        def looked_at(store: LocalStore, dataset: str, one: Any) -> None:
            scheduler._scan()
            looks.append(dataset in scheduler._queue or dataset in scheduler._running)
            commit(store, dataset, one)

        monkeypatch.setattr(data, "write_commit", looked_at)
        found = data.build(tmp_path, 8, times=3) if build == "build" else data.build_many(tmp_path, 3000)
        dataset = found if isinstance(found, str) else found[0]
        assert looks == [False] * 3
        view = wait_for(lambda: server.get(f"/v1/datasets/{dataset}").json)
        assert (view["state"], view["progress"]["partitions_committed"]) == ("ready", 3)
