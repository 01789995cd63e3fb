"""`padfree serve`: the service, with a Ray of its own or one that is there."""

from __future__ import annotations

import argparse
from typing import Any

from padfree.cli import common
from padfree.cli.common import CommandError


def add(verbs: Any) -> None:
    parser = verbs.add_parser("serve", help="start the service")
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (8000; 0: any free one)")
    parser.add_argument(
        "--store", metavar="DIR", help=f"the store: a folder or s3://BUCKET/PREFIX (./{common.DEFAULT_STORE})"
    )
    parser.add_argument(
        "--data-root",
        action="append",
        metavar="DIR",
        help="folder that sources may lie in; may be repeated (.)",
    )
    parser.add_argument("--ray", metavar="ADDRESS", help="an existing Ray cluster instead of an embedded one")
    parser.add_argument("--workers", type=int, metavar="N", help="CPUs of the embedded Ray (all); 0: no Ray")
    parser.add_argument("--max-jobs", type=int, metavar="N", help="datasets packed at the same time (2)")
    parser.add_argument("--log-format", choices=["text", "json"], help="lines for people or for machines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from service.main import serve
    from service.settings import Settings, SettingsError

    given = {
        "host": args.host,
        "port": args.port,
        "store": args.store,
        "data_roots": args.data_root,
        "ray_address": args.ray,
        "workers": args.workers,
        "max_jobs": args.max_jobs,
        "log_format": args.log_format,
    }
    try:
        return serve(
            Settings.from_environment(**{name: value for name, value in given.items() if value is not None})
        )
    except SettingsError as error:
        raise CommandError(str(error), status=2) from None
