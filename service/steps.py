"""What a client must know of a dataset's steps beside the packs: their sizes, and how even they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import BeforeValidator

from packer import order
from service import problems
from service.auth import known_parameters_only
from service.feeds import Snapshot
from service.plan import StreamRequest, deal, epoch_order
from service.schemas import Balance, StepPage
from service.state import Service, service_of

_PAGE = 1 << 20  # optimiser steps

router = APIRouter(prefix="/v1", tags=["stream"])


@router.get(
    "/datasets/{dataset}/steps",
    response_model=StepPage,
    responses=problems.documented(401, 404, 409, 422),
    dependencies=[Depends(known_parameters_only)],
)
async def steps(
    dataset: str,
    start: Annotated[int, Query(ge=0, le=1 << 40, description="The first optimiser step to list")] = 0,
    service: Service = Depends(service_of),  # noqa: B008
) -> dict[str, Any]:
    """Packs of each optimiser step of a "step" dataset, in commit order, as far as they are committed."""
    snapshot = await (await service.feeds.get(dataset)).fresh()
    snapshot.raise_if_stopped(dataset)
    sizes = snapshot.step_sizes
    if sizes is None:
        return {
            "start": start,
            "num_packs": None if snapshot.num_packs else [],
            "finished": snapshot.finished,
        }
    return {
        "start": start,
        "num_packs": sizes[start : start + _PAGE].tolist(),
        "finished": snapshot.finished and start + _PAGE >= len(sizes),
    }


@router.get(
    "/datasets/{dataset}/balance",
    response_model=Balance,
    responses=problems.documented(401, 404, 409, 422),
    dependencies=[Depends(known_parameters_only)],
)
async def balance(
    dataset: str,
    world_size: Annotated[int, Query(ge=1, le=4096, description="Number of ranks")] = 1,
    packs_per_step: Annotated[int, Query(ge=1, le=4096, description="Packs of a rank in a step")] = 1,
    epoch: Annotated[int, Query(ge=0, le=99_999_999)] = 0,
    shuffle_seed: Annotated[
        int | None, BeforeValidator(lambda value: None if value == "" else value), Query()
    ] = None,
    tail: Annotated[Literal["drop", "pad"], Query()] = "drop",
    max_steps: Annotated[int, Query(ge=1, description="Of the first so many steps")] = 1 << 40,
    service: Service = Depends(service_of),  # noqa: B008
) -> dict[str, Any]:
    """How unevenly an epoch's steps cost the ranks, without and with balance=attention.

    Of a dataset that is still being packed: of what is committed.
    """
    snapshot = await (await service.feeds.get(dataset)).fresh()
    snapshot.raise_if_stopped(dataset)
    wanted = StreamRequest(
        dataset=dataset,
        world_size=world_size,
        packs_per_step=packs_per_step,
        epoch=epoch,
        shuffle_seed=shuffle_seed,
        tail=tail,
        max_steps=max_steps,
    ).of(snapshot)
    return await service.long_in_thread(_shares, service, wanted, snapshot)


def _shares(service: Service, wanted: StreamRequest, snapshot: Snapshot) -> dict[str, Any]:
    shares, num_steps = {}, 0
    modes: tuple[Literal["none", "attention"], ...] = ("none", "attention")
    for mode in modes:
        request = replace(wanted, balance=mode)
        epoch = epoch_order(request, snapshot, service.blocks, service.steps)
        costs = order.rank_costs(deal(request, epoch), epoch.costs, max_steps=wanted.max_steps or 1 << 40)
        shares[mode], num_steps = order.idle_share(costs), len(costs)
    return {"num_steps": num_steps, "idle_share": shares}
