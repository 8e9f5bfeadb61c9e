"""Select-N's evaluation: figures 9 to 12 and 14 of its paper, on a simulated A10."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from backfill.offloading.interval import smallest_interval
from experiments.selectn.baselines import FLEXGEN, device_layers
from experiments.selectn.model import (
    OUTPUT_TOKENS,
    OffloadedModel,
    PhaseLoad,
    StepTimes,
    in_grains,
)
from experiments.selectn.result import (
    DEEPSPEED,
    LARGEST_BATCH,
    OTHER,
    RESIDENT,
    SELECT_N,
    Row,
    interval_row,
    model_of,
    portion_row,
)

_MOST_REQUESTS = 256


class Unit(Protocol):
    """A part of a figure that runs by itself."""

    def rows(self) -> list[Row]: ...


@dataclass(frozen=True, slots=True)
class LoadUnit:
    """One load with objectives of some slacks (figures 9 and 10).

    Attributes:
        systems: besides ``select-n``.
        x_is_batch: points are batch sizes instead of slacks.
    """

    model: str
    load: PhaseLoad
    slacks: tuple[float, ...]
    systems: tuple[str, ...]
    num_steps: int
    x_is_batch: bool = False

    def rows(self) -> list[Row]:
        model, load = model_of(self.model), self.load
        of_interval = every_interval(model, load, self.num_steps)
        resident = model.run(load, None, num_steps=self.num_steps)
        record = model.record([load])
        rows = []
        for slack in self.slacks:
            slo_s = objective_s(model, load, slack)
            row = Row(
                group=f"{self.model}, slack {slack:.0%}, {load.phase}"
                if self.x_is_batch
                else f"{self.model} {load.phase}",
                x=float(load.batch_size) if self.x_is_batch else slack,
                system=SELECT_N,
                batch_size=load.batch_size,
                slo_s=slo_s,
            )
            chosen = record.smallest_interval(*load, slo_s)
            times = resident if chosen is None else of_interval[chosen]
            rows.append(interval_row(searched(row, of_interval, chosen, slo_s), model, load, chosen, times))
            for system in self.systems:
                other = replace(row, system=system)
                if system in FLEXGEN:
                    portion = FLEXGEN[system].portion(model, load, slo_s, slack)
                    times = model.run(load, 1, num_steps=self.num_steps, portion=portion)
                    rows.append(portion_row(other, model, load, portion, times))
                else:
                    interval = 1 if system == DEEPSPEED else None
                    times = of_interval[1] if interval else resident
                    rows.append(interval_row(other, model, load, interval, times))
        return rows


@dataclass(frozen=True, slots=True)
class IntervalUnit:
    """Every interval with one objective (figure 11)."""

    model: str
    load: PhaseLoad
    slack: float
    num_steps: int

    def rows(self) -> list[Row]:
        model, load = model_of(self.model), self.load
        of_interval = every_interval(model, load, self.num_steps)
        slo_s = objective_s(model, load, self.slack)
        chosen = model.record([load]).smallest_interval(*load, slo_s)
        resident = model.run(load, None, num_steps=self.num_steps)
        rows = []
        for interval, times in [*of_interval.items(), (None, resident)]:
            row = Row(
                group=f"{self.model}, slack {self.slack:.0%}, {load.phase}",
                x=float(interval or model.shape.num_layers + 1),
                system=SELECT_N if interval == chosen else RESIDENT if interval is None else OTHER,
                batch_size=load.batch_size,
                slo_s=slo_s,
            )
            if interval == chosen:
                row = searched(row, of_interval, chosen, slo_s)
            rows.append(interval_row(row, model, load, interval, times))
        return rows


@dataclass(frozen=True, slots=True)
class BatchUnit:
    """The largest decode batch that objective and memory allow (figure 10b, section 5.6)."""

    model: str
    length: int
    slo_s: float
    systems: tuple[str, ...]
    num_steps: int

    def rows(self) -> list[Row]:
        model = model_of(self.model)
        return [row for system in (SELECT_N, *self.systems) if (row := self._row(model, system)) is not None]

    def _row(self, model: OffloadedModel, system: str) -> Row | None:
        """None where not one request is served within the objective."""
        found: tuple[PhaseLoad, int | None, float | None] | None = None
        for batch_size in range(1, _MOST_REQUESTS + 1):
            load = PhaseLoad("decode", batch_size, self.length)
            times = model.layer_times(load)
            if times.resident_step_s > self.slo_s:
                break
            needed = batch_size * (self.length + OUTPUT_TOKENS)
            interval, portion = None, None
            if system in FLEXGEN:
                slack = self.slo_s / times.resident_step_s - 1.0
                portion = FLEXGEN[system].portion(model, load, self.slo_s, slack)
                room = model.kv_tokens_beside(device_layers(model, portion))
            else:
                if system != RESIDENT:
                    interval = 1 if system == DEEPSPEED else smallest_interval(times, self.slo_s)
                room = model.kv_tokens(interval)
            if needed <= room:
                found = load, interval, portion
        if found is None:
            return None
        load, interval, portion = found
        row = Row(
            group=f"{self.model} decode, {LARGEST_BATCH}",
            x=self.slo_s,
            system=system,
            batch_size=load.batch_size,
            slo_s=self.slo_s,
        )
        if portion is not None:
            times_run = model.run(load, 1, num_steps=self.num_steps, portion=portion)
            return portion_row(row, model, load, portion, times_run)
        if system == SELECT_N:
            row = searched(row, self._tried(model, load, interval), interval, self.slo_s)
        return interval_row(row, model, load, interval, model.run(load, interval, num_steps=self.num_steps))

    def _tried(self, model: OffloadedModel, load: PhaseLoad, chosen: int | None) -> dict[int, StepTimes]:
        """Intervals from 1 on, until the chosen one and one within the objective are among them."""
        tried: dict[int, StepTimes] = {}
        for interval in range(1, model.shape.num_layers + 1):
            tried[interval] = model.run(load, interval, num_steps=self.num_steps)
            if interval >= (chosen or 1) and best_interval(tried, self.slo_s) is not None:
                break
        return tried


@dataclass(frozen=True, slots=True)
class MaxLengthUnit:
    """Tokens of KV at each interval (figure 14)."""

    model: str

    def rows(self) -> list[Row]:
        model = model_of(self.model)
        num_layers = model.shape.num_layers
        return [
            Row(
                group=self.model,
                x=float(interval or num_layers + 1),
                system=RESIDENT if interval is None else OTHER,
                batch_size=0,
                interval=interval,
                host_bytes=model.host_bytes(interval),
                kv_tokens=model.kv_tokens(interval),
                fits=model.kv_tokens(interval) > 0,
            )
            for interval in (*range(1, num_layers + 1), None)
        ]


def every_interval(model: OffloadedModel, load: PhaseLoad, num_steps: int) -> dict[int, StepTimes]:
    intervals = range(1, model.shape.num_layers + 1)
    return {interval: model.run(load, interval, num_steps=num_steps) for interval in intervals}


def objective_s(model: OffloadedModel, load: PhaseLoad, slack: float) -> float:
    """What the slack allows over the P99 without offloading, as the record knows it."""
    return in_grains((1.0 + slack) * model.layer_times(load).resident_step_s)


def best_interval(of_interval: dict[int, StepTimes], slo_s: float) -> int | None:
    """The smallest interval whose P99 is within the objective."""
    return min((each for each, times in of_interval.items() if times.p99_s <= slo_s), default=None)


def searched(row: Row, of_interval: dict[int, StepTimes], chosen: int | None, slo_s: float) -> Row:
    """The row of the interval that the record gives, and what a look at every interval says of it."""
    smaller = of_interval.get((chosen or 0) - 1)
    return replace(
        row,
        searched=True,
        optimum=best_interval(of_interval, slo_s),
        smaller_p99_s=None if smaller is None else smaller.p99_s,
    )
