"""Rows of format tokens: ready ids with labels, checked. Raises RowProblem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.conversations import kind
from packer.templates import RowProblem

IGNORE_INDEX = -100


def ready_ids(
    row: Mapping[str, Any], vocab_size: int, fields: Mapping[str, str]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Ids (n,) int32 of a row and what its labels train (n,) bool; all of it where there are no labels."""
    name = fields.get("input_ids", "input_ids")
    ids = _numbers(row.get("input_ids"), name)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise RowProblem(
            f"field {name}[{at}]: an id from 0 to {vocab_size - 1} is required, "
            f"found {int(ids[at])}; were these ids made by another tokenizer?"
        )
    if row.get("labels") is None:
        return ids.astype(np.int32), np.ones(len(ids), np.bool_)
    name = fields.get("labels", "labels")
    labels = _numbers(row["labels"], name)
    if len(labels) != len(ids):
        raise RowProblem(f"field {name}: {len(ids)} labels are required, one an id, found {len(labels)}")
    trained = labels != IGNORE_INDEX
    wrong = np.flatnonzero(trained & (labels != ids))
    if len(wrong):
        at = int(wrong[0])
        shifted = len(ids) > 1 and bool(np.all((labels[:-1] == ids[1:])[trained[:-1]]))
        hint = "; they look shifted by one: give them unshifted, aligned with input_ids" if shifted else ""
        raise RowProblem(
            f"field {name}[{at}]: -100 or the id at the same place ({int(ids[at])}) is required, "
            f"found {int(labels[at])}{hint}"
        )
    return ids.astype(np.int32), trained


def _numbers(value: Any, name: str) -> NDArray[np.int64]:
    if not isinstance(value, list | tuple | np.ndarray):
        raise RowProblem(f"field {name}: a list of whole numbers is required, found {kind(value)}")
    if not len(value):
        return np.zeros(0, np.int64)
    if isinstance(value, np.ndarray):
        array = value
    elif set(map(type, value)) == {int}:  # a comparison with dtypes would let true and false through
        try:
            array = np.array(value, np.int64)
        except OverflowError:
            raise RowProblem(f"field {name}: numbers of at most 64 bits are required") from None
    else:
        odd = next(item for item in value if type(item) is not int)
        raise RowProblem(f"field {name}: whole numbers are required, found {kind(odd)} ({str(odd)[:40]})")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RowProblem(f"field {name}: whole numbers are required, found an array of {array.dtype}")
    return array.astype(np.int64, copy=False)
