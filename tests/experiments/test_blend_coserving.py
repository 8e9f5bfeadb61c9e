from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from backfill.core.errors import ConfigError
from backfill.costs.hardware import load_hardware_profile
from backfill.simulation.study import run_study
from backfill.simulation.workloads import DrawnLengths
from backfill.workloads.lengths import LengthDistribution
from experiments.__main__ import app
from experiments.blendserve import coserving
from experiments.blendserve.coserving import VARIANTS, Coserving, run_to_the_end
from experiments.blendserve.coserving_replay import Step, StepUsage
from experiments.blendserve.coserving_run import CoserveResult, CoserveRun, run_coserving
from experiments.blendserve.optimum import Work, WorkModel
from experiments.blendserve.overlap import INTERFERENCE, OverlappedCostModel
from experiments.blendserve.pool import HARDWARE
from experiments.blendserve.sources import SOURCES
from experiments.blendserve.traffic import KINDS, OnlineTraffic
from tests.cli.running import assert_fits, run_to_json

TINY = Coserving(traffics="alternating", density=2.5, requests=280, load=0.2, phase=3.0, duration=100.0)


@pytest.fixture
def _short_answers() -> Iterator[None]:
    answers = DrawnLengths(LengthDistribution(200), LengthDistribution(60))
    long = replace(SOURCES["reasoning"], outputs=LengthDistribution(800, 0.3, "lognormal"))
    with mock.patch.dict(KINDS, answers=answers), mock.patch.dict(SOURCES, reasoning=long):  # type: ignore[arg-type]
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_short_answers")
def test_an_order_runs_beside_online_requests_that_meet_their_objectives() -> None:
    """Others: test_blend_run.py."""
    results = {name: run_coserving(TINY.run_of("alternating", name, 1)) for name in ("blend", "blend-online")}
    for result in results.values():
        assert result.ttft_attainment > 0.95 and result.tpot_attainment > 0.95
        assert 1.0 < result.end_s < TINY.duration
        assert 0.0 < result.of_optimum <= 1.0
        assert 0.0 <= result.imbalance < 1.0
        assert result.offline_tok_s > 0.0 and result.num_online > 0
        compute, memory, online_compute, online_memory = result.usage
        assert np.all(online_compute[:1] > 0.0) and np.all(compute >= 0.0) and np.all(memory >= 0.0)
        assert np.all(online_memory <= memory + 1e-9)
    assert results["blend"].usage.tolist() != results["blend-online"].usage.tolist()
    again = TINY.run_of("alternating", "blend-online", 1)
    assert run_coserving(again).end_s == results["blend-online"].end_s


@pytest.mark.usefixtures("_short_answers")
def test_a_pool_that_outlasts_the_traffic_is_refused() -> None:
    with pytest.raises(ConfigError, match="280 requests did not end within 2 s"):
        run_to_the_end("fcfs", replace(TINY, duration=2.0).run_of("alternating", "fcfs", 1))


def test_usage_is_summed_by_bins_and_selected_by_time() -> None:
    usage = StepUsage()
    for at_s in (1.0, 9.0, 11.0):
        usage.add(Step(at_s, 0.5, 2.0, 3.0, 1.0, 0.5))
    assert usage.between(1.0, 9.0)[:, 0].tolist() == [9.0]
    assert usage.binned(10.0).tolist() == [[0.4, 0.2], [0.6, 0.3], [0.2, 0.1], [0.1, 0.05]]


def invented(run: CoserveRun) -> CoserveResult:
    """Of a run that did not take place."""
    gain = 1.0 + 0.1 * run.knows_online + 0.2 * (run.order == "blend")
    return CoserveResult(
        end_s=run.traffic.seed / gain,
        of_optimum=0.5 * gain,
        offline_tok_s=1000.0 * gain,
        offline=Work(0.2, 0.3),
        online=Work(0.3, 0.1),
        imbalance=0.1,
        ttft_attainment=0.99,
        tpot_attainment=1.0,
        ttft_p99_s=1.0,
        num_online=100,
        num_preemptions=2,
        recomputed_share=0.01,
        usage=np.zeros((4, 3)),
    )


@pytest.fixture
def _invented_runs() -> Iterator[None]:
    with mock.patch.object(coserving, "run_coserving", invented):
        yield


@pytest.mark.usefixtures("_invented_runs")
def test_figures_are_means_over_seeds() -> None:
    ((traffic, figures, _),) = run_study(TINY, range(1, 4))
    assert traffic == "alternating"
    assert tuple(figures) == tuple(VARIANTS)
    assert figures["blend-online"]["end_s"] == pytest.approx(2.0 / 1.3)


@pytest.mark.usefixtures("_invented_runs")
def test_the_command_prints_a_table_of_each_traffic_and_ends_with_json() -> None:
    printed, content = run_to_json("blendserve", "coserving", "--requests", "500", "--json", commands=app)
    assert content["traffics"]["steady"]["blend"]["of_optimum"] == pytest.approx(0.6)
    for text in ("alternating traffic, load 0.4", "steady traffic", "blend-online"):
        assert text in printed
    assert_fits(printed)


MODEL = WorkModel.of(
    OverlappedCostModel.of(load_hardware_profile(HARDWARE).costs.cost, INTERFERENCE["blendserve"])
)
TRAFFIC = OnlineTraffic(name="alternating", load=0.4, phase_s=100.0, cv=1.0, duration_s=2000.0, seed=1)


def test_phases_take_turns() -> None:
    arrivals = TRAFFIC.arrivals(MODEL)
    assert [each.at_s for each in arrivals] == sorted(each.at_s for each in arrivals)
    assert arrivals[0].at_s >= 0.0 and arrivals[-1].at_s < 2000.0
    in_phase = [[each.lengths for each in arrivals if each.at_s // 100.0 % 2 == phase] for phase in (0, 1)]
    prompts, answers = (sum(each.input_len for each in some) / len(some) for some in in_phase)
    assert prompts == pytest.approx(2500, rel=0.1)
    assert answers == pytest.approx(223, rel=0.2)
    outputs = [sum(each.output_len for each in some) / len(some) for some in in_phase]
    assert outputs == [pytest.approx(80, rel=0.1), pytest.approx(1500, rel=0.1)]


@pytest.mark.parametrize("name", ["alternating", "steady"])
def test_the_load_is_what_the_requests_take_by_themselves(name: str) -> None:
    traffic = replace(TRAFFIC, name="steady" if name == "steady" else "alternating")
    of_kind: list[list] = [[], []]
    for each in traffic.arrivals(MODEL):
        of_kind[each.lengths.output_len > 500].append(each.lengths)
    seconds = sum(MODEL.least_s(MODEL.of_requests(some)) for some in of_kind)
    assert seconds / traffic.duration_s == pytest.approx(0.4, rel=0.1)


def test_a_seed_draws_the_same_traffic() -> None:
    assert TRAFFIC.arrivals(MODEL) == TRAFFIC.arrivals(MODEL)
    assert TRAFFIC.arrivals(MODEL) != replace(TRAFFIC, seed=2).arrivals(MODEL)
