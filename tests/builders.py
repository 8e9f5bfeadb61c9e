"""Builders of test objects, and executors that need no model."""

from __future__ import annotations

import itertools
import random
import zlib
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from backfill.core.block import BlockCopy, BlockRef, SlotCopy
from backfill.core.measured_on import MeasuredOn
from backfill.core.plan import (
    BlockCopies,
    CopyDirections,
    ForcedTokens,
    Resume,
    SampledToken,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
    WaitForCopies,
    max_in_flight,
)
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.profile import CopySpeed, CostProfile, FitError
from backfill.execution.executor import Executor, ExecutorInfo, PipelinedExecutor
from backfill.execution.simulated_executor import hashed_token
from backfill.offloading.residency import residencies

# In the vocabularies of ``make_info`` and of tests/models/tiny.py; special tokens are below.
_TOKEN_IDS = range(3, 199)
_ids = itertools.count()


def make_request(
    prompt_tokens: int = 4,
    max_tokens: int = 8,
    *,
    request_id: str | None = None,
    service_class: ServiceClass = ServiceClass.ONLINE,
    priority: int = 0,
    arrived_at_s: float = 0.0,
    slo: SLO | None = None,
    complete_by_s: float | None = None,
    prompt_token_ids: Sequence[int] | None = None,
    owner: str = "",
    owner_weight: float = 1.0,
    cache_salt: str = "",
    **sampling: object,
) -> Request:
    """A request; its prompt of ``prompt_tokens`` depends on its id, unless it is given."""
    request_id = request_id or f"r{next(_ids)}"
    return Request(
        request_id=RequestId(request_id),
        prompt_token_ids=list(prompt_token_ids or _prompt_of(request_id, prompt_tokens)),
        sampling=SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling}),  # type: ignore[arg-type]
        service_class=service_class,
        priority=priority,
        arrived_at_s=arrived_at_s,
        slo=slo,
        complete_by_s=complete_by_s,
        owner=owner,
        owner_weight=owner_weight,
        cache_salt=cache_salt,
    )


def _prompt_of(request_id: str, num_tokens: int) -> list[int]:
    """Two requests share no block of these tokens, so they share no cached KV."""
    start, first, number = zlib.crc32(f"{request_id} ".encode()), _TOKEN_IDS[0], len(_TOKEN_IDS)
    return [first + zlib.crc32(b"%d" % position, start) % number for position in range(num_tokens)]


