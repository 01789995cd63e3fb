"""Attention kernels on a GPU, forward and backward, on packs of the same length.

    python benchmarks/attention.py                     every kernel that is installed, beside flash2
    python benchmarks/attention.py --tokens 16384 --heads 32 --kv-heads 8 --dim 128 --packs 57,1

A pack is `--tokens` tokens in as many segments as named, lengths drawn lognormally. Each kernel is called
as trainer_client.attention calls it; "flash4, alone" is its function without what keeps a NaN in its
segment. Times are medians of `--repeat` calls, kernels in turn, by CUDA events. Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from trainer_client import attention_kernels as kernels  # noqa: E402

Run = Callable[[kernels.Call], torch.Tensor]


def installed() -> dict[str, Run]:
    """By name; a loop of SDPA per segment is not timed: it is the oracle of the tests, not a way to train."""
    found: dict[str, Run] = {}
    for name, kernel in kernels.KERNELS.items():
        function = kernel.function()
        if function is None or name == "sdpa":
            continue
        kernels.prepare(name)
        found[name] = lambda call, kernel=kernel, function=function: kernel.run(call, function)
        if name == "flash4":
            found["flash4, alone"] = lambda call, function=function: kernels._flash(call, function)
    return found


def boundaries(num_segments: int, num_tokens: int) -> kernels.Boundaries:
    weights = np.random.default_rng(num_segments).lognormal(0, 1, num_segments)
    ends = np.round(np.cumsum(weights) / weights.sum() * (num_tokens - num_segments)) + np.arange(
        1, num_segments + 1
    )
    cu_seqlens = np.concatenate([[0], ends]).astype(np.int32)
    return kernels.Boundaries(torch.tensor(cu_seqlens, device="cuda"), int(np.diff(cu_seqlens).max()))


def milliseconds(run: Run, call: kernels.Call, weights: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run(call).backward(weights)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--packs", default="57,1", help="numbers of segments, one row each")
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()

    runs = installed()
    shape = (
        f"{options.tokens:,} tokens, {options.heads} heads on {options.kv_heads}, {options.dim} wide, bf16"
    )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {shape}\n")
    print("| segments | kernel | ms | beside flash2 |\n|---|---|---|---|")
    q, k, v = (
        torch.randn(
            options.tokens, heads, options.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    )
    weights = torch.randn_like(q)
    for num_segments in map(int, options.packs.split(",")):
        bounds = boundaries(num_segments, options.tokens)
        call = kernels.Call(
            q=q, k=k, v=v, bounds=bounds, scale=None, causal=True, window=None, softcap=None, dropout=0.0
        )
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.repeat + 3):
            for name, run in runs.items():
                times[name].append(milliseconds(run, call, weights))
        medians = {
            name: statistics.median(found[3:]) for name, found in times.items()
        }  # the first three warm up
        for name, found in medians.items():
            ratio = f"{found / medians['flash2']:.2f}" if "flash2" in medians else "–"
            print(f"| {num_segments} | {name} | {found:.2f} | {ratio} |")


if __name__ == "__main__":
    main()
