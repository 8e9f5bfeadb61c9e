"""Runs a pool of offline requests to its end on a simulated device, in the order that a pool gives them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from backfill.blending.estimates import OutputEstimator, output_moments
from backfill.blending.pool import OfflinePool
from backfill.blending.requests import OrderName, PoolRequest
from backfill.blending.resources import ResourceModel
from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.counters import ClassCounters
from backfill.core.request import PriorityLevel, RequestId, ServiceClass
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.hardware import HardwareProfile, load_hardware_profile
from backfill.costs.model import CostModel
from backfill.engine.engine import Engine
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.scheduling.policies.baselines import FcfsPolicy
from backfill.scheduling.policy import BatchBuilder, ChunkLimits, R, Snapshot, serve
from backfill.simulation.device import executor_info
from backfill.simulation.processes import RunShare
from experiments.blendserve.feed import PoolFeed
from experiments.blendserve.mix import Mix, MixSpec, draw_mix
from experiments.blendserve.optimum import PoolWork, WorkModel
from experiments.blendserve.overlap import INTERFERENCE, InterferenceName, OverlappedCostModel
from experiments.blendserve.sources import TraceFigures

HARDWARE = "a100-80g-llama-3-8b"
_CONTEXT_TOKENS = 131_072  # of Llama 3.1; the profile is of Llama 3, whose shapes are the same
# A step size in tokens is considered whose cost per token is within this of the cheapest one's.
_STEP_EFFICIENCY = 0.95
_MAX_STEP_TOKENS = 2048
_MAX_SEQS = 1024
_TILE_TOKENS = 128  # of the sizes of BlendServe's batches (section 4)
# Requests that wait in the engine, so that a step never lacks prompts; more would let its queue decide.
_QUEUE_DEPTH = 32
_NUM_BINS = 400
_PROGRESS_STEPS = 64

Floats = NDArray[np.float64]
StepSizes = Literal["density", "fixed"]


@dataclass(frozen=True, slots=True)
class PoolResult:
    """What a run measured.

    Attributes:
        drawn: sharing and density of the pool.
        num_requests: of each source.
        seconds: until the last output ended.
        optimal_s: least time of the same work (sections 2.4 and 5.2): all compute beside all memory traffic.
        optimal_with_longest_s: in no fewer steps than the longest output has tokens.
        num_tokens: of all prompts and outputs.
        num_hit_tokens: prompt tokens found in the prefix cache when a request was first admitted.
        num_sharable_tokens: those that a perfect cache finds.
        counters: of the engine.
        compute_s, memory_s: seconds of either resource per step, alone on the device, averaged over runs of
            equally many steps.
    """

    drawn: TraceFigures
    num_requests: Mapping[str, int]
    seconds: float
    optimal_s: float
    optimal_with_longest_s: float
    num_tokens: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_sharable_tokens: int
    num_steps: int
    counters: ClassCounters
    compute_s: Floats
    memory_s: Floats

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens over all the time, as the paper counts them (section 5.2)."""
        return self.num_tokens / self.seconds

    @property
    def sharing(self) -> float:
        """Share of prompt tokens that were found in the cache."""
        return self.num_hit_tokens / self.num_prompt_tokens

    @property
    def of_optimal_sharing(self) -> float:
        return self.num_hit_tokens / self.num_sharable_tokens if self.num_sharable_tokens else 1.0

    @property
    def num_preemptions(self) -> int:
        return self.counters.num_preemptions

    @property
    def recomputed_share(self) -> float:
        """Of the tokens computed, those that had been computed before a preemption."""
        return self.counters.num_recomputed_tokens / self.counters.num_computed_tokens

    @property
    def of_optimum(self) -> float:
        """Throughput over that of the achievable optimum."""
        return self.optimal_s / self.seconds

    @property
    def of_optimum_with_longest(self) -> float:
        """The same, where the optimum cannot have fewer steps than the longest output has tokens."""
        return self.optimal_with_longest_s / self.seconds


def device(interference: InterferenceName) -> tuple[HardwareProfile, OverlappedCostModel]:
    """Args: interference: a name of ``INTERFERENCE``."""
    hardware = replace(load_hardware_profile(HARDWARE), max_model_len=_CONTEXT_TOKENS)
    return hardware, OverlappedCostModel.of(hardware.costs.cost, INTERFERENCE[interference])


