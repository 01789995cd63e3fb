"""What ready ids cost in Python does not grow with the number of tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packing_job import spec_of

from packer.coordinator import pack
from packer.resolve import resolve
from packer.runners import InlineRunner
from packer.spec import parse_spec
from packer.store import LocalStore


def num_calls(source: Path, work: Path) -> int:
    """Python's and C's functions that are called to pack a source of ready ids."""
    store = LocalStore(work)
    job = resolve(parse_spec(spec_of(source, None, packing={"max_tokens": 1 << 17})), store=store)
    count = 0

    def profile(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(profile)
    try:
        report = pack(job, store, InlineRunner())
    finally:
        sys.setprofile(None)
    assert report["rows_packed"] == 50
    return count


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_f49_ready_ids_are_no_python_objects_on_their_way_to_shards(tmp_path: Path, form: str) -> None:
    counts = []
    for length in (1_000, 1_000, 16_000):  # the first one warms up what is made once
        ids = np.arange(length) % 50_000
        rows: list[dict[str, Any]] = [{"input_ids": ids.tolist(), "labels": ids.tolist()}] * 50
        path = tmp_path / f"{len(counts)}.{form}"
        if form == "jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        else:
            pq.write_table(pa.table({name: [ids] * 50 for name in rows[0]}), path)
        counts.append(num_calls(path, tmp_path / f"store-{len(counts)}"))
    # 1.5 million numbers more. What grows: pieces of a file, batches, packs; some calls each.
    assert counts[2] < counts[1] + 50_000
