"""Several servers on one PostgreSQL database and one place of files."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, delete, func, select
from sqlalchemy.exc import DBAPIError, OperationalError

from backfill.core.errors import ConfigError, EngineDead, StepFailed
from backfill.jobs import claims as claims_module
from backfill.jobs import database as database_module
from backfill.jobs import storage as storage_module
from backfill.jobs.blobs import GARBAGE_AGE_S
from backfill.jobs.errors import Busy, Conflict, NotFound, TooMany
from backfill.jobs.leases import Leases
from backfill.jobs.lines import LineResult
from backfill.jobs.manager import JobManager
from backfill.jobs.open_batch import OpenBatch
from backfill.jobs.records import BatchRecord, BatchStatus, LeasedPart
from backfill.jobs.retry import is_temporary
from backfill.jobs.suspects import MAX_BLAMED_LINES, MAX_LONE_LOSSES
from backfill.preparation.lines import BatchLine
from backfill.protocol.service import TokenCount
from tests.jobs.doubles import (
    OWNER,
    InstantRunner,
    check_accounts,
    check_completed,
    content_of,
    create,
    ended,
    hold_after,
    input_of,
    make_manager,
    ready,
    results_of,
    run_batch,
    started,
    store_input,
    submit,
)
from tests.patience import TIMEOUT_S, until
from tests.postgres import PostgresServer

pytestmark = pytest.mark.anyio

LONG_S = 3600.0  # a lease that ends in no test


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backfill.jobs.retry.FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(claims_module, "_LONGEST_PERIOD_S", 0.02)


class Fleet:
    """Managers that share a database and a folder of files, each with a data folder of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.options = {"batch_database_url": url, "batch_file_store": str(folder / "shared")}
        self.managers: list[JobManager] = []
        self._numbers = itertools.count()

    async def add(
        self,
        runner: InstantRunner | None = None,
        *,
        lease_s: float = LONG_S,
        has_engine: bool = True,
        **options: Any,
    ) -> JobManager:
        limits = {**self.options, "batch_lease_timeout": lease_s, **options.pop("limits", {})}
        manager = await started(self.folder / f"{next(self._numbers)}", runner, limits=limits, **options)
        self.managers.append(manager)
        if has_engine:
            ready(manager)
        return manager

    async def stop(self) -> None:
        await asyncio.gather(*(manager.stop() for manager in self.managers))


@pytest.fixture
async def fleet(tmp_path: Path, database_url: str) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path, database_url)
    yield made
    await made.stop()


@pytest.fixture
async def sqlite_fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path, f"sqlite:///{tmp_path / 'jobs.db'}")
    yield made
    await made.stop()


async def test_every_server_answers_for_the_batches_of_all(fleet: Fleet) -> None:
    runner = InstantRunner()
    front = await fleet.add(has_engine=False)
    back = await fleet.add(runner)
    file_id = await store_input(front, input_of(40))
    assert await content_of(back, await back.files.get(OWNER, file_id)) == input_of(40)
    batch = await create(front, file_id)
    await hold_after(front, runner, batch, 6)
    assert [found.id for found in (await front.list_batches(OWNER, limit=9, after=None)).items] == [batch.id]
    for server in (front, back):
        with pytest.raises(Conflict):
            await server.files.delete(OWNER, file_id)
        with pytest.raises(NotFound):
            await server.get_batch("other", batch.id)
    runner.release()
    batch = await ended(front, batch.id)
    await check_completed(front, batch, 40)
    assert set(runner.runs.values()) == {1}
    assert await results_of(back, batch) == await results_of(front, batch)
    await front.files.delete(OWNER, file_id)
    with pytest.raises(NotFound):
        await back.files.get(OWNER, file_id)


