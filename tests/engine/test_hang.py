from __future__ import annotations

import asyncio
import contextlib

import pytest

from backfill.core.config import EngineConfig
from backfill.core.errors import ConfigError
from backfill.engine.hang import Watchdog, hang_timeout_s, heartbeat_s
from tests.builders import flat_cost, linear_cost, make_info

pytestmark = pytest.mark.anyio


def test_the_timeout_follows_the_longest_step_unless_it_is_given() -> None:
    config, info = EngineConfig(model_dir=""), make_info()
    assert hang_timeout_s(config, info, None) == 300.0
    assert hang_timeout_s(config, info, flat_cost(0.01)) == 30.0, "the least"
    assert hang_timeout_s(config, info, flat_cost(4.0)) == 80.0
    in_large_steps = hang_timeout_s(config, info, linear_cost(token_s=0.001))
    assert in_large_steps == pytest.approx(20 * 0.001 * config.scheduler.max_num_batched_tokens)
    for given in (0.0, 5.0):
        assert (
            hang_timeout_s(EngineConfig(model_dir="", engine_hang_timeout=given), info, flat_cost(4.0))
            == given
        )


@pytest.mark.parametrize("given", [-1.0, float("nan"), float("inf")])
def test_a_timeout_out_of_range_is_refused(given: float) -> None:
    with pytest.raises(ConfigError, match="`engine_hang_timeout`"):
        EngineConfig(model_dir="", engine_hang_timeout=given).validate()


def test_an_idle_engine_reports_several_times_within_the_timeout() -> None:
    assert heartbeat_s(1.0) == 0.25
    assert heartbeat_s(30.0) == heartbeat_s(0.0) == 2.0


def test_silence_is_noticed_and_a_report_ends_it() -> None:
    async def run() -> list[str]:
        watchdog, told = Watchdog(0.2), []

        async def report() -> None:
            for _ in range(100):
                await asyncio.sleep(0.005)
                watchdog.on_report()
            told.append("last report")

        async def watch() -> None:
            await watchdog.wait_silent()
            told.append("silent")

        await asyncio.gather(report(), watch())
        return told

    assert asyncio.run(run()) == ["last report", "silent"]


async def test_a_pause_of_the_watching_process_is_no_silence() -> None:
    watchdog = Watchdog(0.4)
    watching = asyncio.create_task(watchdog.wait_silent())
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while loop.time() - began_s < 0.5:  # a stalled loop: no task runs
        pass
    for _ in range(5):
        await asyncio.sleep(0)
    assert not watching.done()
    watching.cancel()


async def test_without_a_timeout_nothing_counts_as_hanging() -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(Watchdog(0.0).wait_silent(), 0.05)
        raise AssertionError
