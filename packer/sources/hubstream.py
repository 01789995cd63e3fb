"""A split of a Hub dataset as `datasets` streams it: nothing is downloaded as a whole, nothing prepared.

    hf://REPO?config=&split=&revision=&streaming=true

The library's order of a split is that of its files, one after another. Each is an input of its own,
`…&shard=2-of-3`, so that workers read several at once; the rows pass through once, into a spool of the fields
in use. Memory is bounded by what the library holds: a row group of Parquet, or some MB.

Identity. Nothing is read before it is packed, so there is no digest of the content: it is the names of the
split's files with what the Hub says of them (repo and commit, or etag), and the reader's options. Files of
this machine have a digest of their content. The commit that a branch stands for is looked up once, and kept.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from packer.sources import tabular
from packer.sources.hub import HubName, open_builder, parse_hub, unprepared
from packer.sources.identity import content_digests
from packer.sources.streams import changed
from packer.sources.values import SourceError
from packer.spec import InputFile

READER = "hub"  # InputFile.reader
_BATCH_ROWS = 128
_SHARD = re.compile(r"&shard=(\d+)-of-(\d+)$")
_COMMIT = re.compile(r"hf://datasets/[^@]+@([0-9a-f]{40})/")


def resolve_stream(name: HubName, *, local: bool) -> list[InputFile]:
    """The files of a split as inputs, in order. Raises SourceError."""
    digest, num_shards, commit = _about(name, local)
    options = {
        "config": name.config,
        "split": name.split,
        "revision": commit or name.revision,
        "streaming": "true",
    }
    query = urllib.parse.urlencode({key: value for key, value in options.items() if value is not None})
    return [
        InputFile(
            path=f"hf://{name.repo}?{query}&shard={number + 1}-of-{num_shards}",
            num_bytes=0,  # which nobody has told
            digest=_shard_digest(digest, number, num_shards),
            reader=READER,
        )
        for number in range(num_shards)
    ]


def check_stream(input: InputFile) -> None:
    """Raise SourceError where the split is not what was resolved."""
    name, number, _ = _parse(input)
    digest, num_shards, _ = _about(name, True)
    if _shard_digest(digest, number, num_shards) != input.digest:
        raise changed(input, "its files, or their versions, are others than when the dataset was posted")


def stream_rows(
    input: InputFile,
    columns_of: Callable[[pa.Schema], list[str]] = lambda schema: schema.names,
    rows: Callable[[pa.RecordBatch], tabular.Rows] = tabular.rows_of,
) -> Iterator[tabular.Rows]:
    """The rows of one file of a split, in order, as `rows` makes them of a batch; columns_of: the columns to
    take, all if not given."""
    name, number, num_shards = _parse(input)
    try:
        dataset = _open(name, True)[1].with_format("arrow").shard(num_shards, number)
        # Of a whole Parquet file Arrow's scanner reads ahead until it holds 1 GiB; of a row group no more.
        dataset = dataset.reshard() if hasattr(dataset, "reshard") else dataset
        for table in dataset.iter(batch_size=_BATCH_ROWS):
            for batch in table.select(columns_of(table.schema)).to_batches():
                yield rows(batch)
    except SourceError:
        raise
    except Exception as error:  # the library raises many kinds
        raise unprepared(name, error) from error


def _parse(input: InputFile) -> tuple[HubName, int, int]:
    """The name of a split, which of its files this is (from 0), and of how many."""
    found = _SHARD.search(input.path)
    assert found is not None, input.path  # made by resolve_stream
    name = parse_hub(input.path[: found.start()], local=True)
    return name, int(found[1]) - 1, int(found[2])


def _shard_digest(digest: str, number: int, num_shards: int) -> str:
    return hashlib.sha256(f"{digest} {number} {num_shards}".encode()).hexdigest()


def _open(name: HubName, local: bool) -> tuple[Any, Any]:
    """The builder and the stream of a split."""
    builder = open_builder(name, local=local)
    try:
        return builder, builder.as_streaming_dataset(split=name.split)
    except Exception as error:  # as above
        raise unprepared(name, error) from error


@functools.lru_cache(maxsize=8)  # asked again for each file of a split; within a process nothing changes
def _about(name: HubName, local: bool) -> tuple[str, int, str | None]:
    """What identifies a split, of how many files it is, and the commit of its repo, if it has one."""
    builder, dataset = _open(name, local)
    config = {
        field.name: repr(getattr(builder.config, field.name))
        for field in dataclasses.fields(builder.config)
        if field.name not in ("data_files", "data_dir", "name")
    }
    files = (getattr(builder.config, "data_files", None) or {}).get(name.split)
    if files is None:  # in the cache of `datasets`: its fingerprint is in the folder's name
        known: list[Any] = [builder.hash]
    elif all(os.path.isfile(file) for file in files):
        known = content_digests([(file, os.path.getsize(file)) for file in files])
    else:
        known = [[str(file) for file in files], list(files.origin_metadata)]
    commit = _COMMIT.match(str(files[0])) if files else None
    about = json.dumps([config, name.split, known], sort_keys=True)
    return hashlib.sha256(about.encode()).hexdigest(), dataset.num_shards, commit[1] if commit else None
