"""What is said of windows that are too short."""

from __future__ import annotations

import pytest

from backfill.core.clock import VirtualClock
from backfill.jobs.lines import LineResult
from backfill.jobs.records import BatchStatus
from backfill.preparation.lines import BatchLine
from backfill.protocol.service import TokenCount
from tests.jobs.doubles import (
    InstantRunner,
    InThreadReader,
    Start,
    ended,
    in_status,
    input_of,
    ready,
    run_batch,
    submit,
)
from tests.protocol.builders import make_generation

pytestmark = pytest.mark.anyio


class TwoSecondsALine(InstantRunner):
    """One line after the other."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock

    async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
        result = await super().run(line, count)
        self.clock.advance(2.0)
        return result


async def test_a_batch_whose_window_is_too_short_says_so_from_its_creation_on(start: Start) -> None:
    clock = VirtualClock()
    runner = TwoSecondsALine(clock)
    reader = InThreadReader(lambda *_: make_generation())
    manager = await start(runner, num_in_flight=1, clock=clock, wall=clock.now_s, reader=reader)
    ready(manager)
    first = await submit(manager, input_of(30), window_s=10)
    assert manager.outlook.warning(first.id) is None, "no line has ended"
    await ended(manager, first.id)
    await run_batch(manager, input_of(50))

    runner.hold()
    clock.advance(1e5)  # nothing ran in this time
    short = await submit(manager, input_of(100), window_s=180)
    assert "needs about 3 minutes, and its window ends in 3 minutes" in str(
        manager.outlook.warning(short.id)
    ), "100 lines of 2 s, as its file's bytes have it"
    await in_status(manager, short.id, BatchStatus.IN_PROGRESS)
    assert manager.outlook.warning(short.id) is not None, "as its lines have it"

    long = await submit(manager, input_of(100), window_s=500)
    assert manager.outlook.warning(long.id) is None, "behind the other one it needs 400 s"
    other = await submit(manager, input_of(1), window_s=500, owner="other")
    assert manager.outlook.warning(long.id) is not None, "half of the pace is another owner's"
    assert manager.outlook.warning(other.id) is None
    await manager.cancel_batch("owner", short.id)
    await ended(manager, short.id)
    assert manager.outlook.warning(short.id) is None
    assert manager.outlook.warning(long.id) is None
    runner.release()


async def test_a_cancelled_batch_leaves_no_time_that_counts_as_work(start: Start) -> None:
    clock = VirtualClock()
    runner = TwoSecondsALine(clock)
    reader = InThreadReader(lambda *_: make_generation())
    manager = await start(runner, num_in_flight=1, clock=clock, wall=clock.now_s, reader=reader)
    ready(manager)
    await run_batch(manager, input_of(50))
    runner.hold()
    cancelled = await submit(manager, input_of(100), window_s=10_000)
    await in_status(manager, cancelled.id, BatchStatus.IN_PROGRESS)
    await manager.cancel_batch("owner", cancelled.id)
    await ended(manager, cancelled.id)
    clock.advance(8 * 3600)
    runner.release()
    await run_batch(manager, input_of(50))
    runner.hold()
    batch = await submit(manager, input_of(100), window_s=2000)
    assert manager.outlook.warning(batch.id) is None, "it needs 200 s"
    runner.release()
