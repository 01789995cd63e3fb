"""The stream beside a raw socket, nginx and other loaders: the same packs, the same run.

    python benchmarks/stream.py                                 padfree, the socket, what is installed here
    python benchmarks/stream.py --nginx /usr/sbin/nginx         and nginx (by default: the one on the PATH)
    python benchmarks/stream.py --peer-python PEERS/bin/python  and the loaders installed there

What is not found is left out, and the output says so. An environment for the peers, apart from padfree's:

    python -m venv PEERS && PEERS/bin/pip install ray datasets mosaicml-streaming litdata pyarrow psutil

Everything runs on this machine, over loopback or from local files. Each figure is the median of --repeat
runs, which take turns, each in a process of its own. Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from loaders import data  # noqa: E402

from packer.shard.checksum import crc32  # noqa: E402

PEERS = {"datasets": "datasets", "ray_data": "ray", "mosaicml": "streaming", "litdata": "litdata"}
SLOW = ("datasets", "ray_data")
FAR = (*SLOW, "mosaicml")
TITLES = {
    "socket": "raw socket copy",
    "nginx": "nginx, `sendfile` of the shard files",
    "padfree_bytes": "padfree over HTTP, bytes only",
    "padfree": "**padfree over HTTP**",
    "padfree_shuffled": "padfree over HTTP, a shuffled epoch",
    "padfree_folder": "padfree from the store's folder",
    "datasets": "`datasets` streaming (local files)",
    "ray_data": "Ray Data `streaming_split` (local files)",
    "mosaicml": "MosaicML streaming (local files)",
    "litdata": "LitData (local files)",
}
Result = dict[str, Any]


# ------------------------------------------------------------------ processes


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", **more}


def read(name: str, python: str = sys.executable, **options: Any) -> Result:
    """What a reader process measures."""
    command = [python, "-m", "loaders.readers", name, json.dumps(options)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-1500:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def cpu_s(process: subprocess.Popen[Any]) -> float:
    """CPU seconds of a process and its children, ended ones too."""
    import psutil

    found = psutil.Process(process.pid)
    total = 0.0
    for one in [found, *found.children(recursive=True)]:
        times = one.cpu_times()
        total += times.user + times.system
    return total


@dataclass
class Server:
    """A server on some port, and its process."""

    port: int
    process: subprocess.Popen[Any]

    def measure(self, run: Callable[[], Result]) -> Result:
        before = cpu_s(self.process)
        found = run()
        return {**found, "server_cpu_s": cpu_s(self.process) - before}


@contextlib.contextmanager
def started(command: list[str], port: int | None, **options: Any) -> Iterator[Server]:
    process = subprocess.Popen(command, env=environment(), text=True, **options)
    try:
        if port is None:  # it prints its own
            assert process.stdout is not None
            port = int(process.stdout.readline())
        else:
            wait_for_port(port, process)
        yield Server(port, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_for_port(port: int, process: subprocess.Popen[Any]) -> None:
    import socket

    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if process.poll() is not None:
            raise RuntimeError(f"{process.args} ended with {process.returncode}")
        time.sleep(0.1)
    raise RuntimeError(f"nothing answers on port {port}")


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def serve_padfree(store: Path) -> contextlib.AbstractContextManager[Server]:
    port = free_port()
    command = [sys.executable, "-m", "padfree", "serve", "--workers", "0", "--port", str(port)]
    command += ["--store", str(store), "--data-root", str(store)]
    return started(command, port, stderr=subprocess.DEVNULL)


def serve_nginx(nginx: str, store: Path, work: Path) -> contextlib.AbstractContextManager[Server]:
    port, folder = free_port(), work / "nginx"
    folder.mkdir(exist_ok=True)
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi"))
    more = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/errors;\n"
        "events { worker_connections 256; }\n"
        f"http {{ access_log off; sendfile on; tcp_nopush on; {temporary} {more}\n"
        f"server {{ listen 127.0.0.1:{port}; root {store}; keepalive_requests 100000; }} }}\n"
    )
    command = [nginx, "-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", f"{folder}/errors"]
    return started(command, port, stderr=subprocess.DEVNULL)


# ------------------------------------------------------------------ runs


@dataclass
class Bench:
    args: argparse.Namespace
    work: Path
    store: Path
    dataset: str
    num_bytes: int  # of all shards
    num_tokens: int
    shards: list[str]

    def stream_path(self, **query: Any) -> str:
        return f"/v1/datasets/{self.dataset}/stream?{urllib.parse.urlencode({'batches': 'pack', **query})}"

    def whole(self, found: Result, epochs: int) -> Result:
        """A run that read the dataset `epochs` times: tokens for those that count bytes, and bytes."""
        return {"tokens": epochs * self.num_tokens, **found, "num_bytes": epochs * self.num_bytes}


def runs_over_network(bench: Bench, servers: dict[str, Server]) -> dict[str, Callable[[], Result]]:
    ours, many, few = servers["padfree"], 8, 3
    url = f"http://127.0.0.1:{ours.port}"

    def padfree(epochs: int, first: int) -> Result:
        return ours.measure(
            lambda: read("padfree", source=url, dataset=bench.dataset, epochs=epochs, first_epoch=first)
        )

    runs = {
        "socket": lambda: bench.whole(
            servers["socket"].measure(
                lambda: read("raw_socket", port=servers["socket"].port, num_bytes=many * bench.num_bytes)
            ),
            many,
        ),
        "padfree_bytes": lambda: bench.whole(
            ours.measure(lambda: read("files_over_http", port=ours.port, paths=few * [bench.stream_path()])),
            few,
        ),
        "padfree": lambda: bench.whole(padfree(1, 0), 1),
        "padfree_shuffled": lambda: bench.whole(padfree(1, 1), 1),
        "padfree_folder": lambda: bench.whole(
            read("padfree", source=str(bench.store), dataset=bench.dataset, epochs=1), 1
        ),
    }
    if "nginx" in servers:
        paths = ["/" + str(Path(shard).relative_to(bench.store)) for shard in bench.shards]
        runs["nginx"] = lambda: bench.whole(
            servers["nginx"].measure(
                lambda: read("files_over_http", port=servers["nginx"].port, paths=many * paths)
            ),
            many,
        )
    return runs


def many_ranks(bench: Bench, server: Server, world_size: int) -> Result:
    """All ranks' streams at once, from one server process; bytes only."""
    paths = [bench.stream_path(rank=rank, world_size=world_size) for rank in range(world_size)]
    return server.measure(lambda: read("drain", port=server.port, paths=paths))


