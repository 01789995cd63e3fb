"""`padfree inspect DATASET|SHARD`: what is in there, segment by segment."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from padfree.cli import common
from padfree.cli.common import CommandError


def add(verbs: Any) -> None:
    parser = verbs.add_parser(
        "inspect", help="show a dataset's report and first packs, or those of a shard file"
    )
    parser.add_argument("what", metavar="DATASET|SHARD", help="a dataset by id or name, or a shard file")
    parser.add_argument("--packs", type=int, default=3, metavar="N", help="packs to show (3)")
    common.add_place(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if Path(args.what).is_file():
        result = {"packs": list(_packs(Path(args.what).read_bytes(), args.packs, args.what))}
        if not args.json:
            _print_packs(result["packs"])
    else:
        result = _dataset(args)
        if not args.json:
            _print_dataset(result)
    common.print_result(args, result)
    return 0


def _print_packs(packs: list[dict[str, Any]]) -> None:
    for pack in packs:
        print(
            f"pack {pack['pack']}: {pack['num_tokens']} tokens, {pack['num_trained']} trained, "
            f"segments {pack['lengths']} of examples {pack['example_ids']}"
        )


def _print_dataset(view: dict[str, Any]) -> None:
    if (spec := view.get("spec")) is None:  # damaged
        print(_unfinished(view))
        return
    tokenizer = spec["tokenizer"]["path"] if spec["tokenizer"] else "none"
    if view["report"]:
        common.print_report(view)
    else:
        print(_unfinished(view))
    print(f"source  {', '.join(spec['source']['paths'])} ({spec['source']['format']}, loss {spec['loss']})")
    print(f"with    tokenizer {tokenizer}, shuffle_seed {spec['shuffle_seed']}")
    options = ", ".join(f"{name} {value}" for name, value in spec["packing"].items() if value is not None)
    print(f"packing {options}")
    _print_packs(view.get("packs", []))


def _unfinished(view: dict[str, Any]) -> str:
    """What there is to say of a dataset without a report."""
    at, error = view["progress"], view["error"]
    if error:
        field = f"{error['field']}: " if error.get("field") else ""
        return f"dataset {view['id']} {view['state']}: {field}{error.get('detail', error.get('title'))}"
    return (
        f"dataset {view['id']} is {view['state']}: {at['partitions_committed']} of "
        f"{at['num_partitions'] or 'unknown'} partitions, {at['num_packs']:,} packs"
    )


def _packs(data: bytes, count: int, name: str) -> Iterator[dict[str, Any]]:
    import itertools

    import numpy as np

    from packer.shard import ShardError, read_packs

    try:
        for number, pack in enumerate(itertools.islice(read_packs(data), count)):
            yield {
                "pack": number,
                "num_tokens": pack.num_tokens,
                "num_trained": pack.num_trained,
                "lengths": np.diff(pack.cu_seqlens).tolist(),
                "example_ids": pack.example_ids.tolist(),
            }
    except ShardError as error:
        raise CommandError(f"{name}: {error}") from None


def _dataset(args: argparse.Namespace) -> dict[str, Any]:
    if args.url:
        return common.request(args, "GET", common.dataset_path(args.what))
    from packer.manifest import Manifest
    from packer.view import dataset_view

    store = common.store_of(args, must_exist=True)
    dataset = common.find_here(store, args.what)
    view = dataset_view(store, dataset)
    if view is None:
        raise CommandError(f"{args.what} is neither a shard file nor a dataset in {store.url}")
    manifest = Manifest(store, dataset)
    manifest.refresh()
    packs: list[dict[str, Any]] = []
    for shard in manifest.shards:
        if len(packs) < args.packs:
            packs += _packs(store.get(shard.key), args.packs - len(packs), shard.key)
    return {**view, "packs": packs}
