"""Which segments go into which pack: lengths in, plans out; integers only, no tokens, no I/O.

    plan           the packs of a run of examples, for every strategy



Errors: PackingError (a ValueError).
"""

from __future__ import annotations

from packer.packing.planning import PackPlan, partition_multiple, plan
from packer.packing.values import PackingError

__all__ = ["PackPlan", "PackingError", "partition_multiple", "plan"]
