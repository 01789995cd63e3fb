"""What can go wrong at the trainer's side.

    ClientError
    ├── UnknownDataset   (LookupError)   no such dataset there
    ├── DatasetFailed                    packing it failed or was cancelled; the text is the reason
    ├── DatasetTooSmall  (ValueError)    fewer packs than one step takes: num_packs, packs_needed
    ├── StateMismatch    (ValueError)    a state of another dataset, or of another order
    ├── StreamRefused                    the service will not serve this request, or the url is of none;
    │                                    trying again will not help
    ├── DataDamaged                      bytes that fail their checksum, again and again
    └── StreamTimeout    (TimeoutError)  nothing came for `timeout_s`; says what was tried

All of these are permanent. What is transient (a lost connection, a restarted server, status 503) is
retried inside and never reaches the training loop, unless it lasts longer than `timeout_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ClientError(Exception):
    """Root of the tree. Travels between processes with its text and its fields.

    Each can be made of a text alone: so torch makes a worker's error anew in the main process. The fields
    that a class has besides then say nothing.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), str(self), self.__dict__)


def _again(kind: type[ClientError], text: str, fields: dict[str, Any]) -> ClientError:
    error = kind.__new__(kind, text)
    error.__dict__.update(fields)
    return error


class UnknownDataset(ClientError, LookupError):
    """There is no such dataset where it was looked for."""


class DatasetFailed(ClientError):
    """Packing the dataset failed or was cancelled: no more packs will come."""

    def __init__(self, dataset: str, reason: str | None = None) -> None:
        super().__init__(dataset if reason is None else f"packing of dataset {dataset} stopped: {reason}")
        self.dataset = "" if reason is None else dataset
        self.reason = dataset if reason is None else reason


class DatasetTooSmall(ClientError, ValueError):
    """A finished dataset has fewer packs than one step takes, and tail="drop" leaves out short steps.

    step: what makes the packs of a step, as {"world_size": 2, "packs_per_step": 4}.
    """

    def __init__(
        self,
        dataset: str,
        *,
        num_packs: int = -1,
        packs_needed: int = -1,
        step: Mapping[str, int] | None = None,
    ) -> None:
        is_told = num_packs >= 0
        super().__init__(_too_small(dataset, num_packs, packs_needed, step or {}) if is_told else dataset)
        self.dataset = dataset if is_told else ""
        self.num_packs = num_packs
        self.packs_needed = packs_needed


def _too_small(dataset: str, num_packs: int, packs_needed: int, step: Mapping[str, int]) -> str:
    """It names what can help alone: a factor of the step that is 1 cannot be smaller."""
    if not num_packs:
        return (
            f"dataset {dataset} has only 0 packs: there is nothing to train; pack rows that train something"
        )
    factors = {name: count for name, count in step.items() if count > 1}
    product = f" ({' x '.join(f'{name} {count}' for name, count in factors.items())})" if factors else ""
    smaller = f"a smaller {' or '.join(factors)}, " if factors else ""
    return (
        f"a step takes {packs_needed} packs{product}, but dataset {dataset} has only {num_packs}: there "
        f'would be no step at all; use {smaller}tail="pad", or pack it with a smaller max_tokens or more data'
    )


class StateMismatch(ClientError, ValueError):
    """A state that does not belong to this stream. `wanted` is the stream's value, `found` the state's."""

    def __init__(self, what: str, *, wanted: object = None, found: object = None, hint: str = "") -> None:
        text = f"this stream has {what} {wanted}, the state was saved with {what} {found}; {hint}"
        super().__init__(text if hint else what)
        self.what = what if hint else ""
        self.wanted = wanted
        self.found = found
        self.hint = hint

    def because(self, reason: str) -> StateMismatch:
        """The same error with a reason, where there is one."""
        hint = f"{reason}; {self.hint}" if reason else self.hint
        return StateMismatch(self.what, wanted=self.wanted, found=self.found, hint=hint)

    def of_source(self, name: str) -> StateMismatch:
        """The same error, of one stream of a mixture."""
        what = f"{self.what} of source {name!r}"
        return StateMismatch(what, wanted=self.wanted, found=self.found, hint=self.hint)


class StreamRefused(ClientError):
    """The service answered that this request is wrong (401, 403, 404, 422, …), or none can be at this url: no
    HTTP or TLS is spoken there, or its certificate cannot be verified."""


class DataDamaged(ClientError):
    """Bytes of the dataset are not what was written. None of them reached a batch."""


class StreamTimeout(ClientError, TimeoutError):
    """No step came for `timeout_s` seconds."""


class Lost(Exception):  # never seen outside: it is caught and retried
    """Internal: a transient fault. `damaged` where the bytes arrived but are wrong."""

    def __init__(self, detail: str, *, damaged: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(detail)
        self.damaged = damaged
        self.wait_s = wait_s  # the server asks to wait at least so long


class Silent(Lost):
    """Internal: nothing came between two steps for a while. No fault while packs are still being made."""
