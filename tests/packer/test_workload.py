"""Whether Ray's start pays goes by the work there is: bytes, tokenizer, format and cores."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import toy
from packing_job import spec_of, write_rows, write_tokenizer

from packer import workload
from packer.resolve import resolve
from packer.runners import InlineRunner
from packer.spec import Job, parse_spec
from packer.store import LocalStore
from packer.workload import ray_pays, work_seconds
from padfree.cli import pack

MB = 1_000_000
TEXT, CHAT = {"text": "a b"}, toy.chat(("user", "a"), ("assistant", "b"))
IDS = {"input_ids": [4, 5]}


def job_of(tmp_path: Path, row: dict[str, Any], num_bytes: int, **more: Any) -> tuple[Job, LocalStore]:
    """A job of one file that claims to be so large."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer", toy.byte_level_bundle())
    store = LocalStore(tmp_path / "store")
    job = resolve(parse_spec(spec_of(write_rows(tmp_path / "rows.jsonl", [row]), tokenizer)), store=store)
    return dataclasses.replace(
        job, inputs=(dataclasses.replace(job.inputs[0], num_bytes=num_bytes, **more),)
    ), store


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PADFREE_FAST", raising=False)
    monkeypatch.setattr(workload.importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("row", "num_bytes", "switch", "pays"),
    [
        (TEXT, 43 * MB, "1", False),
        (TEXT, 2000 * MB, "1", True),
        (TEXT, 43 * MB, "0", False),
        (TEXT, 100 * MB, "0", True),
        (CHAT, 100 * MB, "1", False),
        (CHAT, 400 * MB, "1", True),
        (IDS, 1000 * MB, "1", False),
    ],
)
def test_it_pays_where_there_is_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row: dict[str, Any],
    num_bytes: int,
    switch: str,
    pays: bool,
) -> None:
    monkeypatch.setenv("PADFREE_FAST", switch)
    job, store = job_of(tmp_path, row, num_bytes)
    assert ray_pays(job, store, num_cpus=2) is pays
    assert ray_pays(job, store, num_cpus=1) is False


def test_more_cores_pay_sooner_and_compressed_bytes_are_more_work(tmp_path: Path) -> None:
    job, store = job_of(tmp_path, TEXT, 300 * MB)
    assert not ray_pays(job, store, num_cpus=2)
    assert ray_pays(job, store, num_cpus=16)
    packed, _ = job_of(tmp_path, TEXT, 300 * MB, compression="zstd")
    assert work_seconds(packed, store) == 3 * work_seconds(job, store)


def test_the_command_line_goes_by_it_where_nothing_is_said(tmp_path: Path) -> None:
    job, store = job_of(tmp_path, TEXT, 43 * MB)
    assert isinstance(pack._runner(argparse.Namespace(ray=None, workers=None), job, store), InlineRunner)
    assert isinstance(pack._runner(argparse.Namespace(ray=None, workers=0), job, store), InlineRunner)
