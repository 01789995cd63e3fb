"""Rows of format tokens: ready ids with labels, checked. Raises RowProblem about one row."""

from __future__ import annotations

import array
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from packer.render.conversations import kind, told
from packer.render.templates import RowProblem
from packer.sources.ids import Flat, IdRows

IGNORE_INDEX = -100

Int32 = NDArray[np.int32]


def ready_rows(
    rows: Sequence[Mapping[str, Any]],
    vocab_size: int,
    fields: Mapping[str, str],
    *,
    trains_all: bool = False,
) -> tuple[Int32, NDArray[np.bool_], NDArray[np.int64], list[tuple[int, str]]]:
    """`ready_ids` of many rows: ids (N,) and mask (N,) row after row, lengths (k,), and the rows' errors."""
    quick = _quickly(rows, vocab_size)
    if quick is not None:
        flat, mask, lengths = quick
        return flat, np.ones_like(mask) if trains_all else mask, lengths, []
    ids, masks, errors = [np.zeros(0, np.int32)], [np.zeros(0, np.bool_)], []
    for position, row in enumerate(rows):
        try:
            row_ids, row_mask = ready_ids(row, vocab_size, fields, trains_all=trains_all)
        except RowProblem as problem:
            errors.append((position, str(problem)))
            row_ids, row_mask = ids[0], masks[0]
        ids.append(row_ids)
        masks.append(row_mask)
    lengths = np.array([len(row_ids) for row_ids in ids[1:]], np.int64)
    return np.concatenate(ids), np.concatenate(masks), lengths, errors


def _quickly(
    rows: Sequence[Mapping[str, Any]], vocab_size: int
) -> tuple[Int32, NDArray[np.bool_], NDArray[np.int64]] | None:
    """The rows if nothing is wrong with any of them; else None, and each is looked at by itself."""
    ids, labels, labelled = _columns(rows)
    if ids is None or labels is None or (len(ids[0]) and (ids[0].min() < 0 or ids[0].max() >= vocab_size)):
        return None
    flat, lengths = ids[0].astype(np.int32, copy=False), ids[1]
    if not _attends_to_all(rows, lengths):
        return None
    if not labelled.any():
        return flat, np.ones(len(flat), np.bool_), lengths
    if not np.array_equal(labels[1], lengths[labelled]):
        return None
    trained = labels[0] != IGNORE_INDEX
    inside = slice(None) if labelled.all() else np.repeat(labelled, lengths)
    if (trained & (labels[0] != flat[inside])).any():
        return None
    mask = np.ones(len(flat), np.bool_)
    mask[inside] = trained
    return flat, mask, lengths


def _attends_to_all(rows: Sequence[Mapping[str, Any]], lengths: NDArray[np.int64]) -> bool:
    """Whether every attention mask that rows (of `lengths` ids) have is 1 throughout, and as long as they."""
    if isinstance(rows, IdRows):
        found, given = rows.columns.get("attention_mask"), np.ones(len(rows), np.bool_)
    else:
        masks = [row.get("attention_mask") for row in rows]
        given = np.array([one is not None for one in masks], np.bool_)
        found = _flat([one for one in masks if one is not None]) if given.any() else None
        if given.any() and found is None:
            return False
    return found is None or (bool((found[0] == 1).all()) and np.array_equal(found[1], lengths[given]))


def _columns(rows: Sequence[Mapping[str, Any]]) -> tuple[Flat | None, Flat | None, NDArray[np.bool_]]:
    """Ids of all rows, labels of those that have some, and which these are. None: not whole numbers alone."""
    if isinstance(rows, IdRows):
        labels = rows.columns.get("labels")
        labelled = np.full(len(rows), labels is not None)
        return rows.columns["input_ids"], labels or _flat([]), labelled
    given = [row.get("labels") for row in rows]
    labelled = np.array([one is not None for one in given], np.bool_)
    ids, labels = _flat([row.get("input_ids") for row in rows]), _flat([x for x in given if x is not None])
    return ids, labels, labelled


