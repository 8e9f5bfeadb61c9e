"""An engine's part in coordinating the engines on its bus, between steps."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backfill.bus.file import BusFile, BusUse
from backfill.bus.throttle import Bus
from backfill.core.clock import Clock
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
_LEAST_FOR_WEIGHTS = 0.1  # of the bandwidth, however much is copied


@dataclass(frozen=True, slots=True)
class OffloadedModel:
    """What an engine can offload.

    Attributes:
        num_buffers: layers' worth of device memory.
        interval: the smallest one of use. Where the number of buffers is fixed this is the one that they are
            for: with a smaller one more is transferred, and the memory that it saves is used by nobody.
    """

    num_layers: int
    layer_bytes: int
    num_buffers: int
    interval: int

    @property
    def max_interval(self) -> int:
        """The largest interval that the device memory allows; there is one."""
        return max(
            interval
            for interval in range(1, self.num_layers + 1)
            if num_device_layers(self.num_layers, interval) <= self.num_buffers
        )


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
    """Publishes what this engine needs, and gives it the interval that follows from all needs.

    Every engine computes the same from the same table. So there is no leader, and an engine that dies is
    missed by nobody. Calls come from the thread of the engine. While the table cannot be used, the engine
    keeps its interval and share, and its steps go on.

    Where the memory of the weights can change, the plans of an engine say the interval, and the coordinator
    bounds it (``ask``). What others need of the bus while it changes follows from what is streamed.

    Args:
        set_interval: takes effect with the next step; None where plans say the interval.

    Attributes:
        share: of the bandwidth that this engine may use; 0 while it has no work.
        load: sum of what all need over the bandwidth. Above 1 not all objectives can be met.
    """

    def __init__(
        self,
        bus: Bus,
        model: OffloadedModel,
        clock: Clock,
        set_interval: Callable[[int], None] | None,
    ) -> None:
        self.share = 0.0
        self.load = 0.0
        self._bus = bus
        self._model = model
        self._max_interval = model.max_interval
        self._clock = clock
        self._set_interval = set_interval
        self._wish: LinkWish | None = None
        self._grant: LinkGrant | None = None
        self._streamed_interval: int | None = None
        self._computed_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._published_computed_s = 0.0
        self._published = BusUse()
        # For a computed time, an objective or a pace, and a wish.
        self._needs: tuple[tuple[float, float, bool, LinkWish | None], BusInstance] | None = None
        self._copied_bytes_per_s = 0.0
        self._copies_since: tuple[float, int] = clock.now_s(), bus.copies.num_bytes
        self._fits = True
        self._is_failing = False
        self._table = _Table(bus.file, clock)
        self._followed = self._bounded = 0  # readings that the interval and the least step are of
        self._least_step_s = 0.0

    @property
    def wait_s(self) -> float:
        """For which transfers waited for the bus."""
        return self._bus.wait_s

    @property
    def free_transfer_s(self) -> float:
        """See ``LinkBudget``."""
        return self._model.layer_bytes / self._bus.file.bytes_per_s

    def ask(self, wish: LinkWish) -> LinkGrant | None:
        """See ``LinkBudget``. What is wished is published with the next step."""
        self._wish = wish
        return self._grant

    def begin_step(self, objective_s: float, *, has_objective: bool = True) -> None:
        """Before a step that may take so long: use the interval that the needs of all allow.

        Args:
            has_objective: else this is a pace, which gives way to the objectives of others.
        """
        with self._may_fail():
            self._count_copies()
            streamed = None if self._wish is None else self._streamed_interval
            instance = self._instance(objective_s, has_objective)
            self._publish(BusUse(instance, self._copied_bytes_per_s, streamed))
            self._follow()
            self._is_failing = False

    def end_step(self, computed_s: float, interval: int | None = None) -> None:
        """A step took so long without the time for which layers waited for weights.

        Args:
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
                uses, name, model = self._table.uses, self._bus.file.name, self._model
                instances = [each.instance for each in uses if each.instance is not None]
                own = BusInstance(
                    name,
                    model.num_layers,
                    model.layer_bytes,
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
        needs_of = self._published_computed_s, objective_s, has_objective, wish
        if self._needs is not None and self._needs[0] == needs_of:
            return self._needs[1]
        layer_s = self._published_computed_s / model.num_layers
        step_s = OBJECTIVE_SHARE * objective_s
        if wish is not None and wish.objective_s is not None:
            step_s = wish.objective_s
        instance = BusInstance(
            self._bus.file.name,
            model.num_layers,
            model.layer_bytes,
            step_s=max(step_s, self._published_computed_s),
            compute_s=layer_s,
            min_interval=model.interval if wish is None else wish.min_interval,
            max_interval=self._max_interval if wish is None else wish.max_interval,
            has_objective=has_objective,
        )
        self._needs = needs_of, instance
        return instance

    def _count_copies(self) -> None:
        """What KV copies take of the bus, rounded up."""
        since_s, since_bytes = self._copies_since
        now_s, num_bytes = self._clock.now_s(), self._bus.copies.num_bytes
        if now_s - since_s < _COPIES_WINDOW_S:
            return
        unit = _COPIES_UNIT * self._bus.file.bytes_per_s
        self._copied_bytes_per_s = unit * -(-(num_bytes - since_bytes) // (unit * (now_s - since_s)))
        self._copies_since = now_s, num_bytes

    def _publish(self, use: BusUse) -> None:
        if use != self._published:
            self._bus.file.publish(use)
            self._published = use

    def _follow(self) -> None:
        reading = self._table.read()
        if reading == self._followed:
            return
        self._followed = reading
        file, uses = self._bus.file, self._table.uses
        bandwidth = self._bandwidth(uses)
        plan = coordinate([each.instance for each in uses if each.instance is not None], bandwidth)
        own = plan.of[file.name]
        assert own.interval is not None, "not all layers fit"
        if self._wish is not None:
            transfer_s = self._model.layer_bytes / own.bytes_per_s
            is_bounded = own.interval > self._wish.min_interval
            self._grant = LinkGrant(own.interval, transfer_s, is_bounded)
        streamed = [each.streamed for each in uses]
        plan = coordinate([each for each in streamed if each is not None], bandwidth)
        own = plan.of[file.name]
        if plan.fits != self._fits:
            self._fits = plan.fits
            logger.log(
                logging.INFO if plan.fits else logging.WARNING,
                "the engines on the bus need %.0f %% of its bandwidth for their objectives",
                100 * plan.load,
            )
        self.load = plan.load
        self.share = own.bytes_per_s / file.bytes_per_s
        self._bus.weights.set_share(self.share)
        if self._set_interval is not None:
            assert own.interval is not None
            self._set_interval(own.interval)

    def _bandwidth(self, uses: list[BusUse]) -> float:
        """What copies leave for weights."""
        full = self._bus.file.bytes_per_s
        copied = sum(each.copied_bytes_per_s for each in uses)
        return max(full - copied, _LEAST_FOR_WEIGHTS * full)
