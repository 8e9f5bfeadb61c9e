"""A model on a simulated device with offloaded layers: memory, steps, and the record measured of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from backfill.core.clock import VirtualClock
from backfill.core.measured_on import MeasuredOn
from backfill.core.plan import AdmittedRequest, Compute, ScheduledSlice, StepPlan
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.costs.behaviour import NoiseSource, StepNoise
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.execution.executor import ExecutorInfo
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.offloading.interval import LayerTimes, num_device_layers, offloaded_layers
from backfill.offloading.record import OBJECTIVE_GRAIN_S, PerformanceRecord, Phase, RecordedLoad
from backfill.simulation.device import HOST_S
from experiments.derived import derive_cost_model, measured_error
from experiments.layered_device import LayeredDevice, LayeredExecutor
from experiments.model_work import Device, ModelShape

# NVIDIA A10 Tensor Core GPU data sheet: 24 GB of GDDR6 at 600 GB/s, 125 TFLOP/s of fp16 tensor cores, dense.
# That 23,028 MiB of them can be used is assumed.
A10 = Device("a10", 23_028 * 2**20, 600e9, 125e12)
# Select-N, section 3: the A10's PCIe 4.0 x16, nominally 31.5 GB/s.
LINK_BYTES_PER_S = 24e9
OUTPUT_TOKENS = 32  # of an output; TPOT is the mean over them
WARM_UP_STEPS = 20
_RECORD_STEPS = 1000
_RECORD_SEED = 1000  # the record is measured in other runs than it is used in


def _opt(name: str, num_layers: int, hidden: int, num_heads: int) -> ModelShape:
    return ModelShape(name, num_layers, hidden, num_heads, num_heads, 4 * hidden, 50272, 2048, is_opt=True)


# The paper's models (section 5.1). Qwen2-beta-7B was published as Qwen1.5-7B; its biases are left out.
SHAPES = {
    shape.name: shape
    for shape in (
        _opt("opt-6.7b", 32, 4096, 32),
        _opt("opt-13b", 40, 5120, 40),
        ModelShape("qwen2-beta-7b", 32, 4096, 32, 32, 11008, 151936, 32768),
        ModelShape("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
        ModelShape("llama-13b", 40, 5120, 40, 40, 13824, 32000, 2048),
    )
}


class PhaseLoad(NamedTuple):
    """The step that an instance repeats: whole prompts, or one token of each request.

    Attributes:
        length: tokens of each prompt; or before each decoded token.
    """

    phase: Phase
    batch_size: int
    length: int

    @property
    def slices(self) -> list[tuple[int, int, bool]]:
        """(start, number of tokens, samples) of each request."""
        one = (0, self.length, True) if self.phase == "prefill" else (self.length, 1, True)
        return [one] * self.batch_size

    @property
    def num_tokens(self) -> int:
        """Computed by a step."""
        return self.batch_size * (self.length if self.phase == "prefill" else 1)

    @property
    def kv_tokens(self) -> int:
        """KV that the requests hold."""
        return self.batch_size * (self.length + (self.phase == "decode"))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of many steps in a row, from each to the next."""

    seconds: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        return float(np.mean(self.seconds))

    @property
    def p99_s(self) -> float:
        return float(np.percentile(self.seconds, 99))

    @property
    def tpot_p99_s(self) -> float:
        """P99 over outputs of the mean of their steps."""
        sums = np.cumsum([0.0, *self.seconds])
        span = min(OUTPUT_TOKENS, len(self.seconds))
        return float(np.percentile((sums[span:] - sums[:-span]) / span, 99))


