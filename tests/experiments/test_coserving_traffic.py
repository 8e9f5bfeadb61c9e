from __future__ import annotations

from dataclasses import replace

import pytest

from backfill.costs.hardware import load_hardware_profile
from experiments.blendserve.optimum import WorkModel
from experiments.blendserve.overlap import INTERFERENCE, OverlappedCostModel
from experiments.blendserve.pool import HARDWARE
from experiments.blendserve.traffic import OnlineTraffic

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