async def test_batches_are_spread_and_each_runs_on_one_server(fleet: Fleet) -> None:
    runners = [InstantRunner() for _ in range(3)]
    for runner in runners:
        runner.hold()
        await fleet.add(runner, num_in_flight=2)
    front = fleet.managers[0]
    batches = [await submit(front, input_of(40)) for _ in range(3)]
    await until(lambda: all(runner.held for runner in runners))
    for runner in runners:
        runner.release()
    for batch in batches:
        await check_completed(front, await ended(front, batch.id), 40)
    assert sum((runner.runs for runner in runners[1:]), runners[0].runs).total() == 120


async def test_a_cancellation_reaches_the_server_that_runs_the_batch(fleet: Fleet) -> None:
    runner = InstantRunner()
    front = await fleet.add(has_engine=False)
    await fleet.add(runner)
    batch = await submit(front, input_of(40))
    await hold_after(front, runner, batch, 6)
    assert (await front.cancel_batch(OWNER, batch.id)).status is BatchStatus.CANCELLING
    batch = await ended(front, batch.id)
    assert batch.status is BatchStatus.CANCELLED
    assert batch.request_counts.completed >= 6
    await check_accounts(front, batch, 40)


async def test_a_batch_that_no_server_runs_can_be_cancelled(fleet: Fleet) -> None:
    front = await fleet.add(has_engine=False)
    batch = await submit(front, input_of(4))
    assert (await front.cancel_batch(OWNER, batch.id)).status is BatchStatus.CANCELLED
    back = await fleet.add()
    other = await submit(back, input_of(4))
    await check_completed(front, await ended(front, other.id), 4)


async def test_a_stop_gives_batches_to_another_server_at_once(fleet: Fleet) -> None:
    runners = InstantRunner(), InstantRunner()
    first = await fleet.add(runners[0])
    batch = await submit(first, input_of(60))
    await hold_after(first, runners[0], batch, 6)
    second = await fleet.add(runners[1])
    await first.pause()  # as a drain begins
    batch = await ended(second, batch.id)
    await check_completed(second, batch, 60)
    assert runners[1].runs.total() == 60 - runners[0].runs.total() > 0


class Dying(InstantRunner):
    """Its engine dies over a line whenever that runs."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self._line = line

    async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
        if line.custom_id == self._line:
            raise EngineDead("killed", num_lost=4, num_others=3)
        return await super().run(line, count)


class Alone(InstantRunner):
    """Notes who runs beside each line at its start."""

    def __init__(self) -> None:
        super().__init__()
        self.beside: dict[str, set[str]] = {}

    async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
        self.beside[line.custom_id] = set(self.held)
        return await super().run(line, count)


async def test_a_line_that_has_ended_an_engine_runs_alone_on_the_next_server(fleet: Fleet) -> None:
    dying, runner = Dying("r9"), Alone()
    first = await fleet.add(dying)
    batch = await submit(first, input_of(20))
    saved = first._storage.results.losses_of(batch, None)
    await until(lambda: asyncio.to_thread(saved.read))
    await first.stop()
    second = await fleet.add(runner)
    batch = await ended(second, batch.id)
    await check_completed(second, batch, 20)
    assert runner.beside["r9"] == set()
    assert next(iter(runner.beside)) == "r9", "lost lines go first"


async def test_a_server_that_is_silent_loses_its_batches_and_records_nothing_more(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners = InstantRunner(), InstantRunner()
    first = await fleet.add(runners[0], lease_s=1.0)
    batch = await submit(first, input_of(60))
    await hold_after(first, runners[0], batch, 6)
    assert first._claiming is not None
    first._claiming.cancel()  # it hangs: nothing is renewed
    second = await fleet.add(runners[1])
    await hold_after(second, runners[1], batch, 3)
    runners[0].release()  # it goes on, with lines in the engine
    await until(lambda: batch.id not in first._jobs)
    runners[1].release()
    batch = await ended(second, batch.id)
    await check_completed(second, batch, 60)
    assert runners[0].runs.total() + runners[1].runs.total() > 60, "lines of the first ran in vain"


async def test_a_batch_whose_engine_stays_away_goes_to_another_server(fleet: Fleet) -> None:
    runners = InstantRunner(), InstantRunner()
    first = await fleet.add(runners[0], lease_s=1.0)
    batch = await submit(first, input_of(60))
    await hold_after(first, runners[0], batch, 6)
    first.engine_lost()
    second = await fleet.add(runners[1])
    await check_completed(second, await ended(second, batch.id), 60)
    assert batch.id not in first._jobs


async def test_a_server_that_is_held_keeps_its_batches_and_claims_no_other(fleet: Fleet) -> None:
    """For longer than a lease, with an engine that serves: another server's would not be better."""
    runner = InstantRunner()
    first = await fleet.add(runner, lease_s=0.5)
    batch = await submit(first, input_of(60))
    await hold_after(first, runner, batch, 6)
    first.hold()
    waiting = await submit(await fleet.add(has_engine=False), input_of(5))
    running = first.feeder.num_running
    await asyncio.sleep(1.5)
    assert first.feeder.num_running == running > 0
    assert {job.batch.id for job in first._jobs.values()} == {batch.id}
    runner.release()
    first.engine_ready(first._service, 8)
    for each, num_lines in ((batch, 60), (waiting, 5)):
        await check_completed(first, await ended(first, each.id), num_lines)


