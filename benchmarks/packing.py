"""padfree's packing engines beside other packers: same lengths, same run.

    python benchmarks/packing.py                                  padfree and the textbook packers
    python benchmarks/packing.py --peer-python PEERS/bin/python   and the peers installed there
    python benchmarks/packing.py --data FOLDER                    and lengths of the JSON Lines files in it
    python benchmarks/packing.py --largest 1e8                    scale further than 10 million examples
    python benchmarks/packing.py --only scale                     one part: examples, files, million …

Peers are looked for in the interpreter of --peer-python (else in this one); what is not installed there is
left out, and the output says so. An environment for them, apart from padfree's own:

    python -m venv PEERS && PEERS/bin/pip install trl numba && PEERS/bin/pip install --no-deps axolotl

Every packer gets the same array of lengths, cut to the capacity (split) beforehand, and runs in a process of
its own. Times are CPU seconds without imports and compilation (a first call, with 1,000 lengths, is not
timed). Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PEERS = ("trl_1000", "trl_one", "axolotl", "ffd", "first_fit")
CAPACITIES = (2048, 4096, 8192, 16384, 32768)
PARTS = ("examples", "files", "million", "scale", "order")
OURS = ("window", "global")
TITLES = {
    "window": "padfree window",
    "global": "padfree global",
    "trl_1000": "TRL bfd (batches of 1,000: its default)",
    "trl_one": "TRL bfd (one batch)",
    "axolotl": "axolotl multipack",
    "ffd": "first-fit decreasing",
    "first_fit": "first fit",
}

# ------------------------------------------------------------------ lengths


def synthetic(name: str, n: int) -> np.ndarray[Any, Any]:
    """Token lengths of `n` made-up examples, (n,) int64."""
    rng = np.random.default_rng(7)
    if name == "instructions":  # short, wide: FLAN-like
        drawn = rng.lognormal(np.log(150), 0.9, n)
    elif name == "math":  # narrow
        drawn = np.clip(rng.lognormal(np.log(330), 0.35, n), 32, None)
    elif name == "text":
        drawn = rng.lognormal(np.log(600), 1.0, n)
    elif name == "chat":  # two kinds
        short = rng.lognormal(np.log(250), 0.6, n)
        drawn = np.where(rng.random(n) < 0.6, short, rng.lognormal(np.log(2200), 0.5, n))
    else:  # code: a heavy tail
        drawn = rng.lognormal(np.log(500), 1.2, n)
        drawn = np.where(rng.random(n) < 0.9, drawn, 2000 * (1 + rng.pareto(1.1, n)))
    return np.clip(drawn, 1, 1e7).astype(np.int64)


SYNTHETIC = ("instructions", "math", "text", "chat", "code")


def from_file(path: Path, n: int) -> np.ndarray[Any, Any]:
    """Lengths of the rows of a JSON Lines file, at four characters a token, drawn up to `n`."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        lengths = [_characters(json.loads(line)) // 4 + 1 for line in file if line.strip()]
    return np.random.default_rng(7).choice(np.array(lengths, np.int64), n)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(v) for k, v in value.items() if k not in ("source", "task", "license", "path"))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def split(lengths: np.ndarray[Any, Any], capacity: int) -> np.ndarray[Any, Any]:
    """Lengths of the pieces, none over `capacity`; as many as there were lengths."""
    from packer.packing.overlong import cut
    from packer.packing.values import Capacity

    whole = Capacity(max_tokens=capacity)
    return cut(lengths, whole, overlong="split", truncate_side="right", min_piece=1).length[: len(lengths)]


# ------------------------------------------------------------------ packers (in a child process)


class _Rooms:
    """A segment tree over the room of each pack: the first pack with room enough, in O(log n)."""

    def __init__(self, num_packs: int, capacity: int) -> None:
        self.base = 1 << max(1, num_packs - 1).bit_length()
        self.tree = [capacity] * (2 * self.base)

    def put(self, size: int) -> int:
        tree, node = self.tree, 1
        while node < self.base:
            node *= 2
            if tree[node] < size:
                node += 1
        tree[node] -= size
        pack = node - self.base
        while node > 1:
            node //= 2
            left, right = tree[2 * node], tree[2 * node + 1]
            tree[node] = left if left >= right else right
        return pack


def _first_fit(lengths: np.ndarray[Any, Any], capacity: int) -> int:
    rooms = _Rooms(len(lengths), capacity)
    packs: list[list[int]] = []
    for example, size in enumerate(lengths.tolist()):
        pack = rooms.put(size)
        if pack == len(packs):
            packs.append([])
        packs[pack].append(example)
    return len(packs)


def _first_fit_decreasing(lengths: np.ndarray[Any, Any], capacity: int) -> int:
    return _first_fit(lengths[np.argsort(-lengths, kind="stable")], capacity)


