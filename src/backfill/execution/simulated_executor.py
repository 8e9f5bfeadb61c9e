"""An executor without a device: advances a virtual clock by what each step takes on a simulated one."""

from __future__ import annotations

import math
import zlib
from collections import deque
from dataclasses import replace
from typing import Protocol

from backfill.core.block import BlockCopy, SlotCopy
from backfill.core.clock import VirtualClock
from backfill.core.plan import (
    BlockCopies,
    Compute,
    CopyDirections,
    Resume,
    SampledToken,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
    WaitForCopies,
)
from backfill.core.request import RequestId
from backfill.costs.behaviour import DeviceBehaviour, NoiseSource
from backfill.costs.load import StepLoad
from backfill.execution.executor import Executor, ExecutorInfo, stopped_outcome


def hashed_token(request_id: RequestId, position: int, info: ExecutorInfo) -> int:
    """A token id that depends on its request and its position in it, the same in every process.

    Equal tokens would let requests share cached KV. End tokens are left out: outputs have the lengths that
    their requests ask for.
    """
    token_id = zlib.crc32(f"{request_id} {position}".encode()) % info.vocab_size
    while token_id in info.end_token_ids:
        token_id = (token_id + 1) % info.vocab_size
    return token_id


class StepEvents(Protocol):
    """Events at instants of the clock, such as arrivals, that a running step may meet."""

    def next_at_s(self) -> float:
        """Instant of the next event; inf if there is none."""

    def deliver(self) -> None:
        """Let all events happen that are due now."""


