"""Plots of results, as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from paper.settings import SHAPES, SOURCES, VARIANTS

matplotlib.use("Agg")

from matplotlib import pyplot as plt

Cells = dict[tuple[str, str, str], dict[str, Any]]
_SMOOTH = 10  # steps


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})  # the same results give the same file
    plt.close(figure)


def _plain(title: str) -> str:
    return title.replace("`", "")


def speed(cells: Cells, path: Path) -> None:
    """Useful tokens a second of every variant, over padding with flash-attn."""
    groups = [key for key in {key[:2]: None for key in cells} if (*key, "padded_flash") in cells]
    groups.sort(key=lambda key: (list(SOURCES).index(key[0]), list(SHAPES).index(key[1])))
    figure, axes = plt.subplots(figsize=(max(6.0, 1.3 * len(groups) + 2), 4.5))
    names = [name for name in VARIANTS if any(key[2] == name for key in cells)]
    width = 0.85 / max(1, len(names))
    for number, name in enumerate(names):
        at, heights = [], []
        for place, group in enumerate(groups):
            if (*group, name) in cells:
                at.append(place + number * width)
                heights.append(
                    cells[(*group, name)]["real_per_s"] / cells[(*group, "padded_flash")]["real_per_s"]
                )
        axes.bar(at, heights, width, label=_plain(VARIANTS[name].title))
    axes.set_xticks([place + 0.4 for place in range(len(groups))])
    labels = [f"{SHAPES[m].title}\n{SOURCES[s].title}, {SOURCES[s].batch}" for s, m in groups]
    axes.set_xticklabels(labels, fontsize=7)
    axes.set_ylabel("useful tokens/s over padding, flash-attn")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.legend(fontsize=7)
    _save(figure, path)


def model(cells: Cells, path: Path) -> None:
    """Speed-up against padding share, and 1 / (1 - share), which says that only tokens take time."""
    figure, axes = plt.subplots(figsize=(6, 4.5))
    shares = np.linspace(0, 0.85, 100)
    axes.plot(shares, 1 / (1 - shares), color="grey", label="1 / (1 - padding share)")
    for name, marker in (("minibatch", "o"), ("best_fit", "^")):
        points = [
            (padded["padding_share"], cells[source, shape, name]["real_per_s"] / padded["real_per_s"])
            for (source, shape, variant), padded in cells.items()
            if variant == "padded_flash" and (source, shape, name) in cells
        ]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, label=_plain(VARIANTS[name].title))
    axes.set_xlabel("padding share of the padded mini-batches")
    axes.set_ylabel("useful tokens/s over padding, flash-attn")
    axes.legend()
    _save(figure, path)


def losses(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Training loss (moving mean), and each run's difference to padding."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    kernel = np.ones(_SMOOTH) / _SMOOTH
    base = runs.get("padded")
    for run in runs.values():
        smooth = np.convolve(run["losses"], kernel, mode="valid")
        dashed = "--" if run["run"] == "minibatch" else "-"
        left.plot(np.arange(len(smooth)) + _SMOOTH, smooth, dashed, label=_plain(run["title"]), linewidth=1)
        if base is not None and run is not base:
            apart = np.abs(np.array(run["losses"]) - np.array(base["losses"]))
            right.semilogy(np.maximum(apart, 1e-7), label=_plain(run["title"]), linewidth=0.7)
    left.set_xlabel("step")
    left.set_ylabel(f"training loss, mean of {_SMOOTH} steps")
    left.legend(fontsize=8)
    right.set_xlabel("step")
    right.set_ylabel("difference of the training loss to padding")
    right.legend(fontsize=8)
    _save(figure, path)
