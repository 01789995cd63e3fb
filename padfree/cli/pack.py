"""`padfree pack SOURCE…`: pack a dataset here, or at a service."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from typing import Any

from padfree.cli import common
from padfree.cli.common import CommandError
from padfree.cli.flags import with_flags
from padfree.cli.spec_options import add_spec_options, resolve_here, spec_document


def add(verbs: Any) -> None:
    parser = verbs.add_parser("pack", help="tokenize and pack files into a dataset")
    add_spec_options(parser)
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="Ray workers here; 0: in this process (default: all cores where there is work for more than Ray "
        "takes to start, else 0)",
    )
    parser.add_argument("--ray", metavar="ADDRESS", help="an existing Ray cluster")
    parser.add_argument(
        "--preview",
        type=int,
        metavar="N",
        help="show the first N examples as they will be trained; pack nothing",
    )
    common.add_place(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    document = spec_document(args)
    if args.preview is not None:
        return _preview(args, document)
    from packer.names import kept_name

    view = _pack_at_service(args, document) if args.url else _pack_here(args, document)
    if told := kept_name(view["id"], view["name"], document.get("name")):
        print(f"warning: {told}", file=sys.stderr)
    if not args.json:
        common.print_report(view)
    common.print_result(args, view)
    return 0


# ------------------------------------------------------------------ preview


def _preview(args: argparse.Namespace, document: dict[str, Any]) -> int:
    if args.preview < 1:
        raise CommandError(f"--preview: at least 1 example is required, found {args.preview}", status=2)
    if args.url:
        asked = {**document, "examples": args.preview}
        found = common.request(args, "POST", "/v1/datasets/preview", asked)
    else:
        found = _preview_here(args, document)
    if not args.json:
        colour = sys.stdout.isatty()
        marked = "green" if colour else "in [brackets]"
        print(f"tokens between bars; what is {marked} is trained, the rest is only read")
        for example in found["examples"]:
            sizes = f"{example['num_tokens']:,} tokens, {example['num_trained']:,} trained"
            print(f"example {example['example']} ({example['place']}): {sizes}")
            print(f"  {example['error']}" if example["error"] else _shown(example, colour))
        for warning in found["warnings"]:
            print(f"warning: {with_flags(warning)}")
    common.print_result(args, found)
    return 0


def _preview_here(args: argparse.Namespace, document: dict[str, Any]) -> dict[str, Any]:
    from packer.preview import preview

    with common.scratch_store(args) as store:
        job = resolve_here(document, store, identify=False)
        try:
            return dataclasses.asdict(preview(job, store, args.preview))
        except (ValueError, OSError) as error:  # of reading, rendering and the store
            raise CommandError(str(error)) from None


def _shown(example: dict[str, Any], colour: bool) -> str:
    """Tokens between bars; trained ones in green, or in [brackets] where there is no colour."""
    opening, closing = ("\x1b[32m", "\x1b[0m") if colour else ("[", "]")
    texts = []
    for token in example["tokens"]:
        text = token["text"].replace("\x1b", "\\x1b").replace("\r", "\\r").replace("\n", "\\n\n")
        texts.append(f"{opening}{text}{closing}" if token["trained"] else text)
    if left := example["num_tokens"] - len(texts):
        texts.append(f"… {left:,} more")
    return "|".join(texts)


# ------------------------------------------------------------------ here


def _pack_here(args: argparse.Namespace, document: dict[str, Any]) -> dict[str, Any]:
    from packer.coordinator import Busy, PackingFailed, pack
    from packer.view import dataset_view

    store = common.store_of(args, must_exist=False)
    job = resolve_here(document, store)
    with (
        _Progress(quiet=args.json) as progress,
        _runner(args, job, store) as runner,
    ):
        try:
            pack(job, store, runner, on_progress=lambda manifest, of: progress.show(manifest.num_commits, of))
        except (PackingFailed, Busy) as error:
            raise CommandError(str(error)) from None
    view = dataset_view(store, job.dataset)
    assert view is not None
    return view


def _runner(args: argparse.Namespace, job: Any, store: Any) -> Any:
    from packer.runners import InlineRunner
    from packer.workload import ray_pays

    if args.ray is None and (args.workers == 0 or (args.workers is None and not ray_pays(job, store))):
        return InlineRunner()
    from packer.runners.ray import RayRunner

    try:
        return RayRunner(args.ray, num_cpus=args.workers)
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        where = "starts here" if args.ray is None else f"answers at {args.ray} (--ray)"
        raise CommandError(f"no Ray {where}: {error}; without Ray: --workers 0") from error


# ------------------------------------------------------------------ at a service


def _pack_at_service(args: argparse.Namespace, document: dict[str, Any]) -> dict[str, Any]:
    view = common.request(args, "POST", "/v1/datasets", document)
    if view["state"] == "queued" and sys.stderr.isatty():
        print("queued: a service that has just started waits for its workers first", file=sys.stderr)
    try:
        view = _packed(args, view)
    except KeyboardInterrupt:
        raise CommandError(
            f"stopped waiting; the service goes on packing dataset {view['id']}. `padfree inspect "
            f"{view['id']} --url {args.url}` shows how far it is, `padfree datasets --url {args.url} "
            f"--remove {view['id']}` cancels and removes it",
            status=130,
        ) from None
    if view["state"] != "ready":
        reason = (view.get("error") or {}).get("detail", view["state"])
        raise CommandError(f"dataset {view['id']} {view['state']}: {reason}")
    return view


def _packed(args: argparse.Namespace, view: dict[str, Any]) -> dict[str, Any]:
    """The view of a dataset once the service does not pack it any more."""
    with _Progress(quiet=args.json) as progress:
        while view["state"] in ("queued", "packing"):
            at = view["progress"]
            progress.show(at["partitions_committed"], at["num_partitions"])
            time.sleep(0.5)
            # The service may be restarted meanwhile: it goes on with what is packed.
            view = common.request(args, "GET", f"/v1/datasets/{view['id']}", patience_s=60.0)
        progress.show(view["progress"]["partitions_committed"], view["progress"]["num_partitions"])
    return view


class _Progress:
    """A bar of partitions on a terminal; silent elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._bar: Any = None
        self._quiet = quiet or not sys.stderr.isatty()

    def show(self, done: int, total: int | None) -> None:
        if self._quiet or not total:
            return
        if self._bar is None:
            try:
                from tqdm import tqdm
            except ModuleNotFoundError:  # the base install has none
                self._quiet = True
                return
            self._bar = tqdm(total=total, unit="partition", desc="packing", file=sys.stderr)
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
