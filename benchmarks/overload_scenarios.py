"""Compares policies where objectives collide, on the virtual clock: no model, no device, no server.

    python benchmarks/overload_scenarios.py [--policies fcfs,slo] [--noise 0.06] [--seeds 3]

Steps take what a made-up cost model says, of the order of a 135M model on two CPU cores, times noise that the
engine cannot predict, and the host takes 2 ms between two of them. The server's objectives are a TTFT of 1 s
and a TPOT of 0.15 s. Requests go straight to the engine: none is refused, whatever objectives it brings.

- burst: 200 chats of 32 tokens in and 32 out in one instant.
- closed-loop: 64 requests of 256 to 512 in and 32 to 128 out kept in flight, beside one of 64 in and 48 out a
  second. Also under fcfs with static limits of concurrency, of which the best is named.
- open-loop: chats of 256 in and 64 out at 0.5 to 1.5 times what fcfs completes, CV 1 and 4, with and without
  offline work. Offline requests have 256 to 512 in and 32 to 128 out here and below.
- long-prompt: every 2 s a prompt of 2,040 tokens, and at the same instant one of 50 tokens that asks for a
  TTFT of 0.1 s.
- tight-client: one client, always with one request of 64 in and 64 out in flight, asks for a TPOT of 0.05 s
  beside chats at half the capacity and offline work; and the same chats without it.
- promoted: 48 requests of 400 in and 224 out kept in flight, half of the KV pool, beside offline work in time
  for its completion window and too late for it (slo promotes that).
- full-steps: 60, 100 and 150 requests of 16 in and 224 out kept in flight, and a prompt of 400 a second. Here
  and in promoted the first requests arrive over 8 s.

Figures are defined in ``backfill/simulation/metrics.py``: a request meets both objectives if its TTFT and the
mean of its gaps do. Tokens/s, in and out, are those of the whole server while the load lasts (the burst: for
5 s). /alone and /fcfs divide the figure before them by that of online-only, which serves no offline work, and
by that of fcfs. With --seeds N each figure is the median of N. Ends with one JSON object on a line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import get_args

import clone  # noqa: F401
import numpy as np
from mixed_replay import Flood, Kind, KindFigures, Load, figures_of, replay
from observation import noise_of_ratios

from backfill.core.config import PolicyName, SchedulerConfig
from backfill.core.measured_on import MeasuredOn
from backfill.core.slo import SLO
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.hardware import HardwareProfile
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.profile import CostProfile, FitError
from backfill.simulation.replay import Arrival, Lengths
from backfill.simulation.study import FIRST_REPORTED_SEED
from experiments.workloads import gamma_workload

POLICIES = "online-only,fcfs,priority,slo"
STATIC_LIMITS = (8, 16, 32, 64, 128)
SERVER_SLO = SLO(ttft_s=1.0, tpot_s=0.15)
HOST_S = 0.002
HARDWARE = HardwareProfile(
    name="cpu",
    costs=CostProfile(
        key=MeasuredOn("135m", "cpu", "bfloat16"),
        quality="full",
        num_layers=30,
        cost=CostModel(
            rows_s=PiecewiseLinear((1, 8, 64, 256, 2048), (0.012, 0.014, 0.032, 0.100, 0.76)),
            sampled_s=PiecewiseLinear((1, 256), (0.002, 0.03)),
            request_s=2e-5,
            prefill_pair_s=1.2e-8,
            prefill_context_s=1e-6,
            decode_context_s=6e-7,
        ),
        error=FitError(0.0, 0.0, 0),
        known_tokens=8192,
        known_chunk_tokens=2048,
        copies=None,
        provenance="made up: of the order of a 135M model on two CPU cores",
    ),
    kv_tokens=44_800,
    kv_bytes_per_token=23_040,
    max_model_len=8192,
)

_CHAT = Lengths(256, 64)
_NUM_NOISE_RATIOS = 2000
_NUM_CAPACITY_CHATS = 300
_NUM_LENGTHS = 2000
_RAMP_S = 8.0
# By whose figure each contender's is divided: what offline work costs, and what it brings.
_REFERENCES = {
    "ttft_p99_s": "online-only",
    "itl_p99_s": "online-only",
    "attainment": "online-only",
    "offline_tok_s": "fcfs",
}
_COLUMNS = {
    "ttft_p50_s": "TTFT P50",
    "ttft_p99_s": "TTFT P99",
    "ttft_p99_s_over_online_only": "/alone",
    "itl_p50_s": "gap P50",
    "itl_p99_s": "gap P99",
    "itl_p99_s_over_online_only": "/alone",
    "ttft_attainment": "met TTFT",
    "attainment": "met both",
    "attainment_over_online_only": "/alone",
    "online_tok_s": "online tok/s",
    "offline_tok_s": "offline tok/s",
    "offline_tok_s_over_fcfs": "/fcfs",
}


@dataclass(frozen=True, slots=True)
class Setup:
    """What a scenario's loads are made with.

    Attributes:
        scale: of all durations, and of the burst.
        capacity_rps: chats completed per second by fcfs when there are always enough of them.
    """

    scale: float
    seed: int
    capacity_rps: float

    def drawn_lengths(self) -> tuple[Lengths, ...]:
        rng = np.random.default_rng(self.seed)
        inputs, outputs = rng.integers(256, 513, _NUM_LENGTHS), rng.integers(32, 129, _NUM_LENGTHS)
        return tuple(Lengths(int(i), int(o)) for i, o in zip(inputs, outputs, strict=True))

    def chats(self, load: float, cv: float, duration_s: float) -> Kind:
        """Chats at ``load`` times the capacity."""
        workload = gamma_workload(load * self.capacity_rps, cv, duration_s, _CHAT, offline=(), seed=self.seed)
        return Kind("chats", workload.online)

    def offline(self, window_s: float | None = None) -> Flood:
        return Flood(self.drawn_lengths(), window_s)


Table = Mapping[str, Mapping[str, KindFigures]]
"""Figures by row, which names a load and one of its kinds, and by contender."""


def burst(setup: Setup) -> dict[str, Load]:
    count = max(2, round(200 * setup.scale))
    return {"": Load([Kind(f"{count} at once", [Arrival(0.0, Lengths(32, 32))] * count)], 5.0)}


def closed_loop(setup: Setup) -> dict[str, Load]:
    duration_s, lengths = 60.0 * setup.scale, setup.drawn_lengths()
    first = [Arrival(0.0, each) for each in lengths[:64]]
    return {
        "": Load(
            [
                Kind("one a second", _every(1.0, Lengths(64, 48), duration_s)),
                Kind("64 in flight", first, follow=lengths[64:]),
            ],
            duration_s,
        )
    }


def open_loop(setup: Setup) -> dict[str, Load]:
    duration_s = 24.0 * setup.scale
    return {
        f"{load:g} x capacity, CV {cv:g}{', offline work' if has_flood else ''}": Load(
            [setup.chats(load, cv, duration_s)], duration_s, setup.offline() if has_flood else Flood()
        )
        for has_flood in (False, True)
        for cv in (1.0, 4.0)
        for load in (0.5, 0.8, 1.0, 1.25, 1.5)
    }


def long_prompt(setup: Setup) -> dict[str, Load]:
    duration_s = 40.0 * setup.scale
    urgent = SLO(ttft_s=0.1, tpot_s=SERVER_SLO.tpot_s)
    return {
        "": Load(
            [
                Kind("2,040 tokens", _every(2.0, Lengths(2040, 8), duration_s)),
                Kind("50 tokens, TTFT 0.1 s", _every(2.0, Lengths(50, 8), duration_s), slo=urgent),
            ],
            duration_s,
        )
    }


def tight_client(setup: Setup) -> dict[str, Load]:
    duration_s = 30.0 * setup.scale
    chats, lengths = setup.chats(0.5, 1.0, duration_s), Lengths(64, 64)
    tight = Kind(
        "tight client",
        [Arrival(0.0, lengths)],
        slo=SLO(SERVER_SLO.ttft_s, 0.05),
        follow=(lengths,),
    )
    return {
        "without": Load([chats], duration_s, setup.offline()),
        "with": Load([chats, tight], duration_s, setup.offline()),
    }


def promoted(setup: Setup) -> dict[str, Load]:
    duration_s = 30.0 * setup.scale
    return {
        label: Load([_decodes(48, Lengths(400, 224))], duration_s, setup.offline(window_s))
        for label, window_s in (("in time", 86_400.0), ("too late", 0.01))
    }


def full_steps(setup: Setup) -> dict[str, Load]:
    duration_s = 20.0 * setup.scale
    prompts = Kind("prompts", _every(1.0, Lengths(400, 8), duration_s))
    return {
        str(count): Load([_decodes(count, Lengths(16, 224)), prompts], duration_s) for count in (60, 100, 150)
    }


SCENARIOS: dict[str, Callable[[Setup], dict[str, Load]]] = {
    "burst": burst,
    "closed-loop": closed_loop,
    "open-loop": open_loop,
    "long-prompt": long_prompt,
    "tight-client": tight_client,
    "promoted": promoted,
    "full-steps": full_steps,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", type=_names_among(get_args(PolicyName)), default=POLICIES)
    parser.add_argument("--scenarios", type=_names_among(SCENARIOS), default=",".join(SCENARIOS))
    parser.add_argument(
        "--noise", type=_number(0.0, 1.0), default=0.0, help="of steps: standard deviation of the log"
    )
    parser.add_argument("--seeds", type=int, choices=range(1, 101), default=1, metavar="N")
    parser.add_argument("--scale", type=_number(0.01, 100.0), default=1.0, help="of all durations")
    args = parser.parse_args()
    result: dict[str, object] = {"benchmark": "overload_scenarios", "noise": args.noise}
    result |= {"num_seeds": args.seeds, "scale": args.scale}
    behaviour = behaviour_of(args.noise)
    for scenario in args.scenarios:
        contenders = {name: scheduler_config(name) for name in args.policies}
        limits = static_limits() if scenario == "closed-loop" else {}
        tables = []
        for seed in range(FIRST_REPORTED_SEED, FIRST_REPORTED_SEED + args.seeds):
            print(f"{scenario}, seed {seed}", file=sys.stderr, flush=True)
            loads = SCENARIOS[scenario](Setup(args.scale, seed, capacity_rps(behaviour, seed)))
            tables.append(run(loads, {**contenders, **limits}, behaviour, seed))
        table = median_table(tables)
        print_table(scenario, table)
        result[scenario] = {
            row: {name: {**asdict(each), **ratios(by_name, each)} for name, each in by_name.items()}
            for row, by_name in table.items()
        }
        if limits:
            result["best_static_limit"] = best = best_of(limits, table)
            print(f"  best static limit: {best} (its worse kind meets both objectives most often)")
        print(flush=True)
    print(json.dumps(result))


def behaviour_of(noise: float) -> DeviceBehaviour:
    """Args: noise: standard deviation of the logarithm of a step's time over its typical time."""
    scores = np.random.default_rng(0).standard_normal(_NUM_NOISE_RATIOS)
    step_noise = noise_of_ratios(np.exp(noise * scores).tolist())
    return DeviceBehaviour(HARDWARE.costs.cost, noise=step_noise, host_s=HOST_S)


