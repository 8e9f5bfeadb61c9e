from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from backfill.core.block import BlockCopy, block_index
from backfill.core.clock import VirtualClock
from backfill.core.errors import ConfigError
from backfill.core.measured_on import MeasuredOn
from backfill.core.plan import BlockCopies, CopyDirections, SampledToken, StepOutcome, StepPlan, WaitForCopies
from backfill.core.request import RequestId
from backfill.costs.copy_profiler import CopyProfiler
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.profile import CopySpeed, CostProfile
from backfill.costs.profiler import FULL, QUICK, Capacity, Grid, profile_executor

# A small model on a CPU; its knots are not those of the grids.
TRUTH = CostModel(
    rows_s=PiecewiseLinear((1.0, 12.0, 64.0, 2048.0, 8192.0), (0.020, 0.022, 0.050, 1.45, 5.8)),
    sampled_s=PiecewiseLinear((0.0, 1.0, 16.0, 256.0), (0.0, 0.004, 0.006, 0.050)),
    request_s=2e-5,
    prefill_pair_s=1.5e-7,
    prefill_context_s=4e-7,
    decode_context_s=9e-7,
)
CAPACITY = Capacity(
    kv_tokens=50_000, block_size=16, max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=2048
)
KEY = MeasuredOn("model", "device", "dtype")
SMALL_GRID = Grid(
    quality="full",
    chunks=(1, 16, 128),
    contexts=(16, 256),
    batches=(1, 8, 32),
    rounds=3,
    num_held_out=4,
    row_knots=(1, 16, 128),
    sampled_knots=(1, 32),
)
# A coarse measurement with time for all its steps.
PATIENT = replace(QUICK, budget_s=60.0)


class TimedExecutor:
    """Advances the clock by a known model's time for each plan, and checks what executors rely on."""

    def __init__(self, capacity: Capacity, noise: float = 0.0, seed: int = 1) -> None:
        self.capacity = capacity
        self.clock = VirtualClock()
        self.num_tokens: dict[RequestId, int] = {}
        self.loads: list[StepLoad] = []
        self._seen: set[RequestId] = set()
        self._noise = noise
        self._rng = random.Random(seed)

    def run(self, plan: StepPlan) -> StepOutcome:
        for request_id in plan.released:
            del self.num_tokens[request_id]
        for admitted in plan.admitted:
            assert admitted.request_id not in self._seen, "a request's id is used again"
            self._seen.add(admitted.request_id)
            self.num_tokens[admitted.request_id] = len(admitted.prompt_token_ids)
        if plan.slices:
            self._check(plan)
            self.loads.append(StepLoad.of_slices(plan.slices))
        # Admission and release must not be timed with the step.
        self.clock.advance(0.5 * len(plan.admitted) + 0.25 * len(plan.released))
        factor = 1 + self._rng.gauss(0, self._noise) if self._noise else 1.0
        self.clock.advance(TRUTH.step_time_s(StepLoad.of_slices(plan.slices)) * factor)
        return StepOutcome(
            tuple(SampledToken(scheduled.request_id, 7) for scheduled in plan.slices if scheduled.samples)
        )

    def _check(self, plan: StepPlan) -> None:
        capacity = self.capacity
        assert len(plan.slices) <= capacity.max_num_seqs
        assert plan.num_tokens <= capacity.max_num_batched_tokens
        assert {scheduled.request_id for scheduled in plan.slices} == self.num_tokens.keys()
        blocks = [block_index(ref) for scheduled in plan.slices for ref in scheduled.blocks]
        assert len(blocks) == len(set(blocks)), "a block is in two slices' tables"
        assert min(blocks) >= 0 and (max(blocks) + 1) * capacity.block_size <= capacity.kv_tokens
        assert not any(ref & 1 for scheduled in plan.slices for ref in scheduled.blocks)
        for scheduled in plan.slices:
            end = scheduled.start + scheduled.num_tokens
            assert scheduled.num_tokens > 0
            assert end <= len(scheduled.blocks) * capacity.block_size
            assert end <= self.num_tokens[scheduled.request_id] <= capacity.max_model_len
            assert scheduled.samples == (end == self.num_tokens[scheduled.request_id])


def profiled(
    capacity: Capacity = CAPACITY, grid: Grid = FULL, noise: float = 0.0
) -> tuple[CostProfile, TimedExecutor]:
    executor = TimedExecutor(capacity, noise)
    profile = profile_executor(executor, executor.clock, capacity, grid, key=KEY, num_layers=30)
    assert executor.num_tokens == {}, "requests were left in the executor"
    return profile, executor


