from __future__ import annotations

from dataclasses import replace

import pytest

from backfill.core.config import PolicyName, SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.request import Request
from backfill.core.slo import SLO
from backfill.costs.load import StepLoad
from backfill.costs.profile import FitError, Quality
from backfill.scheduling.objectives import (
    DEFAULT_SLO,
    ServerObjectives,
    achievable_slo,
    check_server_slo,
    impossible_objectives,
    impossible_slo,
    least_tpot_slo,
    never_offered,
    objectives_below_floor,
    server_slo,
    share_in_time,
    throughput_step_s,
)
from tests.builders import flat_cost, linear_cost, make_profile, make_request

# A tenth of a second for each step, certain to 70 %.
PROFILE = replace(make_profile(flat_cost(0.1)), error=FitError(0.01, 0.05, 40))


@pytest.mark.parametrize(
    ("asked", "step_s", "expected"),
    [
        ({}, None, DEFAULT_SLO),
        ({}, 0.01, DEFAULT_SLO),
        ({}, 0.1, SLO(1.0, 0.4)),
        ({}, 0.5, SLO(2.0, 2.0)),
        ({"ttft_slo": 3.0}, 0.1, SLO(3.0, 0.4)),
        ({"tpot_slo": 0.11}, 0.1, SLO(1.0, 0.11)),
        ({"ttft_slo": 1e-9}, 0.1, SLO(1e-9, 0.4)),
        ({"min_ttft_slo": 3.0, "min_tpot_slo": 0.3}, None, SLO(3.0, 0.3)),
        ({"min_ttft_slo": 3.0, "min_tpot_slo": 0.3}, 0.1, SLO(3.0, 0.4)),
        ({"min_tpot_slo": 0.3, "tpot_slo": 0.35}, 0.1, SLO(1.0, 0.35)),
    ],
)
def test_a_server_has_the_objectives_asked_for_and_defaults_it_can_meet(
    asked: dict[str, float], step_s: float | None, expected: SLO
) -> None:
    cost = None if step_s is None else flat_cost(step_s)
    assert server_slo(SchedulerConfig(**asked), cost) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["ttft_slo", "tpot_slo"])
@pytest.mark.parametrize(
    ("asked_s", "quality", "p95", "event"),
    [
        (0.06, "full", 0.05, "refused"),
        (0.06, "refined", 0.05, "refused"),
        (0.06, "refined", 0.6, "warned"),
        (0.06, "coarse", 0.05, "warned"),
        (0.08, "full", 0.05, "warned"),
        (0.1, "full", 0.05, "nothing"),
    ],
)
def test_a_start_is_refused_only_for_what_a_good_profile_knows(
    field: str, asked_s: float, quality: Quality, p95: float, event: str
) -> None:
    profile = replace(PROFILE, quality=quality, error=FitError(0.01, p95, 40))
    config = SchedulerConfig(**{field: asked_s})  # type: ignore[arg-type]
    message = f"`{field}` {asked_s}: one request alone needs 0.1 s"
    if event == "refused":
        with pytest.raises(ConfigError, match=f"^{message} on this device"):
            check_server_slo(config, profile)
    else:
        warning = f"{message}, by a {quality} cost profile; it may often be missed"
        assert check_server_slo(config, profile) == ([warning] if event == "warned" else [])
    assert check_server_slo(config, None) == []


@pytest.mark.parametrize(("num_prompt_tokens", "num_steps"), [(1, 1), (64, 1), (65, 2), (100, 2), (129, 3)])
def test_a_prompt_is_computed_in_chunks(num_prompt_tokens: int, num_steps: int) -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=128, max_prefill_chunk_tokens=64)
    least = achievable_slo(flat_cost(0.1), config, num_prompt_tokens)
    assert least.ttft_s == pytest.approx(0.1 * num_steps)
    assert least.tpot_s == pytest.approx(0.1)


def test_of_a_prompt_longer_than_what_was_measured_only_the_known_length_is_certain() -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=128, max_prefill_chunk_tokens=64)
    profile = replace(PROFILE, known_tokens=130)
    for num_prompt_tokens, num_steps in ((64, 1), (129, 3), (8000, 3)):
        impossible = impossible_slo(profile, config, num_prompt_tokens)
        assert impossible.ttft_s == pytest.approx(0.7 * 0.1 * num_steps)
        assert impossible.tpot_s == pytest.approx(0.7 * 0.1)


def test_of_a_chunk_larger_than_what_was_measured_only_the_known_size_is_certain() -> None:
    config = SchedulerConfig(max_num_batched_tokens=2048, max_prefill_chunk_tokens=2048)
    profile = replace(PROFILE, cost=linear_cost(token_s=0.001, step_s=0.1), known_chunk_tokens=128)
    for num_prompt_tokens, needed_s in ((100, 0.2), (128, 0.228), (2048, 0.228), (2100, 0.228 + 0.152)):
        impossible = impossible_slo(profile, config, num_prompt_tokens)
        assert impossible.ttft_s == pytest.approx(0.7 * needed_s)
    of_nothing = impossible_slo(replace(profile, known_tokens=0, known_chunk_tokens=0), config, 1000)
    assert of_nothing.ttft_s == pytest.approx(0.7 * 0.101)


