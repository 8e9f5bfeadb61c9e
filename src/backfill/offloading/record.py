"""The performance record of a model on a device: what steps cost, and so which interval holds an objective.

Select-N, section 4.4. The paper's record stores an interval for every objective; this one stores the times
that intervals follow from, and finds the interval of an objective when it is asked for.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec

from backfill.core.measured_on import MeasuredFile, MeasuredOn
from backfill.offloading.interval import (
    NUM_STAGING_BUFFERS,
    LayerTimes,
    num_device_layers,
    offloaded_layers,
    step_time_s,
)

# Objectives are rounded down to multiples of this.
OBJECTIVE_GRAIN_S = 0.002

# Of computing, for which delays are recorded; the next ones are twice as long each.
SHORTEST_STRETCH_S = 0.001

Phase = Literal["prefill", "decode"]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=sys.float_info.max)]
Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """A step of requests that are alike, and what it takes without waiting for weights.

    Attributes:
        phase: ``prefill``: whole prompts; ``decode``: one token of each request.
        batch_size: requests.
        length: tokens of each prompt; or before each decoded token.
        compute_s: seconds for one layer, typically.
        other_s: seconds outside the layers.
    """

    phase: Phase
    batch_size: Count
    length: Count
    compute_s: Seconds
    other_s: Seconds


@dataclass(frozen=True, slots=True)
class PerformanceRecord(MeasuredFile):
    """Times of a model's layers, from which the intervals follow.

    Loads between recorded ones count as the next larger recorded ones, in batch size and in length. What is
    beyond every recorded load has no interval: none that the record has would be conservative.

    Attributes:
        num_layers: decoder layers.
        layer_bytes: of the weights of one layer, on all ranks of its stage together.
        transfer_s: seconds to transfer the weights of a layer; few transfers take longer.
        loads: in any order, none twice.
        provenance: how the record was measured, as text.
        max_num_seqs, max_num_batched_tokens: limits of steps when it was measured; larger loads are missing.
        typical_transfer_s: the median; 0 counts as ``transfer_s``.
        transfer_runs_s: seconds of a transfer in runs of 1, 2, 4 and so on one after another, which few runs
            exceed. Longer runs count as the last; without any ``transfer_s`` counts.
        delays_s: by how much few stretches of computing of 1, 2, 4 ms and so on exceed what they typically
            take, because the machine does something else. Without any they take no longer.
        is_thorough: measured by ``backfill profile --offload``, not by a start.
        others_share: of the processors, what other processes used while it was measured, 0 to 1.
        stage_layers: layers of each stage of a pipeline; empty where there is one stage.
    """

    KIND = "performance record"
    FORMAT = 1
    REMEDY = "run `backfill profile --offload` for the model to measure it again."

    key: MeasuredOn
    num_layers: Count
    layer_bytes: Count
    transfer_s: Seconds
    loads: tuple[RecordedLoad, ...]
    provenance: str = ""
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 2048
    typical_transfer_s: Seconds = 0.0
    transfer_runs_s: tuple[Seconds, ...] = ()
    delays_s: tuple[Seconds, ...] = ()
    is_thorough: bool = False
    others_share: float = 0.0
    stage_layers: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        if self.stage_layers and sum(self.stage_layers) != self.num_layers:
            raise ValueError(f"stages of {self.stage_layers} layers do not have {self.num_layers}")

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers of each stage, of which there is at least one."""
        return self.stage_layers or (self.num_layers,)

    @property
    def intervals(self) -> range:
        """All with which a layer is offloaded; each stage offloads one of so many of its own layers."""
        return range(1, max(self.stages) + 1)

    def saves_memory(self, interval: int) -> bool:
        return any(num_device_layers(each, interval) < each for each in self.stages)

    def times_of(self, load: RecordedLoad) -> LayerTimes:
        return LayerTimes(self.num_layers, load.compute_s, self.transfer_s, load.other_s)

    def step_s(self, load: RecordedLoad, interval: int | None) -> float:
        """Seconds that few steps of such a load exceed, many back to back.

        Computation that is late delays the step, unless transfers are what it waits for. Then it may be late
        by as long as the link takes to fill the staging buffers.

        A step passes all stages, each of which has another step before and behind it. What is outside the
        layers counts in the last one, which samples.
        """
        resident_s = self.times_of(load).resident_step_s
        delay_s = self.delay_s(resident_s)
        counts = [len(offloaded_layers(each, interval)) for each in self.stages]
        if not any(counts):
            return resident_s + delay_s
        typical_s = self.typical_transfer_s or self.transfer_s
        # The stage that is late may be any, also one that does not wait for transfers.
        hidden_s = min(*counts, NUM_STAGING_BUFFERS) * typical_s
        slowest_s = [self.run_transfer_s(each) if each else 0.0 for each in counts]
        return max(
            resident_s + delay_s,
            self._stages_s(load, interval, slowest_s),
            self._stages_s(load, interval, [typical_s] * len(counts)) + max(0.0, delay_s - hidden_s),
        )

    def _stages_s(self, load: RecordedLoad, interval: int | None, transfers_s: Sequence[float]) -> float:
        """Seconds of a step, one stage after another, where transfers of each take so long."""
        stages = self.stages
        others_s = [0.0] * (len(stages) - 1) + [load.other_s]
        return sum(
            step_time_s(LayerTimes(num_layers, load.compute_s, transfer_s, other_s), interval)
            for num_layers, transfer_s, other_s in zip(stages, transfers_s, others_s, strict=True)
        )

    def run_transfer_s(self, num_transfers: int) -> float:
        """Seconds of each of so many transfers one after another, at least one, which few exceed together."""
        if not self.transfer_runs_s:
            return self.transfer_s
        return self.transfer_runs_s[min(num_transfers.bit_length(), len(self.transfer_runs_s)) - 1]

    def delay_s(self, compute_s: float) -> float:
        """How much longer than typically few stretches of computing of this length take."""
        for index, delay_s in enumerate(self.delays_s):
            if compute_s <= SHORTEST_STRETCH_S * (1 << index):
                return delay_s
        if not self.delays_s:
            return 0.0
        return self.delays_s[-1] * compute_s / (SHORTEST_STRETCH_S * (1 << (len(self.delays_s) - 1)))

    def with_transfers_of(self, least_s: float) -> PerformanceRecord:
        """The same where no transfer takes less."""
        return replace(
            self,
            transfer_s=max(self.transfer_s, least_s),
            typical_transfer_s=max(self.typical_transfer_s or self.transfer_s, least_s),
            transfer_runs_s=tuple(max(each, least_s) for each in self.transfer_runs_s),
        )

    def scaled(self, compute: float, transfers: float) -> PerformanceRecord:
        """The same where computing and transfers take so many times as long."""
        return replace(
            self,
            loads=tuple(
                replace(each, compute_s=compute * each.compute_s, other_s=compute * each.other_s)
                for each in self.loads
            ),
            transfer_s=transfers * self.transfer_s,
            typical_transfer_s=transfers * self.typical_transfer_s,
            transfer_runs_s=tuple(transfers * each for each in self.transfer_runs_s),
        )

    def find(self, phase: Phase, batch_size: int, length: int) -> RecordedLoad | None:
        """The next recorded load that is at least as large; None beyond the record."""
        larger = (
            each
            for each in self.loads
            if each.phase == phase and each.batch_size >= batch_size and each.length >= length
        )
        return min(larger, key=lambda each: (each.batch_size, each.length), default=None)

    def smallest_interval(self, phase: Phase, batch_size: int, length: int, objective_s: float) -> int | None:
        """The smallest interval with which such steps meet an objective, but for few.

        None if only no offloading might do, and beyond the record. Every interval is tried: step times do not
        always fall as the interval grows, because the layers behind the last offloaded one are more or fewer.
        """
        load = self.find(phase, batch_size, length)
        if load is None:
            return None
        return next((each for each in self.intervals if self.meets(load, each, objective_s)), None)

    def meets(self, load: RecordedLoad, interval: int | None, objective_s: float) -> bool:
        """Whether but few steps exceed an objective, or what few do without offloading if that is more."""
        objective_s = grains(objective_s) * OBJECTIVE_GRAIN_S
        if self.times_of(load).resident_step_s > objective_s:
            return False
        return self.step_s(load, interval) <= max(objective_s, self.step_s(load, None))


def grains(objective_s: float) -> int:
    """An objective in whole ``OBJECTIVE_GRAIN_S``, rounded down; one that is a multiple stays."""
    return math.floor(objective_s / OBJECTIVE_GRAIN_S + 1e-6)