@dataclass(frozen=True)
class OffloadedModel:
    """A model that repeats a step on a device, with weights behind a link."""

    shape: ModelShape
    device: Device = A10
    link_bytes_per_s: float = LINK_BYTES_PER_S

    @cached_property
    def cost(self) -> CostModel:
        return derive_cost_model(self.shape, self.device)

    @cached_property
    def noise(self) -> StepNoise:
        return StepNoise.of_error(measured_error())

    @property
    def transfer_s(self) -> float:
        """Seconds to transfer one layer alone on the link."""
        return self.shape.layer_bytes / self.link_bytes_per_s

    def compute_s(self, load: PhaseLoad) -> float:
        """Typical seconds of a step that waits for no weights."""
        return self.cost.step_time_s(StepLoad.of(load.slices))

    def host_bytes(self, interval: int | None) -> int:
        """Weights in host memory."""
        return len(offloaded_layers(self.shape.num_layers, interval)) * self.shape.layer_bytes

    def kv_tokens(self, interval: int | None) -> int:
        """Tokens of KV that the weights leave room for; negative if these do not fit themselves."""
        return self.kv_tokens_beside(num_device_layers(self.shape.num_layers, interval))

    def kv_tokens_beside(self, num_layers: float) -> int:
        """The same beside so many layers' weights, staging buffers included."""
        shape = self.shape
        left = self.device.usable_bytes - shape.other_weight_bytes - num_layers * shape.layer_bytes
        return math.floor(left / shape.kv_bytes_per_token)

    def run(
        self,
        load: PhaseLoad,
        interval: int | None,
        *,
        num_steps: int,
        portion: float = 1.0,
        seed: int = 1,
    ) -> StepTimes:
        """Steps back to back on the simulated executor.

        Args:
            portion: of an offloaded layer that is transferred; the rest stays on the device.
        """
        clock = VirtualClock()
        info = ExecutorInfo(
            num_blocks=1,
            block_size=1,
            max_model_len=self.shape.max_model_len,
            vocab_size=self.shape.vocab,
            end_token_ids=(),
            device=self.device.name,
            dtype="float16",
            num_layers=self.shape.num_layers,
            offload_interval=interval,
            layer_bytes=round(portion * self.shape.layer_bytes),
        )
        device = LayeredDevice(self.cost, noise=self.noise, layer_transfer_s=portion * self.transfer_s)
        kind = SimulatedExecutor if interval is None else LayeredExecutor
        executor = kind(info, device, clock, seed=seed)
        ids = [RequestId(str(index)) for index in range(load.batch_size)]
        slices = tuple(
            ScheduledSlice(request_id, start, num_tokens, (), samples)
            for request_id, (start, num_tokens, samples) in zip(ids, load.slices, strict=True)
        )
        admitted = tuple(
            AdmittedRequest(request_id, (0,) * load.length, SamplingParams(max_tokens=1))
            for request_id in ids
        )
        plan = StepPlan(0, Compute(slices), admitted=admitted)
        ends_s = [0.0]
        for step in range(WARM_UP_STEPS + num_steps):
            executor.run(plan)
            clock.advance(HOST_S)
            ends_s.append(clock.now_s())
            if step == 0:
                plan = StepPlan(0, Compute(slices))
        return StepTimes(tuple(np.diff(ends_s)[WARM_UP_STEPS:].tolist()))

    def layer_times(self, load: PhaseLoad) -> LayerTimes:
        """What the record knows of a step: the P99 of its computation, without waiting for weights."""
        layer_s = slow_ratio(self.noise) * self.compute_s(load) / self.shape.num_layers
        return LayerTimes(self.shape.num_layers, layer_s, self.transfer_s, HOST_S)

    def record(self, loads: Sequence[PhaseLoad]) -> PerformanceRecord:
        """The performance record (section 4.4) of these steps on the device."""
        recorded = tuple(
            RecordedLoad(*load, compute_s=self.layer_times(load).compute_s, other_s=HOST_S) for load in loads
        )
        return PerformanceRecord(
            MeasuredOn(self.shape.name, self.device.name, "float16"),
            self.shape.num_layers,
            self.shape.layer_bytes,
            self.transfer_s,
            recorded,
            f"P99 of {_RECORD_STEPS} simulated steps without offloading",
        )


@lru_cache(maxsize=8)
def slow_ratio(noise: StepNoise) -> float:
    """The P99 of a measurement of many steps, over their typical time."""
    source = NoiseSource(noise, _RECORD_SEED)
    return float(np.percentile([source.draw() for _ in range(_RECORD_STEPS)], 99))


def in_grains(objective_s: float) -> float:
    """The paper's objectives are multiples of 2 ms: the next larger one."""
    return math.ceil(objective_s / OBJECTIVE_GRAIN_S - 1e-9) * OBJECTIVE_GRAIN_S
