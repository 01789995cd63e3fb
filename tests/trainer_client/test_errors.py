"""Errors that travel: between processes, and out of a DataLoader's worker."""

from __future__ import annotations

import pickle

import pytest
from torch._utils import ExceptionWrapper

from trainer_client import (
    ClientError,
    DataDamaged,
    DatasetFailed,
    DatasetTooSmall,
    StateMismatch,
    StreamRefused,
    StreamTimeout,
    UnknownDataset,
)

ERRORS = [
    DatasetFailed("1234", "line 7: not JSON"),
    DatasetTooSmall("1234", num_packs=3, packs_needed=8),
    StateMismatch("dataset", wanted="12", found="34", hint="start anew"),
    StreamTimeout("nothing came for 3 s"),
    StreamRefused("status 401"),
    UnknownDataset("no 1234"),
    DataDamaged("of shard 3"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_in_another_process(error: ClientError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_workers_error_keeps_its_kind_and_its_text(error: ClientError) -> None:
    """torch makes it anew of a text alone."""
    try:
        raise error
    except ClientError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(type(error)) as caught:
        wrapped.reraise()
    assert str(error) in str(caught.value)
