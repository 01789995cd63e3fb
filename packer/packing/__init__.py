"""Which segments go into which pack: lengths in, plans out; integers only, no tokens, no I/O.

    plan           the packs of a run of examples, for every strategy
    plan_trained   the same without the examples that a cut leaves with nothing to train
    estimate       what each strategy would make of them, beside padding
    lower_bound    packs that no packer can go below
    tokens_of_minibatches    what max_tokens must be for each mini-batch to fit uncut

Two engines make the packs of best_fit: `window` in one pass, near the order of the stream; `histogram`
over all lengths at once. Errors: PackingError (a ValueError).
"""

from __future__ import annotations

from packer.packing.estimating import Estimate, StrategyEstimate, estimate, lower_bound
from packer.packing.overlong import tokens_of_minibatches
from packer.packing.planning import ONE_CAPACITY, PackPlan, partition_multiple, plan
from packer.packing.training import Trained, TrainedPlan, plan_trained
from packer.packing.values import Capacity, PackingError

__all__ = [
    "ONE_CAPACITY",
    "Capacity",
    "Estimate",
    "PackPlan",
    "PackingError",
    "StrategyEstimate",
    "Trained",
    "TrainedPlan",
    "estimate",
    "lower_bound",
    "partition_multiple",
    "plan",
    "plan_trained",
    "tokens_of_minibatches",
]
