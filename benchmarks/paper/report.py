"""Tables of results, for docs/paper."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paper.settings import SHAPES, SOURCES, VARIANTS

Cells = dict[tuple[str, str, str], dict[str, Any]]

# Kundu et al., Table 2 and the authors' pull request (transformers 31629): tokens/s on a GPU, peak MB.
# FSDP on 8 A100-80GB, mini-batches of 4, real FLAN and OrcaMath.
_PAPER = (
    ("flan4", "llama-2-7b", 771, 1455, 29234, 23854),
    ("flan4", "mistral-7b", 742, 1408, 30625, 24549),
    ("flan4", "granite-8b", 693, 1358, 36277, 27538),
    ("math4", "llama-2-7b", 1269, 1746, 22305, 20950),
    ("math4", "mistral-7b", 1216, 1658, 23603, 22409),
)
_LARGE = ("llama-2-7b", "mistral-7b", "granite-8b")
_GOALS = {"flan": 2.5, "math": 1.5}


def environment() -> dict[str, Any]:
    """What results are measured with."""
    import torch

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "flash-attn", "numpy", "pyarrow")},
    }


# ------------------------------------------------------------------ read


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """All results, in the order of the files; where a cell was measured again, the later one."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for file in files:
        for line in file.read_text().splitlines():
            result = json.loads(line)
            names = ("part", "model", "source", "variant", "packing", "run", "learning_rate")
            found[tuple(result.get(name) for name in names)] = result
    return list(found.values())


def write(files: Iterable[Path], docs: Path) -> None:
    """results.md, plots, and the results themselves."""
    from paper import plots

    results = read(files)
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    cells: Cells = {
        (cell["source"], cell["model"], cell["variant"]): cell
        for cell in results
        if cell["part"] == "speed" and "error" not in cell
    }
    failed = [cell for cell in results if cell["part"] == "speed" and "error" in cell]
    streams = [result for result in results if result["part"] == "stream"]
    rates = sorted({result["learning_rate"] for result in results if result["part"] == "convergence"})
    runs = {
        rate: {result["run"]: result for result in results if result.get("learning_rate") == rate}
        for rate in rates
    }
    parts = [
        _environment(results),
        _goals(cells, streams),
        *(_speed(cells, source) for source in SOURCES if any(key[0] == source for key in cells)),
        _failed(failed),
        _beside_the_paper(cells),
        _streams(streams),
        _two_gpus([result for result in results if result["part"] == "two_gpus"], cells),
        *(_losses(rate, of_rate) for rate, of_rate in runs.items()),
    ]
    (docs / "results.md").write_text("\n".join(part for part in parts if part))
    plots.speed(cells, docs / "speed.png")
    plots.model(cells, docs / "model.png")
    for rate, of_rate in runs.items():
        plots.losses(of_rate, docs / f"loss-{rate:g}.png")


