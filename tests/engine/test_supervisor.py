"""When an engine hangs, when it is restarted, and when the supervisor gives up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.config import EngineConfig
from backfill.core.errors import BackfillError, ConfigError, EngineDead
from backfill.engine.client import EngineClient
from backfill.engine.hang import Watchdog, hang_timeout_s, heartbeat_s
from backfill.engine.messages import Ready
from backfill.engine.supervisor import EngineSupervisor
from backfill.engine.tasks import TaskWatch
from backfill.scheduling.objectives import DEFAULT_SLO
from tests.builders import flat_cost, linear_cost, make_info

pytestmark = pytest.mark.anyio


class CountingClock(VirtualClock):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def now_s(self) -> float:
        self.num_asked += 1
        return super().now_s()


class EndingEngine:
    """Runs for each of ``lifetimes_s`` in turn, then without end."""

    def __init__(self, lifetimes_s: Sequence[float]) -> None:
        self.clock = CountingClock()
        self.num_starts = 0
        self.killed = asyncio.Event()
        self.is_settled = False
        self.silent_s = 0.0
        self.has_computed = True
        self._lifetimes_s = list(lifetimes_s)

    async def start(self) -> Ready:
        self.num_starts += 1
        return Ready(make_info(), DEFAULT_SLO)

    async def wait_dead(self) -> None:
        if not self._lifetimes_s:
            self.is_settled = True
            await self.killed.wait()
            self.killed.clear()
            return
        await asyncio.sleep(0)
        self.clock.advance(self._lifetimes_s.pop(0))

    def kill(self) -> None:
        self.killed.set()


class Watched:
    """A supervisor of such an engine, with a record of its callbacks."""

    def __init__(
        self, *lifetimes_s: float, engine: EndingEngine | None = None, has_other_work: bool = False
    ) -> None:
        self.engine = engine or EndingEngine(lifetimes_s)
        self.told: list[str] = []
        self.supervisor = EngineSupervisor(
            cast("EngineClient", self.engine),
            on_ready=self.on_ready,
            on_lost=lambda: self.told.append("lost"),
            on_offline_suspended=self.on_offline_suspended if has_other_work else None,
            clock=self.engine.clock,
            restart_delay_s=0.0,
            poll_s=0.001,
        )

    async def on_ready(self, ready: Ready) -> None:
        self.told.append("ready")

    def on_offline_suspended(self, is_suspended: bool) -> None:
        self.told.append("suspended" if is_suspended else "resumed")


async def run_until(watched: Watched, condition: Callable[[], bool]) -> None:
    running = asyncio.create_task(watched.supervisor.run())
    deadline_at_s = time.monotonic() + 30.0
    while not condition():
        assert not running.done() and time.monotonic() < deadline_at_s
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])


SUSPENDED = ["ready", "lost"] * 10 + ["suspended"] + ["ready", "lost"] * 4


@pytest.mark.parametrize(
    ("lifetimes_s", "silent_s", "has_other_work", "told"),
    [
        pytest.param([100.0] * 4, 0.0, False, ["ready", "lost"] * 4, id="long lives"),
        pytest.param([*[1.0] * 9, 100.0, *[1.0] * 9], 0.0, False, ["ready", "lost"] * 19, id="counts anew"),
        pytest.param([1.0] * 14, 0.0, True, SUSPENDED, id="quick deaths suspend offline work"),
        pytest.param([61.0] * 14, 60.0, True, SUSPENDED, id="hangs soon, however late it is killed"),
        pytest.param([91.0] * 14, 60.0, True, ["ready", "lost"] * 14, id="hangs after a long run"),
    ],
)
async def test_an_engine_that_ended_is_restarted(
    lifetimes_s: Sequence[float], silent_s: float, has_other_work: bool, told: list[str]
) -> None:
    watched = Watched(*lifetimes_s, has_other_work=has_other_work)
    watched.engine.silent_s = silent_s
    await run_until(watched, lambda: watched.engine.is_settled)
    assert watched.told == [*told, "ready"]


async def test_an_engine_with_many_quick_deaths_is_given_up() -> None:
    watched = Watched(*[1.0] * 10, 100.0)
    with pytest.raises(EngineDead, match="10 times"):
        await watched.supervisor.run()
    assert watched.told == ["ready", "lost"] * 10, "the last loss is told too"


async def test_an_engine_that_computes_nothing_is_given_up_however_long_it_waits_for_requests() -> None:
    watched = Watched(*[600.0] * 10)
    watched.engine.has_computed = False
    with pytest.raises(EngineDead, match="10 times"):
        await watched.supervisor.run()


class Hesitant(EndingEngine):
    """Cannot be started the second, third and fourth time, or from the second time on."""

    def __init__(self, lifetimes_s: Sequence[float], error: Exception, *, for_ever: bool = False) -> None:
        super().__init__(lifetimes_s)
        self.error = error
        self.for_ever = for_ever

    async def start(self) -> Ready:
        ready = await super().start()
        if self.num_starts in (2, 3, 4) or (self.for_ever and self.num_starts > 1):
            raise self.error
        return ready


@pytest.mark.parametrize("error", [BackfillError("not enough memory"), OSError("no more processes")])
async def test_a_restart_that_fails_is_retried(error: Exception) -> None:
    watched = Watched(engine=Hesitant([100.0], error))
    await run_until(watched, lambda: watched.engine.is_settled)
    assert watched.told == ["ready", "lost", "ready"]
    assert watched.engine.num_starts == 5


@pytest.mark.parametrize("error", [BackfillError("not enough memory"), OSError("no more processes")])
async def test_after_many_failed_restarts_the_engine_is_given_up_with_its_reason(error: Exception) -> None:
    watched = Watched(engine=Hesitant([100.0], error, for_ever=True))
    with pytest.raises(EngineDead, match=str(error)):
        await watched.supervisor.run()


async def test_an_engine_that_cannot_be_used_after_a_restart_is_restarted() -> None:
    class Picky(Watched):
        async def on_ready(self, ready: Ready) -> None:
            await super().on_ready(ready)
            if self.told.count("ready") == 2:
                raise OSError("too many open files")

    watched = Picky(100.0)
    await run_until(watched, lambda: watched.told.count("ready") == 3)
    assert watched.told == ["ready", "lost", "ready", "lost", "ready"]


async def test_what_the_first_readiness_raises_is_raised() -> None:
    class Picky(Watched):
        async def on_ready(self, ready: Ready) -> None:
            raise BackfillError("no tokenizer")

    with pytest.raises(BackfillError, match="no tokenizer"):
        await Picky().supervisor.run()


async def test_where_there_is_other_work_an_engine_that_cannot_start_is_retried_without_end() -> None:
    engine = Hesitant([100.0], OSError("no more processes"), for_ever=True)
    watched = Watched(engine=engine, has_other_work=True)
    await run_until(watched, lambda: engine.num_starts > 15)
    assert watched.told == ["ready", "lost", "suspended"]


async def test_offline_work_resumes_once_an_engine_has_run_for_five_minutes() -> None:
    watched = Watched(*[1.0] * 10, 299.0, has_other_work=True)
    running = asyncio.create_task(watched.supervisor.run())
    while watched.told[-2:] != ["lost", "ready"] or watched.engine.num_starts < 12:
        await asyncio.sleep(0)
    assert watched.told.count("suspended") == 1, "299 s are not enough"
    watched.engine.clock.advance(299.0)
    num_asked = watched.engine.clock.num_asked
    while watched.engine.clock.num_asked < num_asked + 3:
        await asyncio.sleep(0)
    assert "resumed" not in watched.told
    watched.engine.clock.advance(1.0)
    while "resumed" not in watched.told:
        await asyncio.sleep(0)
    watched.engine.clock.advance(1.0)
    watched.engine.kill()
    while watched.told[-1] != "ready":
        await asyncio.sleep(0)
    assert watched.told[-3:] == ["resumed", "lost", "ready"]
    running.cancel()


async def test_an_expected_end_is_final_and_no_failure() -> None:
    watched = Watched(1.0)
    running = asyncio.create_task(watched.supervisor.run())
    await asyncio.sleep(0)
    watched.supervisor.expect_end()
    await running
    assert watched.told == ["ready"]


async def test_an_engine_that_cannot_start_says_why() -> None:
    class Unstartable(EndingEngine):
        async def start(self) -> Ready:
            raise BackfillError("not enough memory")

    watched = Watched(engine=Unstartable([]))
    with pytest.raises(BackfillError, match="not enough memory"):
        await watched.supervisor.run()
    assert watched.told == []


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


async def fail() -> None:
    raise OSError("disk on fire")


async def succeed() -> int:
    return 3


async def test_a_task_that_an_exception_ends_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    tasks = TaskWatch()
    started = [tasks.start(fail(), "sweeper"), tasks.start(fail(), "sweeper")]
    started.append(tasks.start(asyncio.sleep(60), "cancelled"))
    assert await tasks.start(succeed(), "fine") == 3
    started[-1].cancel()
    await asyncio.wait(started)
    assert dict(tasks.failures) == {"sweeper": 2, "cancelled": 0, "fine": 0}, "growth from 0 can be seen"
    assert "the task sweeper was ended by an exception" in caplog.text
    assert "disk on fire" in caplog.text
