"""``serve --executor ray`` on a real cluster of two nodes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from ray.util import list_named_actors, placement_group_table

from backfill.core.errors import ConfigError
from backfill.parallel.ray_cluster import ADDRESS_VARIABLE, Bundle, bundle_of, most_on_a_node
from tests.api.servers import SMALL_MODEL, RunningServer, launch_small, serve_command, wait_until
from tests.cli.running import assert_refused, run_cli_here
from tests.parallel.processes import parent

TIMEOUT_S = 120.0


def servers_on_nodes() -> dict[int, int]:
    """Process ids of servers in actors of this process's cluster, by replica."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            match = re.search(r"\0backfill-replica-(\d+)\0", (folder / "cmdline").read_text())
            if match and parent(node_of(int(folder.name))) == os.getpid():
                found[int(match[1])] = int(folder.name)
    return found


def node_of(server: int) -> int:
    """The raylet whose worker has started the server."""
    return parent(parent(server))


def answers(server: RunningServer) -> bool:
    body = {"prompt": "Why?", "max_tokens": 3, "ignore_eos": True}
    response = server.http.post("/v1/completions", json=body)
    return response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 3


def is_whole_again(server: RunningServer, replica: int, before: int) -> bool:
    now = servers_on_nodes()
    return len(now) == 2 and now[replica] != before and server.metric("backfill:router_engine_up") == 2


def names_of_actors() -> set[str]:
    """Of replicas, on the whole cluster."""
    names = {each["name"] for each in list_named_actors(all_namespaces=True)}
    return {name for name in names if name.startswith("backfill-replica-")}


def test_two_nodes_answer_at_one_address_and_outlive_a_process_and_an_actor(
    cluster: Cluster, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, cluster.address)
    options = ("--executor", "ray", "--data-parallel-size", "2", "--policy", "fcfs")
    server = launch_small(small_model, *options, data_dir=tmp_path)
    try:
        server.logged("with 2 replicas  (ready")
        first = servers_on_nodes()
        assert len(first) == 2 and node_of(first[0]) != node_of(first[1])
        assert names_of_actors() == {"backfill-replica-0", "backfill-replica-1"}
        logs = Path(cluster.head_node.get_logs_dir_path())
        assert any(" server: " in path.read_text() for path in logs.glob("worker-*.err"))
        line = server.logged("(backfill-replica-1", "INFO replica 1 server: ")
        assert "\x1b" not in line, "the output is no terminal"
        assert answers(server)
        os.kill(first[0], signal.SIGKILL)
        assert answers(server)
        wait_until(lambda: is_whole_again(server, 0, first[0]), "the server that was killed")
        os.kill(parent(first[1]), signal.SIGKILL)
        assert answers(server)
        wait_until(lambda: is_whole_again(server, 1, first[1]), "the actor that was killed")
        assert answers(server)
        assert server.stop() == 0
        wait_until(lambda: not servers_on_nodes() and not names_of_actors(), "the end of all actors")
        assert {each["state"] for each in placement_group_table().values()} == {"REMOVED"}
    finally:
        server.kill()


def test_what_cannot_run_is_said_in_one_line(cluster: Cluster, tmp_path: Path, small_model: Path) -> None:
    """A model that no node has, and more threads than a node can ever give."""
    settings = {**os.environ, ADDRESS_VARIABLE: cluster.address}
    missing = str(tmp_path / "missing")
    few = ("--executor", "ray", "--policy", "fcfs", "--port", "0", "--data-dir")
    commands = [
        serve_command(missing, *SMALL_MODEL, *few, str(tmp_path / "a")),
        serve_command(
            str(small_model), "--threads", "3", "--data-parallel-size", "2", *few, str(tmp_path / "b")
        ),
    ]
    running = [
        subprocess.Popen(each, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=settings)
        for each in commands
    ]
    errors = [each.communicate(timeout=TIMEOUT_S)[1].splitlines()[-1] for each in running]
    assert [each.returncode for each in running] == [1, 1]
    assert errors[0].startswith("backfill: Replica 0: ") and missing in errors[0]
    assert "--data-parallel-size 2 with --executor ray needs 2 times 3 CPU, each on one node" in errors[1]
    assert "have: 2 CPU; 2 CPU." in errors[1]
    wait_until(lambda: not servers_on_nodes() and not names_of_actors(), "the end of all actors")


def test_a_cluster_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setenv(ADDRESS_VARIABLE, address)
        result = run_cli_here("serve", "--executor", "ray", "--port", "0")
        assert_refused(
            result, f"RAY_ADDRESS {address}: no Ray cluster can be reached there (Connection refused)"
        )
    for wrong in ("ray://127.0.0.1:10001", "127.0.0.1", "host:port"):
        monkeypatch.setenv(ADDRESS_VARIABLE, wrong)
        result = run_cli_here("serve", "--executor", "ray", "--port", "0")
        assert_refused(result, "RAY_ADDRESS must be HOST:PORT of a Ray cluster or auto")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert_refused(run_cli_here("serve", "--executor", "ray", "--port", "0"), "pip install 'backfill[ray]'")


@pytest.mark.parametrize(
    ("nodes", "replicas", "ranks", "threads", "uses_gpus", "bundle"),
    [
        ([{"CPU": 8}, {"CPU": 8}], 2, 1, None, None, {"CPU": 8}),
        ([{"CPU": 8}, {"CPU": 8}], 3, 1, None, None, {"CPU": 4}),
        ([{"CPU": 8}, {"CPU": 1}], 2, 1, None, None, {"CPU": 4}),
        ([{"CPU": 8}], 2, 1, 2, None, {"CPU": 2}),
        ([{"CPU": 8, "GPU": 4}] * 2, 4, 2, None, None, {"CPU": 4, "GPU": 2}),
        ([{"CPU": 8, "GPU": 1}] * 2, 2, 2, None, None, {"CPU": 8}),
        ([{"CPU": 8, "GPU": 4}], 2, 2, 4, False, {"CPU": 4}),
    ],
)
def test_replicas_share_a_cluster(
    nodes: list[dict[str, float]],
    replicas: int,
    ranks: int,
    threads: int | None,
    uses_gpus: bool | None,
    bundle: dict[str, float],
) -> None:
    assert bundle_of(nodes, replicas, ranks, threads, uses_gpus, "it").resources == bundle


def test_a_node_may_hold_several_stages() -> None:
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 3.0}]
    found = [most_on_a_node(nodes, Bundle(*each)) for each in ((2, 0), (8, 0), (4, 2), (2, 4), (16, 0))]
    assert found == [4, 1, 2, 1, 1]


def test_a_replica_needs_one_node() -> None:
    nodes = [{"CPU": 8.0, "GPU": 1.0}] * 2
    with pytest.raises(ConfigError, match=r"1 times 2 CPU, 2 GPU, each on one node.*have: 8 CPU, 1 GPU; 8"):
        bundle_of(nodes, 1, 2, None, True, "it")
    with pytest.raises(ConfigError, match="have: none"):
        bundle_of([], 1, 1, None, None, "it")
