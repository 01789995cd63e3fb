"""`padfree stream DATASET`: read a dataset as a trainer would, and measure."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from padfree.cli import common
from padfree.cli.common import CommandError


def add(verbs: Any) -> None:
    parser = verbs.add_parser("stream", help="read a dataset as a trainer would, and measure")
    parser.add_argument(
        "dataset", metavar="DATASET", help="the dataset's id, the beginning of it, or its name"
    )
    parser.add_argument("--rank", type=int, help="which of the ranks this is (0)")
    parser.add_argument("--world-size", type=int, help="how many ranks share the dataset (1)")
    parser.add_argument("--packs-per-step", type=int, default=1, help="packs a rank takes in a step (1)")
    parser.add_argument("--epochs", type=int, default=1, help="times through the dataset (1)")
    parser.add_argument("--shuffle-seed", type=int, default=0, help="order of the second epoch on (0)")
    parser.add_argument(
        "--tail",
        choices=["drop", "pad"],
        default="drop",
        help="packs that fill no step: left out, or filled up with packs that train nothing (drop)",
    )
    parser.add_argument(
        "--balance",
        choices=["none", "attention"],
        default="none",
        help="attention: the ranks of a step get packs of about the same cost (none)",
    )
    parser.add_argument("--max-steps", type=int, help="stop after this many steps")
    common.add_place(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from trainer_client import ClientError, PackedStream

    dataset = args.dataset
    if args.url:  # a person waits: a service that is not there is told at once, not after timeout_s
        dataset = common.request(args, "GET", common.dataset_path(dataset))["id"]
    source = args.url or common.store_of(args, must_exist=True).url
    steps = packs = tokens = trained = 0
    first_batch_s = None
    start = time.perf_counter()
    try:
        with PackedStream(
            source,
            dataset=dataset,
            rank=args.rank,
            world_size=args.world_size,
            packs_per_step=args.packs_per_step,
            epochs=args.epochs,
            shuffle_seed=args.shuffle_seed,
            tail=args.tail,
            balance=args.balance,
            token=args.token,
        ) as stream:
            dataset = stream.dataset
            for batch in stream:
                first_batch_s = first_batch_s or time.perf_counter() - start
                steps, packs = steps + 1, packs + batch.num_packs
                tokens, trained = tokens + batch.num_tokens, trained + batch.num_trained
                if steps == args.max_steps:
                    break
            stats = stream.stats()
    except ClientError as error:
        raise CommandError(str(error)) from None
    except ValueError as error:
        raise CommandError(str(error), status=2) from None
    seconds = time.perf_counter() - start
    flowing_s = seconds - (first_batch_s or 0.0)  # opening the stream is not its speed
    result = {
        "dataset": dataset,
        "steps": steps,
        "packs": packs,
        "tokens": tokens,
        "tokens_trained": trained,
        "seconds": seconds,
        "tokens_per_s": tokens / flowing_s if flowing_s > 0 else 0.0,
        "first_batch_s": first_batch_s,
        "stall_share": stats.stall_share,
    }
    if args.balance != "none":
        result["idle_share"] = {"none": stats.idle_share_before, "attention": stats.idle_share_after}
    if not args.json:
        first = f"{first_batch_s:.3f} s" if first_batch_s is not None else "never"
        print(f"{steps:,} steps, {packs:,} packs, {tokens:,} tokens in {seconds:.2f} s", file=sys.stdout)
        print(f"first batch after {first}, then {result['tokens_per_s']:,.0f} tokens/s")
        if "idle_share" in result:
            before, after = stats.idle_share_before, stats.idle_share_after
            print(f"ranks wait for each other {after:.1%} of the time, {before:.1%} without balance")
    common.print_result(args, result)
    return 0