def _flat(values: list[Any]) -> Flat | None:
    """Lists of whole numbers end to end, and their lengths; None where one is something else."""
    arrays = []
    for value in values:
        if isinstance(value, list):
            try:
                found = np.array(array.array("q", value), np.int64)
            except (TypeError, OverflowError):
                return None
            # true and false pass for 1 and 0
            if any(type(value[at]) is bool for at in np.flatnonzero((found == 0) | (found == 1)).tolist()):
                return None
            value = found
        elif not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind != "i":
            return None
        arrays.append(value)
    lengths = np.array([len(one) for one in arrays], np.int64)
    return (np.concatenate(arrays) if arrays else np.zeros(0, np.int64)), lengths


def ready_ids(
    row: Mapping[str, Any], vocab_size: int, fields: Mapping[str, str], *, trains_all: bool = False
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Ids (n,) int32 of a row and what its labels train (n,) bool; all of it where there are no labels, or
    `trains_all`."""
    name = fields.get("input_ids", "input_ids")
    ids = _numbers(row.get("input_ids"), name)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise RowProblem(
            f"field {name}[{at}]: an id from 0 to {vocab_size - 1} is required, "
            f"found {int(ids[at])}; were these ids made by another tokenizer?"
        )
    trained = np.ones(len(ids), np.bool_)
    if row.get("labels") is not None:
        labelled = _labelled(row, ids, fields)
        trained = trained if trains_all else labelled
    if row.get("attention_mask") is not None:
        _check_padding(row["attention_mask"], trained, fields.get("attention_mask", "attention_mask"))
    return ids.astype(np.int32), trained


def _labelled(row: Mapping[str, Any], ids: NDArray[np.int64], fields: Mapping[str, str]) -> NDArray[np.bool_]:
    """What the labels of a row train, (n,) bool."""
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
    return trained


def _check_padding(value: Any, trained: NDArray[np.bool_], name: str) -> None:
    """Raise RowProblem where padding, which an attention mask tells, would be trained or seen.

    A segment is attended to whole: padding at its end is seen by no token before it, any other is.
    """
    if isinstance(value, str):  # all that CSV can hold
        with contextlib.suppress(orjson.JSONDecodeError):
            value = orjson.loads(value)
    try:
        mask = np.asarray(value)
    except ValueError:  # lists of several lengths
        mask = np.zeros((0, 0))
    if mask.shape != trained.shape or (
        len(mask) and (mask.dtype.kind not in "biuf" or (mask != 1)[mask != 0].any())
    ):
        raise RowProblem(
            f"field {name}: {len(trained)} values are required, 1 or 0 for each id, found {_told(value)}; "
            "leave it out if the ids are one example without padding"
        )
    padding = np.flatnonzero(mask == 0)
    wrong = padding[trained[padding]]
    if len(wrong):
        raise RowProblem(
            f"field {name}[{wrong[0]}]: 1 is required where a token is trained, found 0 (padding); give the "
            "ids without padding, or labels that are -100 there"
        )
    if len(padding) and (mask[padding[0] :] == 1).any():
        raise RowProblem(
            f"field {name}[{padding[0]}]: padding (0) is required to be at the end, found tokens behind it, "
            "which would see it; give the ids without padding"
        )


def _told(value: Any) -> str:
    if isinstance(value, list | np.ndarray):
        odd = next(
            (one for one in value if isinstance(one, str | list | dict | np.ndarray) or one not in (0, 1)),
            None,
        )
        return f"{len(value)} values" + ("" if odd is None else f", among them {str(odd)[:40]}")
    return kind(value)


def _numbers(value: Any, name: str) -> NDArray[np.int64]:
    if isinstance(value, str):  # all that CSV can hold
        with contextlib.suppress(orjson.JSONDecodeError):
            value = orjson.loads(value)
    if not isinstance(value, list | tuple | np.ndarray):
        raise RowProblem(f"field {name}: a list of whole numbers is required, found {told(value)}")
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
