"""Packing files anew against repacking the dataset that is there, on one core.

    python benchmarks/repack.py
    python benchmarks/repack.py --source DATA/flan_like.jsonl.gz --tokenizer package/models --megabytes 100

The rows of --source (prompt and completion) are repeated up to --megabytes and packed at --first max_tokens
with shuffle_seed 0. Then, each in a process of its own that is bound to one core, at --max-tokens: from the
files with the `fast` extra and without, and from the dataset with the same seed, another, and none. CPU
seconds are of that process, without imports and without loading the tokenizer. Prints Markdown.
"""

from __future__ import annotations

import gzip
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import children  # noqa: E402

WAYS = {
    "fast": ("from files, `fast`", 0),
    "plain": ("from files, without `fast`", 0),
    "same": ("from the dataset, same seed", 0),
    "other": ("from the dataset, another seed", 1),
    "none": ("from the dataset, source order", None),
}


def write_source(source: Path, num_bytes: int, path: Path) -> None:
    """Lines of `source` again and again, up to `num_bytes`."""
    with gzip.open(source, "rb") if source.suffix == ".gz" else source.open("rb") as file:
        lines = file.readlines()
    size = 0
    with path.open("wb") as out:
        for line in itertools.cycle(lines):
            if size >= num_bytes:
                return
            out.write(line)
            size += len(line)


def run_child(options: dict[str, Any]) -> dict[str, Any]:
    from packer import rows
    from packer.coordinator import pack
    from packer.resolve import resolve
    from packer.runners import InlineRunner
    from packer.sources import is_packed
    from packer.spec import parse_spec
    from packer.store import LocalStore

    store = LocalStore(options["store"])
    job = resolve(parse_spec(options["spec"]), store=store)
    if not is_packed(job.inputs):
        tokenizer = rows.renderer_of(job, store).tokenizer
        assert tokenizer is not None
        tokenizer.encode(["word " * (1 << 17)])  # loads `fast`
    cpu, wall = time.process_time(), time.monotonic()
    report = pack(job, store, InlineRunner())
    return {
        "dataset": job.dataset,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.monotonic() - wall,
        "peak_mib": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024,
        **{name: report[name] for name in ("rows_packed", "tokens_packed", "num_packs", "fill")},
    }


def measured(store: str, spec: dict[str, Any], core: int, *, fast: bool = True) -> dict[str, Any]:
    """One packing in a process of its own."""
    environ = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PADFREE_FAST": str(int(fast))}
    return children.measured(__file__, {"store": store, "spec": spec}, core=core, **environ)


def main() -> None:
    parser = children.parser_of(__doc__)
    shared = ROOT.parent / "shared" / "data" / "flan_like.jsonl.gz"
    example = ROOT / "examples" / "data" / "gsm8k_1000.jsonl"
    parser.add_argument("--source", type=Path, default=shared if shared.is_file() else example)
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument("--first", type=int, default=8192, help="max_tokens of the dataset that is repacked")
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=tuple(WAYS))
    parser.add_argument("--core", type=int, default=0)
    options = children.parsed(parser, run_child)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        rows = Path(folder) / "rows.jsonl"
        write_source(options.source, int(options.megabytes * 1e6), rows)
        files = {"source": {"paths": [str(rows)]}, "tokenizer": {"path": str(options.tokenizer.absolute())}}
        store, layout = f"{folder}/store", {"packing": {"max_tokens": options.max_tokens}}
        first = measured(store, {**files, "packing": {"max_tokens": options.first}}, options.core)
        packed = {"source": {"paths": [f"dataset://{first['dataset']}"]}}
        print("| way | rows | Mtokens | packs | CPU s | wall s | Mtokens/s | fill | peak MiB |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for way in options.ways:
            name, seed = WAYS[way]
            from_files = way in ("fast", "plain")
            # A store of its own: the fast encoder and the reference give the same dataset.
            where = f"{folder}/{way}" if from_files else store
            source = files if from_files else packed
            spec = {**source, **layout, "shuffle_seed": seed}
            found = measured(where, spec, options.core, fast=way != "plain")
            print(
                f"| {name} | {found['rows_packed']:,} | {found['tokens_packed'] / 1e6:.1f} | "
                f"{found['num_packs']:,} | {found['cpu_s']:.2f} | {found['wall_s']:.2f} | "
                f"{found['tokens_packed'] / found['cpu_s'] / 1e6:.2f} | {found['fill']:.4f} | "
                f"{found['peak_mib']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
