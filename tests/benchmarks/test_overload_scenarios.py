from __future__ import annotations

import json
import sys
from dataclasses import replace

import overload_scenarios as scenarios
import pytest
from mixed_replay import Flood, Kind, KindFigures, Load, Outcome, figures_of, replay

from backfill.core.config import PolicyName
from backfill.core.request import ServiceClass
from backfill.core.slo import SLO
from backfill.simulation.replay import Arrival, Lengths

FIGURES = KindFigures(0.1, 0.2, 0.01, 0.02, 1.0, 0.5, 100.0, 0.0)


def run_main(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["overload_scenarios.py", *options])
    scenarios.main()


def serve(policy: PolicyName, load: Load) -> Outcome:
    config = scenarios.scheduler_config(policy)
    return replay(config, load, scenarios.HARDWARE, scenarios.behaviour_of(0.0), seed=1)


def test_each_scenario_prints_a_table_and_the_figures_end_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--scale", "0.02", "--noise", "0.06", "--policies", "online-only,slo")
    run_main(monkeypatch, *options)
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["best_static_limit"] in scenarios.static_limits()
    titles = [line.split()[0] for line in lines if "TTFT P50" in line]
    assert titles == list(scenarios.SCENARIOS)
    for name in scenarios.SCENARIOS:
        for row, by_name in result[name].items():
            assert {"online-only", "slo"} <= by_name.keys()
            assert f"  {row}" in lines
            alone = by_name["online-only"]
            assert alone["offline_tok_s"] == 0.0
            for figures in by_name.values():
                assert 0.0 < figures["ttft_p50_s"] <= figures["ttft_p99_s"]
                assert 0.0 <= figures["attainment"] <= figures["ttft_attainment"] <= 1.0
                ratio = figures["ttft_p99_s"] / alone["ttft_p99_s"]
                assert figures["ttft_p99_s_over_online_only"] == ratio
                assert figures["offline_tok_s_over_fcfs"] is None


def test_a_run_is_repeated_exactly_and_another_seed_is_another_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def figures(num_seeds: int) -> object:
        options = ("--scenarios", "tight-client", "--policies", "slo", "--scale", "0.05", "--noise", "0.06")
        run_main(monkeypatch, *options, "--seeds", str(num_seeds))
        return json.loads(capsys.readouterr().out.splitlines()[-1])["tight-client"]

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_a_closed_loop_sends_the_next_when_one_ends_until_the_duration() -> None:
    lengths = (Lengths(32, 8), Lengths(32, 4))
    loop = Kind("loop", [Arrival(0.0, lengths[0])] * 2, follow=lengths)
    single = Kind("single", [Arrival(1.0, Lengths(16, 2))])
    records = serve("fcfs", Load([loop, single], duration_s=2.0)).records
    assert len(records["single"]) == 1
    looped = records["loop"]
    assert len(looped) > 4
    assert {len(record.token_at_s) for record in looped} == {4, 8}
    ends = sorted(record.token_at_s[-1] for record in looped)
    starts = sorted(record.arrived_at_s for record in looped)
    assert starts[:2] == [0.0, 0.0]
    assert starts[2:] == [end for end in ends if end < 2.0]
    assert ends[-1] >= 2.0


def test_a_kind_is_served_and_measured_by_its_own_objectives() -> None:
    urgent = Kind("urgent", [Arrival(0.0, Lengths(50, 8))], slo=SLO(0.1, 0.15))
    long_prompt = Kind("long", [Arrival(0.0, Lengths(2040, 8))])
    first = serve("slo", Load([long_prompt, urgent], 1.0)).records
    assert first["urgent"][0].ttft_s < 0.1 < first["long"][0].ttft_s
    same = serve("slo", Load([long_prompt, replace(urgent, slo=None)], 1.0)).records
    assert same["urgent"][0].ttft_s > 0.1


def test_online_only_gets_no_offline_work_and_tokens_of_it_are_counted_apart() -> None:
    chat = Kind("chat", [Arrival(0.0, Lengths(32, 8))])
    load = Load([chat], 1.0, Flood((Lengths(64, 4),), window_s=0.01))
    for outcome, has_offline in ((serve("online-only", load), False), (serve("slo", load), True)):
        assert outcome.tok_s[ServiceClass.ONLINE] == 32 + 8 - 1
        assert (outcome.tok_s[ServiceClass.OFFLINE] > 0) is has_offline
        figures = figures_of(outcome, chat, SLO(1.0, 0.15))
        assert figures.attainment == figures.ttft_attainment == 1.0
        assert figures_of(outcome, chat, SLO(1.0, 1e-6)).attainment == 0.0
        assert figures_of(outcome, chat, SLO(1e-6, 0.15)).ttft_attainment == 0.0
