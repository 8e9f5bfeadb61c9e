"""The command line before a command begins, and `doctor`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from backfill.cli.doctor import Findings
from tests.cli.running import run_cli_here, run_to_json

HEAVY = {
    "numpy",
    "scipy",
    "torch",
    "transformers",
    "fastapi",
    "aiohttp",
    "sqlalchemy",
    "matplotlib",
    "msgspec",
}


def test_help_needs_no_heavy_module() -> None:
    code = "import sys, backfill.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


def test_an_engine_is_started_before_the_libraries_of_the_server_are_loaded() -> None:
    code = "import sys, backfill.cli.serve, backfill.engine.client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    needed = {"msgspec"}  # what the engine's messages are of
    assert not (HEAVY - needed | {"backfill.scheduling.scheduler"}) & set(done.stdout.split())


def test_the_version_is_printed() -> None:
    assert run_cli_here("--version").stdout.startswith("backfill 0.")


def test_without_a_command_help_is_printed() -> None:
    for arguments, status in (((), 2), (("bench",), 2), (("-h",), 0), (("bench", "--help"), 0)):
        done = run_cli_here(*arguments)
        assert (done.returncode, done.stderr) == (status, "")
        assert done.stdout.startswith("Usage: backfill")


def test_a_command_near_the_unknown_one_is_named() -> None:
    done = run_cli_here("serv")
    assert done.returncode == 2
    assert done.stderr.startswith('backfill: Unknown command "serv". Did you mean "serve"?')


def test_errors_of_every_command_begin_alike() -> None:
    for command in (("pull", "no-such-model"), ("serve", "no-such-model", "--port", "0")):
        done = run_cli_here(*command)
        assert done.returncode == 1
        assert done.stderr.startswith("backfill: no model 'no-such-model'")


WELL = Findings(
    processor="a processor",
    num_processors=8,
    num_allowed=8,
    others_share=0.0,
    read_gb_s=40.0,
    available_gib=16.0,
    huge_pages="madvise",
    gpu="",
    has_driver=False,
    torch="2.13.0",
    model="m",
    device="cpu",
    dtype="bfloat16",
    kernels="avx2",
    stored_in="",
    weights_gb=2.0,
)


def test_a_machine_that_is_well_needs_no_advice() -> None:
    assert list(WELL.advice()) == []
    assert dict(WELL.rows())["one stream"].startswith("at most 20 tokens/s")


def test_each_fault_has_its_advice() -> None:
    for fault, word in (
        (replace(WELL, others_share=0.5), "Other processes"),
        (replace(WELL, num_allowed=2), "quota"),
        (replace(WELL, huge_pages="never"), "transparent_hugepage"),
        (replace(WELL, has_driver=True), "TORCH_INDEX="),
        (replace(WELL, available_gib=1.0), "Too little memory"),
    ):
        (line,) = fault.advice()
        assert word in line


def examined(monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    """What ``doctor`` says, after little reading of memory."""
    monkeypatch.setattr("backfill.cli.doctor._READ_BYTES", 1 << 20)
    num_threads = torch.get_num_threads()
    try:
        return run_to_json("doctor", "--json", *options)[1]
    finally:
        torch.set_num_threads(num_threads)


def test_what_a_server_would_choose_is_said_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examined(monkeypatch, "--dtype", "float32", "--quantization", "none")
    assert (found["device"], found["dtype"], found["model"]) == ("cpu", "float32", "smollm2-135m-instruct")
    assert 0 < found["num_allowed"] <= found["num_processors"] == os.cpu_count()
    assert found["read_gb_s"] > 0 and abs(found["weights_gb"] - 0.538) < 0.01


def test_weights_of_few_bits_are_counted_as_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examined(monkeypatch)
    assert found["stored_in"] == "Q4_1 Q8_0"
    assert abs(found["weights_gb"] - 0.097) < 0.001
