"""hf:// datasets, offline: built from a local folder, and found in the cache of `datasets`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
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
        print(json.dumps({
            "rows": out.rows, "ids": out.ids, "errors": [error.location for error in out.errors],
            "places": list(map(str, out.locations)), "digests": out.digests,
        }))
    except SourceError as error:
        print(json.dumps({"refused": str(error)}))
"""


def read(tmp_path: Path, *calls: tuple[str, int | None, str]) -> list[dict[str, Any]]:
    """Read each (url, seed, root) in one process."""
    out = run(tmp_path, SCRIPT, str(tmp_path / "store"), json.dumps(calls))
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def run(tmp_path: Path, script: str, *arguments: str) -> str:
    """What a script prints that is run offline in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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


# ------------------------------------------------------------------ streaming


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A split of three files, 300 rows each."""
    folder = tmp_path / "many"
    folder.mkdir()
    for k in range(3):
        rows = [{"text": f"{k} {i} \u00e9", "other": i} for i in range(300)]
        (folder / f"train-{k}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_stream_gives_the_rows_of_all_files_in_order(tmp_path: Path, files: Path) -> None:
    url = f"hf://{files}?split=train&streaming=true"
    plain, shuffled, prepared, none, wrong = read(
        tmp_path,
        (url, None, ""),
        (url, 3, ""),
        (f"hf://{files}", None, ""),
        (f"{url[: -len('train&streaming=true')]}none&streaming=true", None, ""),
        (f"hf://{files}?streaming=yes", None, ""),
    )
    assert plain["rows"] == [{"text": f"{k} {i} \u00e9"} for k in range(3) for i in range(300)]
    assert plain["rows"] == prepared["rows"]
    assert plain["ids"] == list(range(900))
    assert plain["places"][300] == f"{url}&shard=2-of-3, record 1"
    assert sorted(shuffled["ids"]) == plain["ids"] != shuffled["ids"]
    assert [plain["rows"][i] for i in shuffled["ids"]] == shuffled["rows"]
    assert "none" in none["refused"]
    assert "'yes'" in wrong["refused"]
    # Nothing was prepared for the streams: the library's cache holds what the third call made.
    assert len(list((tmp_path / "hf" / "datasets").glob("many/**/*.arrow"))) == 1


def test_a_stream_is_told_by_what_its_files_hold(tmp_path: Path, files: Path) -> None:
    url = f"hf://{files}?streaming=true"
    (before,) = read(tmp_path, (url, None, ""))
    moved = files.rename(tmp_path / "moved")
    (same,) = read(tmp_path, (f"hf://{moved}?streaming=true", None, ""))
    assert same["digests"] == before["digests"]
    assert len(set(same["digests"])) == 3
    (moved / "train-1.jsonl").write_text('{"text": "x", "other": 1}\n')
    (other,) = read(tmp_path, (f"hf://{moved}?streaming=true", None, ""))
    assert not set(other["digests"]) & set(before["digests"])
    assert len(other["rows"]) == 601


def test_a_cached_dataset_streams_offline_and_a_service_keeps_to_its_folders(
    tmp_path: Path, folder: Path
) -> None:
    read(tmp_path, (f"hf://{folder}", None, ""))
    cache = tmp_path / "hf" / "datasets"
    shutil.move(cache / "gsm", cache / "owner___gsm")
    cached, around = read(
        tmp_path,
        ("hf://owner/gsm?split=train&streaming=true", None, str(tmp_path)),
        (f"hf://{folder}?streaming=true", None, str(tmp_path)),
    )
    assert cached.get("rows") == ROWS, cached
    assert "local path" in around["refused"]


def test_row_groups_stream_in_order(tmp_path: Path) -> None:
    """They are asked for one by one, of each file."""
    folder = tmp_path / "groups"
    folder.mkdir()
    for k in range(2):
        texts = [f"{k} {i}" for i in range(95)]
        pq.write_table(pa.table({"text": texts}), folder / f"train-{k}.parquet", row_group_size=10)
    (out,) = read(tmp_path, (f"hf://{folder}?streaming=true", None, ""))
    assert out["rows"] == [{"text": f"{k} {i}"} for k in range(2) for i in range(95)]
    assert len(out["digests"]) == 2


_PEAK = """
import sys
from packer.sources import cut, detect_format, index_input, read_partition, resolve_inputs
from packer.spec import SourceSpec
from packer.store import LocalStore

def stream(url, store):
    inputs, _ = resolve_inputs([url], roots=None)
    fields = detect_format(inputs, SourceSpec(paths=(url,))).fields
    options = {"store": store, "work_key": "work", "random_access": False, "fields": fields}
    rows = 0
    for partition in cut([index_input(one, **options) for one in inputs], shuffle_seed=None):
        rows += sum(len(records.rows) for records in read_partition(partition, store=store, fields=fields))
    return rows

def peak_kib():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])

store, small, large = sys.argv[1:]
stream(small, LocalStore(store + "-1"))  # the libraries, and what they keep
before = peak_kib()
rows = stream(large, LocalStore(store + "-2"))
print(rows, peak_kib() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_memory_of_a_stream_does_not_grow_with_its_rows(tmp_path: Path, form: str) -> None:
    """Four times as many rows, 240 MB more of text: at most 40 MiB more of memory.

    Both are larger than what is held of any: a block to be digested, a batch of the library.
    """
    grown = []
    for num_rows in (200, 4_000, 16_000):
        folder = tmp_path / str(num_rows)
        folder.mkdir()
        rows = [{"text": f"{i:08x} " * 2200} for i in range(num_rows)]
        if form == "jsonl":
            (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet", row_group_size=50)
        if num_rows > 200:
            urls = [f"hf://{tmp_path / name}?streaming=true" for name in ("200", str(num_rows))]
            out = run(tmp_path, _PEAK, str(tmp_path / f"store-{num_rows}"), *urls)
            found, peak_kib = map(int, out.split()[-2:])
            assert found == num_rows
            grown.append(peak_kib)
    assert grown[1] < grown[0] + (40 << 10), grown
