"""Which dataset somebody means: by its id, by the beginning of its id, or by its name."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, MutableMapping

from packer.manifest import cancelled_key, dataset_key, list_datasets
from packer.store import Store
from packer.view import dataset_state

_ID = re.compile(r"[0-9a-f]{32}")
_BEGINNING = re.compile(r"[0-9a-f]{4,31}")
_MOST_LISTED = 10
_STOPPED = ("failed", "cancelled")


class UnknownName(LookupError):
    """No dataset is called so."""


class AmbiguousName(LookupError):
    """Several are; the text lists them."""


def is_id(text: str) -> bool:
    """Whether this is the whole id of a dataset, which needs no look at the others."""
    return _ID.fullmatch(text) is not None


def choose(
    text: str,
    names: Mapping[str, str | None],
    *,
    state_of: Callable[[str], str | None] = lambda _: None,
    prefer_usable: bool = True,
) -> str:
    """The id that `text` means among datasets (id: name).

    A whole id wins. Else it must be the name of one dataset, or the beginning of one id (4 digits or
    more), and not both of different ones: nobody is to train on another dataset than they meant.
    Of several of one name the only one that neither failed nor was cancelled is meant (a first attempt that
    failed does not take the name), unless `prefer_usable` is false: who removes one is to say which.
    `state_of` tells the state of an id; it is asked where there are several. Raises UnknownName,
    AmbiguousName.
    """
    if text in names:
        return text
    found = [one for one, name in names.items() if name == text]
    if _BEGINNING.fullmatch(text):
        found += [one for one in names if one.startswith(text) and one not in found]
    if not found:
        near = difflib.get_close_matches(text[:80], sorted({name for name in names.values() if name}), n=3)
        meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise UnknownName(
            f"there is no dataset {text[:80]!r}: an id, the beginning of one (4 digits or more) or a name is "
            f"required; {meant}`padfree datasets` and GET /v1/datasets list them"
        )
    if len(found) > 1:
        states = {one: state_of(one) for one in sorted(found)}
        usable = [one for one in found if states[one] not in _STOPPED]
        if prefer_usable and len(usable) == 1 and all(names[one] == text for one in found):
            return usable[0]
        listed = "; ".join(
            f"{one} ({', '.join(filter(None, (names[one] or 'no name', state)))})"
            for one, state in list(states.items())[:_MOST_LISTED]
        )
        more = f" and {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
        raise AmbiguousName(
            f"{text[:80]!r} may be one of {len(found)} datasets, say which by its id: {listed}{more}"
        )
    return found[0]


def find_dataset(
    store: Store,
    text: str,
    known: MutableMapping[str, str | None] | None = None,
    *,
    prefer_usable: bool = True,
) -> str:
    """The id of the dataset of a store that `text` means. Raises UnknownName, AmbiguousName.

    `known` keeps names (by id) from one call to the next: a dataset's name changes only with its removal.
    """
    known = {} if known is None else known
    listed = list_datasets(store)
    for gone in known.keys() - set(listed):
        known.pop(gone, None)
    return choose(
        text,
        {one: _name(store, one, known) for one in listed},
        state_of=lambda one: _state(store, one),
        prefer_usable=prefer_usable,
    )


def kept_name(dataset: str, name: str | None, asked: str | None) -> str | None:
    """What to tell whoever asked for known content under another name than it has; None where all is well.

    A dataset's name is that of the first who asked for it: ids, not names, say what a dataset is.
    """
    if asked is None or asked == name:
        return None
    called = f"is called {name!r}" if name else "has no name"
    return (
        f"the same spec and content are known already as dataset {dataset}, which {called}; the name "
        f"{asked!r} is not taken over. Go on with the id, or remove the dataset and pack it again"
    )


def _state(store: Store, dataset: str) -> str | None:
    return "cancelled" if store.exists(cancelled_key(dataset)) else dataset_state(store, dataset)


def _name(store: Store, dataset: str, known: MutableMapping[str, str | None]) -> str | None:
    if dataset not in known:
        try:
            known[dataset] = json.loads(store.get(dataset_key(dataset, "spec.json")))["spec"]["name"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None  # removed meanwhile, or damaged: its id finds it
    return known[dataset]
