"""A chosen variant of the CPU kernels limits torch's libraries too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.engine.environment import engine_environment
from backfill.execution.machine import check_isa, proc_value
from backfill.kernels.cpu import available_isas
from backfill.kernels.isa import ISA_VARIABLE, library_limits, possible_isas

REPORT = """
import torch
print(torch.backends.cpu.get_cpu_capability(), torch.ops.mkldnn._is_mkldnn_bf16_supported())
"""


@pytest.mark.parametrize("isa", ["", "amx", "z80"])
def test_the_best_variant_and_an_unknown_one_limit_nothing(isa: str) -> None:
    assert library_limits({ISA_VARIABLE: isa}) == library_limits({}) == {}


@pytest.mark.slow  # starts a process; its settings are in the tests around it
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


def test_variants_are_known_without_the_compiled_module() -> None:
    flags, available = proc_value("cpuinfo", "flags"), set(available_isas())
    assert available <= set(possible_isas(None if flags is None else flags.split()))
    # Without flags it is not known what the processor lacks.
    known = set(possible_isas(() if flags is None else flags.split()))
    assert known - available <= {"amx"}, "the system may not permit it"


@pytest.mark.parametrize(
    ("isa", "flags", "part"),
    [
        ("z80", "avx2 fma bmi2", r"this machine has generic, avx2, got 'z80'"),
        ("avx512", "avx2 fma bmi2 avx512f", r"this machine has generic, avx2, got 'avx512'"),
        ("z80", None, r"it may be generic, avx2, .*amx, got 'z80'"),
    ],
)
def test_a_variant_that_cannot_run_is_refused_with_those_that_can(
    monkeypatch: pytest.MonkeyPatch, isa: str, flags: str | None, part: str
) -> None:
    monkeypatch.setattr("backfill.execution.machine.proc_value", lambda *_: flags)
    monkeypatch.setenv(ISA_VARIABLE, isa)
    with pytest.raises(ConfigError, match=f"^{ISA_VARIABLE}: {part}"):
        check_isa(EngineConfig(device="cpu"))


@pytest.mark.parametrize(
    ("isa", "device"), [("", "cpu"), ("generic", "cpu"), ("avx512", "cpu"), ("z80", "cuda")]
)
def test_a_variant_that_runs_or_is_not_used_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, isa: str, device: str
) -> None:
    flags = "avx2 fma bmi2 avx512f avx512bw avx512vl avx512dq"
    monkeypatch.setattr("backfill.execution.machine.proc_value", lambda *_: flags)
    monkeypatch.setenv(ISA_VARIABLE, isa)
    check_isa(EngineConfig(device=device))
