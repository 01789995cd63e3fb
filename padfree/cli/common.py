"""What several verbs share: errors, JSON over HTTP, the store option, output."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

from padfree.cli.flags import with_flags

DEFAULT_STORE = "padfree-store"
TIMEOUT_S = 600.0  # a POST answers once the inputs are hashed


class CommandError(Exception):
    """Printed on standard error; `status` is the exit status."""

    def __init__(self, message: str, *, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def add_place(parser: argparse.ArgumentParser) -> None:
    """--store or --url, and --token."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--store",
        metavar="DIR",
        help=f"the store: a folder or s3://BUCKET/PREFIX (default: ./{DEFAULT_STORE})",
    )
    place.add_argument("--url", metavar="URL", help="a running service, for example http://localhost:8000")
    parser.add_argument(
        "--token",
        type=_token,
        default=os.environ.get("PADFREE_TOKEN"),
        help="bearer token of the service (PADFREE_TOKEN)",
    )


def _token(text: str) -> str | None:
    from trainer_client.options import token_of

    try:
        return token_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@contextlib.contextmanager
def scratch_store(args: argparse.Namespace) -> Iterator[Any]:
    """A store for work that leaves nothing behind; for dataset:// sources the one that holds them, in which
    nothing is written then."""
    from packer.sources import names_dataset
    from packer.store import LocalStore

    if names_dataset(args.source):
        yield store_of(args, must_exist=True)
        return
    with tempfile.TemporaryDirectory(prefix="padfree-") as folder:
        yield LocalStore(folder)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="end with the result as one line of JSON")


def store_of(args: argparse.Namespace, *, must_exist: bool, named_by: str = "--store DIR") -> Any:
    """The store of --store, or of what `named_by` says, a packer.store.Store."""
    from packer.store import StoreError, open_store

    place = args.store or DEFAULT_STORE
    try:
        store = open_store(place)
        if must_exist and not store.is_there():
            raise CommandError(f"there is no store at {place}: name one with {named_by}", status=2)
    except StoreError as error:
        raise CommandError(str(error), status=2) from None
    return store


def find_here(store: Any, text: str, *, prefer_usable: bool = True) -> str:
    """The id of the dataset of a store that the user means by an id, its beginning, or a name.

    prefer_usable: as of packer.names.choose.
    """
    from packer.names import find_dataset

    try:
        return find_dataset(store, text, prefer_usable=prefer_usable)
    except LookupError as error:
        raise CommandError(f"{store.url}: {error}") from None


def dataset_path(text: str) -> str:
    """The path of a dataset at a service, as the user calls it."""
    return f"/v1/datasets/{urllib.parse.quote(text, safe='')}"


def request(
    args: argparse.Namespace, method: str, path: str, body: Any = None, *, patience_s: float = 0.0
) -> Any:
    """One JSON call to the service of --url; for `patience_s` again where none answers.

    Raises CommandError with the problem's detail.
    """
    if not args.url.startswith(("http://", "https://")):
        raise CommandError(f"--url takes a url like http://localhost:8000, found {args.url!r}", status=2)
    call = urllib.request.Request(args.url.rstrip("/") + path, method=method)
    call.add_header("X-Request-Id", f"cli-{uuid.uuid4().hex[:12]}")
    if args.token:
        call.add_header("Authorization", f"Bearer {args.token}")
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        call.add_header("Content-Type", "application/json")
    until = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(call, data, timeout=TIMEOUT_S) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() >= until:
                raise _problem(error, args, path) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            from trainer_client.strangers import why_never

            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            why = why_never(args.url, reason) if isinstance(reason, Exception) else ""
            if why or time.monotonic() >= until:
                raise CommandError(why or f"no padfree service answers at {args.url}: {reason}") from None
        time.sleep(1.0)


def _problem(error: urllib.error.HTTPError, args: argparse.Namespace, path: str) -> CommandError:
    url = args.url
    try:
        problem = json.loads(error.read())
        if str(problem.get("type", "")).endswith(":unknown-dataset"):
            asked = urllib.parse.unquote(path.removeprefix("/v1/datasets/").partition("/")[0])
            return CommandError(
                f"there is no dataset {asked[:80]!r} at {url}: an id, the beginning of one (4 digits or "
                f"more) or a name is required; `padfree datasets --url {url}` lists them"
            )
        text = str(problem["detail"])
        if (field := problem.get("field")) and not text.startswith(f"{field}: "):
            text = f"{field}: {text}"
    except (ValueError, KeyError, TypeError):
        text = f"the service answered {error.code} {error.reason}"
    if error.code == 401:
        is_wrong = "the token that was given is none of its tokens; " if args.token else ""
        text = f"{url}: {text}; {is_wrong}give one of the service's with --token, or as PADFREE_TOKEN"
    if error.code == 404:
        from trainer_client.strangers import without_v1

        hint = without_v1(url) or "is this the url of a padfree service?"
        text = f"{url}: {text}; {hint}"
    if (name := error.headers.get("X-Request-Id")) and error.code >= 500:  # the service's log has more
        text = f"{text} (request {name})"
    return CommandError(text, status=2 if error.code in (400, 422) else 1)


def print_result(args: argparse.Namespace, result: Any) -> None:
    """The last line of standard output, where --json asks for it."""
    if args.json:
        print(json.dumps(result, ensure_ascii=False))


def print_report(view: dict[str, Any]) -> None:
    """A dataset's report, for people."""
    report = view["report"]
    left = {
        name: report[f"rows_{name}"]
        for name in ("empty", "untrained", "overlong", "rejected")
        if report[f"rows_{name}"]
    }
    aside = "".join(f", {count:,} {name}" for name, count in left.items())
    cut = "".join(
        f", {report[f'rows_{name}']:,} {name}" for name in ("truncated", "split") if report[f"rows_{name}"]
    )
    print(f"dataset {view['id']}")
    print(f"rows    {report['rows_in']:,} in, {report['rows_packed']:,} packed{cut}{aside}")
    print(
        f"tokens  {report['tokens_in']:,} in, {report['tokens_packed']:,} packed, "
        f"{report['tokens_trained']:,} trained, {report['tokens_dropped']:,} dropped"
    )
    print(
        f"packs   {report['num_packs']:,} (the tokens alone need {report['lower_bound_packs']:,}), "
        f"fill {report['fill']:.4f} of max_tokens"
    )
    each = report.get("capacities", [])
    if len(each) > 1:
        for one in each:
            print(
                f"        of max_tokens {one['max_tokens']:,}: {one['num_packs']:,} packs, "
                f"{one['num_tokens']:,} tokens, fill {one['fill']:.4f}"
            )
    print(
        f"shards  {report['num_shards']:,}. Padded to the longest of each mini-batch, "
        f"{report['padded_fill']:.4f} of what a model computes would be real tokens"
    )
    for warning in report.get("warnings", []):
        print(f"warning: {with_flags(warning)}", file=sys.stderr)
    for row in report["rejected"][:10]:
        print(f"        {row['file']}, {row['unit']} {row['line']}: {row['reason']}", file=sys.stderr)
