"""What `deploy/` says of the server: metrics, options, paths, times. Nothing here starts a container."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_docs import commands, exposed_metrics

DEPLOY = Path(__file__).parents[1] / "deploy"
SUFFIXES = "(?:_bucket|_sum|_count)?"


def expressions() -> dict[str, list[str]]:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    return {
        "grafana.json": [target["expr"] for panel in board["panels"] for target in panel["targets"]],
        "alerts.yml": [rule["expr"] for group in rules["groups"] for rule in group["rules"]],
    }


def containers() -> dict[str, dict[str, Any]]:
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return {name: each for name, each in services.items() if each["image"] == "backfill"}


def variables(command: str) -> set[str]:
    arguments = commands()[command].assemble_argument_collection()
    return {"BACKFILL_" + each.field_info.name.upper() for each in arguments}


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yml"])
def test_expressions_name_metrics_that_are_exposed(name: str) -> None:
    known = exposed_metrics()
    named = {found for each in expressions()[name] for found in re.findall(r"backfill:(\w+)", each)}
    assert len(named) > 8
    unknown = {each for each in named if not any(re.fullmatch(one + SUFFIXES, each) for one in known)}
    assert unknown == set()


def test_containers_are_given_options_that_their_commands_have() -> None:
    for name, service in containers().items():
        command, *arguments = service["command"]
        assert set(service["environment"]) <= variables(command), name
        options = {"BACKFILL_" + each[2:].upper().replace("-", "_") for each in arguments if each[:2] == "--"}
        assert options <= variables(command), name
    for dockerfile in DEPLOY.glob("Dockerfile*"):
        named = set(re.findall(r"BACKFILL_\w+", dockerfile.read_text()))
        # The cache folder's variable has a name of its own (docs/operations.md).
        assert named - {"BACKFILL_CACHE_ROOT"} <= variables("serve")


def test_requests_that_run_may_end_before_a_container_is_killed() -> None:
    for service in containers().values():
        asked_s = float(service["environment"]["BACKFILL_SHUTDOWN_TIMEOUT"])
        assert float(service["stop_grace_period"].removesuffix("s")) >= asked_s + 10
    pod = next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment.keys() <= variables("serve")
    waited_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    asked_s = float(environment["BACKFILL_SHUTDOWN_TIMEOUT"])
    assert pod["terminationGracePeriodSeconds"] >= waited_s + asked_s + 10
