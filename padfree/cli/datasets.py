"""`padfree datasets`: list what a store or a service has; remove one."""

from __future__ import annotations

import argparse
from typing import Any

from padfree.cli import common
from padfree.cli.common import CommandError


def add(verbs: Any) -> None:
    parser = verbs.add_parser("datasets", help="list datasets, or remove one")
    parser.add_argument("--remove", metavar="ID", help="remove this dataset")
    common.add_place(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.remove:
        _remove(args)
        common.print_result(args, {"removed": args.remove})
        return 0
    views = common.request(args, "GET", "/v1/datasets")["datasets"] if args.url else _views_here(args)
    if not args.json:
        _print_table(views)
    common.print_result(args, views)
    return 0


def _views_here(args: argparse.Namespace) -> list[dict[str, Any]]:
    from packer.manifest import list_datasets
    from packer.view import dataset_view

    store = common.store_of(args, must_exist=True)
    views = (dataset_view(store, dataset) for dataset in list_datasets(store))
    return [view for view in views if view is not None]


def _remove(args: argparse.Namespace) -> None:
    if args.url:
        common.request(args, "DELETE", f"/v1/datasets/{args.remove}")
        return
    from packer.manifest import list_datasets, lock_key, remove_dataset

    store = common.store_of(args, must_exist=True)
    if args.remove not in list_datasets(store):
        raise CommandError(f"there is no dataset {args.remove} in {store.url}; `padfree datasets` lists them")
    with store.lock(lock_key(args.remove)) as mine:
        if not mine:
            raise CommandError(f"dataset {args.remove} is being packed; stop that first")
        remove_dataset(store, args.remove)


def _print_table(views: list[dict[str, Any]]) -> None:
    if not views:
        print("no datasets")
        return
    print(f"{'id':32}  {'state':9}  {'packs':>9}  {'fill':>6}  name")
    for view in views:
        report, progress = view["report"], view["progress"]
        fill = f"{report['fill']:.4f}" if report else "-"
        print(
            f"{view['id']}  {view['state']:9}  {progress['num_packs']:>9,}  {fill:>6}  {view['name'] or ''}"
        )
