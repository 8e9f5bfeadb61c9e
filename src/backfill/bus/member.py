"""An engine's part in coordinating the engines on its bus, between steps."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from backfill.bus.file import BusFile, BusUse
from backfill.core.clock import Clock
from backfill.core.plan import StepPlan
from backfill.offloading.coordinator import BusInstance, attainable_step_s, coordinate
from backfill.offloading.interval import num_device_layers
from backfill.offloading.residency import LinkGrant, LinkWish

logger = logging.getLogger(__name__)

# Of the objective that steps are planned for. The rest is for what differs between steps, and for the chunks
# of others that a transfer waits for.
OBJECTIVE_SHARE = 0.9

_NUM_STEPS = 16  # whose median counts
_NOTICED = 0.1  # a change by less is not published
_COPIES_UNIT = 1 / 32  # of the bandwidth: copies are published in multiples of it
_POLL_S = 0.1  # until an engine that died is noticed
_COPIES_WINDOW_S = 0.5
_FITS_AGAIN = 0.9  # of the bandwidth: needs that are about all of it are said once
_LEAST_FOR_WEIGHTS = 0.1  # of the bandwidth, however much is copied


@dataclass(frozen=True, slots=True)
class OffloadedModel:
    """What an engine can offload.

    The stages of a pipeline work beside each other, each on a step of its own. So together they need of the
    bus what a model needs that has the layers of one stage, the largest, each as large as one of each stage.

    Attributes:
        stage_layers: layers of each stage; of the model if there is one stage.
        layer_bytes: weights of one layer of the model, on all ranks that have a part of it.
        interval: that there is device memory for, and the smallest one of use where this memory is fixed:
            with a smaller one more is transferred, and the memory that it saves is used by nobody.
    """

    stage_layers: tuple[int, ...]
    layer_bytes: int
    interval: int

    @property
    def num_layers(self) -> int:
        """Of the largest stage."""
        return max(self.stage_layers)

    @property
    def total_layer_bytes(self) -> int:
        """Weights of a layer of every stage."""
        return len(self.stage_layers) * self.layer_bytes

    @property
    def max_interval(self) -> int:
        """The largest interval that the device memory of every stage allows; there is one."""
        return max(
            interval
            for interval in range(1, self.num_layers + 1)
            if all(
                num_device_layers(each, interval) <= num_device_layers(each, self.interval)
                for each in self.stage_layers
            )
        )


class _Given(NamedTuple):
    """What an engine uses: its interval, unless it chooses that itself, and its share of the bus."""

    interval: int | None
    share: float


class _Table:
    """What all engines say, read again when it may be something new."""

    def __init__(self, file: BusFile, clock: Clock) -> None:
        self.uses: list[BusUse] = []
        self._num_reads = 0
        self._file = file
        self._clock = clock
        self._generation = -1
        self._read_at_s = 0.0

    def read(self) -> int:
        """Returns: the number of this reading, the same as that of the last one if there is nothing new."""
        generation, now_s = self._file.generation, self._clock.now_s()
        if generation != self._generation or now_s - self._read_at_s >= _POLL_S:
            self._generation, self._read_at_s = generation, now_s
            self.uses = self._file.uses()
            self._num_reads += 1
        return self._num_reads


class BusMember:
    """Publishes what this engine needs, and gives it the interval and share that follow from all needs.

    An engine is one member, however many ranks it has: plans take interval and share to all of them.

    Every engine computes the same from the same table. So there is no leader, and an engine that dies is
    missed by nobody. Calls come from the thread of the engine. While the table cannot be used, the engine
    keeps its interval and share, and its steps go on.

    Where the memory of the weights can change, the engine chooses the interval, and the coordinator bounds it
    (``ask``). What others need of the bus while it changes follows from what is streamed.

    Args:
        divides_memory: the memory of the weights can change.

    Attributes:
        share: of the bandwidth that this engine may use; 0 while it has no work.
        load: sum of what all need over the bandwidth. Above 1 not all objectives can be met.
    """

    def __init__(
        self,
        file: BusFile,
        model: OffloadedModel,
        clock: Clock,
        *,
        divides_memory: bool = False,
    ) -> None:
        self.share = 0.0
        self.load = 0.0
        self._file = file
        self._model = model
        self._max_interval = model.max_interval
        self._clock = clock
        self._divides_memory = divides_memory
        self._due = self._given = _Given(None if divides_memory else model.interval, 1.0)
        self._wish: LinkWish | None = None
        self._grant: LinkGrant | None = None
        self._streamed_interval: int | None = None
        self._computed_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._published_computed_s = 0.0
        self._in_flight: deque[int] = deque(maxlen=_NUM_STEPS)
        self._published = BusUse()
        self._copied_bytes_per_s = 0.0
        self._copied_bytes = 0  # since then
        self._copies_since_s = clock.now_s()
        self._fits = True
        self._is_failing = False
        self._table = _Table(file, clock)
        self._followed = self._bounded = 0  # readings that the interval and the least step are of
        self._least_step_s = 0.0

    @property
    def free_transfer_s(self) -> float:
        """See ``LinkBudget``. Where there are stages, each transfers a layer of its own meanwhile."""
        return self._model.total_layer_bytes / self._file.bytes_per_s

    def ask(self, wish: LinkWish) -> LinkGrant | None:
        """See ``LinkBudget``. What is wished is published with the next step."""
        self._wish = wish
        return self._grant

    def begin_step(
        self, plan: StepPlan, objective_s: float, num_in_flight: int = 1, *, has_objective: bool = True
    ) -> StepPlan:
        """Before a step. Returns: its plan, with what the needs of all change from this step on.

        Args:
            objective_s: that a step may take.
            num_in_flight: steps, this one among them. So many end in the time that one may take.
            has_objective: else the time is a pace, which gives way to the objectives of others.
        """
        # Resumed steps, which have a part of the layers, may be in flight beside one of each stage.
        self._in_flight.append(min(num_in_flight, len(self._model.stage_layers)))
        with self._may_fail():
            self._measure_copies()
            streamed = None if self._wish is None else self._streamed_interval
            instance = self._instance(objective_s, has_objective)
            self._publish(BusUse(instance, self._copied_bytes_per_s, streamed))
            self._follow()
        due, given, self._given = self._due, self._given, self._due
        if due == given:
            return plan
        interval = plan.offload_interval if due.interval == given.interval else due.interval
        return replace(plan, offload_interval=interval, bus_share=due.share)

    def count_copies(self, num_bytes: int) -> None:
        """So much KV was copied over the bus."""
        self._copied_bytes += num_bytes

    def end_step(self, computed_s: float, interval: int | None = None) -> None:
        """A step took so long without the time for which layers waited for weights.

        Args:
            computed_s: where several steps are in flight, since the one before it ended.
            interval: with which it streamed them.
        """
        self._computed_s.append(computed_s)
        self._streamed_interval = interval

    def idle(self) -> None:
        """There is no work: the others need not count with this engine."""
        if self._published.instance is not None:
            with self._may_fail():
                self._publish(BusUse(None, 0.0))
                self.share = 0.0
                self._grant = None

    def least_step_s(self) -> float:
        """What a step's transfers take at least beside what the others need now; infinite if nothing is left.

        No objective below that can be kept, whatever interval this engine has.
        """
        with self._may_fail():
            reading = self._table.read()
            if reading != self._bounded:
                self._bounded = reading
                uses, name, model = self._table.uses, self._file.name, self._model
                instances = [each.instance for each in uses if each.instance is not None]
                own = BusInstance(
                    name,
                    model.num_layers,
                    model.total_layer_bytes,
                    step_s=1.0,
                    max_interval=self._max_interval,
                )
                others = [each for each in instances if each.name != name]
                self._least_step_s = attainable_step_s(own, others, self._bandwidth(uses))
        return self._least_step_s

    @contextmanager
    def _may_fail(self) -> Iterator[None]:
        """Whatever is wrong with the table of all is no reason to end this engine's requests."""
        try:
            yield
        except Exception as error:
            if not self._is_failing:
                logger.warning("the bus cannot be used, and the interval stays as it is: %s", error)
            self._is_failing = True

    def _instance(self, objective_s: float, has_objective: bool) -> BusInstance:
        model = self._model
        computed_s = statistics.median(self._computed_s) if self._computed_s else 0.0
        if abs(computed_s - self._published_computed_s) > _NOTICED * self._published_computed_s:
            self._published_computed_s = computed_s
        wish = self._wish
        if wish is not None:
            has_objective = wish.objective_s is not None
        step_s = OBJECTIVE_SHARE * objective_s
        if wish is not None and wish.objective_s is not None:
            step_s = wish.objective_s
        return BusInstance(
            self._file.name,
            model.num_layers,
            model.total_layer_bytes,
            step_s=max(step_s / max(self._in_flight), self._published_computed_s),
            compute_s=self._published_computed_s / model.num_layers,
            min_interval=model.interval if wish is None else wish.min_interval,
            max_interval=self._max_interval if wish is None else wish.max_interval,
            has_objective=has_objective,
        )

    def _measure_copies(self) -> None:
        """What KV copies take of the bus, rounded up."""
        now_s = self._clock.now_s()
        seconds = now_s - self._copies_since_s
        if seconds < _COPIES_WINDOW_S:
            return
        unit = _COPIES_UNIT * self._file.bytes_per_s
        self._copied_bytes_per_s = unit * -(-self._copied_bytes // (unit * seconds))
        self._copied_bytes, self._copies_since_s = 0, now_s

    def _publish(self, use: BusUse) -> None:
        if use != self._published:
            self._file.publish(use)
            self._published = use

    def _follow(self) -> None:
        reading = self._table.read()
        if reading == self._followed:
            return
        self._followed = reading
        file, uses = self._file, self._table.uses
        bandwidth = self._bandwidth(uses)
        plan = coordinate([each.instance for each in uses if each.instance is not None], bandwidth)
        own = plan.of[file.name]
        assert own.interval is not None, "not all layers fit"
        if self._wish is not None:
            transfer_s = self._model.total_layer_bytes / own.bytes_per_s
            is_bounded = own.interval > self._wish.min_interval
            self._grant = LinkGrant(own.interval, transfer_s, is_bounded)
        streamed = [each.streamed for each in uses]
        plan = coordinate([each for each in streamed if each is not None], bandwidth)
        own = plan.of[file.name]
        if (self._fits and not plan.fits) or (not self._fits and plan.load <= _FITS_AGAIN):
            self._fits = plan.fits
            logger.log(
                logging.INFO if plan.fits else logging.WARNING,
                "the engines on the bus need %.0f %% of its bandwidth for their objectives",
                100 * plan.load,
            )
        self._is_failing = False
        self.load = plan.load
        self.share = own.bytes_per_s / file.bytes_per_s
        self._due = _Given(None if self._divides_memory else own.interval, self.share)

    def _bandwidth(self, uses: list[BusUse]) -> float:
        """What copies leave for weights."""
        full = self._file.bytes_per_s
        copied = sum(each.copied_bytes_per_s for each in uses)
        return max(full - copied, _LEAST_FOR_WEIGHTS * full)
