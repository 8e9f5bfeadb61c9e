from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray
import ray.data
from ray.cluster_utils import Cluster

# Its threads would go on in the process of the tests, and format tracebacks while other tests run.
os.environ["RAY_DATA_USAGE_DISABLED"] = "1"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A real cluster of two nodes, to which this process is connected."""
    node = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