@pytest.mark.parametrize(
    ("asked", "impossible"),
    [
        ({}, {}),
        ({"ttft": 0.2, "tpot": 0.1}, {}),
        ({"ttft": 0.1}, {"ttft": 0.201}),
        ({"tpot": 0.06}, {"tpot": 0.101}),
        ({"ttft": 0.1, "tpot": 0.06}, {"ttft": 0.201, "tpot": 0.101}),
        ({"ttft": 0.15, "tpot": 0.06}, {"tpot": 0.101}),  # 0.7 of what is predicted is not certain
    ],
)
def test_objectives_are_impossible_one_by_one(asked: dict[str, float], impossible: dict[str, float]) -> None:
    config = SchedulerConfig(
        policy="slo", max_num_batched_tokens=128, max_prefill_chunk_tokens=64, prefix_caching=False
    )
    profile = replace(PROFILE, cost=flat_cost(0.1002))
    assert impossible_objectives(asked, profile, config, 100) == impossible
    assert impossible_objectives(asked, None, config, 100) == {}
    assert impossible_objectives(asked, profile, replace(config, policy="priority"), 100) == {}
    if_cached = impossible_objectives({"ttft": 0.06}, profile, replace(config, prefix_caching=True), 100)
    assert if_cached == {"ttft": 0.101}, "one step"


@pytest.mark.parametrize(
    ("tpot", "num_choices", "default_s", "refused"),
    [
        (0.0104, 1, 0.15, (0.01, 0.015)),  # 0.7 of 10 ms, and half as much again for prompts
        (0.0106, 1, 0.15, None),
        (0.06, 8, 0.15, (0.08, 0.12)),
        (0.06, 1, 0.15, None),
        (0.06, 8, 0.06, None),  # the server's own is always offered
        (0.06, 8, 0.1, (0.08, 0.1)),
        (0.106, 20, 0.9, None),  # ten at once
        (0.104, 20, 0.9, (0.1, 0.15)),
    ],
)
def test_a_tpot_objective_is_never_offered_that_leaves_prompts_no_share_of_a_step(
    tpot: float, num_choices: int, default_s: float, refused: tuple[float, float] | None
) -> None:
    profile = replace(PROFILE, cost=linear_cost(token_s=0.01), known_tokens=100, known_chunk_tokens=64)
    config, default = SchedulerConfig(policy="slo", max_num_seqs=10), SLO(1.0, default_s)
    found = never_offered({"tpot": tpot}, default, profile, config, [100] * num_choices)
    assert found == ({} if refused is None else {"tpot": pytest.approx(refused)})
    for uncertain in (replace(profile, quality="coarse"), None):
        assert never_offered({"tpot": tpot}, default, uncertain, config, [100] * num_choices) == {}
    assert impossible_objectives({"tpot": tpot}, profile, config, 100) == {}, "alone it could be met"


@pytest.mark.parametrize("policy", ["slo", "priority"])
def test_objectives_are_below_their_floors_one_by_one(policy: PolicyName) -> None:
    config = SchedulerConfig(policy=policy, min_ttft_slo=0.5, min_tpot_slo=0.05)
    assert objectives_below_floor({"ttft": 0.5, "tpot": 0.05}, config) == {}
    assert objectives_below_floor({"ttft": 0.4}, config) == {"ttft": 0.5}
    assert objectives_below_floor({"ttft": 0.4, "tpot": 0.04}, config) == {"ttft": 0.5, "tpot": 0.05}
    assert objectives_below_floor({"ttft": 1e-6, "tpot": 1e-6}, SchedulerConfig(policy=policy)) == {}


def test_the_servers_own_objective_may_not_be_below_its_floor() -> None:
    SchedulerConfig(ttft_slo=0.5, min_ttft_slo=0.5).validate()
    for name in ("ttft_slo", "tpot_slo"):
        below = SchedulerConfig(**{name: 0.1, f"min_{name}": 0.2})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"^`{name}` 0.1 must be at least `min_{name}` 0.2"):
            below.validate()
        for wrong in (0.0, -1.0, float("inf"), float("nan")):
            with pytest.raises(ConfigError, match=f"`min_{name}` must be .*above 0"):
                SchedulerConfig(**{f"min_{name}": wrong}).validate()  # type: ignore[arg-type]


def test_a_third_of_a_tpot_objective_is_left_for_prompts() -> None:
    assert least_tpot_slo(0.02) == pytest.approx(0.03)


def test_a_coarse_profile_and_one_with_a_large_error_know_nothing_for_certain() -> None:
    nothing = SLO(0.0, 0.0)
    for profile in (
        replace(PROFILE, quality="coarse"),
        replace(PROFILE, quality="refined", error=FitError(0.1, 0.51, 40)),
        replace(PROFILE, error=FitError(0.1, 0.51, 40)),
    ):
        assert impossible_slo(profile, SchedulerConfig(), 1000) == nothing
    known = impossible_slo(replace(PROFILE, quality="refined"), SchedulerConfig(), 1000)
    assert known.ttft_s == pytest.approx(0.07)