def random_mixes(capacity: Capacity, count: int = 200) -> list[StepLoad]:
    """Mixes outside the grid: other numbers of decodes, other contexts, with and without chunks."""
    rng = random.Random(7)
    found: list[StepLoad] = []
    while len(found) < count:
        shape = [(rng.randint(1, 2500), 1, True) for _ in range(rng.choice((0, 0, 1, 2, 5, 20, 50, 90)))]
        shape += [
            (rng.choice((0, rng.randint(1, 2000))), rng.randint(1, 1200), rng.random() < 0.5)
            for _ in range(rng.choice((0, 1, 2)))
        ]
        if shape and capacity.holds(tuple(shape)):
            found.append(StepLoad.of(shape))
    return found


def relative_errors(profile: CostProfile, loads: list[StepLoad]) -> list[float]:
    return sorted(abs(profile.cost.step_time_s(load) / TRUTH.step_time_s(load) - 1) for load in loads)


def test_the_times_of_random_mixes_are_recovered() -> None:
    profile, _ = profiled()
    errors = relative_errors(profile, random_mixes(CAPACITY))
    assert errors[-1] < 0.03
    assert (profile.key, profile.num_layers) == (KEY, 30)
    assert profile.error.num_steps == FULL.num_held_out
    assert profile.error.p95 < 0.03
    assert f"medians of up to {FULL.rounds}; {FULL.num_held_out} others held out" in profile.provenance


def test_short_steps_are_timed_in_every_round_and_held_out_steps_are_not_fitted() -> None:
    grid = replace(SMALL_GRID, chunks=(1, 16, 128, 512))
    _, executor = profiled(grid=grid)
    shapes = [*grid.shapes(CAPACITY), *grid.held_out(CAPACITY)]
    num_shapes = len(shapes)
    runs = Counter(map(repr, executor.loads))
    for load in map(StepLoad.of, shapes):
        num_timed = 1 if TRUTH.step_time_s(load) >= 0.25 else grid.rounds
        assert runs[repr(load)] == 1 + num_timed, "the first run only warms up"
    assert set(runs.values()) == {2, 4}
    assert executor.loads[:num_shapes] != executor.loads[num_shapes : 2 * num_shapes], "each is shuffled"
    assert not set(grid.shapes(CAPACITY)) & set(grid.held_out(CAPACITY))


def test_the_first_round_only_warms_up() -> None:
    class ColdExecutor(TimedExecutor):
        def run(self, plan: StepPlan) -> StepOutcome:
            if plan.slices and len(self.loads) < num_shapes:
                self.clock.advance(10.0)  # as of a long step
            return super().run(plan)

    grid = replace(SMALL_GRID, rounds=1)  # a median of several would hide it
    num_shapes = len(grid.shapes(CAPACITY)) + len(grid.held_out(CAPACITY))
    executor = ColdExecutor(CAPACITY)
    profile = profile_executor(executor, executor.clock, CAPACITY, grid, key=KEY, num_layers=1)
    warm, _ = profiled(grid=grid)
    for load in executor.loads:
        assert profile.cost.step_time_s(load) == pytest.approx(warm.cost.step_time_s(load), rel=1e-6)


@pytest.mark.parametrize("grid", [SMALL_GRID, PATIENT, QUICK], ids=["rounds", "patient", "quick"])
def test_progress_reaches_its_total(grid: Grid) -> None:
    seen: list[tuple[int, int]] = []
    executor = TimedExecutor(CAPACITY)
    profile_executor(
        executor,
        executor.clock,
        CAPACITY,
        grid,
        key=KEY,
        num_layers=1,
        on_step=lambda *each: seen.append(each),
    )
    rounds = grid.rounds + (grid.budget_s is None)
    total = rounds * len([*grid.shapes(CAPACITY), *grid.held_out(CAPACITY)])
    assert seen == [(done, total) for done in range(1, total + 1)], "steps that are left out count too"


