"""What only some of the client needs, said by name where it is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs_torch(what: str) -> Iterator[None]:
    """Within it torch is imported, for `what`: where it is not installed, an error that says what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":  # torch is there, and lacks something of its own
            raise
        raise ModuleNotFoundError(
            f"{what} needs torch, which is not installed (numpy and pyarrow are all that PackedStream itself "
            "needs): pip install torch, or pip install '.[trainer]' in a checkout of padfree",
            name="torch",
        ) from None
