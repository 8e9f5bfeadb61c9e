"""Sizes that are refused, each with the option and what is allowed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.execution import machine
from backfill.execution.machine import check_threads, threads_of_rank
from backfill.parallel.create import check_device_count, create_executor
from tests.models.tiny import save_tiny_model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "`tensor_parallel_size` must be at least 1, got 0"),
        ({"pipeline_parallel_size": -1}, "`pipeline_parallel_size` must be at least 1, got -1"),
        (
            {"tensor_parallel_size": 4, "threads": 3},
            "`threads` 3 is less than the 4 processes of `tensor_parallel_size` 4",
        ),
    ],
)
def test_sizes_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**options).validate()
    assert message in str(refused.value)


@pytest.mark.parametrize("interval", [4, "auto"])
def test_stages_that_may_be_on_several_machines_have_no_bus(interval: int | str) -> None:
    """Before the record of auto is measured on them."""
    bus = {"offload_bus": "left", "offload_bus_gib_per_s": 1.0}
    config = EngineConfig(executor="ray", offload_interval=interval, **bus)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"`offload_bus` .* with `executor` ray: a bus is of one machine"):
        config.validate()


def test_more_ranks_than_devices_are_refused() -> None:
    config = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    check_device_count(config, 4)
    with pytest.raises(ConfigError, match="needs 4 CUDA devices, and torch finds 3 here"):
        check_device_count(config, 3)


def test_each_rank_may_have_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on fewer processors: that is how ranks run where no number of threads is given."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    check_threads(EngineConfig(tensor_parallel_size=3, threads=3))
    with pytest.raises(ConfigError, match="`threads` must be at most 3 here, got 4"):
        check_threads(EngineConfig(tensor_parallel_size=3, threads=4))
    with pytest.raises(ConfigError, match="`threads` must be at most 2 here, got 3"):
        check_threads(EngineConfig(threads=3))


def test_ranks_divide_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_processors", lambda: 7)
    assert threads_of_rank(EngineConfig(tensor_parallel_size=3)) == 2
    assert threads_of_rank(EngineConfig(tensor_parallel_size=9)) == 1
    assert threads_of_rank(EngineConfig(tensor_parallel_size=2, threads=5)) == 2


def test_a_model_that_cannot_be_divided_so_is_refused_with_what_can_be(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    config = EngineConfig(model_dir=str(tmp_path), device="cpu", tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=r"`tensor_parallel_size` 3: the model has .* use 1"):
        create_executor(config)
