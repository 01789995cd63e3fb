"""The page of the service in a real browser: what it shows of datasets, and the commands to type next."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packing_job import pack_document, spec_of, write_rows
from packs import build_dataset, numbered_packs, start_dataset
from serving import Server, running

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium")]


def shown(server: Server, folder: Path) -> str:
    """The page as it stands once its first requests are answered."""
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder}", "--virtual-time-budget=8000", f"{server.url}/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def element(page: str, name: str) -> str:
    found = re.search(rf'id="{name}"[^>]*>(.*?)</', page, flags=re.DOTALL)
    assert found, f"{name} is not on the page"
    return html.unescape(found[1])


def test_an_empty_service_tells_how_to_begin(tmp_path: Path) -> None:
    with running(tmp_path / "store") as server:
        page = shown(server, tmp_path / "browser")
        assert element(page, "health") == "ready"
        assert re.search(r'<p id="none">', page)
        assert element(page, "pack").startswith(f"padfree pack /data/rows.jsonl --url {server.url}")
        assert element(page, "stream") == f"padfree stream NAME --url {server.url}"


def test_datasets_their_progress_and_the_command_for_the_newest(tmp_path: Path) -> None:
    store = tmp_path / "store"
    dataset = build_dataset(store, numbered_packs(6), packs_per_shard=3, name="<b>math</b> it's")
    start_dataset(store, identity="waiting", name="later")
    with running(store) as server:
        page = shown(server, tmp_path / "browser")
    assert dataset[:12] in page
    assert "<progress" in page  # of the one that waits
    assert "&lt;b&gt;math" in page  # as text
    assert "<b>math" not in page
    names = ("later", r"'<b>math</b> it'\''s'")  # one of both: they are equally new
    assert element(page, "stream") in [f"padfree stream {name} --url {server.url}" for name in names]


def test_warnings_of_the_report_and_the_source_of_what_is_packed_anew(tmp_path: Path) -> None:
    store = tmp_path / "store"
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5] * size} for size in (3, 9)])
    first = pack_document(store, spec_of(rows, None, name="base", packing={"max_tokens": 8}))
    nameless = pack_document(store, spec_of(rows, None, packing={"max_tokens": 9}))
    for source in (first, nameless):
        again = spec_of([f"dataset://{source.job.dataset}"], None, packing={"max_tokens": 16})
        pack_document(store, again)
    with running(store) as server:
        page = shown(server, tmp_path / "browser")
    assert "1 of 2 rows (50%) are longer than max_tokens=8 and were cut" in html.unescape(page)
    assert ">dataset://base<" in page
    assert f">dataset://{nameless.job.dataset[:12]}<" in page
