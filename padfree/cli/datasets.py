"""`padfree datasets`: list what a store or a service has; remove one."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from padfree.cli import common
from padfree.cli.common import CommandError


def add(verbs: Any) -> None:
    parser = verbs.add_parser("datasets", help="list datasets, or remove one")
    parser.add_argument("--remove", metavar="DATASET", help="remove this one: id, its beginning, or name")
    common.add_place(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.remove:
        dataset, name = _remove(args)
        if not args.json:
            print(f"removed dataset {dataset} ({name or 'no name'})")
        common.print_result(args, {"removed": dataset})
        return 0
    views = common.request(args, "GET", "/v1/datasets")["datasets"] if args.url else _views_here(args)
    if not args.json:
        _print_table(views)
    common.print_result(args, views)
    return 0


def _views_here(args: argparse.Namespace) -> list[dict[str, Any]]:
    from packer.manifest import ManifestError, list_datasets
    from packer.store import StoreError
    from packer.view import damaged_view, dataset_view

    store = common.store_of(args, must_exist=True)
    views = []
    for dataset in list_datasets(store):
        try:
            view = dataset_view(store, dataset)
        except (ManifestError, StoreError) as error:  # which must not hide the others
            print(f"{dataset}: {error}", file=sys.stderr)
            view = damaged_view(dataset, error)
        if view is not None:
            views.append(view)
    return views


def _remove(args: argparse.Namespace) -> tuple[str, str | None]:
    """Remove a dataset; returns its id and name. Of several of one name none is preferred."""
    from packer.manifest import Manifest, ManifestError, lock_key, remove_dataset
    from packer.names import choose

    if args.url:
        views = {view["id"]: view for view in common.request(args, "GET", "/v1/datasets")["datasets"]}
        names = {one: view["name"] for one, view in views.items()}
        try:
            found = choose(args.remove, names, state_of=lambda one: views[one]["state"], prefer_usable=False)
        except LookupError as error:
            raise CommandError(f"{args.url}: {error}") from None
        common.request(args, "DELETE", common.dataset_path(found))
        return found, names[found]
    store = common.store_of(args, must_exist=True)
    dataset = common.find_here(store, args.remove, prefer_usable=False)
    try:
        name = (Manifest(store, dataset).spec() or {"spec": {}})["spec"].get("name")
    except ManifestError:  # what is damaged can be removed too
        name = None
    with store.lock(lock_key(dataset)) as mine:
        if not mine:
            raise CommandError(f"dataset {dataset} is being packed; stop that first")
        remove_dataset(store, dataset)
    return dataset, name


def _print_table(views: list[dict[str, Any]]) -> None:
    if not views:
        print("no datasets; `padfree pack` makes one")
        return
    rows = [("id", "state", "created (UTC)", "packs", "fill", "size", "name", "source")]
    for view in sorted(views, key=lambda view: view.get("created") or ""):
        progress, fill = view["progress"], (view["report"] or {}).get("fill")
        rows.append(
            (
                view["id"][:12],
                view["state"],
                (view.get("created") or "-").replace("T", " ")[:16],
                f"{progress.get('num_packs', 0):,}",
                "-" if fill is None else f"{fill:.4f}",
                _size(progress.get("num_bytes", 0)),
                view["name"] or "-",
                _source(view),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = (3, 4, 5)  # numbers
    for row in rows:
        cells = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _source(view: dict[str, Any]) -> str:
    paths = ((view.get("spec") or {}).get("source") or {}).get("paths") or ["-"]
    if paths[0].startswith("dataset://"):  # packed anew; as short as ids are in this table
        return paths[0][: len("dataset://") + 12]
    first = paths[0] if len(paths[0]) <= 48 else f"…{paths[0][-47:]}"
    return f"{first} and {len(paths) - 1} more" if len(paths) > 1 else first