@cache
def capacity_rps(behaviour: DeviceBehaviour, seed: int) -> float:
    """Chats completed per second by fcfs, of ``_NUM_CAPACITY_CHATS`` that are there from the start."""
    kind = Kind("chats", [Arrival(0.0, _CHAT)] * _NUM_CAPACITY_CHATS)
    outcome = replay(scheduler_config("fcfs"), Load([kind], 1.0), HARDWARE, behaviour, seed=seed)
    return _NUM_CAPACITY_CHATS / max(record.token_at_s[-1] for record in outcome.records[kind.name])


def scheduler_config(policy: PolicyName, max_num_seqs: int = 256) -> SchedulerConfig:
    return SchedulerConfig(
        policy=policy,
        max_num_seqs=max_num_seqs,
        ttft_slo=SERVER_SLO.ttft_s,
        tpot_slo=SERVER_SLO.tpot_s,
        checkpointing="none",
    )


def static_limits() -> dict[str, SchedulerConfig]:
    return {f"fcfs, {limit} seqs": scheduler_config("fcfs", limit) for limit in STATIC_LIMITS}


def run(
    loads: Mapping[str, Load],
    contenders: Mapping[str, SchedulerConfig],
    behaviour: DeviceBehaviour,
    seed: int,
) -> Table:
    table: dict[str, dict[str, KindFigures]] = {}
    for label, load in loads.items():
        for name, config in contenders.items():
            outcome = replay(config, load, HARDWARE, behaviour, seed=seed)
            for kind in load.kinds:
                row = ": ".join(filter(None, (label, kind.name)))
                table.setdefault(row, {})[name] = figures_of(outcome, kind, SERVER_SLO)
    return table