def slo_after(config: SchedulerConfig, *steps_s: float) -> list[SLO]:
    """Objectives of a server whose first steps took a second, after each fit to steps that took so long."""
    objectives, found = ServerObjectives(config, flat_cost(1.0)), []
    for step_s in steps_s:
        before = objectives.slo
        assert objectives.follow(flat_cost(step_s)) == (objectives.slo != before)
        found.append(objectives.slo)
    return found


def test_a_widened_default_returns_once_three_fits_in_a_row_say_so() -> None:
    slow = SLO(4.0, 4.0)
    assert slo_after(SchedulerConfig(), 0.01, 0.01, 0.01) == [slow, slow, DEFAULT_SLO]
    assert slo_after(SchedulerConfig(), 0.01, 0.01, 0.9, 0.01, 0.01, 0.01)[-2:] == [slow, DEFAULT_SLO]
    # To the largest of the three, and not for a small gain.
    assert slo_after(SchedulerConfig(), 0.5, 0.4, 0.3)[-1] == SLO(2.0, 2.0)
    assert slo_after(SchedulerConfig(), 0.9, 0.9, 0.9)[-1] == slow
    # In steps, and never back.
    later = slo_after(SchedulerConfig(), 0.5, 0.5, 0.5, 0.1, 0.1, 0.1, 2.0, 2.0, 2.0)
    assert [later[at] for at in (2, 4, 5, 8)] == [SLO(2.0, 2.0), SLO(2.0, 2.0), SLO(1.0, 0.4), SLO(1.0, 0.4)]


def test_objectives_that_were_asked_for_and_floors_stay() -> None:
    config = SchedulerConfig(ttft_slo=3.0, min_tpot_slo=0.5)
    assert slo_after(config, 0.01, 0.01, 0.01) == [SLO(3.0, 4.0), SLO(3.0, 4.0), SLO(3.0, 0.5)]


def test_the_next_engine_of_a_server_begins_with_the_objectives_of_the_last() -> None:
    config = SchedulerConfig(kept_slo=SLO(2.0, 0.3))
    assert ServerObjectives(config, flat_cost(1.0)).slo == SLO(2.0, 0.3)
    assert slo_after(config, 0.01, 0.01, 0.01)[-1] == DEFAULT_SLO


def answering(arrived_at_s: float, mean_gap_s: float = 0.1) -> Request:
    """With an objective of 0.1 s between two tokens, and four of them."""
    request = make_request(4, 20, request_id=f"{arrived_at_s} {mean_gap_s}", arrived_at_s=arrived_at_s)
    request.slo = SLO(1.0, 0.1)
    request.first_token_at_s = arrived_at_s + 0.5
    for _ in range(4):
        request.append(1)
    request.last_token_at_s = request.first_token_at_s + 3 * mean_gap_s
    return request


def test_what_throughput_wants_of_a_step_where_nearly_all_are_late() -> None:
    """100 tokens take 1.1 ms each, at most nine tenths of the best rate; long prompts attend to much."""
    cost = replace(linear_cost(step_s=0.01), prefill_pair_s=1e-5)

    def step_s(num_decodes: int, num_late: int, ttft_s: float = 1.0) -> float:
        loads = (StepLoad.of_decodes(num or 1, 0.0, num) for num in (num_decodes, num_late))
        return round(throughput_step_s(cost, *loads, ttft_s, 1000), 6)

    assert step_s(0, 0) == 0.11, "many short prompts, though more than 20 tokens of one do not pay"
    assert step_s(0, 300) == 0.31, "all late answers"
    assert step_s(0, 900) == 0.5, "who arrives can still be in time"
    assert step_s(0, 300, ttft_s=0.05) == 0.0321, "more than it can wait for, but it pays"
    one = StepLoad.of_decodes(1, 0.0, 1)
    assert step_s(1, 300) == round(cost.efficient_prefill_s(one, 0.9, 1000), 6) < 0.1, "it is in time"


def test_the_share_in_time_is_that_of_requests_that_came_together() -> None:
    late = [make_request(4, 4, request_id=f"late{i}", arrived_at_s=10.0) for i in range(6)]
    burst = [answering(10.0), answering(10.0, 0.05)]
    assert share_in_time(burst, late, 1.0) == 2 / 8
    assert share_in_time([*burst, answering(10.0, 0.2), answering(10.0, 0.2)], late, 1.0) == 2 / 10
    assert share_in_time(burst, [], 1.0) == 1.0
    assert share_in_time([], late, 1.0) == 0.0
    # Sockets bring a burst one by one, and the first of it have the earliest deadlines.
    assert share_in_time([answering(10.5), answering(10.6)], late, 1.0) == 2 / 8
    assert share_in_time([answering(10.5), answering(10.6)], late, 0.25) == 1.0
    # Those that came after an overload are not held to be late with what it left.
    assert share_in_time([answering(20.0), answering(30.0)], late, 1.0) == 1.0
    # Of those in time the later half counts: one old answer does not take the backlog for a burst.
    assert share_in_time([answering(0.0), answering(20.0), answering(30.0)], late, 1.0) == 1.0
