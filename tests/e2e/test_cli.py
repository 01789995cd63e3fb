"""The command line as users run it: processes, exit statuses, output, real Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import wait_for

from padfree.cli import main

ROOT = Path(__file__).parent.parent.parent
TOKENIZER = ROOT / "examples" / "tokenizer"
GSM8K = ROOT / "examples" / "data" / "gsm8k_1000.jsonl"


def padfree(*args: Any, cwd: Path | None = None, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "padfree", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
    )
    assert done.returncode == status, f"{done.returncode}: {done.stdout}\n{done.stderr}"
    return done


Padfree = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def inside(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Padfree:
    """`padfree` in this process: for tests that a process of its own would show nothing more."""

    def run(*args: Any, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(cwd)
        try:
            found = main([str(one) for one in args])
        except SystemExit as left:  # argparse
            found = int(left.code or 0)
        said = capsys.readouterr()
        assert found == status, f"{found}: {said.out}\n{said.err}"
        return subprocess.CompletedProcess(args, found, said.out, said.err)

    return run


def last_json(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stdout.splitlines()[-1])


def digests(store: Path, dataset: str) -> list[str]:
    from packer.manifest import Manifest
    from packer.store import LocalStore

    manifest = Manifest(LocalStore(store), dataset)
    manifest.refresh()
    return [shard.sha256 for shard in manifest.shards]


def larger_source(folder: Path) -> Path:
    """Enough text for several partitions: the sample rows, six times, numbered."""
    lines = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    source = folder / "rows.jsonl"
    with source.open("w") as file:
        for copy in range(6):
            for row in lines:
                file.write(json.dumps({**row, "question": f"{copy}. {row['question']}"}) + "\n")
    return source


def test_pack_stream_list_inspect_verify(tmp_path: Path) -> None:
    view = last_json(
        padfree("pack", GSM8K, "--tokenizer", TOKENIZER, "--max-tokens", 2048, "--json", cwd=tmp_path)
    )
    report = view["report"]
    assert view["state"] == "ready"
    assert report["rows_in"] == report["rows_packed"] == 1000
    assert report["fill"] > 0.98
    store = tmp_path / "padfree-store"
    streamed = last_json(padfree("stream", view["id"], "--store", store, "--json"))
    assert streamed["packs"] == streamed["steps"] == report["num_packs"]
    assert streamed["tokens"] == report["tokens_packed"]
    assert streamed["tokens_trained"] == report["tokens_trained"]
    even = padfree(
        "stream", view["id"], "--store", store, "--world-size", 4, "--packs-per-step", 4,
        "--balance", "attention", "--json",
    )  # fmt: skip
    shares = last_json(even)["idle_share"]
    assert 0 < shares["attention"] < shares["none"] < 1
    assert [one["id"] for one in last_json(padfree("datasets", "--store", store, "--json"))] == [view["id"]]
    assert "pack 0: 2048 tokens" in padfree("inspect", view["id"], "--store", store).stdout
    assert last_json(padfree("inspect", view["id"], "--store", store, "--json"))["packs"][0]["pack"] == 0
    shard = next(store.rglob("shards/*.arrow"))
    assert "pack 0: 2048 tokens" in padfree("inspect", shard).stdout
    assert last_json(padfree("verify", store, "--json"))["packs"] == report["num_packs"]
    again = padfree("pack", GSM8K, "--tokenizer", TOKENIZER, "--max-tokens", 2048, cwd=tmp_path)
    assert view["id"] in again.stdout
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    told = padfree("verify", store, status=1).stderr
    assert shard.name in told
    assert "pack it again" in told
    padfree("datasets", "--store", store, "--remove", view["id"])
    assert last_json(padfree("datasets", "--store", store, "--json")) == []


def test_two_ray_workers_and_inline_write_the_same_shards(tmp_path: Path) -> None:
    """One and four: tests/packer/test_workers.py."""
    source = larger_source(tmp_path)
    found = {}
    for workers in (0, 2):
        store = tmp_path / f"store-{workers}"
        done = padfree(
            "pack", source, "--tokenizer", TOKENIZER, "--max-tokens", 2048, "--workers", workers,
            "--store", store, "--json",
        )  # fmt: skip
        view = last_json(done)
        found[workers] = (view["id"], view["report"], digests(store, view["id"]))
    assert found[0] == found[2]
    assert len(found[0][2]) > 1
    assert found[0][1]["rows_packed"] == 6_000


@pytest.mark.slow
def test_f40_packing_killed_again_and_again_ends_as_the_undisturbed_run(tmp_path: Path) -> None:
    source = larger_source(tmp_path)
    arguments = ["pack", source, "--tokenizer", TOKENIZER, "--max-tokens", 1024, "--workers", 0, "--json"]
    undisturbed = last_json(padfree(*arguments, "--store", tmp_path / "calm"))
    store = tmp_path / "killed"
    num_killed = 0
    for found in ("spec.json", "plan.json", "shards/*", "commits/*"):
        process = subprocess.Popen(
            [sys.executable, "-m", "padfree", *map(str, arguments), "--store", str(store)],
            stdout=subprocess.DEVNULL,
        )
        wait_for(lambda found=found: list(store.glob(f"datasets/*/{found}")))
        process.send_signal(signal.SIGKILL)
        num_killed += process.wait() == -signal.SIGKILL
        assert last_json(padfree("verify", store, "--json"))["faults"] == []
    assert num_killed >= 2  # before its end
    view = last_json(padfree(*arguments, "--store", store))
    assert view["report"] == undisturbed["report"]
    assert digests(store, view["id"]) == digests(tmp_path / "calm", view["id"])
    assert not list(store.rglob(".tmp-*"))


def test_a_dataset_is_repacked_and_estimated(inside: Padfree, tmp_path: Path) -> None:
    view = last_json(inside("pack", GSM8K, "--tokenizer", TOKENIZER, "--json", cwd=tmp_path))
    source = f"dataset://{view['id']}"
    found = last_json(inside("estimate", source, "--max-tokens", 2048, "--json", cwd=tmp_path))
    rows = {row["name"]: row for row in found["rows"]}
    again = last_json(inside("pack", source, "--max-tokens", 2048, "--json", cwd=tmp_path))
    assert again["report"]["rows_packed"] == found["num_examples"] == view["report"]["rows_packed"]
    assert again["report"]["tokens_packed"] == rows["best_fit"]["tokens_packed"]
    assert again["report"]["num_packs"] <= rows["best_fit"]["num_packs"] + 1
    shown = inside("pack", source, "--preview", 1, cwd=tmp_path).stdout
    assert shown.splitlines()[1].startswith("example ")
    assert len(list((tmp_path / "padfree-store" / "datasets").iterdir())) == 2
    assert "verify" not in inside("verify", "padfree-store", cwd=tmp_path).stderr


def test_estimate_foretells_what_packing_gives(inside: Padfree, tmp_path: Path) -> None:
    options = [GSM8K, "--tokenizer", TOKENIZER, "--max-tokens", 2048, "--json"]
    found = last_json(inside("estimate", *options, cwd=tmp_path))
    assert list(tmp_path.iterdir()) == []
    rows = {row["name"]: row for row in found["rows"]}
    for strategy in ("sequential", "padded", "wrapped"):
        view = last_json(
            inside("pack", *options, "--strategy", strategy, "--shuffle-seed", "none", cwd=tmp_path)
        )
        report = view["report"]
        assert report["num_packs"] == rows[strategy]["num_packs"]
        assert report["tokens_packed"] == rows[strategy]["tokens_packed"]
        assert report["tokens_in"] == found["num_tokens"]
    assert report["lower_bound_packs"] <= rows["best_fit"]["num_packs"]
    assert "of padding" in inside("estimate", *options[:-1], cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["pack", "nowhere.jsonl", "--tokenizer", TOKENIZER], 1, r"nowhere\.jsonl"),
        (["pack", GSM8K], 2, "tokenizer"),
        (["pack", GSM8K, "--tokenizer", "no-such-folder"], 1, "no-such-folder"),
        (["pack", GSM8K, "--tokenizer", TOKENIZER, "--max-tokens", "0"], 2, r"packing\.max_tokens.*found 0"),
        (["pack", GSM8K, "--tokenizer", TOKENIZER, "--strategy", "bestfit"], 2, "did you mean 'best_fit'"),
        (["pack", GSM8K, "--tokenizer", TOKENIZER, "--loss", "assistant"], 2, "loss"),
        (["pack", GSM8K, "--tokenizer", TOKENIZER, "--field", "question"], 2, "prompt=question"),
        (["pack", GSM8K, "--tokenizer", TOKENIZER, "--format", "text"], 1, "text"),
        (["pack"], 2, "SOURCE"),
        (["estimate", "nowhere.jsonl", "--tokenizer", TOKENIZER], 1, r"nowhere\.jsonl"),
        (["pack", "dataset://" + "0" * 32, "--store", "."], 1, "found none of that id"),
        (["stream", "0" * 32, "--store", "."], 1, "0" * 32),
        (["verify", "no-such-store"], 2, "no-such-store"),
        (["verify", GSM8K.parent], 2, "is no store: .*datasets, tokenizers or uploads in it; name it"),
        (["datasets", "--url", "http://127.0.0.1:9"], 1, "no padfree service answers"),
        (["serve", "--data-root", "no-such-folder"], 2, "no-such-folder"),
        (["serve", "--store", GSM8K], 2, r"\(--store\): a folder .* is required, found .*gsm8k"),
        (["pack", GSM8K, "--tokenizer", TOKENIZER, "--store", GSM8K], 1, r"the store \S*gsm8k.*--store"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_wrong_use_is_told(
    inside: Padfree, tmp_path: Path, arguments: list[Any], status: int, says: str
) -> None:
    told = inside(*arguments, cwd=tmp_path, status=status).stderr
    assert re.search(says, told, re.DOTALL), told
    assert "Traceback" not in told


@pytest.mark.parametrize(("arguments", "status"), [(["pack"], 2), (["verify", "no-such-store"], 2)])
def test_wrong_use_is_the_exit_status_of_the_process(
    tmp_path: Path, arguments: list[str], status: int
) -> None:
    assert "Traceback" not in padfree(*arguments, cwd=tmp_path, status=status).stderr


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet", "rows.jsonl.zst"])
def test_a_file_that_is_not_what_its_name_says(inside: Padfree, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"hello")
    told = inside("pack", tmp_path / name, "--tokenizer", TOKENIZER, cwd=tmp_path, status=1).stderr
    assert name in told
    assert "Traceback" not in told


def test_the_light_verbs_import_no_heavy_package(tmp_path: Path) -> None:
    code = (
        "import sys; from padfree.cli import build_parser; build_parser(); import trainer_client;"
        "heavy = {'ray', 'torch', 'fastapi', 'tokenizers', 'jinja2', 'orjson'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