def run_pool(
    spec: MixSpec, order: OrderName, interference: InterferenceName, steps: StepSizes = "density"
) -> PoolResult:
    """Draw the pool, and run it. The same for the same arguments. Raises: ConfigError."""
    mix, requests, outputs = _drawn(spec)
    hardware, cost = device(interference)
    loop = PoolLoop(
        requests,
        outputs,
        order,
        hardware,
        cost,
        max_step_tokens=step_tokens(cost, spec.density, hardware.kv_tokens),
        seed=spec.seed,
        steps=steps,
    )
    loop.run()
    counters = loop.engine.scheduler.counters[ServiceClass.OFFLINE]
    num_prompt_tokens = sum(len(each.prompt_token_ids) for each in requests)
    model = WorkModel.of(cost)
    work = PoolWork(list(mix.parts.values()), model)
    return PoolResult(
        drawn=mix.figures,
        num_requests={name: len(part) for name, part in mix.parts.items()},
        seconds=loop.clock.now_s(),
        optimal_s=model.least_s(work.total),
        optimal_with_longest_s=model.least_of_steps_s(work.total, work.num_rows, max(outputs)),
        num_tokens=num_prompt_tokens + sum(outputs),
        num_prompt_tokens=num_prompt_tokens,
        num_hit_tokens=counters.num_prefix_hit_tokens,
        num_sharable_tokens=sum(int(part.shared_tokens.sum()) for part in mix.parts.values()),
        num_steps=len(loop.compute_s),
        counters=counters,
        compute_s=_binned(loop.compute_s),
        memory_s=_binned(loop.memory_s),
    )


@lru_cache(maxsize=1)
def _drawn(spec: MixSpec) -> tuple[Mix, list[PoolRequest], list[int]]:
    """Kept for the next order on the same pool."""
    mix = draw_mix(spec)
    return mix, *mix.requests()


def resource_model(cost: OverlappedCostModel) -> ResourceModel:
    """What the device takes, as the pool's planner knows it: a token at the cheapest step size."""
    work = WorkModel.of(cost)
    return ResourceModel(work.row_s + work.sampled_row_s, cost.prefill_pair_s, cost.decode_context_s)


def step_tokens(cost: OverlappedCostModel, density: float, kv_tokens: int) -> int:
    """Most tokens of a step, in every order: an efficient size with the compute that the density needs.

    Beside a full KV cache that is ``density`` times the time of reading it. Larger steps would do a prompt's
    compute in few of them, with nothing left to overlap the others.
    """
    needed = density * kv_tokens * cost.decode_context_s / WorkModel.of(cost).row_s
    sizes = cost.efficient_step_sizes(_STEP_EFFICIENCY, _MAX_STEP_TOKENS)
    return next((size for size in sizes if size >= needed), sizes[-1])


def tracking_step_sizes(cost: CostModel, max_step_tokens: int) -> list[int]:
    """Sizes of steps: multiples of 128 below the first efficient size, and the efficient ones."""
    efficient = cost.efficient_step_sizes(_STEP_EFFICIENCY, max_step_tokens)
    return [*range(_TILE_TOKENS, efficient[0], _TILE_TOKENS), *efficient]


class SizedSteps(FcfsPolicy):
    """``fcfs`` with steps of a wanted size.

    Attributes:
        step_tokens: prompts fill the step up to this. It may be set before each step.
    """

    def __init__(self, step_tokens: int) -> None:
        self.step_tokens = step_tokens

    def build(self, view: Snapshot[R], builder: BatchBuilder[R]) -> None:
        serve(view, builder, frozenset(PriorityLevel), ChunkLimits(step_sizes=(self.step_tokens,)))


