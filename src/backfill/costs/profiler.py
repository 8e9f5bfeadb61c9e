"""Times steps of an executor and fits a cost model to them."""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from backfill.core.block import BlockRef, pack_block_ref
from backfill.core.clock import Clock
from backfill.core.errors import ConfigError
from backfill.core.measured_on import MeasuredOn
from backfill.core.plan import AdmittedRequest, BlockCopies, Compute, ScheduledSlice, WaitForCopies
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.costs.copy_profiler import EMPTY_PLAN, CopyProfiler, RunsPlans
from backfill.costs.fit import (
    TimedStep,
    cross_validated_error,
    fit_beside,
    fit_cost_model,
    fit_error,
    knots_within,
    predicted_s,
)
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.costs.profile import CopySpeed, CostProfile, Quality

Slice = tuple[int, int, bool]  # start, number of tokens, samples
Shape = tuple[Slice, ...]

_PROMPT_TOKEN = 5
_SEED = 0
# Decodes: on most devices they are bound by the memory that copies read too.
_BESIDE_COPIES: tuple[Shape, ...] = tuple(((256, 1, True),) * batch for batch in (32, 8, 1))
_INTERFERENCE_ROUNDS = 9
_FEWEST_INTERFERENCE_ROUNDS = 5  # at the start of an engine, where they take no more than this time
_INTERFERENCE_BUDGET_S = 0.3
# Steps this long take most of a profile's time, and other processes change their times by a smaller share.
_LONG_S = 0.25
_NUM_ALWAYS_TIMED = 2  # of a grid with a budget: the first steps tell what a token costs


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of a step. Shapes beyond them are not timed."""

    kv_tokens: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_host_blocks: int = 0
    block_bytes: int = 1

    def num_blocks(self, shape: Shape) -> int:
        """Blocks that a step of this shape uses."""
        return sum(-(-(start + count) // self.block_size) for start, count, _ in shape)

    def holds(self, shape: Shape) -> bool:
        return (
            len(shape) <= self.max_num_seqs
            and sum(count for _, count, _ in shape) <= self.max_num_batched_tokens
            and self.num_blocks(shape) * self.block_size <= self.kv_tokens
            # One token more than computed: a chunk that does not sample leaves one.
            and all(start + count < self.max_model_len for start, count, _ in shape)
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """Which steps are timed.

    Attributes:
        chunks: tokens of prefills, alone and after each of ``contexts``.
        batches: decoding requests, after each of ``contexts``.
        listed: further steps.
        rounds: most runs of each step.
        budget_s: seconds of all steps together. With a budget, steps run in this order while it lasts, and
            the least time of each counts. Without, all run in every round, and the median counts.
        num_held_out: random mixes that are timed but not fitted to; with 0 the error is cross-validated.
        row_knots, sampled_knots: where the fitted functions may bend, up to the largest step timed.
    """

    quality: Quality
    chunks: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    rounds: int
    num_held_out: int
    row_knots: tuple[int, ...]
    sampled_knots: tuple[int, ...]
    listed: tuple[Shape, ...] = ()
    budget_s: float | None = None

    def shapes(self, capacity: Capacity) -> list[Shape]:
        """Prefills, parts of prompts, several prompts, decodes, and decodes with a prefill."""
        found: list[Shape] = []
        for chunk in self.chunks:
            found += [((0, chunk, True),), ((0, chunk, False),)]
            found += [((context, chunk, False),) for context in self.contexts if chunk > 1]
            found += [((0, chunk // 4, True),) * 4] if chunk >= 8 else []
        for batch, context in itertools.product(self.batches, self.contexts):
            found.append(((context, 1, True),) * batch)
        for batch, chunk in itertools.product(self.batches[1::2], self.chunks[3::3]):
            context = self.contexts[(batch + chunk) % len(self.contexts)]
            found.append((*(((context, 1, True),) * batch), (0, chunk, False)))
        found += self.listed
        return [shape for shape in dict.fromkeys(found) if capacity.holds(shape)]

    def num_blocks(self, capacity: Capacity) -> int:
        """Blocks of the KV pool that the largest step uses."""
        shapes = [*self.shapes(capacity), *self.held_out(capacity)]
        return max(map(capacity.num_blocks, shapes), default=0)

    def held_out(self, capacity: Capacity) -> list[Shape]:
        """Random mixes as in a server: some decodes, often a chunk of a prompt."""
        rng = random.Random(_SEED)
        found: list[Shape] = []
        for _ in range(100 * self.num_held_out):
            if len(found) == self.num_held_out:
                break
            num_decodes = rng.choice((0, 1, 3, 6, 12, 24, 40, 60))
            shape = [(rng.randint(16, 1500), 1, True) for _ in range(num_decodes)]
            if num_decodes == 0 or rng.random() < 0.6:
                start = rng.choice((0, 0, rng.randint(16, 1500)))
                shape.append((start, round(2 ** rng.uniform(3, 10)), rng.random() < 0.5))
            if capacity.holds(tuple(shape)):
                found.append(tuple(shape))
        return found


FULL = Grid(
    quality="full",
    chunks=(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192),
    contexts=(16, 256, 1024, 3072),
    batches=(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    rounds=3,
    num_held_out=40,
    row_knots=(1, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192),
    sampled_knots=(1, 8, 16, 32, 64, 128, 256),
)
# The start of an engine waits for these steps. The most informative come first; each separates one term of
# the model from the others. A large chunk, and a small and a larger one after a long context, separate
# attention's time per pair from its time per cached token. Extrapolated from short prompts alone, predictions
# for long ones were off by more than a factor of two, either way.
QUICK = Grid(
    quality="coarse",
    chunks=(),
    contexts=(),
    batches=(),
    listed=(
        ((0, 1, True),),
        ((0, 16, True),),
        ((16, 1, True),),
        ((0, 128, False),),
        ((16, 1, True),) * 32,
        ((256, 1, True),) * 8,
        ((0, 512, False),),
        ((3072, 256, False),),
        ((3072, 16, False),),
        ((3072, 1, True),),
        ((0, 1, False),),
        ((0, 16, False),),
        ((100, 1, True),) * 32,
        ((0, 32, True),) * 4,
        ((16, 1, True),) * 8,
        (*((256, 1, True),) * 8, (0, 64, False)),
        ((256, 1, True),),
        ((1024, 128, False),),
    ),
    rounds=3,
    budget_s=0.8,
    num_held_out=0,
    row_knots=(1, 16, 128, 512),
    sampled_knots=(1, 32),
)


def profile_executor(
    executor: RunsPlans,
    clock: Clock,
    capacity: Capacity,
    grid: Grid,
    *,
    key: MeasuredOn,
    num_layers: int,
    on_step: Callable[[int, int], None] = lambda _done, _total: None,
    expected: CostModel | None = None,
) -> CostProfile:
    """Run the grid's steps and fit the cost model.

    Args:
        on_step: gets the steps run or left out, and all steps.
        expected: what is expected of such a model, up to a factor: where the few steps of a busy machine say
            nothing, it decides, and not their noise.
    Raises: ConfigError if not even a step of one token is within the capacity.
    """
    fitted_on, held_out = grid.shapes(capacity), grid.held_out(capacity)
    if not fitted_on:
        raise ConfigError(
            f"There is no step to time within a context of {capacity.max_model_len} tokens and a KV pool of "
            f"{capacity.kv_tokens}; raise `max_model_len` or `kv_gib`."
        )
    timer = StepTimer(executor, clock, capacity, on_step)
    if grid.budget_s is None:
        times = timer.time_all([*fitted_on, *held_out], grid.rounds)
        counted = f"medians of up to {grid.rounds}"
    else:
        times = timer.time_within(fitted_on, grid.rounds, grid.budget_s)
        counted = f"the least of up to {grid.rounds}"
    steps, unseen = (
        [TimedStep(StepLoad.of(shape), times[shape]) for shape in shapes if shape in times]
        for shapes in (fitted_on, held_out)
    )
    row_knots = knots_within(grid.row_knots, max(step.load.num_tokens for step in steps))
    sampled_knots = knots_within(grid.sampled_knots, max(step.load.num_sampled for step in steps))

    def fit(steps: Sequence[TimedStep]) -> CostModel:
        if expected is None:
            return fit_cost_model(steps, row_knots, sampled_knots)
        ratio = statistics.median(step.seconds / predicted_s(expected, step.load) for step in steps)
        return fit_beside(expected.slowed(ratio), steps, map(StepLoad.of, FULL.shapes(capacity)))

    cost = fit(steps)
    error = fit_error(cost, unseen) if unseen else cross_validated_error(steps, fit)
    slices = [each for shape in fitted_on if shape in times for each in shape]
    return CostProfile(
        key=key,
        quality=grid.quality,
        num_layers=num_layers,
        cost=cost,
        error=error,
        known_tokens=max(start + count for start, count, _ in slices),
        known_chunk_tokens=max(count for _, count, _ in slices),
        copies=_time_copies(timer, cost, with_budget=grid.budget_s is not None),
        provenance=f"{len(steps)} steps timed here, {counted}; {len(unseen)} others held out.",
    )


@dataclass(slots=True)
class StepTimer:
    """Runs steps on an executor and measures their times."""

    executor: RunsPlans
    clock: Clock
    capacity: Capacity
    on_step: Callable[[int, int], None] = lambda _done, _total: None
    num_requests: int = 0

    def time_all(self, shapes: Sequence[Shape], rounds: int) -> dict[Shape, float]:
        """The median seconds of each step.

        The order is shuffled in each round: a drift of the machine's speed then spreads over all steps. The
        first round warms up and does not count. A step that then takes ``_LONG_S`` is not run again.
        """
        rng = random.Random(_SEED)
        samples: dict[Shape, list[float]] = {shape: [] for shape in shapes}
        total = (rounds + 1) * len(shapes)
        for each_round in range(rounds + 1):
            order = list(shapes)
            rng.shuffle(order)
            for index, shape in enumerate(order):
                if each_round < 2 or samples[shape][-1] < _LONG_S:
                    samples[shape].append(self.time(shape))
                self.on_step(each_round * len(shapes) + index + 1, total)
        return {shape: statistics.median(values[1:]) for shape, values in samples.items()}

    def time_within(
        self,
        shapes: Sequence[Shape],
        rounds: int,
        budget_s: float,
        is_enough: Callable[[Mapping[Shape, float]], bool] = lambda least: False,
    ) -> dict[Shape, float]:
        """The least seconds of each step within the budget, in up to ``rounds`` rounds or until it is enough.

        After the first two, a step is left out if its predicted time exceeds the budget left: its own least
        time, or before its first run the least time per token so far. With few runs, the least time is the
        one that other processes disturbed least.
        """
        least: dict[Shape, float] = {}
        token_s = math.inf
        total = rounds * len(shapes)
        for each_round in range(rounds):
            for index, shape in enumerate(shapes):
                num_tokens = sum(count for _, count, _ in shape)
                if len(least) < _NUM_ALWAYS_TIMED or least.get(shape, num_tokens * token_s) <= budget_s:
                    seconds = self.time(shape)
                    budget_s -= seconds
                    token_s = min(token_s, seconds / num_tokens)
                    least[shape] = min(seconds, least.get(shape, seconds))
                    if is_enough(least):
                        return least
                self.on_step(each_round * len(shapes) + index + 1, total)
        return least

    def time(self, shape: Shape) -> float:
        """Seconds of one step."""
        return self.run(shape, EMPTY_PLAN.copies)[0]

    def run(self, shape: Shape, copies: BlockCopies) -> tuple[float, int]:
        """Seconds of one step that begins the copies, and how many of them completed in it.

        The other copies are waited for, and its requests admitted and released, in steps that are not timed.
        """
        first, self.num_requests = self.num_requests, self.num_requests + len(shape)
        request_ids = [RequestId(f"profile-{number}") for number in range(first, self.num_requests)]
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        admitted = tuple(
            AdmittedRequest(request_id, (_PROMPT_TOKEN,) * (start + count + (not samples)), sampling)
            for request_id, (start, count, samples) in zip(request_ids, shape, strict=True)
        )
        self.executor.run(replace(EMPTY_PLAN, admitted=admitted))
        blocks = _tables(shape, self.capacity.block_size)
        slices = tuple(
            ScheduledSlice(request_id, start, count, table, samples)
            for request_id, (start, count, samples), table in zip(request_ids, shape, blocks, strict=True)
        )
        plan = replace(EMPTY_PLAN, work=Compute(slices), copies=copies)
        began_s = self.clock.now_s()
        outcome = self.executor.run(plan)
        seconds = self.clock.now_s() - began_s
        num_completed = len(outcome.completed_copies)
        outcome = self.executor.run(replace(EMPTY_PLAN, released=tuple(request_ids)))
        num_left = len(copies.checkpoint) + len(copies.restore) - num_completed
        while num_left := num_left - len(outcome.completed_copies):
            outcome = self.executor.run(replace(EMPTY_PLAN, work=WaitForCopies()))
        return seconds, num_completed


def _time_copies(timer: StepTimer, cost: CostModel, *, with_budget: bool) -> CopySpeed | None:
    """Speed of copies, and how they slow a step of decodes; None without a pool in host memory."""
    capacity = timer.capacity
    num_blocks = min(capacity.num_host_blocks, capacity.kv_tokens // capacity.block_size)
    profiler = CopyProfiler(timer.executor, timer.clock, num_blocks, capacity.block_bytes)
    speed = profiler.time_alone()
    if speed is None:
        return None
    rounds = _FEWEST_INTERFERENCE_ROUNDS if with_budget else _INTERFERENCE_ROUNDS
    limit_s = _INTERFERENCE_BUDGET_S / (2 * rounds) if with_budget else math.inf
    for shape in filter(capacity.holds, _BESIDE_COPIES):
        step_s = cost.step_time_s(StepLoad.of(shape))
        if step_s <= limit_s:
            run_step = functools.partial(timer.run, shape)
            return replace(speed, interference=profiler.time_interference(speed, run_step, step_s, rounds))
    return speed


def _tables(shape: Shape, block_size: int) -> list[tuple[BlockRef, ...]]:
    """A block table for each slice; no block is in two of them."""
    ends = list(
        itertools.accumulate((-(-(start + count) // block_size) for start, count, _ in shape), initial=0)
    )
    return [tuple(map(pack_block_ref, range(*table))) for table in itertools.pairwise(ends)]
