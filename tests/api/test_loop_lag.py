from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry, generate_latest

from backfill.api.metrics.loop_lag import LoopLag


def exposed(lag: LoopLag) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(lag)
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_lags_are_counted_and_the_largest_is_of_the_last_minute() -> None:
    lag = LoopLag("m")
    for now_s, lag_s in ((1.0, 0.0004), (2.0, 0.3), (3.0, 0.015), (4.0, -0.001)):
        lag.observe(lag_s, now_s)
    values = exposed(lag)
    assert values['backfill:event_loop_lag_seconds_bucket{le="0.001",model_name="m"}'] == 2
    assert values['backfill:event_loop_lag_seconds_bucket{le="0.02",model_name="m"}'] == 3
    assert values['backfill:event_loop_lag_seconds_bucket{le="+Inf",model_name="m"}'] == 4
    assert lag.max_s() == 0.3
    lag.observe(0.001, 62.5)
    assert lag.max_s() == 0.015, "the larger one is over a minute old"


def test_a_blocked_loop_shows_as_lag() -> None:
    async def hold_up() -> float:
        lag = LoopLag("m")
        probe = asyncio.create_task(lag.run())
        await asyncio.sleep(0.02)
        time.sleep(0.2)  # on the loop
        await asyncio.sleep(0.02)
        probe.cancel()
        return lag.max_s()

    assert asyncio.run(hold_up()) > 0.15
