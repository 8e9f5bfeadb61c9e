"""``backfill simulate run``: what batch work fits beside one's own traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from backfill.core.config import SchedulerConfig
from backfill.core.options import bounded
from backfill.costs.hardware import HardwareProfile, load_device
from backfill.costs.parallel import parallel_hardware
from backfill.costs.profile import CostProfile
from backfill.scheduling.objectives import check_server_slo, server_slo
from backfill.simulation.device import BLOCK_SIZE, MOST_KV_TOKENS
from backfill.simulation.policy_study import PolicyPoint, PolicyStudy, Scenario
from backfill.simulation.study import LEAST, MOST
from backfill.simulation.workloads import TraceLengths, trace_workload


@dataclass(frozen=True, kw_only=True)
class TraceStudy(PolicyStudy):
    """Simulate online traffic beside batch work that never ends, and print what each policy makes of both.

    Figures are medians over the seeds, with the least and the most.

    Attributes:
        hardware: name of a hardware profile, or a JSON file: a hardware profile, or a cost profile that
            `backfill profile` saved.
        online: CSV of the online requests, with Azure's columns (TIMESTAMP, ContextTokens, GeneratedTokens),
            Vidur's (arrived_at, num_prefill_tokens, num_decode_tokens) or BurstGPT's (Timestamp, Request
            tokens, Response tokens). Without times it needs `rate`.
        offline: CSV of the offline requests, which repeat without end, with the same columns; times are not
            read.
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
    """

    hardware: str
    online: Path
    offline: Path
    policies: str = "online-only,priority,slo"
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    rate: float | None = bounded(None, least=LEAST, most=MOST)
    duration: float | None = bounded(None, least=LEAST, most=MOST)
    max_num_batched_tokens: int = SchedulerConfig().max_num_batched_tokens
    tensor_parallel_size: int = bounded(1, least=1)
    pipeline_parallel_size: int = bounded(1, least=1)
    kv_tokens: int | None = bounded(None, least=BLOCK_SIZE, most=MOST_KV_TOKENS)
    kv_bytes_per_token: int | None = bounded(None, least=1, most=1 << 30)
    max_model_len: int | None = bounded(None, least=2, most=MOST_KV_TOKENS)

    scenario: ClassVar[str] = "simulate-run"
    groups: ClassVar[dict[str, str]] = {
        "Traffic": "online offline rate duration ttft_slo tpot_slo",
        "Device": "hardware tensor_parallel_size pipeline_parallel_size kv_tokens kv_bytes_per_token "
        "max_model_len",
        "Scheduling": "policies max_num_batched_tokens",
    }
    figures: ClassVar[str] = (
        "goodput_rps attainment ttft_attainment tpot_attainment itl_attainment ttft_p50_s ttft_p99_s "
        "itl_p50_s itl_p99_s online_tok_s offline_tok_s offline_rps recomputed_token_share "
        "restored_token_share"
    )

    def validate(self) -> None:
        """Raises: ConfigError."""
        super().validate()
        self._scheduler().validate()

    def scenario_of(self, seed: int) -> Scenario:
        hardware, measured = self._device()
        max_len = min(hardware.max_model_len, hardware.kv_tokens // BLOCK_SIZE * BLOCK_SIZE)
        offline = TraceLengths.read(self.offline).sample(None, max_len, np.random.default_rng(seed))
        workload, num_too_long = trace_workload(
            self.online,
            offline=offline,
            max_len=max_len,
            rate_per_s=self.rate,
            duration_s=self.duration,
            seed=seed,
        )
        num_online = len(workload.online)
        setting = (("rate_per_s", num_online / workload.duration_s),)
        return Scenario(
            title=f"{self.online.name} beside {self.offline.name}",
            points={setting: workload},
            hardware=hardware,
            slo=server_slo(self._scheduler(), hardware.costs.cost),
            max_num_batched_tokens=self.max_num_batched_tokens,
            seed=seed,
            profile=measured,
            notes=(
                f"{num_online} online requests in {workload.duration_s:g} s; left out of the trace, as too "
                f"long for the device: {num_too_long}",
                *check_server_slo(self._scheduler(), hardware.costs),
            ),
        )

    def as_json(self, points: Sequence[PolicyPoint]) -> dict[str, Any]:
        return {"scenario": "run", **super().as_json(points)}

    def _scheduler(self) -> SchedulerConfig:
        """The objectives and the limits of a step, for any policy."""
        return SchedulerConfig(
            ttft_slo=self.ttft_slo,
            tpot_slo=self.tpot_slo,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_chunk_tokens=self.max_num_batched_tokens,
        )

    def _device(self) -> tuple[HardwareProfile, CostProfile | None]:
        """See ``load_device``. Raises: ConfigError."""
        sizes = self.tensor_parallel_size, self.pipeline_parallel_size
        if sizes == (1, 1):
            return load_device(self.hardware, self.kv_tokens, self.kv_bytes_per_token, self.max_model_len)
        hardware = parallel_hardware(self.hardware, *sizes)
        return hardware.resized(self.kv_tokens, self.kv_bytes_per_token, self.max_model_len), None
