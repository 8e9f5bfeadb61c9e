from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from backfill.core.errors import ConfigError
from backfill.simulation.fleet_traffic import (
    FleetArrival,
    FleetTraffic,
    Segment,
    answer_number,
    answer_token,
    prompt_tokens,
)
from backfill.workloads.traces import read_trace

DRAWN = FleetTraffic(
    trace=None,
    rate_per_s=20.0,
    duration_s=120.0,
    speed=1.0,
    num_applications=20,
    zipf=1.1,
    turn_share=0.6,
    seed=1,
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"{at},{100 + at},{10 + at % 7}" for at in range(200)]
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "\n".join(rows) + "\n")
    return path


def shared_tokens(arrivals: tuple[FleetArrival, ...]) -> float:
    """Share of prompt tokens whose segments an earlier prompt or answer had in the same place."""
    seen: set[tuple[Segment, ...]] = set()
    num_shared = 0
    for number, arrival in enumerate(arrivals):
        for end in range(len(arrival.prompt), 0, -1):
            if arrival.prompt[:end] in seen:
                num_shared += sum(segment.length for segment in arrival.prompt[:end])
                break
        whole = (*arrival.prompt, Segment(answer_number(number), arrival.output_len))
        seen.update(whole[:end] for end in range(1, len(whole) + 1))
    return num_shared / sum(arrival.input_len for arrival in arrivals)


def test_arrivals_are_in_order_and_of_the_rate_and_the_seed() -> None:
    arrivals = DRAWN.arrivals(8192)
    assert len(arrivals) == 2400
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    assert 0.0 <= times[0] <= times[-1] < DRAWN.duration_s
    assert arrivals == DRAWN.arrivals(8192)
    assert arrivals != replace(DRAWN, seed=2).arrivals(8192)


def test_requests_keep_the_lengths_of_the_trace(trace: Path) -> None:
    arrivals = replace(DRAWN, trace=trace, rate_per_s=None, duration_s=199.0).arrivals(8192)
    source = read_trace(trace)
    assert Counter((each.input_len, each.output_len) for each in arrivals) == Counter(
        zip(source.input_lens.tolist(), source.output_lens.tolist(), strict=True)
    )


def test_a_trace_runs_at_a_multiple_of_its_speed(trace: Path) -> None:
    whole = replace(DRAWN, trace=trace, rate_per_s=None, duration_s=99.5, speed=2.0)
    assert len(whole.arrivals(8192)) == 200
    assert len(replace(whole, speed=1.0).arrivals(8192)) == 100
    with pytest.raises(ConfigError, match=r"`duration` must be at most 49\.75"):
        replace(whole, speed=4.0).arrivals(8192)


def test_a_trace_without_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n10,5\n")
    with pytest.raises(ConfigError, match="has no arrival times"):
        replace(DRAWN, trace=path).arrivals(8192)


def test_prompts_share_system_prompts_and_turns() -> None:
    with_turns, without = DRAWN.arrivals(8192), replace(DRAWN, turn_share=0.0).arrivals(8192)
    assert 0.1 < shared_tokens(without) < shared_tokens(with_turns)
    assert any(len(arrival.prompt) > 3 for arrival in with_turns)
    assert all(len(arrival.prompt) <= 2 for arrival in without)


def test_applications_are_as_skewed_as_asked() -> None:
    def most(zipf: float) -> float:
        arrivals = replace(DRAWN, zipf=zipf, turn_share=0.0).arrivals(8192)
        first = Counter(arrival.prompt[0].number for arrival in arrivals if len(arrival.prompt) > 1)
        return max(first.values()) / first.total()

    assert most(0.0) < 0.1
    assert most(1.5) > 0.2


def test_a_later_turn_begins_with_the_tokens_of_the_answer() -> None:
    history = (Segment(3, 40), Segment(70_000, 20))
    answer = tuple(answer_token(9, position) for position in range(10))
    later = prompt_tokens((*history, Segment(answer_number(9), 10), Segment(8, 5)))
    assert later[:70] == prompt_tokens(history) + answer
    assert len(later) == 75


def test_different_segments_differ_in_their_first_tokens() -> None:
    heads = {prompt_tokens((Segment(number, 2),)) for number in (0, 1, 31_999, 32_000, 64_000, 1 << 28)}
    assert len(heads) == 6
