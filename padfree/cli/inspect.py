"""`padfree inspect DATASET|SHARD`: what is in there, segment by segment."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from padfree.cli import common
from padfree.cli.common import CommandError


def add(verbs: Any) -> None:
    parser = verbs.add_parser("inspect", help="show a dataset's report, or the packs of a shard file")
    parser.add_argument("what", metavar="DATASET|SHARD", help="a dataset's id, or a shard file")
    parser.add_argument("--packs", type=int, default=3, metavar="N", help="packs to show (3)")
    common.add_place(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if Path(args.what).is_file():
        result = {"packs": list(_packs(Path(args.what), args.packs))}
        for pack in result["packs"]:
            print(
                f"pack {pack['pack']}: {pack['num_tokens']} tokens, {pack['num_trained']} trained, "
                f"segments {pack['lengths']} of examples {pack['example_ids']}"
            )
    else:
        result = _dataset(args)
        if result["report"]:
            common.print_report(result)
        else:
            print(f"dataset {result['id']} is {result['state']}: {result['error'] or result['progress']}")
    common.print_result(args, result)
    return 0


def _packs(path: Path, count: int) -> Iterator[dict[str, Any]]:
    import itertools

    import numpy as np

    from packer.shard import ShardError, read_packs

    try:
        for number, pack in enumerate(itertools.islice(read_packs(path.read_bytes()), count)):
            yield {
                "pack": number,
                "num_tokens": pack.num_tokens,
                "num_trained": pack.num_trained,
                "lengths": np.diff(pack.cu_seqlens).tolist(),
                "example_ids": pack.example_ids.tolist(),
            }
    except ShardError as error:
        raise CommandError(f"{path}: {error}") from None


def _dataset(args: argparse.Namespace) -> dict[str, Any]:
    if args.url:
        return common.request(args, "GET", f"/v1/datasets/{args.what}")
    from packer.store import LocalStore
    from packer.view import dataset_view

    store = LocalStore(common.store_folder(args, must_exist=True))
    view = dataset_view(store, args.what)
    if view is None:
        raise CommandError(f"{args.what} is neither a shard file nor a dataset in {store.root}")
    return view
