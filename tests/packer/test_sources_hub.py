"""hf:// datasets, offline: built from a local folder, and found in the cache of `datasets`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A process of its own: the library reads its environment when it is imported.
SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tests")
from reading import read_source
from packer.sources import SourceError

url, work, seed, roots = sys.argv[1:]
try:
    out = read_source(
        url, Path(work), seed=json.loads(seed), roots=[Path(roots)] if roots else None
    )
    print(json.dumps({"rows": out.rows, "ids": out.ids, "errors": len(out.errors)}))
except SourceError as error:
    print(json.dumps({"refused": str(error)}))
"""


def read(tmp_path: Path, url: str, *, seed: int | None = None, roots: str = "") -> dict:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, url, str(tmp_path / "store"), json.dumps(seed), roots],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "gsm"
    folder.mkdir()
    for split, rows in (("train", 25), ("test", 3)):
        lines = [json.dumps({"question": f"{split} {i}", "answer": str(i)}) for i in range(rows)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


def test_a_local_builder_gives_its_split(tmp_path: Path, folder: Path) -> None:
    out = read(tmp_path, f"hf://{folder}?split=train")
    assert out["rows"] == [{"prompt": f"train {i}", "completion": str(i)} for i in range(25)]
    shuffled = read(tmp_path, f"hf://{folder}", seed=3)
    assert sorted(shuffled["ids"]) == list(range(25)) != shuffled["ids"]
    assert len(read(tmp_path, f"hf://{folder}?split=test")["rows"]) == 3
    refused = read(tmp_path, f"hf://{folder}?split=none")["refused"]
    assert "none" in refused
    assert "train" in refused


def test_a_dataset_in_the_cache_is_read_offline(tmp_path: Path, folder: Path) -> None:
    read(tmp_path, f"hf://{folder}")  # prepared once, then moved to where a Hub dataset is kept
    cache = tmp_path / "hf" / "datasets"
    shutil.move(cache / "gsm", cache / "owner___gsm")
    out = read(tmp_path, "hf://owner/gsm?split=train", roots=str(tmp_path))
    assert out.get("rows") == [{"prompt": f"train {i}", "completion": str(i)} for i in range(25)], out


def test_what_the_hub_cannot_give_is_refused_by_name(tmp_path: Path, folder: Path) -> None:
    refused = read(tmp_path, "hf://owner/unknown")["refused"]
    assert refused.startswith("hf://owner/unknown: `datasets` could not prepare it")
    # A service keeps to its folders: no way round them by the library's own local datasets.
    assert "local path" in read(tmp_path, f"hf://{folder}", roots=str(tmp_path))["refused"]
