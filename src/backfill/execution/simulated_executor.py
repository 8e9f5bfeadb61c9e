"""An executor without a device: charges a virtual clock what a step would take."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Protocol

from backfill.core.block import BlockCopy
from backfill.core.clock import VirtualClock
from backfill.core.plan import CopyKinds, SampledToken, ScheduledSlice, StepOutcome, StepPlan
from backfill.core.request import RequestId
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.costs.profile import CopySpeed
from backfill.execution.executor import ExecutorInfo

_SAMPLED_TOKEN = 5  # any id that ends no output; lengths come from each request's max_tokens


class StepEvents(Protocol):
    """What happens while a step runs."""

    def next_at_s(self) -> float:
        """Instant of the next event, inf if there is none."""
        ...

    def deliver(self) -> None:
        """Let all events happen that are due at the clock's present time."""
        ...


class NoEvents:
    def next_at_s(self) -> float:
        return math.inf

    def deliver(self) -> None:
        pass


class SimulatedExecutor:
    """See ``StoppableExecutor``. Runs a plan by advancing the clock by its predicted time.

    A step's time is spread evenly over the layers. Events that fall into a step with safepoints are delivered
    at their instants, and may call ``request_stop``; those of other steps wait for the step's end. Copies of
    one direction run one after another, beside the steps and beside those of the other direction.

    Args:
        copies: None where there is no host pool.
    """

    def __init__(
        self, info: ExecutorInfo, cost: CostModel, clock: VirtualClock, copies: CopySpeed | None = None
    ) -> None:
        self.info = info
        self.events: StepEvents = NoEvents()
        self._cost = cost
        self._clock = clock
        self._step_to_stop = -1
        self._num_tokens: dict[RequestId, int] = {}
        self._suspended_at = 0  # layers that the suspended step has behind it
        self._links: dict[CopyKinds, _Link] = {}
        if copies is not None:
            for kind, speed in (
                (CopyKinds.CHECKPOINT, copies.to_host_bytes_per_s),
                (CopyKinds.RESTORE, copies.to_device_bytes_per_s),
            ):
                self._links[kind] = _Link(info.block_bytes / speed)
        self._copies: list[tuple[float, BlockCopy]] = []  # a heap by the instant of completion

    def request_stop(self, step: int) -> None:
        self._step_to_stop = max(self._step_to_stop, step)

    def run(self, plan: StepPlan) -> StepOutcome:
        for request_id in plan.released:
            self._num_tokens.pop(request_id, None)
        for admitted in plan.admitted:
            self._num_tokens[admitted.request_id] = len(admitted.prompt_token_ids)
        self._begin_copies(plan)
        if not plan.slices:
            if plan.awaits_copy:
                self._wait(self._copies[0][0] - self._clock.now_s())
            return StepOutcome((), copied=self._take_copied())
        first = self._suspended_at if plan.resumes else 0
        stopped_at = self._pass_layers(plan, first)
        if stopped_at is None:
            return StepOutcome(self._sample(plan.slices), copied=self._take_copied())
        stopped_at_s = self._clock.now_s()
        if plan.safepoints is not None and plan.safepoints.suspends:
            self._suspended_at = stopped_at
        stopped = tuple(piece.request_id for piece in plan.slices if piece.yields)
        staying = tuple(piece for piece in plan.slices if not piece.yields)
        self._wait(self._seconds(staying) * (self.info.num_layers - stopped_at) / self.info.num_layers)
        return StepOutcome(self._sample(staying), stopped, stopped_at, stopped_at_s, self._take_copied())

    def _begin_copies(self, plan: StepPlan) -> None:
        """Queue the plan's copies; those it waits for take their time here."""
        for kind, copies in ((CopyKinds.CHECKPOINT, plan.checkpoint), (CopyKinds.RESTORE, plan.restore)):
            if not copies:
                continue
            ends_at_s = self._links[kind].begin(len(copies), self._clock.now_s())
            if kind in plan.waits_for:
                self._wait(ends_at_s[-1] - self._clock.now_s())
            else:
                for entry in zip(ends_at_s, copies, strict=True):
                    heapq.heappush(self._copies, entry)

    def _take_copied(self) -> tuple[BlockCopy, ...]:
        copied = []
        while self._copies and self._copies[0][0] <= self._clock.now_s():
            copied.append(heapq.heappop(self._copies)[1])
        return tuple(copied)

    def _pass_layers(self, plan: StepPlan, first: int) -> int | None:
        """Move the clock through the layers; the layer before which the yielding slices were stopped."""
        num_layers, points = self.info.num_layers, plan.safepoints
        last = num_layers if plan.max_layers is None else min(num_layers, first + plan.max_layers)
        layer_s = self._seconds(plan.slices) / num_layers
        began_s = self._clock.now_s()
        ends_at_s = began_s + (last - first) * layer_s
        while points is not None and self.events.next_at_s() < ends_at_s:
            self._wait(self.events.next_at_s() - self._clock.now_s())
            self.events.deliver()
            if self._step_to_stop == plan.step:
                passed = (self._clock.now_s() - began_s) / (layer_s * points.layers_apart)
                stop_at = first + math.ceil(passed) * points.layers_apart
                if first < stop_at < last:
                    self._wait(began_s + (stop_at - first) * layer_s - self._clock.now_s())
                    return stop_at
                break
        self._wait(ends_at_s - self._clock.now_s())
        return last if last < num_layers else None

    def _seconds(self, slices: tuple[ScheduledSlice, ...]) -> float:
        return self._cost.step_time_s(
            StepLoad.of((piece.start, piece.num_tokens, piece.samples) for piece in slices)
        )

    def _sample(self, slices: tuple[ScheduledSlice, ...]) -> tuple[SampledToken, ...]:
        sampled = []
        for piece in slices:
            if piece.samples:
                self._num_tokens[piece.request_id] += 1
                sampled.append(SampledToken(piece.request_id, _SAMPLED_TOKEN))
        return tuple(sampled)

    def _wait(self, seconds: float) -> None:
        self._clock.advance(max(0.0, seconds))


class _Link:
    """One direction between device and host: copies one block after another."""

    def __init__(self, block_s: float) -> None:
        self._block_s = block_s
        self._busy_until_s = 0.0

    def begin(self, num_blocks: int, now_s: float) -> Sequence[float]:
        """Instants at which the copies of so many blocks complete."""
        began_s = max(self._busy_until_s, now_s)
        ends_at_s = [began_s + (index + 1) * self._block_s for index in range(num_blocks)]
        self._busy_until_s = ends_at_s[-1]
        return ends_at_s
