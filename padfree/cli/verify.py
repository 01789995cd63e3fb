"""`padfree verify STORE`: every checksum and every rule of the format."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from padfree.cli import common
from padfree.cli.common import CommandError

# What a store holds at its top: of a folder without any of it nothing can be said.
_FOLDERS = ("datasets", "tokenizers", "uploads")


def add(verbs: Any) -> None:
    parser = verbs.add_parser("verify", help="check every checksum and every rule of the format in a store")
    parser.add_argument(
        "store",
        nargs="?",
        metavar="STORE",
        help=f"the store: a folder or s3://BUCKET/PREFIX (./{common.DEFAULT_STORE})",
    )
    parser.add_argument("--dataset", metavar="DATASET", help="only this one: id, its beginning, or name")
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from packer.verify import verify_store

    store = common.store_of(args, must_exist=True, named_by="`padfree verify STORE`")
    if not any(store.list(name) for name in _FOLDERS):
        raise CommandError(
            f"{store.url} is no store: one that `padfree pack` or `padfree serve` has written to is "
            f"required, with {', '.join(_FOLDERS[:-1])} or {_FOLDERS[-1]} in it; name it, for example "
            f"`padfree verify {common.DEFAULT_STORE}`",
            status=2,
        )
    found = verify_store(store, dataset=args.dataset and common.find_here(store, args.dataset))
    for fault in found.faults:
        print(fault, file=sys.stderr)
    if found.faults:
        advice = "remove what is damaged (`padfree datasets --remove ID`) and pack it again"
        print(f"{advice}: the same spec gives the same packs", file=sys.stderr)
    if not args.json:
        print(
            f"{found.num_datasets} datasets, {found.num_shards} shards, {found.num_packs} packs: "
            f"{len(found.faults) or 'no'} fault{'' if len(found.faults) == 1 else 's'}"
        )
    common.print_result(
        args,
        {
            "datasets": found.num_datasets,
            "shards": found.num_shards,
            "packs": found.num_packs,
            "faults": found.faults,
        },
    )
    return 1 if found.faults else 0
