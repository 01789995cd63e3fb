"""hf:// datasets, offline: built from a local folder, and found in the cache of `datasets`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# A process of its own: the library reads its environment when it is imported.
SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tests")
from reading import read_source
from packer.sources import SourceError

work, calls = sys.argv[1:]
for url, seed, roots in json.loads(calls):
    try:
        out = read_source(url, Path(work), seed=seed, roots=[Path(roots)] if roots else None)
        print(json.dumps({"rows": out.rows, "ids": out.ids, "errors": len(out.errors)}))
    except SourceError as error:
        print(json.dumps({"refused": str(error)}))
"""


def read(tmp_path: Path, *calls: tuple[str, int | None, str]) -> list[dict[str, Any]]:
    """Read each (url, seed, root) in one process."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), json.dumps(calls)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "gsm"
    folder.mkdir()
    for split, rows in (("train", 25), ("test", 3)):
        lines = [json.dumps({"question": f"{split} {i}", "answer": str(i)}) for i in range(rows)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


ROWS = [{"prompt": f"train {i}", "completion": str(i)} for i in range(25)]


def test_a_local_builder_gives_its_split(tmp_path: Path, folder: Path) -> None:
    plain, shuffled, test, none = read(
        tmp_path,
        (f"hf://{folder}?split=train", None, ""),
        (f"hf://{folder}", 3, ""),
        (f"hf://{folder}?split=test", None, ""),
        (f"hf://{folder}?split=none", None, ""),
    )
    assert plain["rows"] == ROWS
    assert sorted(shuffled["ids"]) == list(range(25)) != shuffled["ids"]
    assert len(test["rows"]) == 3
    assert "none" in none["refused"]
    assert "train" in none["refused"]


def test_a_dataset_in_the_cache_is_read_offline(tmp_path: Path, folder: Path) -> None:
    read(tmp_path, (f"hf://{folder}", None, ""))  # prepared once, then moved to where a Hub dataset is kept
    cache = tmp_path / "hf" / "datasets"
    shutil.move(cache / "gsm", cache / "owner___gsm")
    cached, unknown, around = read(
        tmp_path,
        ("hf://owner/gsm?split=train", None, str(tmp_path)),
        ("hf://owner/unknown", None, ""),
        (f"hf://{folder}", None, str(tmp_path)),
    )
    assert cached.get("rows") == ROWS, cached
    assert unknown["refused"].startswith("hf://owner/unknown: `datasets` could not prepare it")
    # A service keeps to its folders: no way round them by the library's own local datasets.
    assert "local path" in around["refused"]