# ------------------------------------------------------------------ tables


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(str(value) for value in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _environment(results: list[dict[str, Any]]) -> str:
    found = [result for result in results if result["part"] == "environment"]
    if not found:
        return ""
    names = ", ".join(f"{k} {v}" for k, v in found[-1].items() if k not in ("part", "gpu") and v)
    return f"Measured on one {found[-1]['gpu']} with {names}.\n"


def speed_up(cells: Cells, source: str, model: str, variant: str) -> float | None:
    """Useful tokens a second over padding with flash-attn, the same examples a mini-batch."""
    this, padded = cells.get((source, model, variant)), cells.get((source, model, "padded_flash"))
    return this["real_per_s"] / padded["real_per_s"] if this and padded else None


def _goals(cells: Cells, streams: list[dict[str, Any]]) -> str:
    rows = []
    for source, goal in _GOALS.items():
        for model in _LARGE:
            if (best := speed_up(cells, source, model, "best_fit")) is None:
                continue
            by_batch = speed_up(cells, source, model, "minibatch")
            step = speed_up(cells, source, model, "step")
            rows.append(
                (
                    f"{SHAPES[model].title}, {SOURCES[source].title}",
                    f"at least {goal}",
                    f"{best:.2f}",
                    f"{step:.2f}" if step else "",
                    f"{by_batch:.2f}" if by_batch else "",
                )
            )
    text = "## Goals\n\nUseful tokens a second over padding with flash-attn:\n\n"
    text += table(["", "goal", "`best_fit`", "`step`", "`minibatch`"], rows)
    stalls = [cell["stall_share"] for cell in cells.values() if cell["stall_share"] is not None]
    if stalls:
        text += f"\nLargest stall share of any cell fed by the stream: {max(stalls):.3%} (goal: under 1%).\n"
    for result in streams:
        text += (
            f"The stream of `{result['packing']}` feeds the {SHAPES[result['model']].title} model at "
            f"{result['share']:.2%} of the same packs already on the GPU (goal: 98%).\n"
        )
    return text if rows else ""


def _speed(cells: Cells, source: str) -> str:
    text = f"## {SOURCES[source].title}, mini-batches of {SOURCES[source].batch}\n"
    for model in SHAPES:
        rows = [
            _row(cells, cells[source, model, variant])
            for variant in VARIANTS
            if (source, model, variant) in cells
        ]
        if not rows:
            continue
        millions = next(c["parameters"] for k, c in cells.items() if k[:2] == (source, model)) / 1e6
        text += f"\n### {SHAPES[model].title} ({millions:,.0f} M parameters)\n\n"
        head = ["variant", "useful tokens/s", "x padding, flash-attn", "padding timed", "padding an epoch"]
        text += table([*head, "peak GiB", "steps an epoch", "stall"], rows)
    return text


def _row(cells: Cells, cell: dict[str, Any]) -> tuple[str, ...]:
    ratio = speed_up(cells, cell["source"], cell["model"], cell["variant"])
    return (
        VARIANTS[cell["variant"]].title,
        f"{cell['real_per_s']:,.0f}",
        f"{ratio:.2f}" if ratio else "",
        f"{cell['padding_share']:.1%}",
        f"{cell['epoch_padding_share']:.1%}",
        f"{cell['peak_bytes'] / 2**30:.1f}",
        f"{cell['steps_an_epoch']:,}",
        "" if cell["stall_share"] is None else f"{cell['stall_share']:.3%}",
    )


def _failed(failed: list[dict[str, Any]]) -> str:
    if not failed:
        return ""
    rows = [(c["model"], c["source"], VARIANTS[c["variant"]].title, c["error"]) for c in failed]
    return "## Did not run\n\n" + table(["model", "source", "variant", "why"], rows)


def _beside_the_paper(cells: Cells) -> str:
    rows = []
    for source, model, padded, packed, padded_mb, packed_mb in _PAPER:
        if (ours := speed_up(cells, source, model, "minibatch")) is None:
            continue
        one, two = (cells[source, model, variant] for variant in ("padded_flash", "minibatch"))
        rows.append(
            (
                f"{SHAPES[model].title}, {SOURCES[source].title}",
                f"{padded:,} to {packed:,}",
                f"{packed / padded:.2f}",
                f"{packed_mb / padded_mb - 1:.0%}",
                f"{one['real_per_s']:,.0f} to {two['real_per_s']:,.0f}",
                f"{ours:.2f}",
                f"{1 / (1 - one['padding_share']):.2f}",
                f"{two['peak_bytes'] / one['peak_bytes'] - 1:.0%}",
            )
        )
    if not rows:
        return ""
    head = ["mini-batches of 4", "paper: tokens/s", "x", "memory", "here: tokens/s", "x"]
    return (
        "## Beside the paper's own figures\n\n"
        "Padding to mini-batch packing. The paper: 8 A100-80GB, FSDP, real FLAN and OrcaMath; here: one\n"
        "GPU, data of the same kind, another tokenizer. Ratios can be compared, tokens a second cannot.\n\n"
        + table([*head, "1 / (1 - padding)", "memory"], rows)
    )


def _streams(streams: list[dict[str, Any]]) -> str:
    if not streams:
        return ""
    rows = [
        (
            f"{SHAPES[result['model']].title}, `{result['packing']}`",
            ", ".join(f"{value:,.0f}" for value in result["resident_per_s"]),
            ", ".join(f"{value:,.0f}" for value in result["streamed_per_s"]),
            f"{result['share']:.2%}",
            f"{result['stall_share']:.3%}",
        )
        for result in streams
    ]
    head = ["", "on the GPU: tokens/s", "over the stream: tokens/s", "share of medians", "stall"]
    return "## The stream against the same packs on the GPU\n\n" + table(head, rows)


def _two_gpus(results: list[dict[str, Any]], cells: Cells) -> str:
    rows = []
    for result in results:
        one = cells.get((result["source"], result["model"], "best_fit"))
        rows.append(
            (
                f"{SHAPES[result['model']].title}, {SOURCES[result['source']].title}, {result['balance']}",
                f"{result['real_per_s']:,.0f}",
                f"{result['real_per_s'] / one['real_per_s']:.2f}" if one else "",
                f"{result['stall_share']:.3%}",
            )
        )
    head = ["model, source, balance", "useful tokens/s", "x one GPU", "stall"]
    return "## Two GPUs (DDP), `best_fit`, one service\n\n" + table(head, rows) if rows else ""


def _losses(rate: float, runs: dict[str, dict[str, Any]]) -> str:
    if "padded" not in runs:
        return ""
    base = runs["padded"]
    rows = []
    for run in runs.values():
        apart = [abs(a - b) for a, b in zip(run["losses"], base["losses"], strict=True)]
        mean = sum(a - b for a, b in zip(run["losses"], base["losses"], strict=True)) / len(apart)
        rows.append(
            (
                run["title"],
                f"{run['validation'][-1][1]:.3f}",
                f"{sum(apart[:10]) / 10:.5f}",
                f"{sum(apart) / len(apart):.4f}",
                f"{max(apart):.3f}",
                f"{mean:+.4f}",
            )
        )
    head = ["run", "validation loss at the end", "first 10 steps", "all steps", "largest", "signed mean"]
    return (
        f"## Loss curves: {base['parameters'] / 1e6:.0f} M parameters, {base['num_steps']} steps of "
        f"{base['batch']} examples, learning rate {rate:g}\n\n"
        "Differences are those of the training loss to the first run, step by step.\n\n"
        + table(head, rows)
        + _noise(runs)
    )


def _noise(runs: dict[str, dict[str, Any]]) -> str:
    """How far padded runs are from each other, pair by pair, and `minibatch` from each of them."""
    padded = [run["losses"] for name, run in runs.items() if name not in ("minibatch", "unaware")]
    if len(padded) < 2 or "minibatch" not in runs:
        return ""

    def apart(pairs: Iterable[tuple[list[float], list[float]]]) -> str:
        found = [[abs(a - b) for a, b in zip(*pair, strict=True)] for pair in pairs]
        means = [sum(each) / len(each) for each in found]
        return f"{min(means):.4f} to {max(means):.4f} on average and {max(map(max, found)):.3f} at most"

    pairs = list(itertools.combinations(padded, 2))
    return (
        f"\nAny two padded runs ({len(pairs)} pairs) are apart by {apart(pairs)}; `minibatch` and any padded "
        f"run ({len(padded)} pairs) by {apart((runs['minibatch']['losses'], other) for other in padded)}.\n"
    )