def median_table(tables: Sequence[Table]) -> Table:
    """Each figure's median over tables of the same rows and contenders."""

    def median(row: str, name: str) -> KindFigures:
        figures = [asdict(table[row][name]) for table in tables]
        return KindFigures(
            **{field: statistics.median(each[field] for each in figures) for field in figures[0]}
        )

    return {row: {name: median(row, name) for name in by_name} for row, by_name in tables[0].items()}


def ratios(by_name: Mapping[str, KindFigures], figures: KindFigures) -> dict[str, float | None]:
    """A row's figures over those of other contenders; None where these did not run or have 0."""

    def over(field: str, reference: str) -> float | None:
        divisor = getattr(by_name[reference], field) if reference in by_name else 0.0
        return getattr(figures, field) / divisor if divisor else None

    return {
        f"{field}_over_{reference.replace('-', '_')}": over(field, reference)
        for field, reference in _REFERENCES.items()
    }


def best_of(names: Iterable[str], table: Table) -> str:
    """The contender whose worse kind meets both objectives most often; of equals, the lowest TTFT P99."""

    def merit(name: str) -> tuple[float, float]:
        figures = [by_name[name] for by_name in table.values()]
        return min(each.attainment for each in figures), -max(each.ttft_p99_s for each in figures)

    return max(names, key=merit)


