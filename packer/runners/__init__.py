"""Who does the work: this process, or a Ray cluster.

A runner opens one `Tasks` for each job; tasks of different jobs do not meet. `packer.runners.ray` is
imported only where Ray is wanted.
"""

from packer.runners.base import ClusterLost, Done, Joins, Runner, Tasks, WorkerDied
from packer.runners.inline import InlineRunner

__all__ = ["ClusterLost", "Done", "InlineRunner", "Joins", "Runner", "Tasks", "WorkerDied"]