def test_a_coarse_profile_is_right_within_a_quarter_for_short_and_long_prompts() -> None:
    profile, executor = profiled(grid=PATIENT)
    assert len(executor.loads) == 3 * len(QUICK.listed)
    prompts = [StepLoad.of([(0, count, True)]) for count in (1, 10, 40, 100, 200, 256, 512, 2048)]
    chunks = [StepLoad.of([(start, 2048, False)]) for start in (2048, 4096, 6144)]
    decodes = [StepLoad.of([(300, 1, True)] * count) for count in (1, 4, 16, 32)]
    errors = relative_errors(profile, [*prompts, *chunks, *decodes])
    assert errors[-1] < 0.25
    assert errors[len(errors) // 2] < 0.08
    whole = TRUTH.prefill_time_s(7900, 2048)
    assert profile.cost.prefill_time_s(7900, 2048) == pytest.approx(whole, rel=0.15)
    assert profile.quality == "coarse"
    assert (profile.known_tokens, profile.known_chunk_tokens) == (3072 + 256, 512)
    assert profile.error.num_steps == len(QUICK.listed), "each step is held out once"
    assert 0.0 < profile.error.median < 0.1


def test_noise_does_not_confuse_the_terms_of_pairs_and_cached_tokens() -> None:
    """With each step timed once, 8 % off, a prompt four times as long as any step is predicted well."""
    whole = TRUTH.prefill_time_s(7900, 2048)
    for seed in range(12):
        executor = TimedExecutor(CAPACITY, noise=0.08, seed=seed)
        grid = replace(PATIENT, rounds=1)
        profile = profile_executor(executor, executor.clock, CAPACITY, grid, key=KEY, num_layers=1)
        assert profile.cost.prefill_time_s(7900, 2048) == pytest.approx(whole, rel=0.2)


def test_a_coarse_measurement_keeps_to_its_budget() -> None:
    for budget_s in (0.2, 0.5, 1.0, 2.0):
        _, executor = profiled(grid=replace(QUICK, budget_s=budget_s))
        assert sum(map(TRUTH.step_time_s, executor.loads)) < budget_s + 0.1


def test_one_bad_moment_does_not_spoil_a_coarse_profile() -> None:
    class DisturbedExecutor(TimedExecutor):
        def run(self, plan: StepPlan) -> StepOutcome:
            if plan.slices and len(QUICK.listed) < len(self.loads) < 1.5 * len(QUICK.listed):
                self.clock.advance(0.5)
            return super().run(plan)

    executor = DisturbedExecutor(CAPACITY)
    profile = profile_executor(executor, executor.clock, CAPACITY, PATIENT, key=KEY, num_layers=30)
    undisturbed, _ = profiled(grid=PATIENT)
    for load in executor.loads:
        predicted_s = undisturbed.cost.step_time_s(load)
        assert profile.cost.step_time_s(load) == pytest.approx(predicted_s, rel=1e-6)


SMALL = [
    {"kv_tokens": 1024},
    {"kv_tokens": 64},
    {"kv_tokens": 16},
    {"max_model_len": 2048},
    {"max_model_len": 256},
    {"max_model_len": 32},
    {"max_model_len": 17},
    {"max_model_len": 2},
    {"max_num_seqs": 1},
    {"max_num_seqs": 3},
    {"max_num_seqs": 8, "max_num_batched_tokens": 8},
    {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 64, "kv_tokens": 64},
    {"block_size": 64, "kv_tokens": 640},
]


@pytest.mark.parametrize("grid", [PATIENT, FULL], ids=["coarse", "full"])
@pytest.mark.parametrize("limits", SMALL, ids=str)
def test_small_limits_are_kept_and_the_rest_still_fits(limits: dict[str, int], grid: Grid) -> None:
    capacity = replace(CAPACITY, **limits)
    profile, executor = profiled(capacity, grid)  # the executor checks each plan
    assert relative_errors(profile, executor.loads)[-1] < (0.25 if grid is PATIENT else 0.05)
    # Every load within the limits has a positive predicted time.
    for shape in (((0, 1, True),), ((0, 1, False),), ((1, 1, True),)):
        load = StepLoad.of(shape)
        if capacity.holds(shape):
            assert profile.cost.step_time_s(load) == pytest.approx(TRUTH.step_time_s(load), rel=0.15)


@pytest.mark.parametrize(
    "limits", [{"max_model_len": 1}, {"kv_tokens": 15}, {"max_num_seqs": 0}], ids=["context", "pool", "seqs"]
)
def test_a_capacity_without_any_step_is_refused(limits: dict[str, int]) -> None:
    executor = TimedExecutor(CAPACITY)
    with pytest.raises(ConfigError, match="no step to time"):
        profile_executor(executor, executor.clock, replace(CAPACITY, **limits), QUICK, key=KEY, num_layers=1)


def test_capacity_counts_whole_blocks_and_leaves_one_token() -> None:
    capacity = Capacity(
        kv_tokens=48, block_size=16, max_model_len=40, max_num_seqs=3, max_num_batched_tokens=39
    )
    assert capacity.holds(((0, 39, False),))
    assert not capacity.holds(((0, 40, False),)), "one token more would not fit the context"
    assert capacity.holds(((0, 17, True), (0, 16, True)))
    assert not capacity.holds(((0, 17, True), (0, 17, True))), "they take two blocks each"
    assert capacity.holds(((0, 1, True),) * 3)
    assert not capacity.holds(((0, 1, True),) * 4)
    assert not replace(capacity, kv_tokens=480).holds(((0, 20, True),) * 2), "40 tokens in a step of 39"


BLOCK_COPY_S = 0.0005
WITH_HOST_POOL = replace(CAPACITY, num_host_blocks=1000, block_bytes=1000)


class CopyingExecutor(TimedExecutor):
    """Copies beside the steps, ``BLOCK_COPY_S`` each. Copying for a second makes a step longer by a constant.

    Args:
        interference: that constant.
    """

    def __init__(self, interference: float) -> None:
        super().__init__(WITH_HOST_POOL)
        self._interference = interference
        self._in_flight: list[BlockCopy] = []

    def run(self, plan: StepPlan) -> StepOutcome:
        copies = (*plan.copies.checkpoint, *plan.copies.restore)
        if plan.copies.blocking is not CopyDirections.NONE:
            self.clock.advance(BLOCK_COPY_S * len(copies))
            return super().run(plan)
        self._in_flight += copies
        num_completed = len(self._in_flight)
        if isinstance(plan.work, WaitForCopies):
            assert self._in_flight, "there is nothing to wait for"
            num_completed = 1  # what is left comes bit by bit
        elif plan.slices and self._in_flight:
            step_s = TRUTH.step_time_s(StepLoad.of_slices(plan.slices))
            num_completed = min(num_completed, int(step_s / (1.0 - self._interference) / BLOCK_COPY_S))
            self.clock.advance(num_completed * BLOCK_COPY_S * self._interference)
        elif self._in_flight:
            num_completed = 1
        completed = tuple(self._in_flight[:num_completed])
        del self._in_flight[:num_completed]
        return replace(super().run(plan), completed_copies=completed)


@pytest.mark.parametrize("grid", [SMALL_GRID, QUICK], ids=["full", "coarse"])
@pytest.mark.parametrize("interference", [0.0, 0.05, 0.4])
def test_the_interference_of_copies_with_a_step_is_measured(interference: float, grid: Grid) -> None:
    executor = CopyingExecutor(interference)
    profile = profile_executor(executor, executor.clock, WITH_HOST_POOL, grid, key=KEY, num_layers=1)
    assert profile.copies is not None
    assert profile.copies.to_host_bytes_per_s == pytest.approx(1000 / BLOCK_COPY_S)
    assert profile.copy_interference == pytest.approx(interference, abs=0.001)
    assert profile.block_copy_s(1000) == pytest.approx(BLOCK_COPY_S)
    assert not executor._in_flight and executor.num_tokens == {}


def test_a_step_that_seems_faster_beside_copies_has_no_interference() -> None:
    executor = CopyingExecutor(0.0)
    profiler = CopyProfiler(executor, executor.clock, num_blocks=100, block_bytes=1000)
    speed = CopySpeed(1000 / BLOCK_COPY_S, 2000 / BLOCK_COPY_S)

    def measure(beside_s: float, num_completed: int) -> float:
        def run_step(copies: BlockCopies) -> tuple[float, int]:
            return (beside_s, num_completed) if copies.checkpoint else (0.1, 0)

        return profiler.time_interference(speed, run_step, step_s=0.1, rounds=3)

    assert measure(0.11, 100) == pytest.approx(0.01 / (100 * BLOCK_COPY_S))
    assert measure(0.09, 100) == 0.0
    assert measure(5.0, 100) == 2.0, "a busy machine, not the copies"
    assert measure(0.11, 0) == 0.0, "no copy completed beside the step"


def test_the_start_of_an_engine_does_not_wait_for_the_interference_of_a_slow_device() -> None:
    slow = replace(TRUTH, request_s=0.1)
    executor = CopyingExecutor(0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.TRUTH", slow)
        profile = profile_executor(executor, executor.clock, WITH_HOST_POOL, QUICK, key=KEY, num_layers=1)
    assert profile.copies is not None
    assert profile.copy_interference == 0.0, "it is not measured"
