"""torchdata's StatefulDataLoader over a PackedDataset: its state goes on exactly, with workers too."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
from packs import build_dataset, numbered_packs, taken
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer_client import PackedDataset, PackedStream

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def loader_of(store: Path, dataset: str, num_workers: int, **options: Any) -> StatefulDataLoader:
    packed = PackedDataset(store, dataset=dataset, **options)
    return StatefulDataLoader(packed, batch_size=None, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4, 7, 8, 11])
def test_its_state_goes_on_exactly_twice(tmp_path: Path, num_workers: int, stop: int) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(15), packs_per_shard=4)
    options: dict[str, Any] = {"world_size": 2, "rank": 1, "epochs": 2}
    whole = taken(PackedStream(tmp_path, dataset=dataset, **options))
    assert len(whole) == 14
    loader = loader_of(tmp_path, dataset, num_workers, **options)
    found = taken(itertools.islice(loader, stop))
    for _ in range(2):
        state = copy.deepcopy(loader.state_dict())
        loader = loader_of(tmp_path, dataset, num_workers, **options)
        loader.load_state_dict(state)
        found += taken(itertools.islice(loader, 1))
    assert found == whole[: stop + 2]
    state = loader.state_dict()
    loader = loader_of(tmp_path, dataset, num_workers, **options)
    loader.load_state_dict(state)
    assert found + taken(loader) == whole