class PoolLoop:
    """Keeps an engine supplied from a pool until both are empty; see ``PoolFeed``.

    Args:
        requests: whose ids are the indices of ``outputs``.
        outputs: true output lengths.
        cost: of the device; the pool plans with it.
        steps: how many tokens a step has, at most ``max_step_tokens``.
        estimate: of output lengths that are not known.
        waiting: those of the requests that the pool has from the start; all where none are given.

    Attributes:
        compute_s, memory_s: seconds of either resource in each step.
    """

    def __init__(
        self,
        requests: Sequence[PoolRequest],
        outputs: Sequence[int],
        order: OrderName,
        hardware: HardwareProfile,
        cost: OverlappedCostModel,
        *,
        max_step_tokens: int,
        seed: int,
        steps: StepSizes = "density",
        estimate: OutputEstimator = output_moments,
        waiting: Sequence[PoolRequest] | None = None,
    ) -> None:
        self._pool = OfflinePool(
            order, resource_model(cost), kv_tokens=hardware.kv_tokens, seed=seed, estimate=estimate
        )
        self._pool.add(requests if waiting is None else waiting)
        self._cost = cost
        self.clock = VirtualClock()
        info = executor_info(hardware, 0)
        self._executor = SimulatedExecutor(info, DeviceBehaviour(cost), self.clock)
        config = SchedulerConfig(
            policy="fcfs",
            max_num_seqs=min(_MAX_SEQS, max_step_tokens),
            max_num_batched_tokens=max_step_tokens,
            max_prefill_chunk_tokens=max_step_tokens,
        )
        self._policy = SizedSteps(max_step_tokens)
        self.engine = Engine(config, self._executor, self.clock, policy=lambda *_: self._policy)
        self._token_s = resource_model(cost).token_s
        self._step_sizes = (
            tracking_step_sizes(cost, max_step_tokens) if steps == "density" else [max_step_tokens]
        )
        self._feed = PoolFeed(
            self.engine,
            self.clock,
            self._pool,
            requests,
            outputs,
            queue_depth=_QUEUE_DEPTH,
        )
        self.compute_s = array("d")
        self.memory_s = array("d")
        self._num_tokens = sum(len(each.prompt_token_ids) for each in requests) + sum(outputs)
        self._outputs = outputs
        self._unended = sorted(range(len(outputs)), key=outputs.__getitem__)  # the longest one is the last
        self._has_ended = bytearray(len(outputs))
        self._share = RunShare()

    def run(self) -> None:
        self._feed.top_up()
        while self.engine.has_work:
            self.step()
        assert not self._pool.num_waiting, "the engine is idle and requests wait"
        self._share.note(1.0)

    def step(self) -> None:
        began_s = self.clock.now_s()
        outputs = self.engine.step()
        if self.clock.now_s() > began_s:
            compute_s, memory_s = self._cost.resources_s(self._executor.load)
            self.compute_s.append(compute_s)
            self.memory_s.append(memory_s)
            self._feed.on_step()
            self._set_step_size(memory_s)
            if len(self.compute_s) % _PROGRESS_STEPS == 0:
                self._note_share()
        for output in outputs:
            assert output.message is None, f"{output.request_id}: {output.message}"
            if output.finish_reason is not None:
                self._finish(output.request_id)
        self._feed.top_up()

    def _note_share(self) -> None:
        """Of all tokens, or of the steps if these are fewer: the longest output may outlast the others."""
        counters = self.engine.scheduler.counters[ServiceClass.OFFLINE]
        num_new = counters.num_computed_tokens - counters.num_recomputed_tokens
        num_steps = len(self.compute_s)
        self._share.note(
            min(
                (num_new + counters.num_prefix_hit_tokens) / self._num_tokens,
                num_steps / (num_steps + self._num_steps_of_longest()),
            )
        )

    def _num_steps_of_longest(self) -> int:
        """Tokens that the longest output not yet ended lacks."""
        while self._unended and self._has_ended[self._unended[-1]]:
            self._unended.pop()
        if not self._unended:
            return 0
        number = self._unended[-1]
        request = self._feed.in_flight.get(RequestId(str(number)))
        return self._outputs[number] - (0 if request is None else len(request.output_token_ids))

    def _set_step_size(self, memory_s: float) -> None:
        """As many tokens beside this memory traffic as what has not ended has, or a little more.

        Compute that comes too early only overlaps better later; what is left in the end overlaps nothing.
        """
        wanted = self._pool.density * memory_s / self._token_s
        sizes = self._step_sizes
        self._policy.step_tokens = next((size for size in sizes if size >= wanted), sizes[-1])

    def _finish(self, request_id: RequestId) -> None:
        self._feed.finish(request_id)
        self._has_ended[int(request_id)] = True


def _binned(values: array[float]) -> Floats:
    """Means over at most ``_NUM_BINS`` runs of consecutive steps."""
    return np.array([part.mean() for part in np.array_split(np.array(values), _NUM_BINS) if len(part)])
