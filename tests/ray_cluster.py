"""A Ray cluster of several nodes on this machine, in a process of its own that ends with its input.

    python tests/ray_cluster.py FOLDER NUM_WORKERS

prints, as one line of JSON, its address and the raylet process of each worker's node. The head packs
nothing, as in deploy/.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ray.cluster_utils import Cluster


def main() -> None:
    folder, num_workers = sys.argv[1], int(sys.argv[2])
    small: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False}
    head = {"num_cpus": 0, "temp_dir": folder, **small}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    # Addresses of their own, so that a driver on the head's never joins one that will be killed.
    nodes = [
        cluster.add_node(num_cpus=1, node_ip_address=f"127.0.0.{2 + number}", **small)
        for number in range(num_workers)
    ]
    cluster.wait_for_nodes()
    raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
