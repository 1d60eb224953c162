"""A run on two Ray nodes, joined by address, of which one goes away; started by test_survival."""

import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster as Nodes

from tests.controller.test_pipeline import WatchedPipeline, check_ledger
from tests.runs import small_config
from tramontane.placement.actors import Cluster
from tramontane.run import train
from tramontane.run.screen import QuietScreen


def main(folder: Path) -> None:
    # The second node has the room that the first lacks; a third joins when the second goes.
    nodes = Nodes(head_node_args={"num_cpus": 2, "include_dashboard": False}, initialize_head=True)
    second = nodes.add_node(num_cpus=2)
    handles: dict[str, Any] = {}
    make = Cluster._actor
    gone = []

    def remembered(cluster: Cluster, name: str, resources: Any) -> Any:
        handles[name] = make(cluster, name, resources)
        return handles[name]

    class Harmed(WatchedPipeline):
        async def _notify(self) -> None:
            if self.ledger.trained_version == 1 and not gone:
                node = handles["generator 0"]._place[0]
                assert node != handles["trainer"]._place[0]
                gone.append(node)
                nodes.remove_node(second)
                nodes.add_node(num_cpus=2)
            await super()._notify()

    Cluster._actor = remembered
    train.Pipeline = Harmed
    config = small_config(
        folder,
        pipeline={"updates": 5, "n_batch": 8, "group_size": 4, "max_staleness": 2},
        placement={"kind": "ray", "address": nodes.address},
    )
    train.train(config, QuietScreen())
    check_ledger(folder, config)
    assert handles["generator 0"]._place is None or handles["generator 0"]._place[0] not in gone
    assert "replaced: generator 0 (process " in (folder / "events.log").read_text()
    ray.shutdown()
    nodes.shutdown()


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    main(Path(sys.argv[1]))
