"""What a MixedStream's state must hold, checked part by part before any of it counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer_client.cursor import count_in, count_of
from trainer_client.errors import StateMismatch

STATE_VERSION = 1
_PARTS = ("step", "loop_step", "turn", "passes", "tokens", "exhausted", "ended_by", "weights", "sources")
_SETTINGS = {"mixed": "sources", "batches_per_step": "batches_per_step", "until": "until"}


def require_state(
    state: Any, settings: Mapping[str, Any], checked_weights: Callable[[Any], object]
) -> dict[int, list[float]]:
    """Raise ValueError unless `state` is whole and a mixture's, StateMismatch unless it is one of `settings`
    (as the state calls them). Gives its weights by step.

    checked_weights: raises ValueError for what are no weights of these sources.
    """
    _require_kind(state)
    missing = [name for name in (*_SETTINGS, *_PARTS) if name not in state]
    if missing:
        raise ValueError(
            f"a MixedStream's state, whole, is required, found one without {', '.join(missing)}: it was "
            "changed, or cut off; load an earlier one"
        )
    for name, what in _SETTINGS.items():
        if state[name] != settings[name]:
            hint = "the order of batches would be another: open it as the state says"
            raise StateMismatch(what, wanted=settings[name], found=state[name], hint=hint)
    for name in ("step", "loop_step"):
        count_in(state, name)
    num_sources = len(settings["mixed"])
    for name in ("turn", "ended_by"):
        if state[name] is not None and count_in(state, name) >= num_sources:
            wanted = f"0 to {num_sources - 1}, or null, is required"
            raise ValueError(f"{name} of the state: {wanted}, found {state[name]}")
    _require_each(state, "passes", num_sources, "numbers of 0 or more", _is_pass)
    _require_each(state, "tokens", num_sources, "whole numbers of 0 or more", _is_count)
    _require_each(state, "exhausted", num_sources, "true or false", lambda one: isinstance(one, bool))
    _require_each(state, "sources", num_sources, "states", lambda one: isinstance(one, Mapping))
    return _weights_in(state["weights"], checked_weights)


def _require_kind(state: Any) -> None:
    """Raise ValueError unless it is a mixture's state, of this version."""
    if isinstance(state, Mapping) and "mixed" in state and state.get("version") == STATE_VERSION:
        return
    if not isinstance(state, Mapping):
        found = type(state).__name__
    elif "mixed" in state:
        found = f"version {state.get('version')!r}"
    elif "dataset" in state:
        found = f"that of a PackedStream of dataset {state['dataset']}; load it into such a stream"
    else:
        found = f"one with {', '.join(map(str, list(state)[:8])) or 'nothing in it'}"
    raise ValueError(f"a MixedStream's state of version {STATE_VERSION} is required, found {found}")


def _require_each(
    state: Mapping[str, Any], name: str, num: int, kind: str, is_one: Callable[[Any], bool]
) -> None:
    """Raise ValueError unless a part of the state is a list of so many, each of its kind."""
    found = state[name]
    is_list = isinstance(found, Sequence) and not isinstance(found, str | bytes)
    if not is_list or len(found) != num or not all(map(is_one, found)):
        raise ValueError(f"{name} of the state: {num} {kind} are required, one a source, found {found!r:.80}")


def _is_pass(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _weights_in(weights: Any, checked: Callable[[Any], object]) -> dict[int, list[float]]:
    """By optimiser step, from 0 on. JSON makes texts of the steps."""
    try:
        found = {count_of("a step", int(first)): list(each) for first, each in weights.items()}
        for each in found.values():
            checked(each)
        if 0 not in found:
            raise ValueError("none at step 0")
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            'weights of the state: lists of weights by step, as in {"0": [0.5, 0.5]}, are required, found '
            f"{weights!r:.80} ({error})"
        ) from error
    return found
