"""Other loaders on the same packed rows: each writes them in its own format, then reads them from local
files, one pack a step, as numpy or torch arrays. None of these crosses a network here.

Those that have a format of their own store the arrays that a trainer takes, finished: labels too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from loaders.taking import ARRAYS, Taker

from packer.shard import labels, read_packs


def _row(pack: Any) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(getattr(pack, name)) for name in ARRAYS}


def _counted(rows: Iterable[Any], since: float, cpu: float) -> dict[str, Any]:
    first, taker = 0.0, Taker()
    for row in rows:
        taker.take(row["input_ids"], row["labels"], row["position_ids"], row["cu_seqlens"])
        first = first or time.perf_counter() - since
    return {
        "tokens": taker.num_tokens,
        "seconds": time.perf_counter() - since,
        "first_batch_s": first,
        "cpu_s": _cpu_s() - cpu,
    }


def _cpu_s() -> float:
    """Of this process and all it started, ended or not."""
    import psutil

    me = psutil.Process()
    times = [me.cpu_times()]
    for child in me.children(recursive=True):
        try:
            times.append(child.cpu_times())
        except psutil.Error:
            continue
    own = sum(one.user + one.system for one in times)
    return own + times[0].children_user + times[0].children_system


def datasets(shards: list[str], work: str) -> dict[str, Any]:
    """Hugging Face datasets, streaming the shard files themselves; labels are made here, as padfree's are."""
    from datasets import load_dataset

    names = ["input_ids", "position_ids", "loss_mask", "cu_seqlens"]

    since, cpu = time.perf_counter(), _cpu_s()
    stream = load_dataset("arrow", data_files=shards, split="train", streaming=True)
    rows = stream.select_columns(names).with_format("numpy")
    whole = ({**row, "labels": labels(row["input_ids"], row["loss_mask"])} for row in rows)
    return _counted(whole, since, cpu)


def ray_data(shards: list[str], work: str) -> dict[str, Any]:
    """Ray Data: Parquet of the same rows, streaming_split."""
    folder = Path(work) / "parquet"
    folder.mkdir(exist_ok=True)
    for shard in shards:
        rows = [_row(pack) for pack in read_packs(Path(shard).read_bytes())]
        table = pa.table({name: [row[name] for row in rows] for name in ARRAYS})
        pa.parquet.write_table(table, folder / (Path(shard).stem + ".parquet"), compression="lz4")
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    import ray

    ray.init(num_cpus=2, logging_level="ERROR", log_to_driver=False)
    since, cpu = time.perf_counter(), _cpu_s()
    (only,) = ray.data.read_parquet(str(folder)).streaming_split(1)
    batches = only.iter_batches(batch_size=1, batch_format="numpy")
    found = _counted(({name: batch[name][0] for name in ARRAYS} for batch in batches), since, cpu)
    ray.shutdown()
    return found


def mosaicml(shards: list[str], work: str) -> dict[str, Any]:
    """MosaicML streaming: MDS of the same arrays."""
    from streaming import MDSWriter, StreamingDataset

    folder = Path(work) / "mds"
    with MDSWriter(out=str(folder), columns=dict.fromkeys(ARRAYS, "ndarray:int32")) as out:
        for shard in shards:
            for pack in read_packs(Path(shard).read_bytes()):
                out.write(_row(pack))
    since, cpu = time.perf_counter(), _cpu_s()
    return _counted(StreamingDataset(local=str(folder), shuffle=False, batch_size=1), since, cpu)


def _litdata_rows(shard: str) -> Any:
    for pack in read_packs(Path(shard).read_bytes()):
        yield _row(pack)


def litdata(shards: list[str], work: str) -> dict[str, Any]:
    """LitData: its chunks of the same arrays."""
    from litdata import StreamingDataset, optimize

    folder = Path(work) / "litdata"
    optimize(fn=_litdata_rows, inputs=shards, output_dir=str(folder), chunk_bytes="64MB", num_workers=1)
    since, cpu = time.perf_counter(), _cpu_s()
    return _counted(StreamingDataset(str(folder), shuffle=False), since, cpu)


READERS: dict[str, Callable[..., dict[str, Any]]] = {
    one.__name__: one for one in (datasets, ray_data, mosaicml, litdata)
}
