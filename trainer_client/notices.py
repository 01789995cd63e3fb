"""What a stream says in the log of its end: an empty loop may be a mistake, and so may a second one."""

from __future__ import annotations

import logging

from trainer_client.cursor import Term

log = logging.getLogger(__name__)


def nothing_is_left(dataset: str, *, epoch: int, term: Term) -> None:
    """Of an iteration that gave nothing, since the stream stood at its end."""
    log.warning(
        "dataset %s: nothing is left, the stream stands at epoch %d and ends there (epochs=%s, counted "
        "from the first); give more epochs to go on, or set_epoch() where a loop counts epochs itself "
        "(iterating over this stream once more begins the next epoch too)",
        dataset,
        epoch,
        term.epochs,
    )


def goes_on(dataset: str, *, epoch: int, before: Term, after: Term) -> None:
    """Of an iteration that begins at the end of the last one, where that was of several epochs: who writes
    one `for` an epoch wants epochs=1, and has the data so many times too often."""
    if after == before or after.epochs is None or after.epochs == 1 or after.until is None:
        return
    log.warning(
        "dataset %s: the stream came to its end (epochs=%d) and is iterated once more: it goes on from epoch "
        "%d to the end of epoch %d; one `for` goes over all epochs, with epochs=1 each `for` is one epoch",
        dataset,
        after.epochs,
        epoch,
        after.until - 1,
    )
