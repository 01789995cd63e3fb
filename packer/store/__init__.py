"""Where datasets lie: complete objects under keys, in a folder or in an object store.

An object that can be read is complete. Keys are relative paths with "/" between the parts.

    datasets/<id>/spec.json                 the resolved spec (packer.spec)
    datasets/<id>/origin.json               when it was asked for, and by which request
    datasets/<id>/commits/000000.arrow      one a committed partition, in order (packer.manifest)
    datasets/<id>/finished.json             the report; last of all
    datasets/<id>/failed.json               why packing stopped; gone when it goes on
    datasets/<id>/shards/00000-000.arrow    the packs
    datasets/<id>/work/                     indexes and unpacked sources; gone when finished

`open_store` gives the store of a folder or of a url (s3://, gs://). Errors: StoreError (an OSError);
NoSpaceLeft where a disk is full; LockLost where a lock is no longer held.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from packer.store.base import LockLost, NoSpaceLeft, Staged, Store, StoreError, not_written
from packer.store.local import LocalStore

if TYPE_CHECKING:
    from packer.store.objects import ObjectStore

__all__ = [
    "LocalStore",
    "LockLost",
    "NoSpaceLeft",
    "Staged",
    "Store",
    "StoreError",
    "is_url",
    "not_written",
    "open_store",
]


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether a store's place is the url of an object store rather than a folder."""
    return str(place).startswith(("s3://", "gs://"))


def open_store(place: str | os.PathLike[str]) -> LocalStore | ObjectStore:
    """The store in a folder or at s3://BUCKET/PREFIX or gs://BUCKET/PREFIX. Connects to nothing yet.

    Raises StoreError for a url that names none.
    """
    if not is_url(place):
        return LocalStore(place)
    # Imported here: a trainer that reads from a service or a folder needs none of it.
    from packer.store.objects import open_objects

    return open_objects(str(place))
