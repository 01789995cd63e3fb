"""Read sources as the pipeline does, for tests."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packer.sources import (
    Location,
    Partition,
    RowError,
    cut,
    detect_format,
    index_input,
    read_partition,
    resolve_inputs,
)
from packer.spec import Format, SourceSpec
from packer.store import LocalStore


@dataclass
class Read:
    """All that came out of a source."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    locations: list[Location] = field(default_factory=list)
    errors: list[RowError] = field(default_factory=list)
    ignored: tuple[str, ...] = ()
    digests: list[str] = field(default_factory=list)  # of the inputs
    partitions: list[Partition] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        return [row["text"] for row in self.rows]


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}


def read_source(
    paths: Sequence[Path | str] | Path | str,
    work: Path,
    *,
    seed: int | None = None,
    format: Format = "auto",
    fields: Mapping[str, str] | None = None,
    roots: Sequence[Path] | None = None,
    cutting: Mapping[str, int] | None = None,
    on_bad_row: Literal["fail", "skip"] = "fail",
    **limits: int,
) -> Read:
    """Read `paths` through every step; what passes between them is pickled, as between processes."""
    paths = [paths] if isinstance(paths, str | Path) else paths
    names = tuple(map(str, paths))
    inputs, ignored = resolve_inputs(names, roots=roots)
    spec = SourceSpec(paths=names, format=format, fields=fields or {}, on_bad_row=on_bad_row)
    full = detect_format(inputs, spec).fields
    store = LocalStore(work)
    indexes = [
        index_input(one, store=store, work_key="work", random_access=seed is not None, fields=full, **limits)
        for one in inputs
    ]
    out = Read(ignored=ignored, digests=[one.digest for one in inputs])
    out.partitions = cut(pickle.loads(pickle.dumps(indexes)), shuffle_seed=seed, **(cutting or {}))
    row_limit = {"max_row_bytes": limits["max_row_bytes"]} if "max_row_bytes" in limits else {}
    for partition in pickle.loads(pickle.dumps(out.partitions)):
        before = len(out.rows) + len(out.errors)
        for records in read_partition(partition, store=store, fields=full, **row_limit):
            out.rows += map(_plain, records.rows)
            out.ids += records.example_ids.tolist()
            out.locations += records.locations
            out.errors += records.errors
            assert len(records.rows) == len(records.example_ids) == len(records.locations)
        assert len(out.rows) + len(out.errors) - before == partition.stop - partition.start
    return out


def lines(*texts: str) -> bytes:
    """A JSON Lines file of texts."""
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def parquet(*texts: str) -> bytes:
    """A Parquet file of texts."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts)}), sink)
    return sink.getvalue()
