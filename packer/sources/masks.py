"""Masks of ready ids under names that are not read: training all would be wrong, and nobody would see it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from packer.sources.parse import RowFault, find, is_missing

# Of other meaning: of attention_mask the rows themselves are checked, the rest says nothing of the loss.
_OTHER_MASKS = {"attention_mask", "special_tokens_mask"}
# What else people call labels or weights: a value for each id makes them so.
_OTHER_LABELS = {"label", "label_ids", "target", "targets", "target_ids", "loss_weight", "loss_weights"}


def unread_masks(sample: Sequence[Mapping[str, Any]], fields: Mapping[str, str]) -> list[str]:
    """Names that look like masks of training, in records of ready ids that have no labels.

    sample: the first records. fields: our names (input_ids, labels, …) to the source's.
    """
    used = set(fields.values())
    found: dict[str, None] = {}
    for record in sample:
        ids = _value(record, fields["input_ids"])
        if ids is None or _value(record, fields["labels"]) is not None:
            continue
        for name, value in record.items():
            if name not in used and name not in found and _is_mask(name.lower(), value, ids):
                found[name] = None
    return list(found)


def _is_mask(name: str, value: Any, ids: Any) -> bool:
    if name.endswith(("mask", "masks")) and name not in _OTHER_MASKS:
        # null: other rows of the column may have one.
        return value is None or isinstance(_parsed(value), list | np.ndarray)
    if name in _OTHER_LABELS:
        values, ids = _parsed(value), _parsed(ids)
        lists = isinstance(values, list | np.ndarray) and isinstance(ids, list | np.ndarray)
        return lists and len(values) == len(ids) > 0
    return False


def _parsed(value: Any) -> Any:
    """A value, or what stands in it: a list in CSV is its JSON text."""
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(orjson.JSONDecodeError):
            return orjson.loads(value)
    return value


def _value(record: Mapping[str, Any], name: str) -> Any:
    """What stands under a source name, None where nothing does."""
    try:
        value = find(record, name)
    except RowFault:
        return None
    return None if is_missing(value) or (isinstance(value, str) and not value) else value
