"""Two engines with offloaded layers on one bus: figure 12 of Select-N's paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from backfill.costs.behaviour import NoiseSource
from backfill.offloading.coordinator import BusInstance, coordinate
from backfill.offloading.interval import offloaded_layers, smallest_interval
from backfill.simulation.device import HOST_S
from experiments.selectn.baselines import FLEXGEN, least_portion
from experiments.selectn.bus import BusEngine, run_beside
from experiments.selectn.model import (
    LINK_BYTES_PER_S,
    OUTPUT_TOKENS,
    OffloadedModel,
    PhaseLoad,
    StepTimes,
)
from experiments.selectn.result import ALONE, SELECT_N, Row, interval_row, model_of, portion_row

_PAIR_STEPS = 200  # of each pair of intervals that is tried on a shared bus


@dataclass(frozen=True, slots=True)
class ContentionUnit:
    """Two devices that decode on one bus (figure 12)."""

    models: tuple[str, str]
    load: PhaseLoad
    slo_s: float
    num_steps: int

    def rows(self) -> list[Row]:
        models = [model_of(name) for name in self.models]
        kv_tokens = self.load.batch_size * (self.load.length + OUTPUT_TOKENS)
        instances = [self._instance(model, kv_tokens) for model in models]
        alone = [self._alone(instance) for instance in instances]
        plan = coordinate(instances, LINK_BYTES_PER_S)
        chosen = [plan.of[instance.name].interval for instance in instances]
        exists = plan.fits and all(any(True for _ in instance.intervals) for instance in instances)
        optimum = self._optimum(models, instances) if exists else None
        rows = []
        for system, intervals in ((SELECT_N, chosen), (ALONE, alone)):
            times = self._run(models, intervals, [1.0, 1.0], self.num_steps)
            for index, model in enumerate(models):
                start = replace(self._start(index, system), exists=exists)
                if system == SELECT_N and exists:
                    best = None if optimum is None else optimum[index]
                    start = replace(start, searched=True, found=optimum is not None, optimum=best)
                rows.append(interval_row(start, model, self.load, intervals[index], times[index]))
        portions = []
        for model in models:
            portion = FLEXGEN["flexgen-slo"].portion(model, self.load, self.slo_s, 0.0, len(models))
            portions.append(min(1.0, max(portion, least_portion(model, kv_tokens))))
        times = self._run(models, [1, 1], portions, self.num_steps)
        for index, model in enumerate(models):
            start = self._start(index, "flexgen-slo")
            rows.append(portion_row(start, model, self.load, portions[index], times[index]))
        return rows

    def _start(self, index: int, system: str) -> Row:
        return Row(
            group=f"{self.models[index]} beside {self.models[1 - index]}, {1000 * self.slo_s:g} ms",
            x=float(self.load.batch_size),
            system=system,
            batch_size=self.load.batch_size,
            slo_s=self.slo_s,
        )

    def _instance(self, model: OffloadedModel, kv_tokens: int) -> BusInstance:
        num_layers, times = model.shape.num_layers, model.layer_times(self.load)
        fitting = [i for i in range(1, num_layers + 1) if model.kv_tokens(i) >= kv_tokens]
        most = max(fitting, default=1)
        return BusInstance(
            model.shape.name,
            num_layers,
            model.shape.layer_bytes,
            max(self.slo_s, times.resident_step_s),
            times.compute_s,
            times.other_s,
            min_interval=smallest_interval(times, self.slo_s) or num_layers,
            max_interval=None if model.kv_tokens(None) >= kv_tokens else most,
        )

    def _alone(self, instance: BusInstance) -> int | None:
        """The interval that it would have with the bus to itself, or what fits if that does not."""
        return coordinate([instance], LINK_BYTES_PER_S).of[instance.name].interval

    def _run(
        self,
        models: Sequence[OffloadedModel],
        intervals: Sequence[int | None],
        portions: Sequence[float],
        num_steps: int,
    ) -> list[StepTimes]:
        engines = []
        for seed, (model, interval, portion) in enumerate(zip(models, intervals, portions, strict=True), 1):
            layer_s = model.compute_s(self.load) / model.shape.num_layers
            engines.append(
                BusEngine(
                    model.shape.num_layers,
                    interval,
                    portion * model.shape.layer_bytes,
                    _draws(NoiseSource(model.noise, seed), layer_s),
                    HOST_S,
                )
            )
        return run_beside(engines, LINK_BYTES_PER_S, num_steps)

    def _optimum(
        self, models: Sequence[OffloadedModel], instances: Sequence[BusInstance]
    ) -> tuple[int | None, int | None] | None:
        """The pair that saves the most memory of those whose simulated P99s are within the objective.

        Pairs are tried from the most memory on. Those whose bytes alone take longer than the objective are
        left out: no schedule could meet it.

        Returns: None where no pair is within it; None in a pair is no offloading.
        """
        first, second = instances

        def offered_bytes(instance: BusInstance, interval: int | None) -> int:
            return len(offloaded_layers(instance.num_layers, interval)) * instance.layer_bytes

        pairs = sorted(
            ((one, two) for one in _fitting(first) for two in _fitting(second)),
            key=lambda pair: (
                -(first.saved_bytes(pair[0]) + second.saved_bytes(pair[1])),
                offered_bytes(first, pair[0]) + offered_bytes(second, pair[1]),
            ),
        )
        for one, two in pairs:
            offered = offered_bytes(first, one) + offered_bytes(second, two)
            if offered > self.slo_s * LINK_BYTES_PER_S:
                continue
            if all(
                times.p99_s <= self.slo_s for times in self._run(models, [one, two], [1.0, 1.0], _PAIR_STEPS)
            ):
                return one, two
        return None


def _draws(source: NoiseSource, layer_s: float) -> Callable[[], float]:
    return lambda: layer_s * source.draw()


def _fitting(instance: BusInstance) -> list[int | None]:
    """Intervals that fit, and None if all layers do; those below the record's are tried too."""
    most = instance.max_interval or instance.num_layers
    kept: list[int | None] = list(range(1, most + 1))
    return kept if instance.max_interval is not None else [*kept, None]