def _trl(lengths: np.ndarray[Any, Any], capacity: int, batch_size: int) -> Callable[[], int]:
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    datasets.disable_progress_bars()
    datasets.disable_caching()
    # Tokens of type null take no bytes, so that what is timed is the packing and not a copy of the text.
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    tokens = pa.LargeListArray.from_arrays(offsets, pa.nulls(int(lengths.sum())))
    dataset = datasets.Dataset(pa.table({"input_ids": tokens}))
    options = {"batch_size": batch_size, "keep_in_memory": True}
    return lambda: len(pack_dataset(dataset, capacity, strategy="bfd", map_kwargs=options))


def _axolotl(lengths: np.ndarray[Any, Any], capacity: int) -> Callable[[], int]:
    from axolotl.utils.samplers.multipack import pack_parallel

    options = {"group_size": 100_000, "bin_size": 1 << 20, "num_processes": 1}  # groups as by default
    pack_parallel(lengths[:1000], capacity, **options)  # compiles
    return lambda: len(pack_parallel(lengths, capacity, **options))


def _prepared(name: str, lengths: np.ndarray[Any, Any], capacity: int) -> Callable[[], int]:
    """A function that packs and gives the number of packs; imports and compilation come before."""
    if name in OURS:
        from packer.packing import plan

        return lambda: plan(lengths, capacity, scope=name, seed=0).num_packs
    if name.startswith("trl"):
        return _trl(lengths, capacity, 1000 if name == "trl_1000" else len(lengths))
    if name == "axolotl":
        return _axolotl(lengths, capacity)
    packer = _first_fit if name == "first_fit" else _first_fit_decreasing
    return lambda: packer(lengths, capacity)


