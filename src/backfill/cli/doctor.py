"""``backfill doctor``: what this machine has, what ``auto`` chooses on it, and what would make it faster."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from backfill.cli.command import VARIABLES, command
from backfill.cli.interrupts import LOADING, interruptible
from backfill.cli.startup import find_folder
from backfill.core.config import GIB, EngineConfig
from backfill.engine.environment import engine_environment, restart_with
from backfill.engine.options import ModelOptions

_READ_BYTES = 256 << 20  # far above any cache
_READS = 7
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NVIDIA = (Path("/dev/nvidia0"), Path("/dev/dxg"))
_MUCH_USED = 0.1  # of the processors


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was found on the machine, and chosen for the model.

    Attributes:
        num_allowed: processors that this process may use, of ``num_processors``.
        others_share: of all processors, what other processes used while this was measured, 0 to 1.
        read_gb_s: gigabytes of memory that all threads read in a second.
        available_gib: memory that is free, or that the container leaves.
        huge_pages: ``always``, ``madvise``, ``never``, or empty where the system does not say.
        gpu: name and memory of the first CUDA device; empty without one.
        has_driver: an NVIDIA device is there, whether or not torch can use it.
        device, dtype, kernels: what a server would choose.
        stored_in: formats of weights of 4 and 8 bits; empty where there are none.
        weights_gb: gigabytes of the model's weights, which each step reads at least once.
    """

    processor: str
    num_processors: int
    num_allowed: int
    others_share: float
    read_gb_s: float
    available_gib: float | None
    huge_pages: str
    gpu: str
    has_driver: bool
    torch: str
    model: str
    device: str
    dtype: str
    stored_in: str
    kernels: str
    weights_gb: float

    def rows(self) -> Iterator[tuple[str, str]]:
        yield "processor", self.processor
        yield "processors", f"{self.num_allowed} of {self.num_processors}; others use {self.others_share:.0%}"
        yield "memory read", f"{self.read_gb_s:.1f} GB/s with {self.num_allowed} threads"
        if self.available_gib is not None:
            yield "memory available", f"{self.available_gib:.1f} GiB"
        yield "huge pages", self.huge_pages or "unknown"
        yield "GPU", self.gpu or "none that torch can use"
        yield "torch", self.torch
        yield "model", f"{self.model}, {self.weights_gb:.2f} GB of weights in {self.stored_in or self.dtype}"
        yield "auto chooses", f"{self.device}, {self.dtype}, kernels: {self.kernels}"
        if self.device == "cpu":
            most = self.read_gb_s / self.weights_gb
            yield "one stream", f"at most {most:.0f} tokens/s, as each reads all weights"

    def advice(self) -> Iterator[str]:
        """What would make a server faster here; nothing where all is well."""
        if self.others_share > _MUCH_USED:
            yield "Other processes use the processors: steps take longer than predicted. Stop them."
        if self.num_allowed < self.num_processors:
            yield "The affinity or the container's quota leaves processors out; a quota also stops threads."
        if self.huge_pages == "never":
            yield f"Huge pages are off: echo madvise > {_HUGE_PAGES}, for fewer misses when weights are read."
        if self.has_driver and not self.gpu:
            yield "There is an NVIDIA device, and this torch has no CUDA: make clean install TORCH_INDEX="
        if self.available_gib is not None and self.available_gib * GIB < 1.5e9 * self.weights_gb:
            yield "Too little memory is available for the weights and a KV pool."


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """How the findings are printed.

    Attributes:
        json: as one line of JSON.
    """

    json: bool = False


def doctor(model: ModelOptions, engine: EngineConfig, output: DoctorOptions) -> None:
    """Say what this machine has, what a server of MODEL would choose on it, and what would make it faster."""
    restart_with(engine_environment(os.environ))
    with interruptible(LOADING):
        findings = _examine(model.model, find_folder(model), engine)
    if output.json:
        print(json.dumps({**asdict(findings), "advice": list(findings.advice())}))
        return
    table = Table(show_header=False, box=None)
    for row in findings.rows():
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    for line in findings.advice():
        console.print(f"- {line}")


app = command(
    doctor,
    {"Model": "model revision dtype quantization device", "Output": "json"},
    positional="model",
    variables=VARIABLES,
)


def _examine(name: str, folder: Path, engine: EngineConfig) -> Findings:
    """Raises: ConfigError, ModelError."""
    import torch

    from backfill.execution.create import target_of
    from backfill.execution.machine import (
        OthersMeter,
        available_host_bytes,
        available_processors,
        proc_value,
    )
    from backfill.kernels import create_kernels

    others = OthersMeter()
    asked = EngineConfig(
        model_dir=str(folder), dtype=engine.dtype, quantization=engine.quantization, device=engine.device
    )
    target = target_of(asked)
    num_allowed = available_processors()
    torch.set_num_threads(num_allowed)
    read_gb_s = _read_rate()
    has_gpu = torch.cuda.is_available()
    gpu = torch.cuda.get_device_properties(0) if has_gpu else None
    available = available_host_bytes()
    return Findings(
        processor=proc_value("cpuinfo", "model name") or "unknown",
        num_processors=os.cpu_count() or 1,
        num_allowed=num_allowed,
        others_share=others.share(),
        read_gb_s=read_gb_s,
        available_gib=None if available is None else available / GIB,
        huge_pages=_huge_pages(),
        gpu="" if gpu is None else f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB",
        has_driver=any(path.exists() for path in _NVIDIA),
        torch=torch.__version__,
        model=name,
        device=target.device.type,
        dtype=target.dtype_name,
        stored_in=target.checkpoint.stored_in,
        kernels=create_kernels(target.device).description,
        weights_gb=target.weight_sizes(target.placement.shards()).device_bytes(None) / 1e9,
    )


def _read_rate() -> float:
    """GB/s that all threads read: the best of several products of a matrix with a vector."""
    import torch

    rows, x = torch.zeros(_READ_BYTES // 4).view(-1, 4096), torch.ones(4096)
    best_s = float("inf")
    for _ in range(_READS):
        started_at_s = time.perf_counter()
        torch.mv(rows, x)
        best_s = min(best_s, time.perf_counter() - started_at_s)
    return _READ_BYTES / best_s / 1e9


def _huge_pages() -> str:
    try:
        return _HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""
