"""How ``backfill run-batch`` shows what a run does."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from backfill.blending.resources import ResourceModel
from backfill.cli.run_batch import _LiveProgress, _print_summary, describe
from backfill.core.counters import ClassCounters
from backfill.core.errors import ConfigError
from backfill.engine.messages import ClassStats, EngineStats, StepReport, StepStats
from backfill.execution.executor import ExecutorInfo
from backfill.jobs.progress import RunSpeed
from backfill.jobs.records import RequestCounts, TokenUsage


def running(phase: str = "checking the input", **fields: Any) -> Any:
    """A run as its progress is shown."""
    state = {
        "counts": RequestCounts(),
        "num_resumed": 0,
        "speed": None,
        "order": "blend",
        "planned": None,
        "is_stopping": False,
        "num_in_flight": 0,
    }
    return SimpleNamespace(phase=phase, **{**state, **fields})


def paced(num_done: int, num_failed: int = 0) -> Any:
    """The 400th second of a run of 1,000 lines, of which one ends every two seconds."""
    speed = speed_of(1000)
    for second in range(400):
        speed.rates.prompts.add(1200, second)
        speed.rates.outputs.add(345, second)
        speed.time_left.update(second // 2, second)
    counts = RequestCounts(1000, num_done - num_failed, num_failed)
    return running(counts=counts, speed=speed)


def speed_of(num_lines: int, offload_interval: int | None = None) -> RunSpeed:
    """Of an engine whose KV pool has 1,000 tokens."""
    resources = ResourceModel(token_s=0.01, prompt_pair_s=0.0, cached_token_s=0.001)
    info = ExecutorInfo(125, 8, 512, 49152, (2,), "cpu", "float32", offload_interval=offload_interval)
    return RunSpeed(resources, info, num_lines=num_lines, num_at_once=8, now_s=0.0)


def test_a_run_that_ends_before_anything_is_drawn_says_why() -> None:
    async def use_progress() -> None:
        async with _LiveProgress(running(), Console(file=io.StringIO(), force_terminal=True)).drawn():
            raise ConfigError("no such file")

    with pytest.raises(ConfigError, match="no such file"):
        asyncio.run(use_progress())


def test_what_a_run_does_is_told_in_words() -> None:
    assert describe(running("loading the model"), 0.0) == "loading the model"
    pace = "tok/s: 1,200 in, 345 out; 0:26:41 left; 3 failed"
    assert describe(paced(199, num_failed=3), 399.0) == f"{pace}; order blend"
    assert describe(paced(199, num_failed=3), 399.0, len(pace)) == pace
    offloading = paced(199, num_failed=3)
    offloading.speed.offload_interval = 6
    assert describe(offloading, 399.0) == f"{pace}; order blend; offload interval 6"
    assert describe(paced(1000), 399.0) == "tok/s: 1,200 in, 345 out; order blend", "nothing is left"
    done = RequestCounts(20, 20)
    assert describe(running(counts=done), 0.0) == "done", "an earlier run has answered all"
    assert describe(running(counts=done, speed=speed_of(20)), 0.2) == "done"
    begun = running(speed=speed_of(10))
    begun.speed.rates.prompts.add(30_000, 0.1)
    assert describe(begun, 0.2) == "running"
    begun.is_stopping = True
    assert describe(begun, 0.3) == "stopping"
    begun.num_in_flight = 3
    assert describe(begun, 0.3) == "stopping: 3 lines in flight"


def report_of(
    num_tokens: int = 0, kv_usage_frac: float = 0.0, num_queried: int = 0, num_hit: int = 0
) -> StepReport:
    totals = ClassCounters(num_prefix_queried_tokens=num_queried, num_prefix_hit_tokens=num_hit)
    none = ClassStats(0, 0, ClassCounters())
    step = StepStats("offline", num_tokens, 0.0, 0.0)
    stats = EngineStats(none, ClassStats(0, 0, totals), kv_usage_frac, 0, 0.0, 0, step, num_blocks=125)
    return StepReport([], stats)


def test_a_run_tells_its_prefix_hits_and_what_its_work_is_bound_by() -> None:
    run = paced(199)
    for second in range(400):  # 100 tokens computed, and 500 cached tokens read, in a second
        run.speed.work.on_report(report_of(num_tokens=100, kv_usage_frac=0.5), second)
    run.speed.rates.on_report(report_of(num_queried=200, num_hit=60), 399.0)
    text = describe(run, 399.0)
    assert text.endswith("0:26:41 left; 30% prefix hits; 67% compute, 33% memory; order blend")


@pytest.mark.parametrize("width", [60, 120])
def test_a_second_bar_shows_the_plan_until_it_is_made(width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    run = running(counts=RequestCounts(400_000), speed=speed_of(9))
    progress = _LiveProgress(run, console)

    def shown() -> list[str]:
        progress.show(0.0)
        screen.seek(0)
        screen.truncate()
        console.print(progress._progress.get_renderable())
        return screen.getvalue().splitlines()

    assert len(shown()) == 1
    run.planned = 12_288, 390_000
    plan, lines = shown()
    assert plan.startswith("plan") and "12288/390000 reading and planning lines" in plan
    assert lines.startswith("lines") and "0/400000 running" in lines
    run.planned = None
    assert len(shown()) == 1


def test_where_there_is_no_bar_the_plan_is_told_in_words() -> None:
    screen = io.StringIO()
    run = running(counts=RequestCounts(400_000), speed=speed_of(9))
    run.planned = 12_288, 390_000
    _LiveProgress(run, Console(file=screen))._print_line(0.0)
    expected = "0 of 400000 lines; running; reading and planning lines: 12288 of 390000"
    assert screen.getvalue().strip() == expected


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_bar_takes_one_line_of_the_terminal(width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    progress = _LiveProgress(paced(199), console)
    console.print(progress._progress.get_renderable())
    progress._progress.update(
        progress._task, total=1000, completed=199, description="tok/s: 1,200 in, 345 out; 0:26:41 left"
    )
    screen.seek(0)
    screen.truncate()
    console.print(progress._progress.get_renderable())
    assert "199/1000 tok/s: 1,200 in, 345 out; 0:26:41 left" in screen.getvalue()
    assert screen.getvalue().rstrip().count("\n") == 0


def test_without_a_terminal_it_prints_a_line_now_and_then() -> None:
    screen = io.StringIO()

    async def use_progress() -> None:
        console = Console(file=screen, force_terminal=False)
        async with _LiveProgress(running("loading the model"), console, line_interval_s=0.0).drawn():
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(use_progress())
    assert screen.getvalue() == "0 of 0 lines; loading the model\n"


@pytest.mark.parametrize(
    ("num_at_stop", "num_dropped", "part"),
    [
        (0, 0, "Interrupted: no line had begun. The same command goes on from here."),
        (3, 0, "Interrupted: all lines that had begun have ended. The same"),
        (3, 2, "Interrupted: what was computed of 2 lines is dropped. The same"),
    ],
)
def test_the_summary_of_a_stopped_run_says_what_is_lost(
    num_at_stop: int, num_dropped: int, part: str
) -> None:
    screen = io.StringIO()
    run = paced(199)
    run.usage, run.num_at_stop, run.num_dropped = TokenUsage(), num_at_stop, num_dropped
    _print_summary(run, Console(file=screen, width=60), "", is_whole=False, as_json=False)
    assert part in screen.getvalue()
