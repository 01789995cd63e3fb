"""examples/evaluation.py: the loss of every example equals the example alone, however it was packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import evaluation
import pytest
import torch
import torch.distributed as dist
from training import STEPS, Row, on_ranks, pack_rows, rows_of, tiny


def alone(rows: list[Row]) -> dict[int, tuple[float, int]]:
    """(summed loss, trained tokens) of each row, evaluated by itself with transformers' own attention."""
    model = tiny().eval()
    model.set_attn_implementation("sdpa")
    found = {}
    for index, row in enumerate(rows):
        labels = torch.tensor([row["labels"]])
        count = int((labels[0, 1:] != -100).sum())
        if count:
            with torch.no_grad():
                loss = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels, use_cache=False).loss
            found[index] = (loss.item() * count, count)
    return found


def assert_equal_alone(found: dict[int, evaluation.ExampleLoss], rows: list[Row]) -> None:
    wanted = alone(rows)
    assert list(found) == list(wanted)
    for index, (total, count) in wanted.items():
        assert found[index].num_tokens == count
        assert found[index].total == pytest.approx(total, abs=1e-4)
        assert found[index].mean == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize(
    "packing",
    [
        {"strategy": "best_fit", "minibatch_size": None, "max_tokens": 64},
        {"strategy": "best_fit", "minibatch_size": None, "max_tokens": 64, "pack_multiple": 64},
        {"strategy": "minibatch"},
    ],
)
def test_every_example_as_if_alone(tmp_path: Path, packing: dict[str, Any]) -> None:
    rows = rows_of(23)
    dataset = pack_rows(tmp_path, rows, **packing)
    assert_equal_alone(evaluation.evaluate(tiny(), evaluation.open_stream(str(tmp_path), dataset)), rows)


@pytest.mark.parametrize("packing", [{"strategy": "minibatch", "minibatch_size": 2}, STEPS])
@pytest.mark.parametrize(("world_size", "packs_per_step"), [(1, 1), (2, 1), (2, 3), (3, 2), (7, 1)])
def test_every_example_once_on_any_number_of_ranks(
    tmp_path: Path, packing: dict[str, Any], world_size: int, packs_per_step: int
) -> None:
    """Also where the last step is mostly filled up, or a rank gets nothing else; and each time anew."""
    rows = rows_of(9)
    dataset = pack_rows(tmp_path, rows, **packing)
    streams = [
        evaluation.open_stream(
            str(tmp_path), dataset, rank=rank, world_size=world_size, packs_per_step=packs_per_step
        )
        for rank in range(world_size)
    ]
    orders = []
    for _ in range(2):
        found: dict[int, evaluation.ExampleLoss] = {}
        order = []
        for stream in streams:
            batches = list(stream)
            order.append([batch.example_ids.tolist() for batch in batches])
            for example, loss in evaluation.evaluate(tiny(), batches).items():
                assert example not in found
                found[example] = loss
        assert len({len(batches) for batches in order}) == 1
        assert_equal_alone(dict(sorted(found.items())), rows)
        orders.append(order)
    assert orders[0] == orders[1]


@pytest.mark.parametrize(
    "packing",
    [
        {"strategy": "wrapped", "max_tokens": 10},
        {"strategy": "best_fit", "max_tokens": 10, "overlong": "split"},
    ],
)
def test_pieces_of_a_cut_example_come_together(tmp_path: Path, packing: dict[str, Any]) -> None:
    """By example_ids: the loss of an example is the sum of its pieces', each evaluated alone."""
    rows = rows_of(7)
    dataset = pack_rows(tmp_path, rows, minibatch_size=None, **packing)
    found = evaluation.evaluate(tiny(), evaluation.open_stream(str(tmp_path), dataset))
    pieces: list[tuple[int, Row]] = []
    for batch in evaluation.open_stream(str(tmp_path), dataset):
        for number, example in enumerate(batch.example_ids.tolist()):
            part = slice(batch.cu_seqlens[number], batch.cu_seqlens[number + 1])
            piece = {"input_ids": batch.input_ids[part].tolist(), "labels": batch.labels[part].tolist()}
            pieces.append((example, piece))
    assert len(pieces) > len(rows)
    wanted: dict[int, tuple[float, int]] = {}
    for number, (total, count) in alone([piece for _, piece in pieces]).items():
        example = pieces[number][0]
        before = wanted.get(example, (0.0, 0))
        wanted[example] = (before[0] + total, before[1] + count)
    assert found.keys() == wanted.keys()
    assert set(found) <= set(range(len(rows)))
    for example, (total, count) in wanted.items():
        assert found[example].num_tokens == count
        assert found[example].total == pytest.approx(total, abs=1e-4)
    # No token is lost on the way: the pieces of each example are the example.
    for example, row in enumerate(rows):
        tokens = [token for of, piece in pieces if of == example for token in piece["input_ids"]]
        assert sorted(tokens) == sorted(row["input_ids"])


def on_rank(store: Path, dataset: str) -> tuple[dict[int, evaluation.ExampleLoss], list[int], int]:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stream = evaluation.open_stream(str(store), dataset, rank=rank, world_size=world_size)
    batches = list(stream)
    again = evaluation.open_stream(str(store), dataset, rank=rank, world_size=world_size)
    found = evaluation.evaluate(tiny(), again)
    dist.destroy_process_group()
    return found, [int(example) for batch in batches for example in batch.example_ids], len(batches)


@pytest.mark.slow
def test_every_pack_once_over_two_ranks(tmp_path: Path) -> None:
    rows = rows_of(9)
    dataset = pack_rows(tmp_path, rows, minibatch_size=2)  # 5 packs: the last step is filled up
    first, second = on_ranks(2, on_rank, tmp_path, dataset)
    assert first[0] == second[0]
    assert_equal_alone(first[0], rows)
    assert first[2] == second[2] == 3
    assert sorted(first[1] + second[1]) == [-1, *range(9)]
