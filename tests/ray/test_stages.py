"""Ranks of one engine as actors on a real cluster of two nodes."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import list_named_actors, placement_group_table

from backfill.core.config import GIB, EngineConfig
from backfill.core.errors import ConfigError, EngineDead, ExecutorDead
from backfill.core.plan import Compute, DeviceMemory, StepPlan
from backfill.engine import analyzer
from backfill.engine.analyzer import saved_record
from backfill.engine.client import EngineClient
from backfill.engine.interval_choice import with_chosen_interval
from backfill.execution.create import create_torch_executor, target_of
from backfill.parallel import ray_stages
from backfill.parallel.create import create_executor
from backfill.parallel.memories import with_device_of_ranks
from backfill.parallel.ray_cluster import ADDRESS_VARIABLE, Bundle
from backfill.parallel.ray_stages import BUILD, StageNode, check_builds
from tests.api.servers import wait_until
from tests.models.tiny import save_tiny_model
from tests.parallel.fake_ranks import plan_of
from tests.parallel.processes import children, parent, wait_ended
from tests.parallel.test_engine import generate
from tests.parallel.test_rank_records import GRID, config_of
from tests.parallel.test_rank_tokens import tokens
from tests.ray.fake_engines import fake_executor, load_fake_engine

TWO = EngineConfig(executor="ray", pipeline_parallel_size=2, threads=4)


def raylet_of(rank: int) -> int:
    """The process of the node on which the rank runs."""
    return parent(parent(rank))


def is_clean() -> bool:
    names = {each["name"] for each in list_named_actors(all_namespaces=True)}
    groups = {each["state"] for each in placement_group_table().values()}
    return not any(name.startswith("backfill-stage-") for name in names) and groups <= {"REMOVED"}


def test_another_build_on_a_node_is_refused() -> None:
    nodes = [
        StageNode("a", "10.0.0.1", (), None, BUILD),
        StageNode("b", "10.0.0.2", (), None, "0.0.1, big-endian"),
    ]
    check_builds(nodes[:1])
    with pytest.raises(ConfigError, match=r"10\.0\.0\.2 has 0\.0\.1, big-endian, and the engine "):
        check_builds(nodes)


def test_auto_on_gpus_of_other_machines_needs_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_stages, "plan_stages", lambda _: Bundle(2, 1))
    given = replace(TWO, offload_interval="auto")
    with pytest.raises(ConfigError, match="`offload_interval` auto needs `device_memory` with"):
        with_device_of_ranks(given)
    limited = replace(given, device_memory=1.0)
    assert with_device_of_ranks(limited) == replace(limited, device="cuda")
    alone = replace(given, executor="process")
    assert with_device_of_ranks(alone) is alone


def test_tokens_on_two_nodes_are_those_of_one_process(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages of two ranks: a stage needs all of a node. Then weights give KV memory, on each of them."""
    monkeypatch.setenv("BACKFILL_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr(ray_stages, "_PASSED_ON", ("BACKFILL_CACHE_ROOT",))
    save_tiny_model("llama", tmp_path, num_hidden_layers=8)
    common = {"model_dir": str(tmp_path), "dtype": "float32", "block_size": 8, "kv_gib": 2**20 / GIB}
    expected = create_torch_executor(EngineConfig(device="cpu", threads=1, **common))  # type: ignore[arg-type]
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    offloading = {"offload_interval": 2, "min_offload_interval": 1}
    config = EngineConfig(executor="ray", **common, **sizes, **offloading)  # type: ignore[arg-type]
    executor = create_executor(config)
    try:
        ranks = [pid or 0 for pid in executor.pids]  # type: ignore[union-attr]
        nodes = [raylet_of(pid) for pid in ranks]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        assert set(list_named_actors()) == {"backfill-stage-0", "backfill-stage-1"}
        wait_until(lambda: ray.available_resources().get("CPU", 0.0) == 0.0, "all CPUs to be reserved")
        assert tokens(executor) == tokens(expected)
        assert executor.info.num_blocks == expected.info.num_blocks
        few = executor.info.residencies[0]
        memory = DeviceMemory(few.num_blocks, few.interval)
        executor.run(StepPlan(100, Compute(()), offload_interval=1, memory=memory))
        assert tokens(executor) == tokens(expected)
        assert few.num_blocks > executor.info.num_blocks
    finally:
        executor.close()  # type: ignore[union-attr]
    wait_ended(ranks)
    wait_until(is_clean, "the end of all actors")


def test_the_record_of_stages_on_two_nodes_is_measured_there(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``device_memory`` is of a node, which has room for one of these stages."""
    monkeypatch.setenv("BACKFILL_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr(ray_stages, "_PASSED_ON", ("BACKFILL_CACHE_ROOT",))  # each node has its own
    monkeypatch.setattr(analyzer, "QUICK_LOADS", GRID)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    config = replace(config_of(tmp_path / "model", **sizes), executor="ray", device="auto", threads=None)
    config.validate()
    target = target_of(replace(config, offload_interval=1), 2, 2)
    of_nodes = [target.least_device_bytes(each) for each in ((0, 1), (2, 3))]
    chosen = with_chosen_interval(replace(config, device_memory=(max(of_nodes) + 4096) / GIB))
    assert (chosen.offload_interval, chosen.device) == (1, "cpu")
    record = saved_record(chosen)
    assert record is not None
    assert record.key.device.endswith(", 2 x 2 ranks, actors of Ray")
    assert sum(record.stages) == record.num_layers
    assert record.others_share == 0.0
    assert len(list((tmp_path / "cache" / "packed").glob("*.layers"))) == 4
    wait_until(is_clean, "the end of all actors")


@pytest.mark.anyio
async def test_an_engine_is_started_again_after_its_actor_and_leaves_nothing_when_it_is_killed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, cluster.address)
    client = EngineClient(TWO, load=load_fake_engine)
    try:
        await client.start()
        assert await generate(client, "a") == 4
        ranks = ranks_of_cluster()
        assert len(ranks) == 2
        waiting = asyncio.create_task(generate(client, "r1:hang"))
        os.kill(parent(ranks[1]), signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"actor backfill-stage-. on node .* has ended"):
            await waiting
        wait_ended(ranks)
        await client.wait_dead()
        await client.start()
        assert await generate(client, "b") == 4
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await client.wait_dead()
    finally:
        await client.stop()
    wait_until(lambda: not ranks_of_cluster() and is_clean(), "the end of all actors")


def ranks_of_cluster() -> list[int]:
    """Processes of ranks in actors of this process's cluster."""
    raylets = [pid for pid in children(os.getpid()) if "raylet" in Path(f"/proc/{pid}/comm").read_text()]
    workers = [worker for raylet in raylets for worker in children(raylet)]
    found = [pid for worker in workers for pid in children(worker)]
    return [pid for pid in found if Path(f"/proc/{pid}/comm").read_text().startswith("backfill-rank")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"pipeline_parallel_size": 3, "threads": 6},
            r"needs 3 times 2 CPU, each .* there is room for 2: .*",
        ),
        ({"tensor_parallel_size": 3}, r"needs 1 times 3 CPU, .* no node is big enough for one: .*"),
        ({"device": "cuda"}, r"needs 1 times 1 CPU, 1 GPU, .* no node is big enough for one: .*"),
    ],
)
def test_a_cluster_that_is_too_small_is_described(
    cluster: Cluster, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"`executor` ray {message}: 2 CPU; 2 CPU"):
        fake_executor(EngineConfig(executor="ray", **fields))  # type: ignore[arg-type]


def test_the_end_of_a_node_is_noticed_and_another_one_takes_its_place(cluster: Cluster) -> None:
    """The last test of the cluster: one of its nodes is another one then."""
    executor = fake_executor(TWO)
    ranks = executor.pids
    executor.submit(plan_of(0, "r0:hang", "r1:hang"))
    (other,) = cluster.worker_nodes
    cluster.remove_node(other, allow_graceful=False)
    with pytest.raises(ExecutorDead, match=r"backfill-stage-. on node .* has ended"):
        executor.collect()
    wait_ended(ranks)
    cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    cluster.wait_for_nodes()
    again = fake_executor(TWO)
    try:
        assert len(again.run(plan_of(0, "a")).sampled) == 1
    finally:
        again.close()
