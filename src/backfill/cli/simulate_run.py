"""``backfill simulate run``: what batch work fits beside one's own traffic."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.simulate import (
    SeedOptions,
    plot_path,
    policy_names,
    print_done,
    print_result,
    print_scenario,
)
from backfill.core.config import SchedulerConfig, at_least
from backfill.core.errors import ConfigError
from backfill.core.options import check_types
from backfill.costs.hardware import HardwareProfile, load_device
from backfill.costs.parallel import parallel_hardware
from backfill.costs.profile import CostProfile
from backfill.scheduling.objectives import check_server_slo, server_slo
from backfill.simulation.device import BLOCK_SIZE
from backfill.simulation.scenarios import Point, Scenario
from backfill.simulation.seeds import run_seeds
from backfill.simulation.workloads import offline_lengths, trace_workload

_POLICIES = ("online-only", "priority", "slo")
_FIGURES = (
    "goodput_rps attainment ttft_attainment tpot_attainment itl_attainment ttft_p50_s ttft_p99_s itl_p50_s "
    "itl_p99_s online_tok_s offline_tok_s offline_rps recomputed_token_share restored_token_share"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """A device, its online traffic, and the batch work to run beside it.

    Attributes:
        hardware: name of a hardware profile, or a JSON file: a hardware profile, or a cost profile that
            `backfill profile` saved.
        online: CSV of the online requests: arrival times, and tokens of prompt and output.
        offline: CSV of the tokens of prompt and output of the offline requests, which repeat without end.
        policies: policies to compare, separated by commas. Default: online-only, priority and slo.
        ttft_slo: seconds to the first token. Default: as `backfill serve` chooses it.
        tpot_slo: seconds between two tokens. Default: as `backfill serve` chooses it.
        rate: mean online requests per second, to which the trace's times are stretched. Default: its own.
        duration: seconds of the trace to run, after stretching. Default: all.
        max_num_batched_tokens: tokens computed in one step, prefill and decode together.
        tensor_parallel_size: devices among which each layer is divided; `hardware` is then a device and a
            model, such as a100-80g-llama-3-70b.
        pipeline_parallel_size: stages of layers, each on so many devices.
        kv_tokens: tokens of KV that fit on the device; needed with a cost profile. Default: the hardware
            profile's.
        kv_bytes_per_token: bytes of KV per token. Default: the hardware profile's; with a cost profile
            nothing is copied to host memory without it.
        max_model_len: most tokens of prompt and output; longer requests are left out. Default: the hardware
            profile's, or as far as the cost profile was measured.
        plot: PNG to write; simulate-run.png by default, if matplotlib is installed.
        json: end with one JSON object on a line.
    """

    hardware: str
    online: Path
    offline: Path
    policies: str | None = None
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    rate: float | None = None
    duration: float | None = None
    max_num_batched_tokens: int = SchedulerConfig().max_num_batched_tokens
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    kv_tokens: int | None = None
    kv_bytes_per_token: int | None = None
    max_model_len: int | None = None
    plot: Path | None = None
    json: bool = False

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        self.scheduler().validate()
        for field, value in (("rate", self.rate), ("duration", self.duration)):
            if value is not None and not 0.0 < value < math.inf:
                raise ConfigError(f"must be a number above 0, got {value:g}.", field=field)
        for field, count, least in (
            ("tensor_parallel_size", self.tensor_parallel_size, 1),
            ("pipeline_parallel_size", self.pipeline_parallel_size, 1),
            ("kv_tokens", self.kv_tokens, BLOCK_SIZE),
            ("kv_bytes_per_token", self.kv_bytes_per_token, 1),
            ("max_model_len", self.max_model_len, 2),
        ):
            if count is not None:
                at_least(field, count, least)

    def scheduler(self) -> SchedulerConfig:
        """The objectives and the limits of a step, for any policy."""
        return SchedulerConfig(
            ttft_slo=self.ttft_slo,
            tpot_slo=self.tpot_slo,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_chunk_tokens=self.max_num_batched_tokens,
        )


def run(options: RunOptions, seeds: SeedOptions) -> None:
    """Simulate online traffic beside batch work that never ends, and print what each policy makes of both."""
    console = Console()
    plot = plot_path(options.plot, "simulate-run.png")
    policies = policy_names(options.policies) or _POLICIES
    hardware, measured = _device(options)
    for warning in check_server_slo(options.scheduler(), hardware.costs):
        console.print(warning, style="yellow", markup=False)
    first, num_too_long = _build(options, hardware, measured, seeds.first_seed)
    print_scenario(console, first, plot)
    (point,) = first.points
    console.print(
        f"{len(point.workload.online)} online requests in {point.workload.duration_s:g} s; left out of the "
        f"trace, as too long for the device: {num_too_long}"
    )
    with interruptible():
        result = run_seeds(
            lambda seed: _build(options, hardware, measured, seed)[0],
            seeds.all(),
            policies,
            lambda seed, setting, policy, metrics: print_done(console, seed, setting, policy, metrics),
        )
    print_result(console, result, _FIGURES, plot)
    if options.json:
        print(json.dumps(result.as_json()))


app = command(
    run,
    {
        "Traffic": "online offline rate duration ttft_slo tpot_slo",
        "Device": "hardware tensor_parallel_size pipeline_parallel_size kv_tokens kv_bytes_per_token "
        "max_model_len",
        "Scheduling": "policies max_num_batched_tokens",
        "Seeds": "seeds first_seed",
        "Output": "plot json",
    },
    prefix="BACKFILL_SIMULATE_RUN_",
)


def _device(options: RunOptions) -> tuple[HardwareProfile, CostProfile | None]:
    """See ``load_device``. Raises: ConfigError."""
    sizes = options.tensor_parallel_size, options.pipeline_parallel_size
    if sizes == (1, 1):
        return load_device(
            options.hardware, options.kv_tokens, options.kv_bytes_per_token, options.max_model_len
        )
    hardware = parallel_hardware(options.hardware, *sizes)
    changed = replace(
        hardware,
        kv_tokens=options.kv_tokens or hardware.kv_tokens,
        kv_bytes_per_token=options.kv_bytes_per_token or hardware.kv_bytes_per_token,
        max_model_len=options.max_model_len or hardware.max_model_len,
    )
    return changed, None


def _build(
    options: RunOptions, hardware: HardwareProfile, measured: CostProfile | None, seed: int
) -> tuple[Scenario, int]:
    """The scenario, and how many online requests are too long for the device. Raises: ConfigError."""
    max_len = min(hardware.max_model_len, hardware.kv_tokens // BLOCK_SIZE * BLOCK_SIZE)
    workload, num_too_long = trace_workload(
        options.online,
        offline=offline_lengths(options.offline, max_len=max_len, seed=seed),
        max_len=max_len,
        rate_per_s=options.rate,
        duration_s=options.duration,
        seed=seed,
    )
    rate_per_s = len(workload.online) / workload.duration_s
    scenario = Scenario(
        name="run",
        title=f"{options.online.name} beside {options.offline.name}",
        points=(Point({"rate_per_s": rate_per_s}, workload),),
        paper={},
        hardware=hardware,
        policies=_POLICIES,
        slo=server_slo(options.scheduler(), hardware.costs.cost),
        max_num_batched_tokens=options.max_num_batched_tokens,
        profile=measured,
        seed=seed,
    )
    return scenario, num_too_long