def peers(bench: Bench) -> tuple[dict[str, Callable[[], Result]], list[str]]:
    python, runs, missing = bench.args.peer_python, {}, []
    for name, module in PEERS.items():
        command = [python, "-c", f"import {module}"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        if done.returncode:
            missing.append(f"{TITLES[name]}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
            continue
        runs[name] = lambda name=name: peer(bench, name, python)
    return runs, missing


def peer(bench: Bench, name: str, python: str) -> Result:
    """All the shards, so that what a loader does at its start weighs as much as padfree's; slow ones read a
    quarter, which is enough for a rate."""
    shards = bench.shards[: -(-len(bench.shards) // 4)] if name in SLOW else bench.shards
    work = Path(tempfile.mkdtemp(dir=bench.work))
    try:
        found = read(name, python=python, shards=shards, work=str(work))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {**found, "num_bytes": sum(os.path.getsize(shard) for shard in shards)}


def take_turns(runs: dict[str, Callable[[], Result]], repeat: int) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {name: [] for name in runs}
    for turn in range(repeat):
        for name, run in runs.items():
            if turn and name in FAR:
                continue  # once is enough
            try:
                found[name].append(run())
            except RuntimeError as error:
                print(f"{name} failed: {error}", file=sys.stderr)
            print(f"turn {turn + 1}: {name} {found[name][-1:]}", file=sys.stderr, flush=True)
    return {name: results for name, results in found.items() if results}


# ------------------------------------------------------------------ report


def median(results: list[Result], of: Callable[[Result], float]) -> float:
    return statistics.median(of(one) for one in results)


def report(found: dict[str, list[Result]], *, base: str) -> None:
    def rate(results: list[Result]) -> float:
        return median(results, lambda one: one["tokens"] / one["seconds"])

    print("| | million tokens/s | GB/s of shard bytes | against " + TITLES[base].split(",")[0], end="")
    print(" | client CPU s/GB | server CPU s/GB | first batch ms | client peak MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for name in (name for name in TITLES if name in found):
        results = found[name]
        gb = median(results, lambda one: one["num_bytes"]) / 1e9
        per_gb = [
            f"{median(results, lambda one, key=key: one[key]) / gb:.2f}" if key in results[0] else ""
            for key in ("cpu_s", "server_cpu_s")
        ]
        first = median(results, lambda one: one.get("first_batch_s", 0.0))
        cells = [
            TITLES[name],
            f"{rate(results) / 1e6:,.1f}",
            f"{median(results, lambda one: one['num_bytes'] / one['seconds']) / 1e9:.3f}",
            f"{rate(results) / rate(found[base]):.2f}",
            *per_gb,
            f"{1e3 * first:,.0f}" if first else "",
            f"{median(results, lambda one: one['peak_mib']):,.0f}",
        ]
        print(f"| {' | '.join(cells)} |")


def report_ranks(found: dict[int, list[Result]]) -> None:
    print("\n| ranks on one server process | aggregate GB/s | against 8 ranks | server CPU s/GB |")
    print("|---|---|---|---|")
    rates = {n: median(r, lambda one: one["num_bytes"] / one["seconds"]) for n, r in found.items()}
    for ranks, results in found.items():
        gb = results[0]["num_bytes"] / 1e9
        cpu = median(results, lambda one: one["server_cpu_s"]) / gb
        print(f"| {ranks} | {rates[ranks] / 1e9:.3f} | {rates[ranks] / rates[8]:.2f} | {cpu:.2f} |")


def report_first_batches(bench: Bench) -> None:
    """A ready dataset of very many packs: the first batch of an epoch."""
    dataset = data.build_many(bench.store, bench.args.many_packs)
    print(f"\n| first batch, {bench.args.many_packs:,} packs | epoch 0, ms | epoch 1, ms |\n|---|---|---|")
    with serve_padfree(bench.store) as server:
        url = f"http://127.0.0.1:{server.port}"
        with urllib.request.urlopen(f"{url}/v1/datasets/{dataset}") as answer:
            answer.read()
        times = [read("first_batch", source=url, dataset=dataset, epoch=epoch)["times"] for epoch in (0, 1)]
    for title, of in (
        ("the first time", lambda t: t[0]),
        ("median of four more", lambda t: statistics.median(t[1:])),
    ):
        print(f"| {title} | {1e3 * of(times[0]):.1f} | {1e3 * of(times[1]):.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packs", type=int, default=8192, help="full packs of 8,192 tokens")
    parser.add_argument("--many-packs", type=int, default=1_000_000, help="small packs, for the first batch")
    parser.add_argument("--times", type=int, default=32, help="how often many ranks read these packs")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--nginx", default=shutil.which("nginx"))
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--work", type=Path, help="where files go; default: a temporary folder")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.work)))
        work.chmod(0o755)  # nginx reads as nobody
        store = work / "store"
        dataset, num_bytes, num_tokens = data.build(store, args.packs)
        shards = sorted(str(path) for path in store.glob(f"datasets/{dataset}/shards/*"))
        bench = Bench(args, work, store, dataset, num_bytes, num_tokens, shards)
        options = json.dumps({"paths": shards, "repeat": 8})
        command = [sys.executable, "-m", "loaders.readers", "serve_bytes", options]
        servers = {
            "socket": stack.enter_context(started(command, None, stdout=subprocess.PIPE)),
            "padfree": stack.enter_context(serve_padfree(store)),
        }
        if args.nginx:
            servers["nginx"] = stack.enter_context(serve_nginx(args.nginx, store, work))
        others, missing = peers(bench)
        if not args.nginx:
            missing.append("nginx: not found; give --nginx")
        print(
            f"{args.packs:,} packs of {data.MAX_TOKENS:,} tokens, {num_bytes / 1e6:,.0f} MB of shards, ",
            end="",
        )
        print(f"{num_bytes / bench.num_tokens:.2f} bytes a token; load {os.getloadavg()[0]:.1f}; ", end="")
        print(f"padfree's checksums by {crc32.__module__}\n")
        found = take_turns({**runs_over_network(bench, servers), **others}, args.repeat)
        report(found, base="nginx" if "nginx" in found else "socket")
        # Long enough that the requests at its start, a millisecond each, are not what is measured.
        dataset, num_bytes, num_tokens = data.build(store, args.packs, times=args.times)
        long = Bench(args, work, store, dataset, num_bytes, num_tokens, [])
        ranks: dict[int, list[Result]] = {1: [], 8: [], 64: []}
        for _ in range(args.repeat):
            for world_size, results in ranks.items():
                results.append(many_ranks(long, servers["padfree"], world_size))
                print(f"{world_size} ranks: {results[-1]}", file=sys.stderr, flush=True)
        report_ranks(ranks)
        report_first_batches(bench)
        print("\nLeft out: " + ("; ".join(missing) or "none"))


if __name__ == "__main__":
    main()
