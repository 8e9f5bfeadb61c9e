"""A chosen variant of the CPU kernels limits torch's libraries too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from backfill.engine.environment import engine_environment
from backfill.kernels.isa import ISA_VARIABLE, library_limits

REPORT = """
import torch
print(torch.backends.cpu.get_cpu_capability(), torch.ops.mkldnn._is_mkldnn_bf16_supported())
"""


@pytest.mark.parametrize("isa", ["", "amx", "z80"])
def test_the_best_variant_and_an_unknown_one_limit_nothing(isa: str) -> None:
    assert library_limits({ISA_VARIABLE: isa}) == library_limits({}) == {}


def test_libraries_keep_to_the_variant_of_the_environment() -> None:
    chosen = {ISA_VARIABLE: "generic"}
    settings = engine_environment(chosen)
    assert settings["ONEDNN_MAX_CPU_ISA"] == "SSE41"
    report = subprocess.run(
        [sys.executable, "-c", REPORT],
        env={**os.environ, **chosen, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    assert report.stdout.split() == ["DEFAULT", "False"]


def test_a_limit_that_is_set_already_stays() -> None:
    current = {ISA_VARIABLE: "avx2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    assert "ONEDNN_MAX_CPU_ISA" not in engine_environment(current)
    assert engine_environment(current)["ATEN_CPU_CAPABILITY"] == "avx2"
