"""A server that falls silent, on a real PostgreSQL: who goes on, after how long, and that nothing is lost.

``BACKFILL_LEASE_S=30 python -m pytest tests/jobs/test_takeover.py -s`` shows the times with that lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from backfill.jobs.errors import Busy
from backfill.jobs.manager import JobManager
from backfill.jobs.records import BatchRecord
from tests.jobs.doubles import (
    InstantRunner,
    check_completed,
    ended,
    input_of,
    ready,
    started,
    submit,
    until_some_done,
)
from tests.patience import TIMEOUT_S, until
from tests.postgres import PostgresServer

pytestmark = pytest.mark.anyio

LEASE_S = float(os.environ.get("BACKFILL_LEASE_S", "2"))
NUM_LINES = 300  # which the server that falls silent needs 4 s for; it has all of them
# Of the database, where a server hangs in a transaction; as much of a lease as by default.
IDLE_S = LEASE_S / 3

_SERVER = """
import asyncio, json, os, signal, sys, threading
from pathlib import Path
from sqlalchemy import Engine, event
from tests.jobs.doubles import InstantRunner, make_manager, ready

class SlowRunner(InstantRunner):
    async def run(self, line, count=None, **_):
        await asyncio.sleep(0.3)
        return await super().run(line, count)

hangs = threading.Event()

@event.listens_for(Engine, "commit")
def hang(_):
    if hangs.is_set() and threading.current_thread().name.startswith("results"):
        hangs.clear()
        os.kill(os.getpid(), signal.SIGSTOP)

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, hangs.set)
    manager = make_manager(Path(sys.argv[1]), SlowRunner(), limits=json.loads(sys.argv[2]), num_in_flight=25)
    await manager.start()
    ready(manager)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Cable:
    """A Unix socket that leads to a database's. While it is cut nothing passes, and nobody is told."""

    def __init__(self, folder: Path, to: str) -> None:
        self._to = to
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._path = folder / ".s.PGSQL.5432"
        self._tasks: list[asyncio.Task[None]] = []

    async def lay(self) -> None:
        await asyncio.start_unix_server(self._connect, self._path)

    def cut(self) -> None:
        self._is_whole.clear()

    def mend(self) -> None:
        self._is_whole.set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(self._to)
        for ends in ((reader, back), (there, writer)):
            self._tasks.append(asyncio.create_task(self._pass(*ends)))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._is_whole.wait()
                writer.write(data)
        except ConnectionError:
            pass  # an end was closed with data on its way to it
        finally:  # else the other end would wait without end
            writer.close()


async def submit_with_retries(manager: JobManager, content: bytes) -> BatchRecord:
    """As a client does: on a busy machine the database may end a transaction as an idle one."""
    while True:
        with contextlib.suppress(Busy):
            return await submit(manager, content)


async def test_a_silent_server_is_replaced_within_two_lease_times(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    url = f"{postgres.new_schema()}%20-cidle_in_transaction_session_timeout%3D{1000 * IDLE_S:.0f}"
    cable = Cable(tmp_path, f"{postgres.folder}/.s.PGSQL.5432")
    await cable.lay()
    limits = {"batch_file_store": str(tmp_path / "shared"), "batch_lease_timeout": LEASE_S}
    runner = InstantRunner()
    heir = await started(
        tmp_path / "heir", runner, limits={**limits, "batch_database_url": url}, num_in_flight=NUM_LINES
    )
    by_cable = {**limits, "batch_database_url": url.replace(str(postgres.folder), str(tmp_path))}
    silent = start_process(tmp_path / "silent", {**by_cable, "batch_min_free_gib": 0})
    try:
        for fault, begin, end in (
            ("partition", cable.cut, cable.mend),
            ("hang", lambda: silent.send_signal(signal.SIGUSR1), lambda: silent.send_signal(signal.SIGCONT)),
            ("crash", silent.kill, silent.wait),
        ):
            batch = await submit_with_retries(heir, input_of(NUM_LINES))
            await until_some_done(heir, batch, 50)
            num_before = runner.runs.total()
            begin()
            since_s = time.monotonic()
            ready(heir)
            await until(lambda before=num_before: runner.runs.total() > before)
            took_s = time.monotonic() - since_s
            print(f"{fault}: taken over after {took_s:.1f} s, {took_s / LEASE_S:.2f} leases")
            assert took_s < 2 * LEASE_S
            end()
            await check_completed(heir, await ended(heir, batch.id), NUM_LINES)
            heir.engine_lost()
    finally:
        silent.kill()
        silent.wait(TIMEOUT_S)
        await heir.stop()


async def test_batches_go_on_while_their_connections_are_ended(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    url = postgres.new_schema()
    limits = {"batch_database_url": url, "batch_file_store": str(tmp_path / "shared")}
    runner = InstantRunner()
    manager = await started(tmp_path / "server", runner, limits=limits)
    ready(manager)
    engine = create_engine(url)
    try:
        batch = await submit(manager, input_of(300))
        for _ in range(20):
            await asyncio.to_thread(end_connections, engine)
            await asyncio.sleep(0.05)
        await check_completed(manager, await ended(manager, batch.id), 300)
    finally:
        await manager.stop()
        engine.dispose()


def end_connections(engine: Engine) -> None:
    others = "application_name = 'backfill' AND state <> 'idle'"
    statement = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"
    with engine.begin() as connection:
        connection.execute(text(statement))


def start_process(folder: Path, limits: Mapping[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _SERVER, str(folder), json.dumps(limits)]
    return subprocess.Popen(command, text=True, cwd=Path(__file__).parents[2])
