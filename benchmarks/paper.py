"""The experiment of arXiv 2407.09105 (packing with FlashAttention) with padfree, end to end.

    python benchmarks/paper.py prepare --data DATA --work WORK       once, CPU: sources as they are used
    python benchmarks/paper.py run --work WORK --out OUT             one CUDA GPU
    python benchmarks/paper.py report OUT/results.jsonl… --docs docs/paper

DATA holds flan_like, math and python_code .jsonl.gz. `run` packs them with padfree into WORK/store, starts
a padfree service on it, and feeds models of random weights from its stream: for each model, source and
variant some training steps (forward, backward, AdamW) are timed, and only tokens of examples are counted.
Padded batches hold the very mini-batches of `minibatch` and lie on the GPU before the clock starts;
packed ones come over the stream. `--parts` stream: the stream against the same packs already on the GPU;
convergence: loss curves of a small model; two_gpus: the 1.1B model on two GPUs. Each result is appended
to OUT/results.jsonl at once.

    --tiny --device cpu     the whole way in a minute, with tiny models: shows that it runs, and no speed

Needs torch, transformers, and flash-attn for the variants that name it; `report` needs matplotlib.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from paper import serving  # noqa: E402
from paper.settings import (  # noqa: E402
    LOSS_MODEL,
    SHAPES,
    SOURCES,
    TINY_LOSS_MODEL,
    VARIANTS,
    Source,
    packings,
    tiny,
)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the service ends too
    args = parser().parse_args()
    return args.command(args)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = top.add_subparsers(required=True, metavar="VERB")

    prepare = verbs.add_parser("prepare", help="write the sources as they are used")
    prepare.add_argument("--data", type=Path, required=True)
    prepare.set_defaults(command=prepare_sources)

    run = verbs.add_parser("run", help="measure")
    run.add_argument("--out", type=Path, required=True, help="folder for results.jsonl")
    run.add_argument("--device", default="cuda")
    run.add_argument("--models", default="llama-2-7b,mistral-7b,granite-8b,llama-1b")
    run.add_argument("--variants", default=",".join(VARIANTS))
    run.add_argument("--parts", default="speed,stream,convergence")
    run.add_argument("--stream", default="best_fit,minibatch", help="packings of part stream")
    run.add_argument("--backend", default="auto", help="of padfree's attention")
    run.add_argument("--loss-steps", type=int, default=250)
    run.add_argument("--loss-runs", default="", help="of part convergence (default: all)")
    run.add_argument("--learning-rate", type=float, default=3e-4, help="of part convergence")
    run.add_argument("--stop-after", type=float, default=1e9, metavar="S", help="start nothing later")
    run.set_defaults(command=run_all)
    for verb in (prepare, run):
        verb.add_argument("--work", type=Path, required=True, help="folder for sources and the store")
        verb.add_argument("--sources", default="flan,math")
        verb.add_argument("--tiny", action="store_true")

    report = verbs.add_parser("report", help="tables and plots")
    report.add_argument("results", type=Path, nargs="+")
    report.add_argument("--docs", type=Path, required=True)
    report.set_defaults(command=write_report)
    return top


# ------------------------------------------------------------------ verbs


def prepare_sources(args: argparse.Namespace) -> int:
    for source in sources_of(args):
        serving.prepare(source, args.data, args.work)
    return 0


def write_report(args: argparse.Namespace) -> int:
    from paper.report import write

    write(args.results, args.docs)
    return 0


def run_all(args: argparse.Namespace) -> int:
    run = Run(args)
    parts = args.parts.split(",")
    sources = sources_of(args)
    need_loss = [source for source in sources[:1] if "convergence" in parts]
    views = run.pack({source.name: source for source in sources}, need_loss)
    with serving.Service(args.work / "store", args.out / "service.log") as service:
        # Imported behind the packing processes, so that they need not share the cores with it.
        from paper.speed import read

        if "speed" in parts or "stream" in parts:
            data = {source.name: read(source, service.url, views[source.name]) for source in sources}
            for shape in chosen("tiny" if args.tiny else args.models, SHAPES):
                run.measure_model(shape, data, parts)
        if "two_gpus" in parts:
            run.use_two_gpus(service.url, views)
        if "convergence" in parts:
            run.compare_losses(read(need_loss[0], service.url, views["loss"]))
    run.note("done")
    return 0


def sources_of(args: argparse.Namespace) -> list[Source]:
    named = chosen(args.sources, SOURCES)
    return [tiny(source) for source in named] if args.tiny else named


def chosen(names: str, of: dict[str, Any]) -> list[Any]:
    unknown = set(names.split(",")) - set(of)
    if unknown:
        raise SystemExit(f"not known: {', '.join(sorted(unknown))}; there are {', '.join(of)}")
    return [of[name] for name in names.split(",")]


class Run:
    """One call of `run`: what it was asked for, and where its results go."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._start = time.perf_counter()
        args.out.mkdir(parents=True, exist_ok=True)

    def note(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._start:6.1f} s] {text}", flush=True)

    def record(self, result: dict[str, Any]) -> None:
        with (self.args.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")

    @property
    def out_of_time(self) -> bool:
        return time.perf_counter() - self._start > self.args.stop_after

    def pack(self, sources: dict[str, Source], need_loss: list[Source]) -> dict[str, dict[str, Any]]:
        """Views by source and packing; "loss": mini-batches of which every token is trained."""
        wanted = [(name, which, {}) for name in sources for which in packings(sources[name])]
        wanted += [("loss", "minibatch", {"loss": "all"}) for _ in need_loss]
        views: dict[str, dict[str, Any]] = {name: {} for name, _, _ in wanted}
        futures: dict[str, Future[dict[str, Any]]] = {}
        with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
            keys = []
            for name, which, extra in wanted:
                source = need_loss[0] if name == "loss" else sources[name]
                packing = packings(source)[which] | extra
                # Two sources of one file have most datasets in common.
                keys.append(json.dumps([source.file, packing]))
                if keys[-1] not in futures:
                    file, store = self.args.work / source.file, self.args.work / "store"
                    futures[keys[-1]] = pool.submit(serving.pack, source, file, store, packing)
            for (name, which, _), key in zip(wanted, keys, strict=True):
                views[name][which] = futures[key].result()
        self.note(f"packed {len(futures)} datasets")
        return views

    def attention(self, implementation: str) -> str:
        """flash-attn needs CUDA; SDPA stands in for it elsewhere, and results say so."""
        import torch

        on_cuda = torch.device(self.args.device).type == "cuda"
        return implementation if on_cuda or implementation == "padfree" else "sdpa"

    def measure_model(self, shape: Any, data: dict[str, Any], parts: list[str]) -> None:
        from paper.report import environment
        from paper.speed import measure_cell, measure_stream
        from paper.training import Trainer

        if self.out_of_time:
            return
        gc.collect()  # the model before this one
        trainer = Trainer(shape, device=self.args.device, backend=self.args.backend)
        self.record({"part": "environment", **environment()})
        self.note(f"{shape.title}: {trainer.num_parameters:,} parameters")
        for source, variant in ((s, v) for s in data.values() for v in chosen(self.args.variants, VARIANTS)):
            if "speed" not in parts or self.out_of_time:
                break
            name = self.attention(variant.attention)
            cell = measure_cell(trainer, shape, source, variant, attention=name)
            self.record(cell)
            self.note(f"{shape.name} {source.source.name} {variant.name}: {_shown(cell)}")
        for packing in self.args.stream.split(","):
            # The smallest model is the one that takes most tokens a second.
            if "stream" not in parts or self.out_of_time or shape.name not in ("llama-1b", "tiny"):
                break
            num = shape.packs if packing == "best_fit" else shape.batches
            result = measure_stream(
                trainer,
                shape,
                next(iter(data.values())),
                packing,
                num=num,
                rounds=3,
                attention=self.attention("padfree"),
            )
            self.record(result)
            self.note(
                f"stream of {packing}: {result['share']:.4f} of resident, stall {result['stall_share']:.4%}"
            )

    def use_two_gpus(self, url: str, views: dict[str, dict[str, Any]]) -> None:
        from paper.two_gpus import compare

        results = compare(
            SHAPES["tiny" if self.args.tiny else "llama-1b"],
            [(source, url, views[source]["best_fit"]["id"]) for source in views if source != "loss"],
            kind=self.args.device,
            attention=self.attention("padfree"),
            world_size=2,
            folder=self.args.out / "two_gpus",
        )
        for result in results:
            self.record(result)
            self.note(
                f"two GPUs, {result['source']}, balance {result['balance']}: "
                f"{result['real_per_s']:,.0f} tokens/s, stall {result['stall_share']:.3%}"
            )

    def compare_losses(self, data: Any) -> None:
        from paper.convergence import RUNS, train

        config = TINY_LOSS_MODEL if self.args.tiny else LOSS_MODEL
        named = {run.name: run for run in RUNS}
        for run in chosen(self.args.loss_runs or ",".join(named), named):
            if self.out_of_time:
                break
            result = train(
                run,
                data,
                config,
                num_steps=3 if self.args.tiny else self.args.loss_steps,
                learning_rate=self.args.learning_rate,
                device=self.args.device,
                attention_name=self.attention(run.attention),
            )
            self.record(result)
            self.note(
                f"loss, {run.name}: {result['losses'][0]:.4f} to {result['losses'][-1]:.4f}, "
                f"validation {result['validation'][-1][1]:.4f} ({result['seconds']:.0f} s)"
            )


def _shown(cell: dict[str, Any]) -> str:
    if "error" in cell:
        return cell["error"]
    stall = "" if cell["stall_share"] is None else f", stall {cell['stall_share']:.3%}"
    return (
        f"{cell['real_per_s']:,.0f} tokens/s, padding {cell['padding_share']:.1%}, "
        f"{cell['peak_bytes'] / 2**30:.1f} GiB{stall} ({cell['whole_s']:.1f} s)"
    )


if __name__ == "__main__":
    sys.exit(main())
