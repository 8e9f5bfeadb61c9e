"""Runs many independent simulations, in one process or several."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from statistics import fmean
from typing import TypeVar

import numpy as np

from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.costs.hardware import load_hardware_profile
from backfill.simulation.device import measured_profile, typical_behaviour
from backfill.simulation.metrics import PolicyMetrics, metrics_of
from backfill.simulation.progress import RunShare, SweepProgress, reporting_to
from backfill.simulation.replay import (
    Arrival,
    Lengths,
    ReplayResult,
    StepObserver,
    Workload,
    simulate,
)
from backfill.simulation.scenarios import OWN_POLICIES, VARIANTS
from backfill.workloads.arrivals import burstiness_of_cv, gamma_arrivals

_HOST_POOL_RATIO = 4

Work = TypeVar("Work")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Simulation:
    """One policy on one workload.

    Attributes:
        hardware: name of a hardware profile.
        policy: one of the ``VARIANTS``.
        slo: objectives of every online request.
        max_step_tokens: most tokens of a step, and of a chunk of a prompt.
        seed: of the device's noise, while it is profiled and while it serves.
        slowness: the device is so many times as slow as the profile's.
    """

    hardware: str
    policy: str
    workload: Workload
    slo: SLO
    max_step_tokens: int
    seed: int
    slowness: float = 1.0

    def replay(self, observer: StepObserver | None = None) -> ReplayResult:
        """The host's KV pool is four times the device's. ``observer`` is told of each step."""
        hardware = load_hardware_profile(self.hardware).slowed(self.slowness)
        config = replace(
            VARIANTS[self.policy],
            max_num_batched_tokens=self.max_step_tokens,
            max_prefill_chunk_tokens=self.max_step_tokens,
            ttft_slo=self.slo.ttft_s,
            tpot_slo=self.slo.tpot_s,
        )
        behaviour = typical_behaviour(hardware.costs)
        replay = simulate(
            config,
            self.workload,
            hardware,
            _HOST_POOL_RATIO * hardware.kv_tokens,
            behaviour=behaviour,
            profile=measured_profile(hardware, behaviour, self.seed),
            policy=OWN_POLICIES.get(self.policy),
            seed=self.seed,
            observer=observer,
        )
        num_hits = replay.num_prefix_hit_tokens
        assert num_hits == 0, f"{self.policy}: {num_hits} tokens of prompts that differ are prefix hits"
        return replay


def figures_of(simulation: Simulation) -> PolicyMetrics:
    return metrics_of(simulation.replay(), simulation.slo)


class Processes:
    """Runs functions in processes of their own, or in this one where ``num_processes`` is 1.

    Results come in the order of the work and do not depend on the number of processes.
    """

    def __init__(self, pool: ProcessPoolExecutor | None) -> None:
        self._pool = pool

    def map(self, function: Callable[[Work], Result], work: Iterable[Work]) -> Iterator[Result]:
        """``function`` must be importable, the work and the results small enough to be pickled."""
        return map(function, work) if self._pool is None else self._pool.map(function, work)


@contextmanager
def processes(num_processes: int, progress: SweepProgress | None = None) -> Iterator[Processes]:
    """Ends the processes with the block; what they have begun is dropped if the block raises.

    Args:
        progress: counts what has been done of runs that say so.
    """
    if num_processes == 1:
        with reporting_to(progress):
            yield Processes(None)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        num_processes,
        mp_context=context,
        initializer=_begin,
        initargs=(None if progress is None else progress.value,),
    )
    before = set(multiprocessing.active_children())
    try:
        yield Processes(pool)
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(num_done: Synchronized[float] | None) -> None:
    """An interrupt of the terminal reaches every process; only the command itself reports it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    RunShare.num_done = num_done


def online_requests(
    rate_per_s: float, cv: float, lengths: Sequence[Lengths], rng: np.random.Generator
) -> tuple[Arrival, ...]:
    """Requests of these lengths with gamma-distributed gaps, over a time of their number by the rate."""
    instants = gamma_arrivals(len(lengths), rate_per_s, burstiness_of_cv(cv), rng)
    return tuple(Arrival(float(at_s), each) for at_s, each in zip(instants, lengths, strict=True))


def mean_figures(names: Sequence[str], runs: Sequence[PolicyMetrics]) -> dict[str, float]:
    """The named figures of ``PolicyMetrics``, averaged over runs with different seeds."""
    return {name: fmean(getattr(run, name) for run in runs) for name in names}


def check_positive(**values: float) -> None:
    """Raises: ConfigError for a value that is not above 0, named as the keyword."""
    for name, value in values.items():
        if not 0 < value < float("inf"):
            bound = "finite" if value == float("inf") else "above 0"
            raise ConfigError(f"`{name}` must be {bound}, got {value:g}.")


def check_names(field: str, names: Sequence[str], known: Iterable[str]) -> None:
    """Raises: ConfigError for a name that is not known, or if there is none."""
    allowed = list(known)
    for name in names:
        if name not in allowed:
            raise ConfigError(f"`{field}`: there is no {name!r}; there are {', '.join(allowed)}.")
    if not names:
        raise ConfigError(f"`{field}` names none; there are {', '.join(allowed)}.")