async def test_a_window_ends_without_any_engine(fleet: Fleet) -> None:
    front = await fleet.add(has_engine=False)
    batch = await submit(front, input_of(20), window_s=0)
    batch = await ended(front, batch.id)
    assert batch.status is BatchStatus.EXPIRED
    await check_accounts(front, batch, 20)


async def test_limits_of_an_owner_hold_over_all_servers(fleet: Fleet) -> None:
    runner = InstantRunner()
    runner.hold()
    limits = {"batch_max_queued_lines": 25, "batch_max_open": 3}
    first = await fleet.add(runner, limits=limits)
    second = await fleet.add(has_engine=False, limits=limits)
    batches = [await submit(server, input_of(20)) for server in (first, second)]
    statuses = []
    async with asyncio.timeout(TIMEOUT_S):
        while len(statuses) < 2:
            found = [await second.get_batch(OWNER, batch.id) for batch in batches]
            statuses = [batch.status for batch in found if batch.status is not BatchStatus.VALIDATING]
            await asyncio.sleep(0.002)
    assert sorted(status.value for status in statuses) == ["failed", "in_progress"]
    assert [error.code for batch in found for error in batch.errors] == ["token_limit_exceeded"]
    for _ in range(2):
        await submit(second, input_of(1))
    with pytest.raises(TooMany, match="At most 3 of your batches"):
        await submit(first, input_of(1))
    runner.release()


async def test_servers_that_start_at_once_share_an_empty_database(fleet: Fleet) -> None:
    managers = await asyncio.gather(*(fleet.add() for _ in range(4)))
    batch = await submit(managers[0], input_of(9))
    for manager in managers:
        await check_completed(manager, await ended(manager, batch.id), 9)


async def test_batches_of_a_server_that_knew_no_leases_go_on(fleet: Fleet) -> None:
    front = await fleet.add(has_engine=False)
    batch = await submit(front, input_of(9))
    engine = create_engine(fleet.options["batch_database_url"])
    with engine.begin() as connection:
        connection.execute(delete(LeasedPart))
    engine.dispose()
    for _ in range(2):
        await fleet.add()
    await check_completed(front, await ended(front, batch.id), 9)


async def test_files_of_other_servers_are_not_swept_away(fleet: Fleet) -> None:
    first = await fleet.add()
    upload = await first.files.begin_upload(OWNER)
    await upload.write(input_of(3))
    kept = await store_input(first, input_of(3))
    files = fleet.folder / "shared" / "files"
    garbage = [files / "file-1", files / "file-2.part"]
    old_s = time.time() - GARBAGE_AGE_S - 1
    for path in (*garbage, files / kept):
        path.touch()
        os.utime(path, (old_s, old_s))
    (files / "file-3").touch()
    second = await fleet.add()
    await until(lambda: not any(path.exists() for path in garbage))
    record = await upload.finish(filename="in.jsonl", purpose="batch", expires_after_s=None)
    assert await content_of(second, record) == input_of(3)
    assert {path.name for path in files.iterdir()} == {kept, record.id, "file-3"}