class SimulatedExecutor(Executor):
    """Runs a plan by advancing the clock by the time it takes on the device.

    That time is not the predicted one: it is the device's own cost of the step, with noise. It is spread
    evenly over the layers. Events that fall into a step with safepoints are delivered at their instants, and
    may call ``request_stop``; those of other steps wait for the step's end. Copies run one after another, in
    both directions over one link, beside the steps; a copy of slots takes their share of a block's time.
    Sampled tokens are ``hashed_token``. Host time passes between steps, so it is not part of ``run``.

    Attributes:
        load: of the step that was computed last.

    Args:
        seed: of the device's noise.
    """

    def __init__(
        self, info: ExecutorInfo, device: DeviceBehaviour, clock: VirtualClock, *, seed: int = 0
    ) -> None:
        self.info = info
        self.events: StepEvents | None = None
        self.load = StepLoad()
        self._device = device
        self._clock = clock
        self._noise = NoiseSource(device.noise, seed)
        self._step_to_stop = -1
        self._num_tokens: dict[RequestId, int] = {}
        self._suspended_at: dict[RequestId, int] = {}  # layers that suspended slices have passed
        self._copying_until_s = 0.0
        # In flight, with the instant of completion.
        self._copies: deque[tuple[float, BlockCopy | SlotCopy]] = deque()

    def request_stop(self, step: int) -> None:
        self._step_to_stop = max(self._step_to_stop, step)

    def run(self, plan: StepPlan) -> StepOutcome:
        self._change_requests(plan)
        now_s = self._clock.now_s()
        self._wait(self._begin_copies(plan.copies, now_s) - now_s)
        match plan.work:
            case WaitForCopies():
                self._wait(self._copies[0][0] - self._clock.now_s())
                return self._outcome(())
            case Compute(slices=()):
                return self._outcome(())
            case Compute():
                first, last = 0, self.info.num_layers
            case Resume(num_layers=num_layers):
                first = self._taken_up(plan)
                last = first + num_layers
        ratio = self._noise.draw()
        stopped_at = self._pass_layers(plan, first, last, ratio)
        if stopped_at is None:
            return self._outcome(self._sample(plan.slices))
        stopped_at_s = self._clock.now_s()
        online = tuple(scheduled for scheduled in plan.slices if not scheduled.stoppable)
        if online:
            unstoppable = replace(plan, work=Compute(online))
            self._pass_layers(unstoppable, stopped_at, self.info.num_layers, ratio)
        outcome = stopped_outcome(self._outcome(self._sample(online)), plan, stopped_at, stopped_at_s)
        self._suspended_at |= dict.fromkeys(outcome.suspended, stopped_at)
        return outcome

    def _change_requests(self, plan: StepPlan) -> None:
        for request_id in plan.released:
            self._num_tokens.pop(request_id, None)
        for request_id in plan.dropped:
            self._suspended_at.pop(request_id, None)
        for admitted in plan.admitted:
            self._num_tokens[admitted.request_id] = len(admitted.prompt_token_ids)

    def _taken_up(self, plan: StepPlan) -> int:
        """The layers that the slices of a plan have passed, which are suspended no more."""
        (first,) = {self._suspended_at.pop(scheduled.request_id) for scheduled in plan.slices}
        return first

    def _outcome(self, sampled: tuple[SampledToken, ...]) -> StepOutcome:
        """Of a step without stopped slices, with the copies that have completed."""
        if not self._copies:
            return StepOutcome(sampled)
        completed = []
        while self._copies and self._copies[0][0] <= self._clock.now_s():
            completed.append(self._copies.popleft()[1])
        return StepOutcome(
            sampled,
            completed_copies=tuple(copy for copy in completed if isinstance(copy, BlockCopy)),
            completed_slot_copies=tuple(copy for copy in completed if isinstance(copy, SlotCopy)),
        )

    def _begin_copies(self, copies: BlockCopies, at_s: float) -> float:
        """Queue the copies, which begin at this time; returns when the blocking ones have completed."""
        checkpoints: list[BlockCopy | SlotCopy] = [*copies.checkpoint, *copies.slot_checkpoint]
        restores: list[BlockCopy | SlotCopy] = [*copies.restore, *copies.slot_restore]
        for direction, of_direction in (
            (CopyDirections.CHECKPOINT, checkpoints),
            (CopyDirections.RESTORE, restores),
        ):
            for copy in of_direction:
                began_s = max(self._copying_until_s, at_s)
                share = copy.num / self.info.block_size if isinstance(copy, SlotCopy) else 1.0
                self._copying_until_s = began_s + self._copy_block_s(direction) * share
                if direction not in copies.blocking:
                    self._copies.append((self._copying_until_s, copy))
            if of_direction and direction in copies.blocking:
                at_s += self._copying_until_s - at_s
        return at_s

    def _copy_block_s(self, direction: CopyDirections) -> float:
        speed = self._device.copies
        assert speed is not None, "there is no host pool to copy to and from"
        to_host = direction is CopyDirections.CHECKPOINT
        return self.info.block_bytes / (speed.to_host_bytes_per_s if to_host else speed.to_device_bytes_per_s)

    def _pass_layers(self, plan: StepPlan, first: int, last: int, ratio: float) -> int | None:
        """Advance the clock through layers ``[first, last)`` of a step with this noise.

        Returns: the layer before which slices stopped; None if they passed all of the model's layers.
        """
        num_layers, points, events = self.info.num_layers, plan.safepoints, self.events
        layer_s = ratio * self._seconds(plan.slices) / num_layers
        began_s = self._clock.now_s()
        ends_at_s = began_s + (last - first) * layer_s
        while points is not None and events is not None and events.next_at_s() < ends_at_s:
            self._wait(events.next_at_s() - self._clock.now_s())
            events.deliver()
            if self._step_to_stop == plan.step:
                passed = (self._clock.now_s() - began_s) / (layer_s * points.layers_apart)
                stop_at = first + max(1, math.ceil(passed)) * points.layers_apart
                if first < stop_at < last:
                    self._wait(began_s + (stop_at - first) * layer_s - self._clock.now_s())
                    return stop_at
                break
        self._wait(ends_at_s - self._clock.now_s())
        return last if last < num_layers else None

    def _seconds(self, slices: tuple[ScheduledSlice, ...]) -> float:
        self.load = StepLoad.of_slices(slices)
        return self._device.cost.step_time_s(self.load)

    def _sample(self, slices: tuple[ScheduledSlice, ...]) -> tuple[SampledToken, ...]:
        sampled = []
        for scheduled in slices:
            if scheduled.samples:
                request_id, position = scheduled.request_id, self._num_tokens[scheduled.request_id]
                self._num_tokens[request_id] = position + 1
                sampled.append(SampledToken(request_id, hashed_token(request_id, position, self.info)))
        return tuple(sampled)

    def _wait(self, seconds: float) -> None:
        self._clock.advance(max(0.0, seconds))
