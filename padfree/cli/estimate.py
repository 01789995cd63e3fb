"""`padfree estimate SOURCE…`: padding against each strategy, on your own data, before any work."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from padfree.cli import common
from padfree.cli.common import CommandError
from padfree.cli.flags import with_flags
from padfree.cli.spec_options import add_spec_options, resolve_here, spec_document


def add(verbs: Any) -> None:
    parser = verbs.add_parser("estimate", help="compare padding with each strategy on your own data")
    add_spec_options(parser)
    parser.add_argument(
        "--packs-per-step", type=int, default=1, metavar="N", help="packs (or mini-batches) a step (1)"
    )
    parser.add_argument(
        "--store", metavar="DIR", help=f"store of a dataset:// source (./{common.DEFAULT_STORE})"
    )
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from packer.measure import measure
    from packer.packing import estimate
    from packer.report import beyond_model_warnings
    from packer.roles import unlearned_warnings
    from packer.rows import beyond_model

    with common.scratch_store(args) as store:
        job = resolve_here(spec_document(args), store)
        try:
            measured = measure(job, store)
            rejected = measured.rejected
            if rejected.num_rows and job.spec.source.on_bad_row == "fail":
                said = _said(rejected)
                end = "" if said.endswith("?") else "."
                raise CommandError(f"{said}{end} Correct them, or leave them out with --on-bad-row skip")
            packing = job.spec.packing
            found = estimate(
                measured.lengths,
                packing.capacities,
                minibatch_size=packing.minibatch_size or 8,
                packs_per_step=args.packs_per_step,
                overlong=packing.overlong,
                truncate_side=packing.truncate_side,
                min_piece=packing.min_piece,
                scope=packing.scope,
                segment_multiple=packing.segment_multiple,
                pack_multiple=packing.pack_multiple,
                begins=measured.begins,
                trained=measured.trained,
                bounds=measured.bounds,
            )
            found = _with_left_out(found, measured.counters)
        except (ValueError, OSError) as error:  # of reading, rendering, packing and the store
            raise CommandError(str(error)) from None
    size = packing.minibatch_size or 8
    warnings = [
        *_warnings(measured.lengths, packing, size),
        *unlearned_warnings(measured.unlearned),
        *beyond_model_warnings(beyond_model(measured.lengths, job), job.model_max_length),
    ]
    if rejected.num_rows:
        warnings.insert(0, f"{_said(rejected)}; left out of these figures")
    for warning in warnings:
        print(f"warning: {with_flags(warning)}", file=sys.stderr)
    if not args.json:
        _print(found, packing.capacities, size)
    listed = [
        {"file": row.file, "line": row.line, "unit": row.unit, "reason": row.reason} for row in rejected.first
    ]
    result = {
        "warnings": warnings,
        "rows_in": measured.counters.rows_in,
        "rows_empty": measured.counters.rows_empty,
        "rows_rejected": rejected.num_rows,
        "rejected": listed,
    }
    common.print_result(args, {**dataclasses.asdict(found), **result})
    return 0


def _with_left_out(found: Any, counters: Any) -> Any:
    """The estimate with the rows counted that have nothing to train even uncut, and their tokens."""
    rows = tuple(
        row
        if row.problem
        else dataclasses.replace(
            row,
            tokens_dropped=row.tokens_dropped + counters.tokens_dropped,
            rows_untrained=row.rows_untrained + counters.rows_untrained,
        )
        for row in found.rows
    )
    return dataclasses.replace(found, num_tokens=found.num_tokens + counters.tokens_dropped, rows=rows)


def _warnings(lengths: Any, packing: Any, size: int) -> list[str]:
    """That mini-batches of the rows, in source order, do not fit into a pack, where that is so."""
    import numpy as np

    from packer.packing import Capacity, tokens_of_minibatches

    capacity = Capacity(
        max_tokens=packing.capacities[-1],
        segment_multiple=packing.segment_multiple,
        pack_multiple=packing.pack_multiple,
    )
    sizes = tokens_of_minibatches(lengths, capacity, size)
    count = int(np.count_nonzero(sizes > capacity.pack))
    if not count or len(packing.capacities) > 1:  # of several the table says that minibatch takes one
        return []
    return [
        f"under minibatch {count:,} of {len(sizes):,} mini-batches of {size} rows take more than a pack "
        f"of max_tokens={capacity.max_tokens}, the largest {sizes.max()}: their rows would "
        f"be cut or left out, and the loss not that of padding. Raise packing.max_tokens to {sizes.max()} or "
        "more (packs take no more than they need), or lower packing.minibatch_size"
    ]


def _said(rejected: Any) -> str:
    first = rejected.first[0]
    count = f"{rejected.num_rows:,} row{'s'[: rejected.num_rows > 1]}"
    return f"{count} could not be used, the first is {first.location}: {first.reason}"


def _left_out(found: Any) -> str:
    """What the figures leave out though it has tokens."""
    count = next(row for row in found.rows if row.name == "padding").rows_untrained
    if not count:
        return ""
    return f" ({count:,} row{'s'[: count > 1]} more have nothing to train, or nothing after a cut: left out)"


def _print(found: Any, capacities: tuple[int, ...], minibatch_size: int) -> None:
    print(
        f"{found.num_examples:,} examples, {found.num_tokens:,} tokens{_left_out(found)}; "
        f"max_tokens {' or '.join(f'{number:,}' for number in capacities)}, "
        f"mini-batches of {minibatch_size}\n"
        f"the tokens alone need {found.volume_packs:,} packs; with whole examples no packer needs fewer than "
        f"{found.lower_bound_packs:,}\n"
    )
    padding = next(row for row in found.rows if row.name == "padding")
    _print_row("", "packs", "steps", "fill", "tokens computed", "of padding", "dropped")
    for row in found.rows:
        if row.problem:
            _print_row(row.name, *"------")
            continue
        share = row.tokens_computed / padding.tokens_computed if padding.tokens_computed else 0.0
        _print_row(
            row.name,
            f"{row.num_packs:,}",
            f"{row.num_steps:,}",
            f"{row.fill:.4f}",
            f"{row.tokens_computed:,}",
            f"{share:.1%}",
            f"{row.tokens_dropped:,}",
        )
    problems = [f"{row.name}: {row.problem}" for row in found.rows if row.problem]
    if problems:
        print("\n" + "\n".join(problems))


def _print_row(name: str, *cells: str) -> None:
    widths = (10, 10, 7, 17, 11, 11)
    print(f"{name:18}" + "".join(f" {cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