@pytest.mark.postgres  # a server of its own
async def test_batches_wait_for_a_database_that_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = PostgresServer()
    try:
        fleet = Fleet(tmp_path, server.new_schema())
        runner = InstantRunner()
        manager = await fleet.add(runner, lease_s=1.0)
        batch = await submit(manager, input_of(60))
        await hold_after(manager, runner, batch, 6)
        await asyncio.to_thread(server.stop)
        runner.release()
        with pytest.raises(Busy, match="database of files and batches does not answer"):
            await manager.get_batch(OWNER, batch.id)
        with pytest.raises(Busy):
            await manager.files.list(OWNER, purpose=None, order="asc", limit=9, after=None)
        await until(lambda: "results cannot be written" in caplog.text)
        await asyncio.to_thread(server.start)
        await check_completed(manager, await ended(manager, batch.id), 60)
        await asyncio.to_thread(server.stop)
        await asyncio.wait_for(fleet.stop(), TIMEOUT_S)
    finally:
        server.close()


@pytest.mark.postgres  # a server of its own
async def test_a_database_that_hangs_delays_no_reader_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = PostgresServer()
    try:
        fleet = Fleet(tmp_path, server.new_schema())
        manager = await fleet.add(lease_s=1.0)
        batch = await submit(manager, input_of(60))
        monkeypatch.setattr(storage_module, "READ_TIMEOUT_S", 0.1)
        server.freeze()
        with pytest.raises(Busy):
            await asyncio.wait_for(manager.get_batch(OWNER, batch.id), TIMEOUT_S)
        server.thaw()
        await check_completed(manager, await ended_despite_pauses(manager, batch.id), 60)
        await fleet.stop()
    finally:
        server.close()


