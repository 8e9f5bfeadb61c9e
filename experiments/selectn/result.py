"""Rows of Select-N's figures, and the paper's own beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

from experiments.selectn.baselines import FLEXGEN, device_layers
from experiments.selectn.model import (
    LINK_BYTES_PER_S,
    SHAPES,
    OffloadedModel,
    PhaseLoad,
    StepTimes,
    slow_ratio,
)

SELECT_N, DEEPSPEED, RESIDENT, ALONE = "select-n", "deepspeed", "resident", "uncoordinated"
OTHER = "interval"  # one that was not chosen
LARGEST_BATCH = "largest batch"  # of a group whose points are objectives
TOLERANCE = 1.02  # of the objective, within which a P99 has to be


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One system at one point of a figure.

    Attributes:
        group: what the points of one curve have in common.
        x: slack of the objective, batch size, interval or objective in seconds, by the figure.
        interval: None where every layer is resident, or where a portion of each is offloaded.
        portion: of every layer, where that is what a system offloads.
        slo_s: objective of a step, host time included.
        p99_s: of steps; ``tpot_p99_s``: of the mean over an output, of decode.
        searched: every interval was tried. Then ``optimum`` is the smallest whose simulated P99 is within the
            objective, None without one; on a shared bus the one of the pair that saves most memory, where
            None is no offloading.
        found: whether some pair was within the objective on a shared bus.
        exists: an interval, or no offloading, holds the objective and fits, as far as this was looked for.
        smaller_p99_s: with the next smaller interval.
        host_bytes: weights in host memory.
        kv_tokens: KV that fits on the device; negative if the weights do not fit.
        fits: the KV of the batch fits.
        tokens_per_s: prompt tokens of prefill, output tokens of decode.
    """

    group: str
    x: float
    system: str
    batch_size: int
    interval: int | None = None
    portion: float | None = None
    slo_s: float | None = None
    p99_s: float | None = None
    tpot_p99_s: float | None = None
    searched: bool = False
    optimum: int | None = None
    found: bool = True
    exists: bool = True
    smaller_p99_s: float | None = None
    host_bytes: float = 0.0
    kv_tokens: int = 0
    fits: bool = True
    tokens_per_s: float = 0.0

    @property
    def over_slo(self) -> float | None:
        return None if self.p99_s is None or self.slo_s is None else self.p99_s / self.slo_s

    @property
    def smaller_over_slo(self) -> float | None:
        return None if self.smaller_p99_s is None or self.slo_s is None else self.smaller_p99_s / self.slo_s


def model_of(name: str) -> OffloadedModel:
    return OffloadedModel(SHAPES[name])


def interval_row(
    row: Row, model: OffloadedModel, load: PhaseLoad, interval: int | None, times: StepTimes
) -> Row:
    kv_tokens = model.kv_tokens(interval)
    return replace(
        row,
        interval=interval,
        p99_s=times.p99_s,
        tpot_p99_s=times.tpot_p99_s if load.phase == "decode" else None,
        host_bytes=model.host_bytes(interval),
        kv_tokens=kv_tokens,
        fits=load.kv_tokens <= kv_tokens,
        tokens_per_s=load.num_tokens / times.mean_s,
    )


