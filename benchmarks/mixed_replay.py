"""A replay on the virtual clock of several kinds of online requests, in open and closed loops."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from in_process import check_no_prefix_hits

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.slo import SLO
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.hardware import HardwareProfile
from backfill.engine.engine import Engine
from backfill.engine.messages import TokenOutput
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.simulation.device import executor_info
from backfill.simulation.metrics import percentile
from backfill.simulation.replay import Arrival, Lengths, OnlineRecord, Replay, Workload


@dataclass(frozen=True, slots=True)
class Kind:
    """Online requests that are reported together.

    Attributes:
        arrivals: in order, in seconds from the start.
        slo: what they ask for and are measured by; None: the server's.
        follow: of a closed loop: when one of the requests ends, one of the next of these lengths is sent;
            they repeat. Empty for an open loop.
    """

    name: str
    arrivals: Sequence[Arrival]
    slo: SLO | None = None
    follow: Sequence[Lengths] = ()


@dataclass(frozen=True, slots=True)
class Flood:
    """Offline work without end.

    Attributes:
        lengths: of its requests, which repeat; empty for no work.
        window_s: completion window of each request; None for none.
    """

    lengths: tuple[Lengths, ...] = ()
    window_s: float | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What a server gets. Closed loops and the flood send nothing after ``duration_s``."""

    kinds: Sequence[Kind]
    duration_s: float
    flood: Flood = Flood()


@dataclass(frozen=True, slots=True)
class KindFigures:
    """One kind's figures, defined in ``PolicyMetrics``; the rates are those of all requests of a class."""

    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    ttft_attainment: float
    attainment: float
    online_tok_s: float
    offline_tok_s: float


class MixedReplay(Replay):
    """See ``Replay``."""

    def __init__(self, engine: Engine, clock: VirtualClock, load: Load, *, host_s: float) -> None:
        pairs = [(arrival, kind) for kind in load.kinds for arrival in kind.arrivals]
        pairs.sort(key=lambda pair: pair[0].at_s)
        arrivals = tuple(arrival for arrival, _ in pairs)
        super().__init__(
            engine, clock, Workload(arrivals, load.duration_s, load.flood.lengths), host_s=host_s
        )
        self._kinds = [kind for _, kind in pairs]  # of each online request
        self._kind_by_id: dict[RequestId, Kind] = {}
        self._follow = {kind.name: itertools.cycle(kind.follow) for kind in load.kinds if kind.follow}
        self._window_s = load.flood.window_s

    def records(self) -> dict[str, list[OnlineRecord]]:
        """Of all online requests, by the name of their kind."""
        records: dict[str, list[OnlineRecord]] = {kind.name: [] for kind in self._kinds}
        for request_id, record in self._records.items():
            records[self._kind_by_id[request_id].name].append(record)
        return records

    def _request(self, name: str, lengths: Lengths, service_class: ServiceClass) -> Request:
        request = super()._request(name, lengths, service_class)
        if service_class is ServiceClass.ONLINE:
            kind = self._kinds[self._next_arrival]
            request.slo = kind.slo
            self._kind_by_id[request.request_id] = kind
        elif self._window_s is not None:
            request.complete_by_s = self._clock.now_s() + self._window_s
        return request

    def _record(self, output: TokenOutput, now_s: float) -> None:
        super()._record(output, now_s)
        kind = self._kind_by_id.get(output.request_id)
        if kind is None or not kind.follow or output.finish_reason is None:
            return
        if self._elapsed_s < self._duration_s:
            index = self._next_arrival
            arrival = Arrival(self._elapsed_s, next(self._follow[kind.name]))
            self._online = (*self._online[:index], arrival, *self._online[index:])
            self._kinds.insert(index, kind)
            self._num_unfinished += 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a server did with a load.

    Attributes:
        records: of all online requests, by the name of their kind.
        tok_s: tokens computed per second of the load's duration, by class; recomputed ones count once.
    """

    records: Mapping[str, Sequence[OnlineRecord]]
    tok_s: Mapping[ServiceClass, float]


def replay(
    config: SchedulerConfig, load: Load, hardware: HardwareProfile, behaviour: DeviceBehaviour, *, seed: int
) -> Outcome:
    """Serve a load until all online requests have ended. Under online-only there is no offline work.

    Args:
        hardware: what the engine predicts with.
        behaviour: what steps take.
        seed: of the device's noise.
    """
    if config.policy == "online-only":
        load = Load(load.kinds, load.duration_s)
    clock = VirtualClock()
    executor = SimulatedExecutor(executor_info(hardware, 0), behaviour, clock, seed=seed)
    engine = Engine(config, executor, clock, hardware.costs)
    mixed = MixedReplay(engine, clock, load, host_s=behaviour.host_s)
    executor.events = mixed
    result = mixed.run()
    check_no_prefix_hits(engine.scheduler.counters.values())
    tok_s = {
        service_class: (counters.num_computed_tokens - counters.num_recomputed_tokens) / load.duration_s
        for service_class, counters in result.counters.items()
    }
    return Outcome(mixed.records(), tok_s)


def figures_of(outcome: Outcome, kind: Kind, server_slo: SLO) -> KindFigures:
    """Args: server_slo: the objectives of requests that bring none."""
    slo, records = kind.slo or server_slo, outcome.records[kind.name]
    ttfts = np.array([record.ttft_s for record in records])
    tpots = np.array([record.tpot_s for record in records])
    gaps = np.array([gap for record in records for gap in record.gaps_s()])
    met_ttft = ttfts <= slo.ttft_s
    return KindFigures(
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        itl_p50_s=percentile(gaps, 50),
        itl_p99_s=percentile(gaps, 99),
        ttft_attainment=float(met_ttft.mean()),
        attainment=float((met_ttft & (tpots <= slo.tpot_s)).mean()),
        online_tok_s=outcome.tok_s[ServiceClass.ONLINE],
        offline_tok_s=outcome.tok_s[ServiceClass.OFFLINE],
    )