def _peak_bytes() -> int:
    """Most memory this process ever held; unlike ru_maxrss, without what its parent held."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(name: str) -> None:
    """Answer requests, one JSON line each; stay alive, for some peers take long to import."""
    is_warm = False
    for line in sys.stdin:
        path, capacity = json.loads(line)
        try:
            lengths = np.load(path)
            if not is_warm:  # what a first call imports, compiles or makes ready for all later ones
                _prepared(name, lengths[:1000], capacity)()
                is_warm = True
            run = _prepared(name, lengths, capacity)
        except ImportError as error:
            print(json.dumps({"missing": str(error)}), flush=True)
            continue
        before = time.process_time()
        packs = run()
        seconds = time.process_time() - before
        peak = _peak_bytes()
        print(json.dumps({"packs": packs, "seconds": seconds, "peak": peak}), flush=True)


# ------------------------------------------------------------------ the run


class Bench:
    """Packers in processes of their own."""

    def __init__(self, peer_python: str, folder: str) -> None:
        self.peer_python, self.path = peer_python, str(Path(folder) / "lengths.npy")
        self.missing: dict[str, str] = {}
        self.running: dict[str, subprocess.Popen[str]] = {}

    def measure(self, name: str, lengths: np.ndarray[Any, Any], capacity: int) -> dict[str, Any] | None:
        """Number of packs, CPU seconds and peak bytes of the process so far; None where it is missing."""
        if name in self.missing:
            return None
        if name not in self.running:
            python = sys.executable if name in OURS else self.peer_python
            self.running[name] = subprocess.Popen(
                [python, str(Path(__file__)), "--child", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        np.save(self.path, lengths)
        process = self.running[name]
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # told below
            process.stdin.write(json.dumps([self.path, capacity]) + "\n")
            process.stdin.flush()
        found: dict[str, Any] = {"missing": f"its process ended with {process.poll()}"}
        for line in process.stdout:  # libraries may print too
            if line.startswith("{"):
                found = json.loads(line)
                break
        if "missing" in found:
            self.missing[name] = found["missing"]
            return None
        return found

    def stop(self) -> None:
        """End all processes, so that the next measurement starts fresh ones."""
        for process in self.running.values():
            process.kill()
            process.communicate()
        self.running = {}

    def compare(self, cases: list[tuple[str, np.ndarray[Any, Any], int]], names: tuple[str, ...]) -> None:
        """A table: packs over the lower bound, and CPU microseconds an example."""
        from packer.packing import lower_bound

        print("| lengths | max_tokens | examples a pack | " + " | ".join(TITLES[n] for n in names) + " |")
        print("|---" * (3 + len(names)) + "|", flush=True)
        for title, lengths, capacity in cases:
            bound = lower_bound(lengths, capacity)
            cells = [title, f"{capacity:,}", f"{capacity / lengths.mean():.1f}"]
            for name in names:
                found = self.measure(name, lengths, capacity)
                if found is None:
                    cells.append("–")
                    continue
                each = found["seconds"] / len(lengths) * 1e6
                cells.append(f"{found['packs'] / bound:.5f} · {each:.2f} µs")
            print("| " + " | ".join(cells) + " |", flush=True)
        print()

    def scale(self, largest: float) -> None:
        print("| lengths | max_tokens | examples | engine | CPU s | µs an example | fill | peak MiB |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for title, capacity in (("instructions", 4096), ("math", 2048), ("code", 8192)):
            n = 100_000
            while n <= largest:
                lengths = split(synthetic(title, n), capacity)
                for name in OURS if n <= 10_000_000 else ("global",):
                    self.stop()
                    found = self.measure(name, lengths, capacity)
                    if found is None:
                        continue
                    fill = int(lengths.sum()) / (found["packs"] * capacity)
                    each = found["seconds"] / len(lengths) * 1e6
                    print(
                        f"| {title} | {capacity:,} | {len(lengths):,} | {name} | {found['seconds']:.2f} "
                        f"| {each:.2f} | {fill:.5f} | {found['peak'] / 2**20:,.0f} |",
                        flush=True,
                    )
                n *= 10
        print()


def order_table() -> None:
    """What the order of packs says about length, and how long ranks wait for each other."""
    from packer.packing import plan

    print(
        "| lengths | max_tokens | plan | position with length | length of two in one pack "
        "| idle of 8 ranks | idle of 64 ranks |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    plans: dict[str, dict[str, Any]] = {
        "sequential": {"strategy": "sequential"},
        "window": {"seed": 0},
        "window, balance": {"seed": 0, "balance": "attention"},
        "global": {"seed": 0, "scope": "global"},
        "global, balance": {"seed": 0, "scope": "global", "balance": "attention"},
    }
    for title, capacity in (("instructions", 4096), ("math", 2048), ("chat", 8192), ("code", 32768)):
        lengths = split(synthetic(title, 100_000), capacity)
        for name, options in plans.items():
            planned = plan(lengths, capacity, **options)
            position, rank = np.arange(planned.num_segments), np.argsort(np.argsort(planned.length))
            pack = np.repeat(np.arange(planned.num_packs), np.diff(planned.pack_offsets))
            both = pack[1:] == pack[:-1]
            log = np.log(planned.length)
            costs = np.add.reduceat(planned.length**2, planned.pack_offsets[:-1])
            idle = []
            for ranks in (8, 64):
                steps = costs[: len(costs) // ranks * ranks].reshape(-1, ranks)
                idle.append(f"{1 - steps.mean() / steps.max(axis=1).mean():.1%}")
            print(
                f"| {title} | {capacity:,} | {name} | {np.corrcoef(position, rank)[0, 1]:+.3f} "
                f"| {np.corrcoef(log[1:][both], log[:-1][both])[0, 1]:+.3f} | {idle[0]} | {idle[1]} |",
                flush=True,
            )
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with the peers installed")
    parser.add_argument("--data", type=Path, help="folder of *.jsonl or *.jsonl.gz files")
    parser.add_argument("--examples", type=float, default=1e5, help="of each row of the first table")
    parser.add_argument(
        "--million", type=float, default=1e6, help="of each row of the second; 0 leaves it out"
    )
    parser.add_argument("--largest", type=float, default=1e7, help="of the table of scale")
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    parts = (arguments.only,) if arguments.only else PARTS
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.peer_python, folder)
        if "examples" in parts:
            examples_table(bench, int(arguments.examples))
        if "files" in parts and arguments.data:
            files_table(bench, int(arguments.examples), arguments.data)
        if "million" in parts and arguments.million:
            n = int(arguments.million)
            print(f"{n:,} examples\n")
            cases = [(s, split(synthetic(s, n), c), c) for s, c in (("instructions", 4096), ("math", 2048))]
            bench.compare(cases, (*OURS, "trl_one", "axolotl", "ffd", "first_fit"))
        if "scale" in parts:
            bench.scale(arguments.largest)
        bench.stop()
        if "order" in parts:
            order_table()
        for name, reason in bench.missing.items():
            print(f"left out: {TITLES[name]} ({reason})")


def examples_table(bench: Bench, n: int) -> None:
    """Synthetic lengths."""
    print(f"{n:,} examples: packs over the lower bound · CPU time an example\n")
    cases = [(s, split(synthetic(s, n), c), c) for s in SYNTHETIC for c in (2048, 8192, 32768)]
    bench.compare(cases, OURS + PEERS)


def files_table(bench: Bench, n: int, data: Path) -> None:
    """Lengths of files. TRL in one batch takes minutes on files of long rows: its packs are those of
    first-fit decreasing, which stands beside it in the first table."""
    cases = []
    for path in sorted(data.glob("*.jsonl*")):
        lengths = from_file(path, n)
        cases += [(path.name.split(".")[0], split(lengths, c), c) for c in CAPACITIES]
    bench.compare(cases, (*OURS, "trl_1000", "axolotl", "ffd", "first_fit"))


if __name__ == "__main__":
    main()
