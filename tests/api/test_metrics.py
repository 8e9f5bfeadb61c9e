"""Metrics of requests and steps, without a server."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from backfill.api.metrics.registry import Metrics
from backfill.api.metrics.requests import ObjectiveCounts
from backfill.api.stats_log import FieldWarnings, StatsLog
from backfill.core.clock import VirtualClock
from backfill.core.counters import ClassCounters, TierBlocks
from backfill.core.request import FinishReason, ServiceClass
from backfill.core.slo import SLO
from backfill.costs.profile import FitError
from backfill.engine.messages import ClassStats, EngineStats, StepReport, StepStats
from backfill.generation.timeline import RequestRecord
from backfill.http.metrics import exposed
from tests.builders import make_info, make_profile

SERVER_SLO = SLO(ttft_s=1.5, tpot_s=0.11)
ONLINE = ServiceClass.ONLINE
NO_STEP = StepStats("none", 0, 0.0, 0.0)
WITHOUT_TOKEN = RequestRecord(
    service_class=ONLINE,
    slo=SERVER_SLO,
    finish_reason=FinishReason.ABORT,
    num_prompt_tokens=1,
    num_output_tokens=0,
    max_tokens=1,
    num_preemptions=0,
    arrived_at_s=10.0,
    first_scheduled_at_s=None,
    first_token_at_s=None,
    last_token_at_s=None,
    finished_at_s=10.5,
)


def make_metrics() -> Metrics:
    return Metrics("m", make_info(), slo=SERVER_SLO)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"backfill:{name}", {"model_name": "m", "engine": "0", **labels})


def attained_and_missed(metrics: Metrics, slo: str) -> tuple[float | None, float | None]:
    labels = {"class": "online", "slo": slo}
    registry = metrics.registry
    return value(registry, "slo_attained_total", **labels), value(registry, "slo_missed_total", **labels)


def report(step: StepStats, num_stopped_steps: int = 0, num_discarded_tokens: int = 0) -> StepReport:
    idle = ClassStats(0, 0, ClassCounters(num_discarded_tokens=num_discarded_tokens))
    return StepReport([], EngineStats(idle, idle, 0.0, 0, 0.0, num_stopped_steps, step))


def test_the_type_of_kv_is_said() -> None:
    for kv_dtype, said in (("", make_info().dtype), ("int8", "int8")):
        info = replace(make_info(), kv_dtype=kv_dtype)
        registry = Metrics("m", info, slo=SERVER_SLO).registry
        text = exposed(registry).decode()
        assert f'cache_dtype="{said}"' in text


def test_every_first_token_and_every_gap_counts_against_its_objective() -> None:
    metrics = make_metrics()
    metrics.requests.on_first_token(ONLINE, 1.5, SERVER_SLO)
    metrics.requests.on_first_token(ONLINE, 1.6, SERVER_SLO)
    for gap_s in (0.01, 0.11, 0.12):
        metrics.requests.on_next_token(ONLINE, gap_s, SERVER_SLO)
    metrics.requests.on_next_token(ONLINE, 0.12, SLO(1.0, 0.2))
    metrics.requests.on_first_token(ServiceClass.OFFLINE, 99.0, None)
    metrics.requests.on_next_token(ServiceClass.OFFLINE, 99.0, None)
    assert attained_and_missed(metrics, "ttft") == (1, 1)
    assert attained_and_missed(metrics, "tpot") == (3, 1)
    assert metrics.requests.objective_counts() == {"ttft": (1, 1), "tpot": (3, 1)}, "for the log"


def test_the_histograms_give_attainment() -> None:
    metrics = make_metrics()
    for waited_s in (1.4, 1.5, 1.6):
        metrics.requests.on_first_token(ONLINE, waited_s, SERVER_SLO)
    for gap_s in (0.1, 0.11, 0.12):
        metrics.requests.on_next_token(ONLINE, gap_s, SERVER_SLO)
    for name, bound in (("time_to_first_token_seconds", "1.5"), ("inter_token_latency_seconds", "0.11")):
        assert value(metrics.registry, f"{name}_bucket", le=bound, **{"class": "online"}) == 2


def test_a_request_without_a_token_missed_its_objective_unless_its_client_left_in_time() -> None:
    metrics = make_metrics()
    metrics.requests.on_finished(WITHOUT_TOKEN)
    metrics.requests.on_finished(replace(WITHOUT_TOKEN, slo=None, finished_at_s=99.0))
    assert attained_and_missed(metrics, "ttft") == (0, 0)
    metrics.requests.on_finished(replace(WITHOUT_TOKEN, finished_at_s=11.6))
    metrics.requests.on_finished(replace(WITHOUT_TOKEN, finish_reason=FinishReason.ERROR))
    assert attained_and_missed(metrics, "ttft") == (0, 2)


def test_a_stopped_step_computed_nothing() -> None:
    metrics = make_metrics()
    metrics.engine.on_report(report(StepStats("mixed", 40, 0.2, 0.1)))
    stopped = StepStats("offline", 90, 0.05, 0.4, stopped=True, stop_latency_s=0.002)
    metrics.engine.on_report(report(stopped, 1, 90))
    metrics.engine.on_report(report(StepStats("none", 0, 0.0, 0.0), 1, 90))
    metrics.engine.on_report(report(StepStats("online", 3, 0.01, 0.0), 1, 90))
    registry = metrics.registry
    counts = [value(registry, "step_seconds_count", kind=kind) for kind in ("online", "mixed", "offline")]
    assert counts == [1, 1, 0]
    assert value(registry, "iteration_tokens_total_sum") == 43
    assert value(registry, "step_predicted_ratio_sum") == 2.0
    assert value(registry, "step_predicted_ratio_count") == 1, "a step without a prediction has no ratio"
    assert value(registry, "step_stops_total") == 1
    assert value(registry, "stop_latency_seconds_sum") == 0.002
    assert value(registry, "discarded_tokens_total", **{"class": "offline"}) == 90


def test_samples_that_are_asked_for_come_alone() -> None:
    metrics = make_metrics()
    metrics.engine.on_report(report(StepStats("online", 3, 0.01, 0.0)))
    names = ("backfill:kv_blocks", "backfill:step_seconds_sum", "backfill:slo_seconds", "backfill:no_such")
    lines = exposed(metrics.registry, names).decode().splitlines()
    samples = {line.partition("{")[0] for line in lines if not line.startswith("#")}
    assert samples == set(names[:3])


def test_the_prefix_cache_is_counted_by_class_and_tier() -> None:
    online = ClassCounters(
        num_prefix_queried_tokens=100,
        num_prefix_hit_tokens=48,
        num_host_prefix_hit_tokens=16,
        num_evicted_blocks=3,
        num_evicted_host_blocks=1,
    )
    offline = ClassCounters(num_prefix_queried_tokens=900, num_prefix_hit_tokens=320, num_evicted_blocks=7)
    metrics = Metrics("m", make_info(), slo=SERVER_SLO, vllm_names=True)
    states = [ClassStats(0, 0, totals) for totals in (online, offline)]
    metrics.engine.on_report(StepReport([], EngineStats(*states, 0.25, 0, 0.0, 0, NO_STEP, 4, 5, 3, 4, 2)))

    def of(name: str, **labels: str) -> float | None:
        return value(metrics.registry, f"prefix_cache_{name}_total", **labels)

    for which, queries, hits, host_hits, evictions, host_evictions in (
        ("online", 100, 48, 16, 3, 1),
        ("offline", 900, 320, 0, 7, 0),
    ):
        labels = {"class": which}
        assert of("queries", **labels) == queries
        assert of("hits", **labels, tier="device") == hits
        assert of("hits", **labels, tier="host") == host_hits
        assert of("evictions", **labels, tier="device") == evictions
        assert of("evictions", **labels, tier="host") == host_evictions
    vllm = {"model_name": "m", "engine": "0"}
    get = metrics.registry.get_sample_value
    assert get("vllm:prefix_cache_queries_total", vllm) == 1000
    assert get("vllm:prefix_cache_hits_total", vllm) == 384
    states_of_blocks = ("empty", "cached", "cached_with_copy", "referenced", "protected")
    blocks = [value(metrics.registry, "kv_blocks", state=state) for state in states_of_blocks]
    assert blocks == [4, 5, 3, 4, 2]
    assert value(metrics.registry, "kv_cache_usage_perc") == 0.25


def test_load_under_vllm_names_is_of_online_requests_alone() -> None:
    metrics = Metrics("m", make_info(), slo=SERVER_SLO, vllm_names=True)
    states = (ClassStats(2, 1, ClassCounters()), ClassStats(30, 400, ClassCounters()))
    stats = EngineStats(
        *states,
        *(0.9, 0, 0.0, 0, NO_STEP),
        num_blocks=20,
        device_blocks=TierBlocks(online=5, offline=13, cached=1, empty=1),
        host_blocks=TierBlocks(offline=7, empty=3),
    )
    metrics.engine.on_report(StepReport([], stats))
    get, labels = metrics.registry.get_sample_value, {"model_name": "m", "engine": "0"}
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [get(f"vllm:{name}", labels) for name in names] == [2, 1, 0.25]
    pool = {"block_size": "4", "num_gpu_blocks": "16", "cache_dtype": "none", "device": "none"}
    assert [get(f"{prefix}:cache_config_info", {**labels, **pool}) for prefix in ("backfill", "vllm")] == [
        1,
        1,
    ]
    uses = ("online", "offline", "cached", "empty")
    for tier, expected in (("device", [5, 13, 1, 1]), ("host", [0, 7, 0, 3])):
        assert [value(metrics.registry, "kv_tier_blocks", tier=tier, use=use) for use in uses] == expected


def test_cached_prompt_tokens_of_ended_requests_are_counted() -> None:
    metrics = make_metrics()
    for which, num_cached in ((ONLINE, 32), (ONLINE, 0), (ServiceClass.OFFLINE, 16)):
        ended = replace(WITHOUT_TOKEN, service_class=which, slo=None, num_cached_tokens=num_cached)
        metrics.requests.on_finished(replace(ended, num_prompt_tokens=40))
    counts = [
        value(metrics.registry, f"{name}_total", **{"class": which})
        for which in ("online", "offline")
        for name in ("prompt_tokens", "prompt_tokens_cached")
    ]
    assert counts == [80, 32, 40, 16]


def test_failed_tasks_are_counted_and_creation_times_of_counters_are_not_exposed() -> None:
    metrics = Metrics("m", make_info(), slo=SERVER_SLO, task_failures={"sweeper": 2})
    metrics.http.on_request("GET", "/v1/models", 200, 0.1)
    assert b'backfill:task_failures_total{task="sweeper"} 2.0' in exposed(metrics.registry)
    assert b"_created" not in exposed(metrics.registry)


def test_the_profile_in_use_and_its_error_are_shown() -> None:
    metrics = make_metrics()
    assert b"cost_profile" not in exposed(metrics.registry), "without a profile there is nothing to show"
    coarse = replace(make_profile(), quality="coarse", error=FitError(0.2, 0.7, 18))
    metrics.engine.on_profile(coarse)
    assert value(metrics.registry, "cost_profile_info", quality="coarse") == 1
    assert value(metrics.registry, "cost_profile_error_ratio", quantile="0.5") == 0.2
    assert value(metrics.registry, "cost_profile_error_ratio", quantile="0.95") == 0.7
    metrics.engine.on_profile(replace(coarse, quality="refined", error=FitError(0.02, 0.07, 50)))
    assert value(metrics.registry, "cost_profile_info", quality="coarse") is None
    assert value(metrics.registry, "cost_profile_info", quality="refined") == 1
    assert value(metrics.registry, "cost_profile_error_ratio", quantile="0.95") == 0.07


def test_lags_are_counted_and_the_largest_is_of_the_last_minute() -> None:
    metrics = make_metrics()
    for now_s, lag_s in ((1.0, 0.0004), (2.0, 0.3), (3.0, 0.015), (4.0, -0.001)):
        metrics.loop_lag.observe(lag_s, now_s)

    def lag(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(
            f"backfill:event_loop_lag_{name}", {"model_name": "m", **labels}
        )

    assert [lag("seconds_bucket", le=bound) for bound in ("0.001", "0.02", "+Inf")] == [2, 3, 4]
    assert lag("max_seconds") == 0.3
    metrics.loop_lag.observe(0.001, 62.5)
    assert lag("max_seconds") == 0.015, "the larger one is over a minute old"


def test_a_blocked_loop_shows_as_lag() -> None:
    async def hold_up() -> float:
        lag = make_metrics().loop_lag
        probe = asyncio.create_task(lag.run())
        await asyncio.sleep(0.02)
        time.sleep(0.2)  # on the loop
        await asyncio.sleep(0.02)
        probe.cancel()
        return lag.max_s()

    assert asyncio.run(hold_up()) > 0.15


def test_only_missed_objectives_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    counts = {"ttft": ObjectiveCounts(0, 0), "tpot": ObjectiveCounts(0, 0)}
    log = StatsLog(lambda: dict(counts))
    log.log_missed()
    counts.update(ttft=ObjectiveCounts(100, 0), tpot=ObjectiveCounts(1000, 10))
    log.log_missed()
    assert not caplog.messages, "one gap in a hundred may be late"
    counts.update(ttft=ObjectiveCounts(130, 10), tpot=ObjectiveCounts(1100, 10))
    log.log_missed()
    (line,) = caplog.messages
    assert "TTFT by 10 of 40 requests" in line
    assert "TPOT" not in line
    assert "--shed-hopeless" in line
    log.log_missed()
    assert len(caplog.messages) == 1, "no objective was missed since"


def test_prompts_that_wait_and_are_late_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    StatsLog(dict, lambda: 3, stolen_s=lambda: 0.0).log_missed()
    assert "TTFT by 3 that wait" in caplog.text
    assert "hypervisor" not in caplog.text


def test_what_the_hypervisor_took_is_said_beside_missed_objectives(caplog: pytest.LogCaptureFixture) -> None:
    StatsLog(dict, lambda: 3, stolen_s=lambda: 6.0).log_missed()
    assert "The hypervisor took 10% of the processors' time." in caplog.text


def test_missed_objectives_are_logged_every_minute(caplog: pytest.LogCaptureFixture) -> None:
    num_asked = 0

    def counts() -> dict[str, ObjectiveCounts]:
        nonlocal num_asked
        num_asked += 1
        return {"tpot": ObjectiveCounts(0, num_asked)}

    async def run() -> None:
        log = asyncio.create_task(StatsLog(counts, interval_s=0.0).run())
        while num_asked < 3:
            await asyncio.sleep(0)
        log.cancel()

    asyncio.run(run())
    assert caplog.messages[0].startswith("objectives missed in the last minute: TPOT by 1 of 1 gaps")
    assert len(caplog.messages) == 3


def reported(online: tuple[int, int, int], offline: tuple[int, int, int]) -> StepReport:
    """Of one step. Totals of a class: tokens looked up, found on the device, found in host memory."""
    states = [
        ClassStats(
            0,
            0,
            ClassCounters(
                num_prefix_queried_tokens=totals[0],
                num_prefix_hit_tokens=totals[1],
                num_host_prefix_hit_tokens=totals[2],
            ),
        )
        for totals in (online, offline)
    ]
    step = StepStats("mixed", 1, 0.1, 0.1)
    return StepReport([], EngineStats(*states, 0.5, 0, 0.0, 0, step))


def test_the_hit_rate_is_that_of_the_interval_by_class(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    intervals = [
        [reported((100, 50, 0), (0, 0, 0)), reported((200, 60, 15), (0, 0, 0))],
        [reported((200, 60, 15), (0, 0, 0))],
        [reported((300, 160, 15), (80, 0, 8))],
        [reported((40, 0, 20), (0, 0, 0))],  # a new engine
    ]

    async def run() -> None:
        log = StatsLog(dict, interval_s=0.001)
        logging_task = asyncio.create_task(log.run())
        for number, reports in enumerate(intervals, start=1):
            for each in reports:
                log.on_report(each)
            while len(caplog.messages) < number:
                await asyncio.sleep(0)
        logging_task.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))
    rates = [message.partition("prefix cache hit rate ")[2] for message in caplog.messages]
    assert rates == ["online 37.5%", "", "online 100.0%, offline 10.0%", "online 50.0%"]
    assert caplog.messages[1].endswith("KV use 50.0%"), "nothing was looked up"


def test_warnings_of_fields_have_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    warnings = FieldWarnings(clock)
    for name in ("a", "b", "c"):
        warnings.add(f"unknown fields: {name}")
        clock.advance(20.0)
    warnings.add("unknown fields: d")
    first, second = caplog.messages
    assert first == "in a request: unknown fields: a"
    assert "unknown fields: d (2 other requests" in second