def portion_row(row: Row, model: OffloadedModel, load: PhaseLoad, portion: float, times: StepTimes) -> Row:
    num_layers = model.shape.num_layers
    kv_tokens = model.kv_tokens_beside(device_layers(model, portion))
    return replace(
        row,
        portion=portion,
        p99_s=times.p99_s,
        tpot_p99_s=times.tpot_p99_s if load.phase == "decode" else None,
        host_bytes=portion * num_layers * model.shape.layer_bytes,
        kv_tokens=kv_tokens,
        fits=load.kv_tokens <= kv_tokens,
        tokens_per_s=load.num_tokens / times.mean_s,
    )


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of the paper, beside ours."""

    name: str
    ours: str
    paper: str


@dataclass(frozen=True, slots=True)
class SelectnResult:
    """A figure.

    Attributes:
        settings: the device and the baselines, as text.
    """

    scenario: str
    rows: tuple[Row, ...]
    settings: tuple[str, ...]

    @classmethod
    def of_rows(cls, scenario: str, rows: Sequence[Row]) -> SelectnResult:
        return cls(scenario, tuple(rows), settings(rows))

    @property
    def groups(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.group, []).append(row)
        return found

    def of(self, system: str) -> list[Row]:
        return [row for row in self.rows if row.system == system]

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": list(self.settings),
            "rows": [
                {**asdict(row), "over_slo": row.over_slo, "smaller_over_slo": row.smaller_over_slo}
                for row in self.rows
            ],
            "compared": [asdict(each) for each in compare(self)],
        }


def settings(rows: Sequence[Row]) -> tuple[str, ...]:
    """What the systems of these rows are, each a sentence."""
    systems = {row.system for row in rows}
    ratio = slow_ratio(model_of("opt-6.7b").noise)
    texts = {
        SELECT_N: f"smallest interval of the record, whose layers take {ratio:.3f} of their typical time",
        DEEPSPEED: "interval 1: all layers offloaded, the next one fetched during each",
        RESIDENT: "no offloading",
        ALONE: "each engine's interval as if it had the bus to itself",
        "flexgen": "portion of each layer hidden in peak roofline times (1 + slack)",
        "flexgen-flops": "the same with FLOPs at the peak alone",
        "flexgen-slo": "portion whose transfers take the objective, bus divided by its devices",
    }
    link = f"A10: {LINK_BYTES_PER_S / 1e9:g} GB/s to the host; peaks of 125 TFLOP/s and 600 GB/s in estimates"
    return (link, *(f"{name}: {text}" for name, text in texts.items() if name in systems))


def compare(result: SelectnResult) -> list[Compared]:
    """The paper's figures that its text states, beside those of these rows."""
    ours = result.of(SELECT_N)
    found: list[Compared] = []
    if searched := [row for row in ours if row.searched]:
        checked = [row for row in searched if row.interval is not None or row.optimum is not None]
        same = sum(row.found and row.interval == row.optimum for row in checked)
        found.append(Compared("interval is the exhaustive optimum", f"{same} of {len(checked)}", "all"))
        worst = max(row.over_slo or 0.0 for row in searched)
        found.append(Compared("P99 over SLO, worst", f"{worst:.3f}", "at most 1"))
    smaller = [row.smaller_over_slo for row in ours if row.smaller_over_slo is not None]
    if smaller:
        found.append(Compared("the same, next smaller interval, least", f"{min(smaller):.3f}", "above 1"))
    if result.scenario == "selectn-slo":
        decodes = [row for row in result.of(DEEPSPEED) if row.group.endswith("decode")]
        worst = max((row.over_slo or 0.0 for row in decodes), default=0.0)
        found.append(Compared("deepspeed P99 over SLO, decode, worst", f"{worst:.2f}", "8.08"))
        found += _ratio(result, "throughput", DEEPSPEED, "decode", _throughput, "6.8 to 8.23")
    if result.scenario == "selectn-memory":
        for phase in ("prefill", "decode"):
            for system in FLEXGEN:
                found += _ratio(result, "host memory", system, phase, _host, "2.37 (figure 5: 2.1)")
        for system in FLEXGEN:
            found += _ratio(result, "throughput", system, LARGEST_BATCH, _throughput, "1.85 at best")
    if result.scenario == "selectn-interval":
        paper = {"opt-6.7b, slack 50%, prefill": "3", "opt-6.7b, slack 50%, decode": "8"}
        found += [
            Compared(f"interval, {row.group}", str(row.interval), paper.get(row.group, "")) for row in ours
        ]
    if result.scenario == "selectn-contention":
        held = sum((row.over_slo or 0.0) <= TOLERANCE for row in ours if row.exists)
        exist = sum(row.exists for row in ours)
        found.append(Compared("engines with an interval, SLO held", f"{held} of {exist}", "all"))
        found.append(Compared("engines without any", str(len(ours) - exist), "0 of 6"))
        for group in result.groups:
            found += _ratio(result, "tokens/s", "flexgen-slo", group, _throughput, "up to 2.9")
    return found


_throughput: Callable[[Row], float] = attrgetter("tokens_per_s")
_host: Callable[[Row], float] = attrgetter("host_bytes")


def _ratio(
    result: SelectnResult, name: str, system: str, group: str, figure: Callable[[Row], float], paper: str
) -> list[Compared]:
    """Of ``select-n`` over a system: the least and the most of the groups whose names end so."""
    others = {(row.group, row.x): row for row in result.of(system)}
    ratios = [
        figure(row) / figure(other)
        for row in result.of(SELECT_N)
        if row.group.endswith(group)
        and (other := others.get((row.group, row.x))) is not None
        and figure(other) > 0
    ]
    if not ratios:
        return []
    return [Compared(f"{name} over {system}, {group}", f"{min(ratios):.2f} to {max(ratios):.2f}", paper)]
