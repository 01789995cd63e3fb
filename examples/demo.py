"""`make demo`: the whole way on this machine, from a file of questions to a falling loss.

Starts the service with an embedded Ray, posts examples/data, trains 30 steps of a tiny model while
packing goes on, prints what it measured and stops everything it started. All files go to .demo/.
With --url the same at a running service, which must see the examples under the same path; its token in
PADFREE_TOKEN.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".demo"
OPTIONS = ["--store", str(FOLDER / "store"), "--data-root", str(ROOT / "examples")]
DATA = ROOT / "examples" / "data" / "gsm8k_1000.jsonl"
COPIES = 6  # of it, so that there is packing to go on while the first steps are trained
STEPS = 30
MAX_TOKENS = 1024
TOKEN = os.environ.get("PADFREE_TOKEN")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a running service instead of one of our own")
    url = parser.parse_args().url
    return run(url) if url else run_with_service()


def run_with_service() -> int:
    """Start a service, run the demo at it, end it."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log_path = FOLDER / "service.log"
    print(f"starting the service at {url} (log: {log_path.relative_to(ROOT)}) …", flush=True)
    with log_path.open("wb") as log:
        service = subprocess.Popen(
            [sys.executable, "-m", "padfree", "serve", "--port", str(port), *OPTIONS],
            cwd=FOLDER,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until_ready(url, service, log_path)
        return run(url)
    finally:
        stop(service)


def run(url: str) -> int:
    # Imported here, so that the service starts while torch loads.
    from tokenizers import Tokenizer
    from train_tiny import tiny_model, train

    from trainer_client import PackedStream

    model = tiny_model(Tokenizer.from_file(str(ROOT / "examples/tokenizer/tokenizer.json")).get_vocab_size())
    print(f"posting {DATA.relative_to(ROOT)}, {COPIES} times over, and training on its stream …", flush=True)
    posted = time.perf_counter()
    view = call(
        f"{url}/v1/datasets",
        {
            "name": "gsm8k",
            "source": {"paths": [str(DATA)] * COPIES},
            "tokenizer": {"path": str(ROOT / "examples/tokenizer")},
            "packing": {"max_tokens": MAX_TOKENS},
        },
    )
    at_first: dict[str, Any] = {}  # what was packed when the first batch came, and when that was

    def came() -> None:
        came_s = time.perf_counter() - posted
        at_first.update(call(f"{url}/v1/datasets/{view['id']}")["progress"], came_s=came_s)

    with PackedStream(url, dataset=view["id"], token=TOKEN) as stream:
        result = train(stream, model, STEPS, on_first_batch=came)
    while view["state"] in ("queued", "packing"):
        time.sleep(0.1)
        view = call(f"{url}/v1/datasets/{view['id']}")
    if view["state"] != "ready":
        print(f"the dataset is {view['state']}: {view['error']}", file=sys.stderr)
        return 1
    start = time.perf_counter()
    with PackedStream(url, dataset=view["id"], token=TOKEN) as stream:
        streamed = sum(batch.num_tokens for batch in stream)
    stream_s = time.perf_counter() - start
    print_table(view, result, streamed / stream_s, at_first)
    print(f"\nposted, packed and trained in {time.perf_counter() - posted:.1f} s")
    if result.last_loss >= result.first_loss:
        print("the loss did not fall", file=sys.stderr)
        return 1
    return 0


def print_table(
    view: dict[str, Any], result: Any, stream_tokens_per_s: float, at_first: dict[str, Any]
) -> None:
    report = view["report"]
    rows = [
        ("rows in", f"{report['rows_in']:,}"),
        ("rows packed", f"{report['rows_packed']:,}"),
        ("packs", f"{report['num_packs']:,} of {MAX_TOKENS:,} tokens"),
        ("packs, lower bound", f"{report['lower_bound_packs']:,}"),
        ("fill", f"{report['fill']:.4f}"),
        ("padding would have filled", f"{report['padded_fill']:.4f}"),
        ("packing", f"{report['tokens_packed'] / view['progress']['seconds']:,.0f} tokens/s"),
        ("stream", f"{stream_tokens_per_s:,.0f} tokens/s"),
        ("first batch after POST", f"{at_first['came_s']:.2f} s"),
        ("rows packed by then", f"{at_first['rows_packed']:,}"),
        ("training steps", f"{result.steps}"),
        ("first loss", f"{result.first_loss:.3f}"),
        ("last loss (mean of 5)", f"{result.last_loss:.3f}"),
    ]
    width = max(len(name) for name, _ in rows)
    print()
    for name, value in rows:
        print(f"  {name:{width}}  {value:>20}")


# ------------------------------------------------------------------ service


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def call(url: str, body: Any = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    if TOKEN:
        headers["Authorization"] = f"Bearer {TOKEN}"
    request = urllib.request.Request(url, headers=headers)
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(request, data, timeout=60) as answer:
        return json.loads(answer.read())


def wait_until_ready(
    url: str, service: subprocess.Popen[bytes], log_path: Path, timeout_s: float = 120
) -> None:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if service.poll() is not None:
            raise SystemExit(f"the service ended with status {service.returncode}:\n{log_path.read_text()}")
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
                if json.loads(answer.read())["packing"]:
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"the service was not ready after {timeout_s:.0f} s:\n{log_path.read_text()}")


def stop(service: subprocess.Popen[bytes]) -> None:
    """End the service and what it started: it ends its own Ray; a hard kill only if it does not."""
    service.send_signal(signal.SIGTERM)
    try:
        service.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(service.pid, signal.SIGKILL)
        service.wait()


if __name__ == "__main__":
    sys.exit(main())
