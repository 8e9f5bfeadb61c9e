"""Times steps of a real executor and fits the cost model to them."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from backfill.core.block import BlockCopy, BlockRef, pack_block_ref
from backfill.core.clock import Clock
from backfill.core.errors import ConfigError
from backfill.core.plan import AdmittedRequest, CopyKinds, ScheduledSlice, StepOutcome, StepPlan
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.costs.fit import TimedStep, fit_cost_model, fit_error, num_terms
from backfill.costs.load import StepLoad
from backfill.costs.profile import CopySpeed, CostProfile, ProfileKey

Slice = tuple[int, int, bool]  # start, number of tokens, samples
Shape = tuple[Slice, ...]

_PROMPT_TOKEN = 5
_SEED = 0
_COPIED_BLOCKS = 64
_COPY_ROUNDS = 6
_SHORTEST_S = 1e-9


class RunsPlans(Protocol):
    """The part of an executor that the profiler needs."""

    def run(self, plan: StepPlan) -> StepOutcome: ...


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a step may be at most: shapes beyond it are left out.

    Attributes:
        kv_tokens: tokens of the KV pool.
        num_host_blocks: blocks of the pool in host memory.
        block_bytes: of a block of either pool.
    """

    kv_tokens: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_host_blocks: int = 0
    block_bytes: int = 1

    def holds(self, shape: Shape) -> bool:
        blocks = sum(-(-(start + count) // self.block_size) for start, count, _ in shape)
        return (
            len(shape) <= self.max_num_seqs
            and sum(count for _, count, _ in shape) <= self.max_num_batched_tokens
            and blocks * self.block_size <= self.kv_tokens
            # One token more than computed: it is what a chunk that does not sample leaves over.
            and all(start + count < self.max_model_len for start, count, _ in shape)
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """Which steps are timed.

    Attributes:
        chunks: tokens of prefills, alone and behind each of ``contexts``.
        batches: decoding requests, behind each of ``contexts``.
        rounds: how often each step is run; the median counts.
        num_held_out: random mixes that are timed and not fitted on.
        row_knots, sampled_knots: where the fitted functions may bend; those beyond what fits are left out.
    """

    chunks: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    rounds: int
    num_held_out: int
    row_knots: tuple[int, ...]
    sampled_knots: tuple[int, ...]

    def shapes(self, capacity: Capacity) -> list[Shape]:
        """Prefills, parts of prompts, several prompts, decodes, and decodes beside a prefill."""
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
        return [shape for shape in dict.fromkeys(found) if capacity.holds(shape)]

    def held_out(self, capacity: Capacity) -> list[Shape]:
        """Random mixes like those of a server: some decodes, often a chunk of a prompt."""
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
    chunks=(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192),
    contexts=(16, 256, 1024, 3072),
    batches=(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    rounds=3,
    num_held_out=40,
    row_knots=(1, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192),
    sampled_knots=(1, 8, 16, 32, 64, 128, 256),
)
QUICK = Grid(
    chunks=(1, 16, 128),
    contexts=(16, 256),
    batches=(1, 8, 32),
    rounds=2,
    num_held_out=4,
    row_knots=(1, 16, 128),
    sampled_knots=(1, 32),
)


def profile_executor(
    executor: RunsPlans,
    clock: Clock,
    capacity: Capacity,
    grid: Grid,
    *,
    key: ProfileKey,
    num_layers: int,
    on_step: Callable[[int, int], None] | None = None,
) -> CostProfile:
    """Run the grid's steps and fit the cost model.

    Steps run in an order that is shuffled anew each round, so that a drift of the machine's speed spreads
    over all of them; the first round warms up and does not count.

    Args:
        on_step: called with (steps run, steps in all).
    Raises: ConfigError when not even a step of one token is within the capacity.
    """
    fitted_on, held_out = grid.shapes(capacity), grid.held_out(capacity)
    if not fitted_on:
        raise ConfigError(
            f"There is no step to time within a context of {capacity.max_model_len} tokens and a KV pool of "
            f"{capacity.kv_tokens}; raise --max-model-len or --kv-gib."
        )
    times = _time_steps(executor, clock, capacity, [*fitted_on, *held_out], grid.rounds, on_step)
    timed = [
        TimedStep(StepLoad.of(shape), seconds)
        for shape, seconds in zip([*fitted_on, *held_out], times, strict=True)
    ]
    steps, unseen = timed[: len(fitted_on)], timed[len(fitted_on) :]
    row_knots = _within(grid.row_knots, max(step.load.num_tokens for step in steps))
    sampled_knots = _within(grid.sampled_knots, max(step.load.num_sampled for step in steps))
    # Small limits leave few shapes. Repeated they have the same best fits, of which any will do.
    repeats = -(-num_terms(row_knots, sampled_knots) // len(steps))
    cost = fit_cost_model(steps * repeats, row_knots, sampled_knots)
    return CostProfile(
        key=key,
        num_layers=num_layers,
        cost=cost,
        error=fit_error(cost, unseen or steps),
        copies=_time_copies(executor, clock, capacity),
        provenance=f"{len(steps)} steps timed here, medians of {grid.rounds}; {len(unseen)} others held out.",
    )


def _time_steps(
    executor: RunsPlans,
    clock: Clock,
    capacity: Capacity,
    shapes: Sequence[Shape],
    rounds: int,
    on_step: Callable[[int, int], None] | None,
) -> list[float]:
    rng = random.Random(_SEED)
    samples: list[list[float]] = [[] for _ in shapes]
    numbers = itertools.count()
    total = (rounds + 1) * len(shapes)
    done = 0
    for each_round in range(rounds + 1):
        order = list(range(len(shapes)))
        rng.shuffle(order)
        for index in order:
            seconds = _time_step(executor, clock, capacity, shapes[index], numbers)
            if each_round > 0:
                samples[index].append(seconds)
            done += 1
            if on_step is not None:
                on_step(done, total)
    return [statistics.median(values) for values in samples]


def _time_step(
    executor: RunsPlans, clock: Clock, capacity: Capacity, shape: Shape, numbers: Iterator[int]
) -> float:
    """Seconds of one step; its requests are made known before it and forgotten after it."""
    request_ids = [RequestId(f"profile-{next(numbers)}") for _ in shape]
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    admitted = tuple(
        AdmittedRequest(request_id, (_PROMPT_TOKEN,) * (start + count + (not samples)), sampling)
        for request_id, (start, count, samples) in zip(request_ids, shape, strict=True)
    )
    executor.run(StepPlan(step=0, admitted=admitted, slices=(), released=()))
    blocks = _tables(shape, capacity.block_size)
    plan = StepPlan(
        step=0,
        admitted=(),
        slices=tuple(
            ScheduledSlice(request_id, start, count, table, samples)
            for request_id, (start, count, samples), table in zip(request_ids, shape, blocks, strict=True)
        ),
        released=(),
    )
    began_s = clock.now_s()
    executor.run(plan)
    seconds = clock.now_s() - began_s
    executor.run(StepPlan(step=0, admitted=(), slices=(), released=tuple(request_ids)))
    return seconds


def _time_copies(executor: RunsPlans, clock: Clock, capacity: Capacity) -> CopySpeed | None:
    """Bytes a second of copies each way; None without a pool in host memory."""
    count = min(capacity.num_host_blocks, capacity.kv_tokens // capacity.block_size, _COPIED_BLOCKS)
    if not count:
        return None
    copies = tuple(BlockCopy(index, index) for index in range(count))
    empty = StepPlan(step=0, admitted=(), slices=(), released=())
    plans = (
        replace(empty, checkpoint=copies, waits_for=CopyKinds.CHECKPOINT),
        replace(empty, restore=copies, waits_for=CopyKinds.RESTORE),
    )
    speeds = []
    for plan in plans:
        samples = []
        for _ in range(_COPY_ROUNDS):
            began_s = clock.now_s()
            executor.run(plan)
            samples.append(clock.now_s() - began_s)
        # The first one meets memory that was never touched; a clock that did not move has no speed.
        seconds = max(statistics.median(samples[1:]), _SHORTEST_S)
        speeds.append(count * capacity.block_bytes / seconds)
    return CopySpeed(*speeds)


def _tables(shape: Shape, block_size: int) -> list[tuple[BlockRef, ...]]:
    """Blocks for each slice, no two alike."""
    indices = itertools.count()
    return [
        tuple(pack_block_ref(next(indices)) for _ in range(-(-(start + count) // block_size)))
        for start, count, _ in shape
    ]


def _within(knots: Sequence[int], largest: int) -> list[int]:
    """The knots up to the largest value that was timed, which ends the last piece if it is none."""
    kept = [knot for knot in knots if knot <= largest]
    return kept if len(kept) > 1 else [*kept, max(largest, kept[-1] + 1 if kept else 1)]
