"""Benchmarks whose measured part runs in a process of its own: the same script, called with --child."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

EXAMPLE_TOKENIZER = Path(__file__).resolve().parent.parent / "examples" / "tokenizer"


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that such benchmarks share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, default=EXAMPLE_TOKENIZER)
    parser.add_argument("--work", help="a folder for inputs and stores (default: the system's)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def parsed(
    parser: argparse.ArgumentParser, run_child: Callable[[dict[str, Any]], dict[str, Any]]
) -> argparse.Namespace:
    """The options. In a child this prints what `run_child` makes of those it was called with, and ends."""
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_child(json.loads(options.child))))
        raise SystemExit
    return options


def measured(
    script: str, options: Mapping[str, Any], *, core: int | None = None, **environ: str
) -> dict[str, Any]:
    """What a child of `script` prints. core: the one that it is bound to."""
    done = subprocess.run(
        [sys.executable, script, "--child", json.dumps(options)],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
