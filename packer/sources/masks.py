"""Masks under names that are not read: what they take out would be trained, and nobody would see it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from packer.sources.parse import RowFault, find, is_missing
from packer.spec import Format

# Of other meaning: of attention_mask the rows themselves are checked, the rest says nothing of the loss.
_OTHER_MASKS = {"attention_mask", "special_tokens_mask"}
# What else people call labels or weights: a value for each id makes them so.
_OTHER_LABELS = {"label", "label_ids", "target", "targets", "target_ids", "loss_weight", "loss_weights"}
# Names, beside those that end in "mask", of what says whether a message is trained: of axolotl, ms-swift and
# others. `train` and `weight` are read where they are spelt so.
_FLAGS = {
    *("train", "weight", "weights", "loss", "losses", "loss_weight", "loss_weights", "loss_scale", "no_loss"),
    *("compute_loss", "calculate_loss", "use_loss", "with_loss", "has_loss", "ignore_loss", "in_loss"),
    *("trained", "training", "trainable", "is_trained", "is_trainable", "train_detail", "training_detail"),
    *("train_on", "train_on_turn", "train_turn", "train_this", "should_train", "do_train", "to_train"),
    *("masked", "is_masked", "mask_out", "unmasked", "learn", "learnable", "supervised"),
}
_MEASURED = {"loss", "losses", "weights"}  # numbers under these may be of something else
_HOLD_WORDS = ("messages", "prompt", "completion", "text")  # of our fields
_WORDS = {"true", "false", "yes", "no", "0", "1"}
_IGNORED = -100  # of labels


# How a format says what is trained, and the loss that trains as if nothing more were said.
_MASKED_BY: dict[Format, tuple[str, str]] = {
    "messages": ("`train` (true or false) in each message", "assistant"),
    "prompt_completion": ("what is prompt and what is completion, or by `train` in messages", "completion"),
    "text": ("prompt and completion, or by `train` in messages (a text is trained whole)", "all"),
}


def mask_reason(found: Sequence[str], format: Format, fields: Mapping[str, str]) -> str:
    """What to tell of masks that `masks_in` found."""
    if format == "tokens":
        return (
            f"the field {fields['labels']!r} is required to say which of the ready ids are "
            f"trained, found {_listed(found)} instead, which is not read: every token would be trained. "
            "Make labels of it (the id where it is trained, else -100, unshifted), or leave it out, or "
            'set loss to "all" (--loss all) to train every token'
        )
    how, loss = _MASKED_BY[format]
    words = " and ".join(fields[ours] for ours in _HOLD_WORDS if ours in fields)
    return (
        f"what is trained must be said by {how}; found {_listed(found)} beside {words}, "
        "which is not read and would change nothing. Say it so, or leave it out, or set loss to "
        f'"{loss}" (--loss {loss}) to train regardless of it'
    )


def _listed(names: Sequence[str]) -> str:
    """In one order, however a record or a process has them: reasons are part of commits."""
    return ", ".join(repr(name) for name in sorted(names)[:20])


def unread_flag(message: Mapping[str, Any]) -> str | None:
    """The first key of a message that looks like a mask and is none that is read; null says nothing."""
    for name, value in message.items():
        if name not in ("train", "weight") and value is not None and _is_flag(str(name).lower(), value):
            return name
    return None


def _is_flag(name: str, value: Any) -> bool:
    if not (_is_called_mask(name) or name in _FLAGS):
        return False
    if isinstance(value, str):
        return value.strip().lower() in _WORDS
    if name in _MEASURED and isinstance(value, int | float):
        return value in (0, 1)
    return isinstance(value, bool | int | float | list | np.ndarray)


def _is_called_mask(name: str) -> bool:
    return name.endswith(("mask", "masks")) and name not in _OTHER_MASKS


def may_mask(name: str, format: Format) -> bool:
    """Whether what stands under a name, beside the fields of a format, may be a mask of training."""
    name = name.lower()
    is_labels = name == "labels" or name in _OTHER_LABELS
    return _is_called_mask(name) or is_labels or (format != "tokens" and name in _FLAGS)


def masks_in(
    suspects: Mapping[str, Any], record: Mapping[str, Any], format: Format, fields: Mapping[str, str]
) -> list[str]:
    """Names of masks of training among what a record holds under names that `may_mask`.

    Beside words these are lists of numbers or of true and false: a name that is used for other things too
    (`weights`) counts where it holds a value for each message, one of labels where it holds -100. Beside
    ready ids without labels they are lists, under a name of labels as long as the ids. null says nothing.
    fields: our names (input_ids, labels, …) to the source's.
    """
    lists = {name: values for name, value in suspects.items() if (values := _list_of(value)) is not None}
    if not lists:
        return []
    if format == "tokens":
        ids = _list_of(_value(record, fields["input_ids"]))
        if ids is None or _value(record, fields["labels"]) is not None:
            return []
        return [
            name
            for name, values in lists.items()
            if _is_called_mask(name.lower()) or len(values) == len(ids) > 0
        ]
    messages = _list_of(_value(record, fields["messages"])) if format == "messages" else None
    num_messages = 0 if messages is None else len(messages)
    return [name for name, values in lists.items() if _masks_words(name.lower(), values, num_messages)]


def _masks_words(name: str, values: Any, num_messages: int) -> bool:
    if not len(values) or not _are_numbers(values):
        return False
    if _is_called_mask(name):
        return True
    return len(values) == num_messages if name in _FLAGS else bool(_IGNORED in values)


def _are_numbers(values: Any) -> bool:
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values.dtype.kind in "biuf"
    return all(one is None or isinstance(one, bool | int | float | np.number | np.bool_) for one in values)


def _list_of(value: Any) -> Any:
    """A list, also as its JSON text (all that CSV can hold); None for anything else."""
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(orjson.JSONDecodeError):
            value = orjson.loads(value)
    return value if isinstance(value, list | np.ndarray) else None


def _value(record: Mapping[str, Any], name: str) -> Any:
    """What stands under a source name, None where nothing does."""
    try:
        value = find(record, name)
    except RowFault:
        return None
    return None if is_missing(value) or (isinstance(value, str) and not value) else value
