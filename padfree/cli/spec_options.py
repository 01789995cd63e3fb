"""The spec as options of a command: what `pack` and `estimate` share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from padfree.cli.common import CommandError


def add_spec_options(parser: argparse.ArgumentParser) -> None:
    """One option a field of the spec, under the field's name."""
    parser.add_argument(
        "source", nargs="+", metavar="SOURCE", help="files, folders, globs, urls, or dataset://ID"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="a folder with tokenizer.json, or a Hub id")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template instead of the tokenizer's")
    parser.add_argument("--add-bos", choices=["auto", "true", "false"], help="begin texts with BOS (auto)")
    parser.add_argument("--add-eos", choices=["auto", "true", "false"], help="end texts with EOS (auto)")
    parser.add_argument(
        "--max-tokens",
        type=_numbers,
        metavar="N[,N…]",
        help="tokens a pack holds at most (8192); several: each example in the smallest that holds it",
    )
    parser.add_argument("--strategy", help="best_fit, sequential, wrapped, minibatch, step or padded")
    parser.add_argument("--minibatch-size", type=int, metavar="N", help="examples a pack, for minibatch")
    parser.add_argument("--step-size", type=int, metavar="N", help="examples a step, for step")
    parser.add_argument("--overlong", help="truncate, split, drop or error")
    parser.add_argument("--truncate-side", help="which end truncate cuts off: right or left")
    parser.add_argument("--min-piece", type=int, metavar="N", help="shortest piece that split makes")
    parser.add_argument("--scope", help="best_fit over a window of the stream or global, a whole partition")
    parser.add_argument("--balance", help="none, or attention: packs of equal attention cost side by side")
    parser.add_argument("--segment-multiple", type=int, metavar="N", help="pad each segment to a multiple")
    parser.add_argument("--pack-multiple", type=int, metavar="N", help="pad each pack to a multiple")
    parser.add_argument("--format", help="text, prompt_completion, messages, tokens or auto")
    parser.add_argument(
        "--field", action="append", default=[], metavar="OURS=THEIRS", help="for example prompt=question"
    )
    parser.add_argument("--loss", help="all, completion, assistant, last_assistant or auto")
    parser.add_argument("--on-bad-row", help="fail or skip")
    parser.add_argument("--shuffle-seed", metavar="N", help='a number, or "none" to keep the order (0)')
    parser.add_argument("--name", help="a name for people")


def spec_document(args: argparse.Namespace) -> dict[str, Any]:
    """The spec that the options say; what is not said is left to its default."""

    def given(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    flags = {"auto": "auto", "true": True, "false": False, None: None}
    fields = {}
    for pair in args.field:
        ours, separator, theirs = pair.partition("=")
        if not separator or not ours or not theirs:
            raise CommandError(
                f"--field takes OURS=THEIRS, for example prompt=question, found {pair!r}", status=2
            )
        fields[ours] = theirs
    document = given(name=args.name, loss=args.loss)
    document["source"] = given(
        paths=[_absolute(path) for path in args.source],
        format=args.format,
        fields=fields or None,
        on_bad_row=args.on_bad_row,
    )
    if args.tokenizer is not None:
        template = args.chat_template
        document["tokenizer"] = given(
            path=_absolute(args.tokenizer),
            chat_template=_absolute(template) if template and "{" not in template else template,
            add_bos=flags[args.add_bos],
            add_eos=flags[args.add_eos],
        )
    document["packing"] = given(
        strategy=args.strategy,
        max_tokens=args.max_tokens,
        overlong=args.overlong,
        truncate_side=args.truncate_side,
        min_piece=args.min_piece,
        scope=args.scope,
        balance=args.balance,
        minibatch_size=args.minibatch_size,
        step_size=args.step_size,
        segment_multiple=args.segment_multiple,
        pack_multiple=args.pack_multiple,
    )
    if args.shuffle_seed is not None:
        document["shuffle_seed"] = _seed(args.shuffle_seed)
    return document


def _numbers(text: str) -> int | list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a whole number is required, or several with commas between (2048,8192), found {text!r}"
        ) from None
    return numbers if len(numbers) > 1 else numbers[0]


def _seed(text: str) -> int | None:
    if text.lower() in ("none", "null"):
        return None
    try:
        return int(text)
    except ValueError:
        raise CommandError(
            f'--shuffle-seed takes a whole number or "none", found {text!r}', status=2
        ) from None


def _absolute(path: str) -> str:
    """A path of this machine in full, so that a service here finds it; urls and Hub ids as they are."""
    return str(Path(path).absolute()) if "://" not in path and Path(path).exists() else path


def resolve_here(document: dict[str, Any], store: Any, *, identify: bool = True) -> Any:
    """The job of a spec, with errors as a command tells them. `store`: a packer.store.Store; `identify`:
    as of packer.resolve.resolve."""
    from packer.render import RenderError
    from packer.resolve import resolve
    from packer.sources import SourceError
    from packer.spec import SpecError, parse_spec
    from packer.tokenization import TokenizerError

    try:
        return resolve(parse_spec(document), store=store, identify=identify)
    except SpecError as error:
        raise CommandError(str(error), status=2) from None
    except (SourceError, TokenizerError, RenderError, OSError) as error:
        raise CommandError(str(error)) from None
