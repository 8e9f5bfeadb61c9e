from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

# Its threads would go on in the process of the tests, and format tracebacks while other tests run.
os.environ["RAY_DATA_USAGE_DISABLED"] = "1"


@pytest.fixture(scope="package")
def two_nodes() -> Iterator[Cluster]:
    node = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def cluster(two_nodes: Cluster) -> Cluster:
    """A real cluster of two nodes, to which this process is connected."""
    if not ray.is_initialized():  # at first, and after a command in this process that has ended with an error
        ray.init(address=two_nodes.address, logging_level="ERROR", log_to_driver=False)
        from ray.data import DataContext  # 2 s, which every worker would take to collect tests

        DataContext.get_current().enable_progress_bars = False
    return two_nodes