def print_table(scenario: str, table: Table) -> None:
    widths = [max(8, len(title) + 2) for title in _COLUMNS.values()]
    titles = zip(_COLUMNS.values(), widths, strict=True)
    print(f"{scenario:20}" + "".join(f"{title:>{width}}" for title, width in titles))
    for row, by_name in table.items():
        print(f"  {row}")
        for name, figures in by_name.items():
            values = {**asdict(figures), **ratios(by_name, figures)}
            cells = zip((_text(values[column]) for column in _COLUMNS), widths, strict=True)
            print(f"    {name:16}" + "".join(f"{cell:>{width}}" for cell, width in cells))


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3f}"


def _every(period_s: float, lengths: Lengths, duration_s: float) -> list[Arrival]:
    """Arrivals from half a period on, one at least."""
    count = max(1, round(duration_s / period_s))
    return [Arrival((index + 0.5) * period_s, lengths) for index in range(count)]


def _decodes(count: int, lengths: Lengths) -> Kind:
    """So many requests kept in flight, the first of which arrive evenly over ``_RAMP_S``."""
    arrivals = [Arrival(_RAMP_S * index / count, lengths) for index in range(count)]
    return Kind(f"{count} decodes", arrivals, follow=(lengths,))


def _names_among(known: Iterable[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there are {', '.join(known)}")
        return list(dict.fromkeys(given))

    return names


def _number(least: float, most: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be from {least:g} to {most:g}, got {text}")
        return value

    return number


if __name__ == "__main__":
    main()