def linear_cost(token_s: float = 0.001, step_s: float = 0.0, context_s: float = 0.0) -> CostModel:
    """Every token costs the same, in addition to a constant for the step and the context that it reads."""
    knots = (1.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
    return CostModel(
        rows_s=PiecewiseLinear(knots, tuple(step_s + token_s * knot for knot in knots)),
        sampled_s=PiecewiseLinear((0.0, 1.0), (0.0, 0.0)),
        request_s=0.0,
        prefill_pair_s=0.0,
        prefill_context_s=context_s,
        decode_context_s=context_s,
    )


def make_info(
    num_blocks: int = 16,
    block_size: int = 4,
    max_model_len: int | None = None,
    end_token_ids: Sequence[int] = (2,),
    num_host_blocks: int = 0,
    num_layers: int = 1,
) -> ExecutorInfo:
    return ExecutorInfo(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len or num_blocks * block_size,
        vocab_size=1000,
        end_token_ids=tuple(end_token_ids),
        device="none",
        dtype="none",
        num_layers=num_layers,
        num_host_blocks=num_host_blocks,
    )


def with_residencies(info: ExecutorInfo, least: int) -> ExecutorInfo:
    """An executor whose offloading interval may fall to ``least``."""
    largest, layers = info.offload_interval, info.stage_layers
    assert largest is not None
    of_all = residencies(
        info.num_layers, least, largest, info.num_blocks, info.layer_bytes, info.block_bytes, layers
    )
    return replace(info, residencies=of_all)


def flat_cost(step_s: float, row_s: float = 0.0) -> CostModel:
    """Every step takes ``step_s`` seconds, and ``row_s`` for each of its tokens."""
    rows = PiecewiseLinear((0.0, 1.0), (step_s, step_s + row_s))
    return CostModel(rows, PiecewiseLinear((0.0, 1.0), (0.0, 0.0)), 0.0, 0.0, 0.0, 0.0)


class ScriptedExecutor(Executor):
    """Checks what a real executor relies on in each plan, and samples ``hashed_token`` or ``next_token``.

    A plan fails that names an unknown request, skips a token, or uses a block of another request.

    Attributes:
        next_token: the token that every request samples; None for tokens of its own.
        max_forced: tokens at most that follow a sampled one as if a grammar had forced them.
        fail_at_step: this step raises, after ``num_admitted_by_failure`` of its requests were admitted.
    """

    def __init__(self, info: ExecutorInfo, next_token: int | None = None) -> None:
        self.info = info
        self.next_token = next_token
        self.max_forced = 0
        self._most_tokens: dict[RequestId, int] = {}
        self.plans: list[StepPlan] = []
        self.num_tokens: dict[RequestId, int] = {}
        self.fail_at_step: int | None = None
        self.num_admitted_by_failure: int | None = None  # all
        self._perhaps_known: set[RequestId] = set()

    def request_stop(self, step: int) -> None:
        """Its steps do not stop."""

    def run(self, plan: StepPlan) -> StepOutcome:
        self.plans.append(plan)
        fails = self.fail_at_step == plan.step
        for request_id in plan.released:
            assert request_id in self.num_tokens or request_id in self._perhaps_known
            self.num_tokens.pop(request_id, None)
            self._perhaps_known.discard(request_id)
        for admitted in plan.admitted[: self.num_admitted_by_failure if fails else None]:
            assert admitted.request_id not in self.num_tokens
            self.num_tokens[admitted.request_id] = num_tokens = len(admitted.prompt_token_ids)
            self._most_tokens[admitted.request_id] = num_tokens + (admitted.sampling.max_tokens or 0)
        if fails:
            self._perhaps_known |= {admitted.request_id for admitted in plan.admitted}
            raise RuntimeError("scripted failure")
        in_tables = Counter(ref for scheduled in plan.slices for ref in scheduled.blocks)
        for scheduled in plan.slices:
            for ref in self._written(scheduled):
                assert in_tables[ref] == 1, "a slice writes a block of another request's table"
                assert in_tables[BlockRef(ref ^ 1)] <= 1, "two requests read what a slice may write"
        sampled, forced = [], []
        for scheduled in plan.slices:
            end = scheduled.start + scheduled.num_tokens
            assert scheduled.num_tokens > 0
            assert end <= len(scheduled.blocks) * self.info.block_size
            assert scheduled.samples == (end == self.num_tokens[scheduled.request_id])
            if scheduled.samples:
                self.num_tokens[scheduled.request_id] += 1
                sampled.append(SampledToken(scheduled.request_id, self._sampled(scheduled.request_id, end)))
                if self.max_forced:
                    forced.append(self._forced(scheduled.request_id, end + 1))
        return StepOutcome(tuple(sampled), forced=tuple(forced))

    def _forced(self, request_id: RequestId, position: int) -> ForcedTokens:
        room = min(self.max_forced, self._most_tokens[request_id] - position)
        num_tokens = zlib.crc32(f"{request_id} {position}".encode()) % (room + 1)
        self.num_tokens[request_id] += num_tokens
        positions = range(position, position + num_tokens)
        return ForcedTokens(request_id, tuple(self._sampled(request_id, each) for each in positions))

    def _written(self, scheduled: ScheduledSlice) -> Sequence[BlockRef]:
        """The blocks to which the slice writes."""
        size = self.info.block_size
        return scheduled.blocks[
            scheduled.start // size : -(-(scheduled.start + scheduled.num_tokens) // size)
        ]

    def _sampled(self, request_id: RequestId, position: int) -> int:
        if self.next_token is not None:
            return self.next_token
        return hashed_token(request_id, position, self.info)


@dataclass
class _Copy:
    """A copy in flight; one of a block has all its slots."""

    copy: BlockCopy | SlotCopy
    slots: slice
    to_host: bool
    is_moved: bool

    def shares_slots(self, other: _Copy) -> bool:
        return self.slots.start < other.slots.stop and other.slots.start < self.slots.stop


class TwoTierExecutor(ScriptedExecutor):
    """A ScriptedExecutor with memory: every slot of both tiers holds a hash of all tokens up to its own.

    A copy moves its block when it begins or when it completes, at random; in between its target is undefined.
    Copies complete after random delays, in random order. Some steps with safepoints are stopped. A slice
    fails if its earlier tokens are not in its blocks, or if it uses a block in a copy.

    Args:
        fails: the share of steps that raise, after their copies have begun.
        stops: the share of the steps with safepoints that are stopped at one.

    Attributes:
        namespaces: requests of different ones may not read each other's KV, even if their tokens are equal.
            Those that are not entered share one.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        rng: random.Random,
        *,
        completes: float = 0.4,
        fails: float = 0.0,
        stops: float = 0.0,
    ) -> None:
        super().__init__(info)
        self.in_flight: list[_Copy] = []
        self.num_copies = {"checkpoint": 0, "restore": 0}
        self._rng = rng
        self._completes, self._fails, self._stops = completes, fails, stops
        self._device = self._undefined(info.max_num_blocks)
        self._num_blocks = info.num_blocks  # that have memory
        self.num_moves = 0
        self._host = self._undefined(info.num_host_blocks)
        self._suspended: dict[RequestId, tuple[ScheduledSlice, int]] = {}  # with the layers passed
        self._hashes: dict[RequestId, list[int]] = {}  # what each request's slots must hold
        self.namespaces: dict[RequestId, str] = {}
        self.is_pipelined = False  # then a step without slices need not wait for copies
        self._lost: set[RequestId] = set()  # in a step that failed, and not released since

    def run(self, plan: StepPlan) -> StepOutcome:
        self._lost.difference_update(plan.released)
        for admitted in plan.admitted:
            root = hash(self.namespaces.get(admitted.request_id, ""))
            hashes = itertools.accumulate(admitted.prompt_token_ids, _next_hash, initial=root)
            self._hashes[admitted.request_id] = list(hashes)[1:]
        for dropped in plan.dropped:
            self._suspended.pop(dropped, None)
        self._change_memory(plan)
        self._begin(plan.copies)
        waits = isinstance(plan.work, WaitForCopies)
        assert waits == (not plan.slices and bool(self.in_flight)) or (self.is_pipelined and not waits)
        reading = self._slots_in_flight(to_host=True)
        writing = self._slots_in_flight(to_host=False)
        for scheduled in plan.slices:
            if scheduled.request_id not in self._lost:
                self._check(scheduled, reading, writing)
        stopped, layers_done = self._stopped(plan)
        is_unknown = any(
            each.request_id not in self.num_tokens for each in plan.slices if each.request_id in self._lost
        )
        if plan.slices and (is_unknown or self._rng.random() < self._fails):
            self.fail_at_step = plan.step
            self.num_admitted_by_failure = self._rng.randint(0, len(plan.admitted))
        for scheduled in plan.slices:
            if self.fail_at_step == plan.step:
                self._lost.add(scheduled.request_id)
            is_undefined = scheduled.request_id in stopped or scheduled.request_id in self._lost
            self._write(scheduled, is_undefined)
        outcome = self._sample(plan, stopped)
        for sampled in outcome.sampled:
            hashes = self._hashes[sampled.request_id]
            hashes.append(_next_hash(hashes[-1], sampled.token_id))
        completed = self._complete(must=waits)
        suspends = plan.safepoints is not None and plan.safepoints.suspends
        return StepOutcome(
            outcome.sampled,
            suspended=tuple(stopped) if suspends else (),
            discarded=() if suspends else tuple(stopped),
            layers_done=layers_done,
            completed_copies=tuple(copy for copy in completed if isinstance(copy, BlockCopy)),
            completed_slot_copies=tuple(copy for copy in completed if isinstance(copy, SlotCopy)),
        )

    def _change_memory(self, plan: StepPlan) -> None:
        """What lies beyond the pool's end is lost, and a move takes place at once."""
        if plan.memory is not None:
            self._num_blocks = plan.memory.num_blocks
            assert self.info.num_blocks <= self._num_blocks <= self.info.max_num_blocks
            for slots in self._device[self._num_blocks :]:
                slots[:] = [None] * len(slots)
        copied = {each.copy.device for each in self.in_flight}
        suspended = {ref >> 1 for each, _ in self._suspended.values() for ref in each.blocks}
        for move in plan.moves:
            assert max(move) < self._num_blocks
            assert copied.isdisjoint(move), "a block in a copy is moved"
            if isinstance(plan.work, Resume):
                suspended = {ref >> 1 for each in plan.slices for ref in each.blocks}
                assert move.source not in suspended, "a resumed slice has the table of before"
            else:
                assert move.target not in suspended, "a move overwrites what a suspended slice reads"
            self._device[move.target] = list(self._device[move.source])
            self.num_moves += 1

    def _slots_in_flight(self, *, to_host: bool) -> set[tuple[int, int]]:
        """Block and slot, on the device, of each slot in a copy of this direction."""
        return {
            (each.copy.device, slot)
            for each in self.in_flight
            if each.to_host == to_host
            for slot in range(each.slots.start, each.slots.stop)
        }

    def _sample(self, plan: StepPlan, stopped: Collection[RequestId]) -> StepOutcome:
        work = plan.work
        if not isinstance(work, WaitForCopies):
            slices = tuple(scheduled for scheduled in work.slices if scheduled.request_id not in stopped)
            work = replace(work, slices=slices)
        return super().run(replace(plan, work=work))

    def _begin(self, copies: BlockCopies) -> None:
        assert len({copy.host for copy in copies.checkpoint}) == len(copies.checkpoint)
        assert len({copy.device for copy in copies.restore}) == len(copies.restore)
        checkpoints: list[BlockCopy | SlotCopy] = [*copies.checkpoint, *copies.slot_checkpoint]
        restores: list[BlockCopy | SlotCopy] = [*copies.restore, *copies.slot_restore]
        self.num_copies["checkpoint"] += len(checkpoints)
        self.num_copies["restore"] += len(restores)
        assert all(copy.device < self._num_blocks for copy in (*checkpoints, *restores))
        for to_host, of_kind in ((True, checkpoints), (False, restores)):
            waits = (CopyDirections.CHECKPOINT if to_host else CopyDirections.RESTORE) in copies.blocking
            for copy in of_kind:
                slots = slice(0, self.info.block_size)
                if isinstance(copy, SlotCopy):
                    slots = slice(copy.first, copy.first + copy.num)
                    assert 0 <= slots.start < slots.stop <= self.info.block_size
                begun = _Copy(copy, slots, to_host, is_moved=waits or self._rng.random() < 0.5)
                for other in self.in_flight:
                    if not begun.shares_slots(other):
                        continue
                    assert copy.device != other.copy.device, "a slot is in two copies"
                    if to_host or other.to_host:
                        assert copy.host != other.copy.host, "two copies use a host slot that one writes"
                if begun.is_moved:
                    self._move(begun)
                else:
                    memory, index = (self._host, copy.host) if to_host else (self._device, copy.device)
                    memory[index][slots] = [None] * (slots.stop - slots.start)
                if not waits:
                    self.in_flight.append(begun)

    def _move(self, each: _Copy) -> None:
        on_device, on_host = self._device[each.copy.device], self._host[each.copy.host]
        if each.to_host:
            on_host[each.slots] = on_device[each.slots]
        else:
            on_device[each.slots] = on_host[each.slots]

    def _complete(self, must: bool) -> tuple[BlockCopy | SlotCopy, ...]:
        self._rng.shuffle(self.in_flight)
        done = [each for each in self.in_flight if self._rng.random() < self._completes]
        if must and not done:
            done = self.in_flight[:1]
        for each in done:
            if not each.is_moved:
                self._move(each)
            self.in_flight.remove(each)
        return tuple(each.copy for each in done)

    def _check(
        self, scheduled: ScheduledSlice, reading: Set[tuple[int, int]], writing: Set[tuple[int, int]]
    ) -> None:
        blocks, expected = [ref >> 1 for ref in scheduled.blocks], self._hashes[scheduled.request_id]
        assert max(blocks) < self._num_blocks, "a block without memory"
        for block, slots, positions in self._spans(scheduled, 0, scheduled.start):
            assert self._device[block][slots] == expected[positions], (
                f"{scheduled.request_id} in block {block}: other KV"
            )
        whole = {
            each.copy.device
            for each in self.in_flight
            if isinstance(each.copy, BlockCopy) and not each.to_host
        }
        assert whole.isdisjoint(blocks), "a slice uses a block that is being copied to"
        end = scheduled.start + scheduled.num_tokens
        assert writing.isdisjoint(self._slots_of(scheduled, 0, end, among=writing)), (
            "a slice uses a slot that is being copied to"
        )
        assert reading.isdisjoint(self._slots_of(scheduled, scheduled.start, end, among=reading)), (
            "a slice writes a slot that is being copied"
        )

    def _write(self, scheduled: ScheduledSlice, is_undefined: bool) -> None:
        hashes, end = self._hashes[scheduled.request_id], scheduled.start + scheduled.num_tokens
        for block, slots, positions in self._spans(scheduled, scheduled.start, end):
            written = hashes[positions]
            self._device[block][slots] = [None] * len(written) if is_undefined else written

    def _spans(self, scheduled: ScheduledSlice, start: int, end: int) -> Iterator[tuple[int, slice, slice]]:
        """Where the tokens ``[start, end)`` are: blocks, the slots in each, and the positions in those."""
        size = self.info.block_size
        for index in range(start // size, -(-end // size)):
            ref = scheduled.blocks[index]
            first, stop = max(start - index * size, 0), min(end - index * size, size)
            slots = slice(first, stop)
            if ref & 1:
                slots = slice(size - 1 - first, size - 1 - stop if stop < size else None, -1)
            yield ref >> 1, slots, slice(index * size + first, index * size + stop)

    def _slots_of(
        self, scheduled: ScheduledSlice, start: int, end: int, among: Set[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Block and slot of these tokens, in the blocks of ``among`` alone."""
        blocks = {block for block, _ in among}
        size = self.info.block_size
        for block, slots, _ in self._spans(scheduled, start, end) if blocks else ():
            if block in blocks:
                yield from ((block, slot) for slot in range(size)[slots])

    def _stopped(self, plan: StepPlan) -> tuple[Sequence[RequestId], int]:
        """Requests stopped in this step, and the layers that they have passed."""
        num_layers = self.info.num_layers
        first, last = 0, num_layers
        if isinstance(plan.work, Resume):
            resumed = [self._suspended.pop(scheduled.request_id) for scheduled in plan.slices]
            assert [scheduled for scheduled, _ in resumed] == list(plan.slices)
            (first,) = {layers_done for _, layers_done in resumed}
            last = first + plan.work.num_layers
            assert first < last <= num_layers
        else:
            assert self._suspended.keys().isdisjoint(each.request_id for each in plan.slices)
        if plan.safepoints is not None and last - first > 1 and self._rng.random() < self._stops:
            last = self._rng.randint(first + 1, last - 1)
        stopped = [scheduled for scheduled in plan.slices if scheduled.stoppable and last < num_layers]
        if stopped and plan.safepoints is not None and plan.safepoints.suspends:
            self._suspended |= {scheduled.request_id: (scheduled, last) for scheduled in stopped}
        return [scheduled.request_id for scheduled in stopped], last

    def _undefined(self, num_blocks: int) -> list[list[int | None]]:
        return [[None] * self.info.block_size for _ in range(num_blocks)]


class InFlightExecutor(PipelinedExecutor):
    """A TwoTierExecutor with several steps in flight: each runs at some time until it is collected.

    A plan fails that a pipeline could not run: one with a request in flight, unless it is the next chunk of
    its prompt, one that waits for copies beside another step, and one that drops what a step in flight may
    suspend.

    Attributes:
        num_followed: chunks that were submitted while the one before was in flight.
    """

    def __init__(self, executor: TwoTierExecutor, rng: random.Random) -> None:
        self.info = executor.info
        self.executor = executor
        executor.is_pipelined = True
        self._rng = rng
        self.num_followed = 0
        self._submitted: deque[StepPlan] = deque()  # and not collected
        self._done: deque[StepOutcome | Exception] = deque()  # of the first of them

    def submit(self, plan: StepPlan) -> None:
        most = max_in_flight(self.info.max_steps_in_flight, self._submitted)
        assert len(self._submitted) < most, "too many steps are in flight"
        last = {
            scheduled.request_id: (scheduled, each) for each in self._submitted for scheduled in each.slices
        }
        for scheduled in plan.slices:
            if scheduled.request_id in last:
                before, earlier = last[scheduled.request_id]
                assert not before.samples and scheduled.start == before.start + before.num_tokens
                assert not (before.stoppable and earlier.safepoints), "it may be stopped"
                self.num_followed += 1
        assert not last.keys() & set(plan.released), "a request in flight is released"
        if self._submitted:
            assert not isinstance(plan.work, WaitForCopies), "it would wait for the step before it"
            slices = [scheduled for each in self._submitted for scheduled in each.slices]
            held = {ref >> 1 for scheduled in slices for ref in scheduled.blocks}
            assert held.isdisjoint(itertools.chain(*plan.moves)), "a block of a step in flight is moved"
        assert not last.keys() & set(plan.dropped), "it may be suspended"
        self._submitted.append(plan)
        if self._rng.random() < 0.5:
            self._run_some(self._rng.randint(0, len(self._submitted)))

    def collect(self) -> StepOutcome:
        self._run_some(max(1, self._rng.randint(0, len(self._submitted))))
        self._submitted.popleft()
        outcome = self._done.popleft()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def request_stop(self, step: int) -> None:
        """Steps stop at random."""

    def _run_some(self, num_steps: int) -> None:
        """Run the first steps in flight, up to so many."""
        for plan in list(self._submitted)[len(self._done) : num_steps]:
            try:
                self._done.append(self.executor.run(plan))
            except RuntimeError as error:
                self._done.append(error)


def _next_hash(before: int, token_id: int) -> int:
    return hash((before, token_id))


def make_profile(cost: CostModel | None = None, **key: str) -> CostProfile:
    return CostProfile(
        key=MeasuredOn(**{"model": "model", "device": "device", "dtype": "dtype", **key}),
        quality="full",
        num_layers=32,
        cost=cost or linear_cost(token_s=1e-4, step_s=5e-3, context_s=1e-6),
        error=FitError(0.01, 0.02, 3),
        known_tokens=8192,
        known_chunk_tokens=8192,
        copies=CopySpeed(1e10, 2e10),
        provenance="made up for tests",
    )