async def test_a_server_that_hangs_in_a_transaction_freezes_no_other(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runner = InstantRunner()
    runner.hold()
    manager = await fleet.add(runner)
    batch = await submit(manager, input_of(9))
    await until(lambda: runner.held)
    other = database_module.open_database(fleet.options["batch_database_url"], tmp_path)
    timeouts = {**database_module._SESSION_TIMEOUTS_MS, "idle_in_transaction_session_timeout": 300}
    with monkeypatch.context() as patched:  # not of the manager's, which end so on a busy machine
        patched.setattr(database_module, "_SESSION_TIMEOUTS_MS", timeouts)
        other.dispose()  # of the connection that opened it, which has the usual timeouts
        hanging = other.connect()
    with hanging:
        hanging.execute(select(LeasedPart).with_for_update())
        runner.release()
        await check_completed(manager, await ended(manager, batch.id), 9)
        with pytest.raises(DBAPIError) as error:
            hanging.execute(select(1))
        assert is_temporary(error.value)
    other.dispose()


async def test_a_session_has_timeouts_unless_the_url_sets_them(fleet: Fleet, tmp_path: Path) -> None:
    url = fleet.options["batch_database_url"]
    for given, expected in ("", ["10s", "10s", "1min"]), ("%20-clock_timeout%3D7s", ["10s", "7s", "1min"]):
        opened = database_module.open_database(url + given, tmp_path)
        with opened.connect() as connection:
            names = database_module._SESSION_TIMEOUTS_MS
            assert [connection.exec_driver_sql(f"SHOW {name}").scalar() for name in names] == expected
        opened.dispose()


async def test_leases_are_renewed_while_all_threads_of_the_database_are_blocked(sqlite_fleet: Fleet) -> None:
    runner = InstantRunner()
    runner.hold()
    manager = await sqlite_fleet.add(runner)
    engine, blocked = create_engine(sqlite_fleet.options["batch_database_url"]), threading.Event()

    def renewed_until_s() -> float:
        with engine.connect() as connection:
            return connection.execute(select(func.max(LeasedPart.expires_at))).scalar() or 0.0

    try:
        await submit(manager, input_of(9))
        await until(lambda: runner.held)
        blocking = [asyncio.ensure_future(manager._threads.database.run(blocked.wait)) for _ in range(4)]
        await asyncio.sleep(0.1)  # a claim waits for them
        until_s = renewed_until_s()
        await until(lambda: renewed_until_s() > until_s)
    finally:
        blocked.set()
        runner.release()
        await asyncio.gather(*blocking)
        engine.dispose()


async def ended_despite_pauses(manager: JobManager, batch_id: str) -> BatchRecord:
    """As ``ended``, where the database may still be slow."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            with contextlib.suppress(Busy):
                return await ended(manager, batch_id)


async def test_the_clock_of_the_database_says_when_windows_end_and_files_expire(sqlite_fleet: Fleet) -> None:
    days_s = 31 * 24 * 3600.0
    right = await sqlite_fleet.add()
    ahead = await sqlite_fleet.add(wall=lambda: time.time() + days_s)
    behind = await sqlite_fleet.add(wall=lambda: time.time() - days_s)
    file_id = await store_input(right, input_of(9))
    await ahead.files._delete_expired()
    for manager in (ahead, behind):
        batch = await create(manager, file_id, window_s=3600)
        assert abs(batch.expires_at - time.time() - 3600) < 600
        await check_completed(right, await ended(right, batch.id), 9)
        assert abs((await manager.store_snapshot()).oldest_line_s) < 600


async def test_servers_on_one_sqlite_database_divide_the_lines_of_a_batch(sqlite_fleet: Fleet) -> None:
    runners = [InstantRunner() for _ in range(2)]
    for runner in runners:
        runner.hold()
        await sqlite_fleet.add(runner, num_in_flight=4)
    front = await sqlite_fleet.add(has_engine=False)
    await asyncio.sleep(0.1)  # both have said that they are ready
    batch = await submit(front, input_of(80))
    await until(lambda: all(runner.held for runner in runners))
    for runner in runners:
        runner.release()
    await check_completed(front, await ended(front, batch.id), 80)
    assert set((runners[0].runs + runners[1].runs).values()) == {1}
    assert min(runner.runs.total() for runner in runners) >= 4


@pytest.mark.parametrize("method", ["claim", "release"])
async def test_leases_whose_claim_or_release_had_no_answer_are_not_orphaned(
    sqlite_fleet: Fleet, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Though the server that holds them lives, and no other one is there."""
    work = getattr(Leases, method)
    num_answers_lost = 0

    def work_without_answer(self: Leases, *args: Any, **options: Any) -> Any:
        nonlocal num_answers_lost
        found = None if method == "release" else work(self, *args, **options)
        if method == "claim" and (found is None or found.lease.lines is None):
            return found
        if num_answers_lost < 3:
            num_answers_lost += 1
            raise OperationalError("COMMIT", None, ConnectionError("lost"))
        return work(self, *args, **options) if method == "release" else found

    monkeypatch.setattr(Leases, method, work_without_answer)
    runner = InstantRunner()
    lease_s = LONG_S if method == "claim" else 0.2
    server = await sqlite_fleet.add(runner, lease_s=lease_s)
    if method == "release":
        runner.hold()
    batch = await submit(server, input_of(20))
    if method == "release":
        await until(lambda: runner.held)
        server.engine_lost()
        await until(lambda: num_answers_lost)
        runner.release()
        ready(server)
    await check_completed(server, await ended(server, batch.id), 20)
    assert num_answers_lost


async def test_servers_that_are_full_of_one_owner_take_lines_of_another(sqlite_fleet: Fleet) -> None:
    runners = [InstantRunner(), InstantRunner()]
    for runner in runners:
        runner.hold()
        await sqlite_fleet.add(runner)
    first, second = sqlite_fleet.managers
    flood = await submit(first, input_of(200))
    await until(lambda: all(runner.held for runner in runners))
    late = await submit(second, input_of(10), owner="other", window_s=7200)
    await until(lambda: jobs_of(sqlite_fleet, "other"))
    assert sum(job.num_unfinished for job in jobs_of(sqlite_fleet, OWNER)) < 200 / 2
    for runner in runners:
        runner.release()
    assert (await ended(first, late.id, "other")).request_counts.completed == 10
    await check_completed(first, await ended(first, flood.id), 200)


def jobs_of(fleet: Fleet, owner: str) -> list[OpenBatch]:
    """Those of lines."""
    jobs = [job for manager in fleet.managers for job in manager._jobs.values()]
    return [job for job in jobs if job.batch.owner == owner and job.lines is not None]


class DyingRunner(InstantRunner):
    async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
        self.runs[line.custom_id] += 1
        raise StepFailed("", num_lost=1, num_others=0)


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_batch_of_lines_that_end_engines_fails_with_the_reason(
    sqlite_fleet: Fleet, is_shared: bool
) -> None:
    runner = DyingRunner()
    if not is_shared:
        sqlite_fleet.options.clear()
    manager = await sqlite_fleet.add(runner)
    batch = await run_batch(manager, input_of(100))
    assert batch.status is BatchStatus.FAILED
    assert [error.code for error in batch.errors] == ["engine_error"]
    num_leases = 4 if is_shared else 1  # that may run at once
    assert 1 <= batch.request_counts.failed <= num_leases * MAX_BLAMED_LINES
    assert len(runner.runs) < 100 and max(runner.runs.values()) <= MAX_LONE_LOSSES


async def test_sqlite_without_a_place_of_files_is_for_one_server(sqlite_fleet: Fleet) -> None:
    del sqlite_fleet.options["batch_file_store"]
    await sqlite_fleet.add()
    with pytest.raises(ConfigError, match="belongs to another data folder"):
        await sqlite_fleet.add()


async def test_a_database_has_one_place_of_files(fleet: Fleet) -> None:
    await fleet.add()
    for place in (None, str(fleet.folder / "elsewhere")):
        fleet.options["batch_file_store"] = place  # type: ignore[assignment]
        with pytest.raises(ConfigError, match="one place of files"):
            await fleet.add()


async def test_a_folder_that_holds_other_files_is_refused(fleet: Fleet) -> None:
    (fleet.folder / "shared" / "files").mkdir(parents=True)
    (fleet.folder / "shared" / "files" / "thesis").touch()
    with pytest.raises(ConfigError, match=r"`batch_file_store` .* holds files of another database"):
        await fleet.add()
    assert (fleet.folder / "shared" / "files" / "thesis").exists()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://u:hidden@127.0.0.1:1/db", "127.0.0.1:1/db cannot be opened: .*refused"),
        ("postgresql+psycopg://u@127.0.0.1:1/db?password=hidden", "cannot be opened"),
        ("postgresql://u:hidden@nowhere.invalid/db", "nowhere.invalid"),
        ("mysql://u:hidden@host/db", "SQLite or PostgreSQL, got one of mysql"),
        ("hidden", "no database URL"),
    ],
)
async def test_a_database_that_cannot_be_opened(tmp_path: Path, url: str, expected: str) -> None:
    manager = make_manager(tmp_path, InstantRunner(), limits={"batch_database_url": url})
    with pytest.raises(ConfigError, match="(?s)`batch_database_url`.*" + expected) as raised:
        await manager.start()
    assert "hidden" not in str(raised.value)
    other = await started(tmp_path)  # the data folder is free
    await other.stop()


async def test_a_database_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "OPEN_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://u:hidden@127.0.0.1:{silent.getsockname()[1]}/db"
        manager = make_manager(tmp_path, InstantRunner(), limits={"batch_database_url": url})
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1.* does not answer within 0\.1 s"):
            await manager.start()
