"""The command line: one module a verb, each with `add(subparsers)` and `run(args) -> exit status`.

Exit status: 0, 1 (the work failed), 2 (wrong use). A verb imports what it needs when it runs, so that
`padfree stream` works where only the base install is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from padfree import __version__
from padfree.cli import datasets, estimate, inspect, pack, serve, stream, verify
from padfree.cli.common import CommandError
from padfree.cli.flags import with_flags


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="padfree",
        description="Tokenize and pack datasets, serve them, and stream packed batches to trainers.",
    )
    parser.add_argument("--version", action="version", version=f"padfree {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for module in (serve, pack, stream, datasets, inspect, estimate, verify):
        module.add(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    args = build_parser().parse_args(arguments)
    try:
        return args.run(args)
    except CommandError as error:
        print(f"padfree {args.verb}: {with_flags(str(error))}", file=sys.stderr)
        return error.status
    except ModuleNotFoundError as error:
        extra = "trainer" if error.name == "torch" else "service"
        print(
            f"padfree {args.verb}: needs the package {error.name}: in padfree's checkout, "
            f"pip install '.[{extra}]'",
            file=sys.stderr,
        )
        return 1
    except BrokenPipeError:  # the reader of our output (head, less) is gone
        sys.stderr.close()
        return 1
    except (ValueError, OSError) as error:
        # Ours say what to do; any other is a fault of padfree and keeps its traceback.
        if not type(error).__module__.startswith(("packer.", "trainer_client.", "service.")):
            raise
        print(f"padfree {args.verb}: {with_flags(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"padfree {args.verb}: stopped", file=sys.stderr)
        return 130
