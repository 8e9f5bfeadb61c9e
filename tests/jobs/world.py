"""One simulated world: servers on one database, whose faults a seed chooses, and what must hold despite them.

Claims, leases, managers, drivers, feeders, the reader of input files and the store are the product's. Time,
threads, engines and the network to the database are simulated. Some servers are routers: their engines, to
which they send lines, are looked at, lost, ejected and tried again by the product's code. The database is
SQLite, so transactions of different servers do not overlap; ``test_shared_store.py`` has those of PostgreSQL.

``python -m tests.jobs.world 0 10000`` runs these seeds, and prints those that fail;
``python -m tests.jobs.world 17`` runs one, and prints what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import random
import shutil
import sqlite3
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import OperationalError

from backfill.core.durable_files import write_all
from backfill.core.errors import ConfigError, EngineDead
from backfill.jobs import database_results, results, storage
from backfill.jobs.config import JobsConfig
from backfill.jobs.database import open_database
from backfill.jobs.errors import Busy, Conflict, NotFound, StorageFull
from backfill.jobs.lines import LineResult, completed
from backfill.jobs.manager import JobManager
from backfill.jobs.threads import JobThreads
from backfill.preparation.line_file import is_marked
from backfill.preparation.lines import BatchLine
from backfill.protocol.service import TokenCount
from backfill.router import line_runner
from backfill.router.line_reader import RoutedReader
from tests.jobs.doubles import empty_database, ready, submit
from tests.jobs.routed_engines import TIMEOUT_S, RoutedEngines
from tests.jobs.virtual_processes import CALL_S, Process, VirtualPool
from tests.router.virtual_fleet import EngineWorld
from tests.seeds import run_seeds

_EPOCH_S = 1_700_000_000.0
_DAY_S = 86400.0
_LINE_S = 0.4  # in an engine, at most
_PERIODS_PER_LEASE = 5
_TURN_S = 0.01  # for which a router waits at first for a line's turn to be alone: less than a line may take
_LONGEST_HANG_S = 5.0
_CLIENT_S = 6.0  # that a client waits for an answer
_RUNS = "status IN ('in_progress', 'cancelling')"
_FINAL = {"completed", "failed", "expired", "cancelled"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a seed makes of the world.

    Attributes:
        faults: kinds that occur.
        chaos_s: seconds during which they do.
        num_lines: of each batch, with its owner.
        num_routers: so many of the servers have engines behind them.
        num_engines: of each router; all have the same.
        is_shared: a database that several servers may have; else one server has all, with results in files.
    """

    num_servers: int
    lease_s: float
    capacity: int
    chaos_s: float
    faults: frozenset[str]
    num_lines: tuple[tuple[str, int], ...]
    is_shared: bool = True
    num_routers: int = 0
    num_engines: int = 1

    @property
    def is_mild(self) -> bool:
        """Nobody waits to retry, and no line runs alone: what an owner waits is explained by its share."""
        return self.faults <= _MILD_FAULTS

    @classmethod
    def of(cls, source: random.Random) -> Plan:
        lease_s = source.choice([1.0, 2.0, 4.0])
        if source.random() < _FAIR_SHARE:
            return cls(
                num_servers=source.randint(1, 2),
                lease_s=lease_s,
                capacity=source.choice([2, 4]),
                chaos_s=lease_s * source.uniform(2, 4),
                faults=frozenset(kind for kind in FAULTS if kind in _MILD_FAULTS and source.random() < 0.5),
                num_lines=(("a", 120),),
            )
        owners = ["a", "b", "c"][: source.randint(1, 3)]
        is_shared = source.random() < _SHARED_SHARE
        return cls(
            num_servers=source.randint(1, 3) if is_shared else 1,
            is_shared=is_shared,
            lease_s=lease_s,
            capacity=source.choice([2, 4, 8]),
            chaos_s=lease_s * source.uniform(2, 4),
            faults=frozenset(kind for kind in FAULTS if source.random() < 0.35)
            - ({"partitions"} if not is_shared else set()),
            num_lines=tuple(
                (source.choice(owners), source.choice([1, 7, 20, 40])) for _ in range(source.randint(1, 3))
            ),
            num_routers=source.choice([0, 1, 3]) if source.random() < _ROUTED_SHARE else 0,
            num_engines=source.randint(1, 3),
        )


FAULTS = (
    "lost commits",
    "lost answers",
    "refusals",
    "partitions",
    "pauses",
    "clock jumps",
    "full disks",
    "dead engines",
    "silent engines",
    "fatal lines",
    "kills",
    "stops",
    "cancellations",
    "short windows",
)
_MILD_FAULTS = frozenset({"clock jumps", "stops"})
_SHARED_SHARE = 0.75  # of seeds
_ROUTED_SHARE = 0.5  # of seeds
_FAIR_SHARE = 0.1  # of seeds, with mild faults and one owner's flood
_LOSSES_OF_THE_GUILTY = 3  # with no other line; by faults, the innocent may have as many
_LATE_LINES = 6  # of another owner, once the faults have ended


class SimulatedEngine:
    """A ``LineRunner`` that takes a while for each line. Fatal ones end it, and all in flight are lost."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._in_flight: dict[str, asyncio.Future[None]] = {}
        self.is_up = False

    def start(self) -> None:
        if not self.is_up and self._server.is_serving:
            self.is_up = True
            ready(self._server.manager)

    def die(self, away_s: float) -> None:
        if not self.is_up:
            return
        self.is_up = False
        self._server.world.note_lost(self._in_flight)
        num_lost = len(self._in_flight)
        for end in self._in_flight.values():
            if not end.done():
                end.set_exception(EngineDead("killed", num_lost=num_lost, num_others=num_lost - 1))
        self._server.manager.engine_lost()
        self._server.process.loop.call_later(away_s, self.start)

    async def run(self, line: BatchLine, count: TokenCount | None = None, **_: object) -> LineResult:
        world, loop = self._server.world, self._server.process.loop
        if not self.is_up:
            raise EngineDead("The engine is not running.")
        world.note_run(self._server, line)
        end = self._in_flight[line.custom_id] = loop.create_future()
        seconds = world.source.uniform(*world.run_s)
        if line.custom_id in world.poison:
            timer = loop.call_later(seconds, self.die, world.longest_away_s)
        else:
            timer = loop.call_later(seconds, lambda: end.done() or end.set_result(None))
        try:
            await end
        finally:
            timer.cancel()
            del self._in_flight[line.custom_id]
        return completed(line, json.loads(world.answer_of(line.custom_id)))


class Server:
    """A server that may be started again after its end, with the same data folder."""

    def __init__(self, world: World, name: str, *, is_router: bool) -> None:
        self.world = world
        self.folder = world.folder / name
        self.name = name
        self.is_router = is_router
        self.num_starts = 0
        self.is_cut_off = False
        self.is_stopping = False
        self.process: Process
        self.manager: JobManager
        self.engine: SimulatedEngine | RoutedEngines
        self.start()

    @property
    def is_serving(self) -> bool:
        return not (self.process.is_dead or self.is_stopping) and self.manager._is_open

    @property
    def holder(self) -> str:
        """Its name in leases, once it serves."""
        leases = self.manager._storage.store.leases
        assert leases is not None, "the store is shared"
        return leases.holder

    @property
    def has_room(self) -> bool:
        claims = self.manager._claims
        assert claims is not None
        return claims._max_lines() > claims._lines_of().total()

    def start(self) -> None:
        world, plan = self.world, self.world.plan
        self.num_starts += 1
        self.is_stopping = False
        self.process = process = Process(world.scheduler, f"{self.name}.{self.num_starts}")
        self.engine = RoutedEngines(self) if self.is_router else SimulatedEngine(self)
        self.manager = JobManager(
            JobsConfig(
                data_dir=self.folder,
                batch_database_url=f"sqlite:///{world.database}" if plan.is_shared else None,
                batch_file_store=str(world.folder / "shared") if plan.is_shared else None,
                batch_lease_timeout=plan.lease_s,
                batch_min_free_gib=0,
                max_in_flight=plan.capacity,
            ),
            RoutedReader("fcfs", world.scheduler.clock),
            model_names=["m"],
            runner=self.engine,
            wall=world.database_time_s,
            clock=world.scheduler.clock,
            threads=JobThreads(partial(VirtualPool, process, self._hang_s)),
        )
        world.scheduler.note(f"{process.name} starts")
        process.spawn(self._serve())

    async def _serve(self) -> None:
        manager, process = self.manager, self.process
        try:
            await manager.start()
        except ConfigError as error:
            self.world.scheduler.note(f"{process.name} cannot start: {error}")
            self.world.scheduler.after(1.0, partial(self._start_again, process))
            return
        manager._driver.on_lines = self.world.note_durable
        if manager._claims is not None:
            manager._claims._period_s = self.world.plan.lease_s / _PERIODS_PER_LEASE
        self.engine.start()

    def _start_again(self, ended: Process) -> None:
        if self.process is ended and not self.world.is_over:
            ended.is_dead = True
            self.start()

    def kill(self, away_s: float) -> None:
        """As by SIGKILL. It is started again after ``away_s``."""
        if self.process.is_dead:
            return
        self.world.scheduler.note(f"{self.process.name} is killed")
        ended = self.process
        ended.is_dead = True
        self.is_stopping = False
        self.manager._lock.release()
        if not self.world.plan.is_shared:
            self._tear_results()
        self.world.scheduler.after(away_s, partial(self._start_again, ended))

    def _tear_results(self) -> None:
        """It was writing."""
        for blobs in self.world.query(
            f"SELECT output_blob, error_blob FROM batches WHERE {_RUNS} ORDER BY sequence"
        ):
            for blob in blobs:
                path = self.world.files / blob
                if path.exists() and self.world.source.random() < 0.5:
                    with path.open("ab") as file:
                        file.write(b'{"id":"batch_req_'[: self.world.source.randrange(18)])

    def stop(self, away_s: float | None = None) -> None:
        """In order. It is started again after ``away_s``."""
        if not self.is_serving:
            return
        self.world.scheduler.note(f"{self.process.name} stops")
        self.is_stopping = True
        ended = self.process
        ended.spawn(self.manager.stop()).add_done_callback(partial(self._note_stopped, ended, away_s))

    def _note_stopped(self, ended: Process, away_s: float | None, _: object) -> None:
        if not self.is_stopping:  # it was killed meanwhile
            return
        ended.is_dead = True
        self.is_stopping = False
        if away_s is not None:
            self.world.scheduler.after(away_s, partial(self._start_again, ended))

    def _hang_s(self) -> float:
        """That a call waits for a network which is cut."""
        return self.world.source.uniform(0.5, _LONGEST_HANG_S) if self.is_cut_off else 0.0

    # ---- What the database and the disk answer ----

    def listen(self, engine: Engine) -> None:
        event.listen(engine, "begin", self._on_begin)
        event.listen(engine, "commit", self._on_commit)

    def _on_begin(self, _: Connection) -> None:
        if self.process.is_dead or self.is_cut_off or self.world.occurs("refusals", 0.03):
            raise OperationalError("BEGIN", None, ConnectionError("refused"))

    def _on_commit(self, connection: Connection) -> None:
        if self.process.is_dead:
            raise OperationalError("COMMIT", None, ConnectionError("lost"))
        if self.world.occurs("lost commits", 0.05):
            self.world.scheduler.note(f"{self.process.name} loses a commit")
            raise OperationalError("COMMIT", None, ConnectionError("lost"))
        if self.world.occurs("lost answers", 0.05):
            self.world.scheduler.note(f"{self.process.name} loses the answer to a commit")
            connection.connection.commit()
            raise OperationalError("COMMIT", None, ConnectionError("lost"))


@dataclass(slots=True)
class World(EngineWorld):
    """Runs a seed. ``violations`` are what did not hold."""

    loads_s = 0.2
    run_s = _LINE_S / 2, _LINE_S

    folder: Path
    runs: Counter[str] = field(default_factory=Counter)
    lost_alone: Counter[str] = field(default_factory=Counter)  # lines, with their engines
    durable: dict[str, Any] = field(default_factory=dict)
    created: dict[str, tuple[str, int, str]] = field(default_factory=dict)  # by id: owner, lines, label
    cancelled: set[str] = field(default_factory=set)
    wanted: set[str] = field(default_factory=set)  # labels of batches whose clients have no answer yet
    jumped_s: float = 0.0
    went_back_s: float = 0.0
    is_disk_full: bool = False
    is_over: bool = False  # no server starts any more
    plan: Plan = field(init=False)
    servers: list[Server] = field(default_factory=list)
    _reader: sqlite3.Connection | None = None
    _ask_at_s: float = 0.0

    @staticmethod
    def plan_of(source: random.Random) -> Plan:
        return Plan.of(source)

    @property
    def database(self) -> Path:
        return (self.folder if self.plan.is_shared else self.folder / "s0") / "jobs.db"

    @property
    def files(self) -> Path:
        """The folder of stored files."""
        return self.folder / ("shared" if self.plan.is_shared else "s0") / "files"

    @property
    def longest_away_s(self) -> float:
        return self.plan.lease_s / 4

    def answer_of(self, name: str) -> bytes:
        """Each says which of the line's runs it is of."""
        self.runs[name] += 1
        usage = {"prompt_tokens": 2, "completion_tokens": 1}
        return json.dumps({"usage": usage, "run": self.runs[name]}).encode()

    def database_time_s(self) -> float:
        return _EPOCH_S + self.scheduler.clock.now_s() + self.jumped_s

    def run(self) -> None:
        with self._patched():
            for number in range(self.plan.num_servers):
                self.servers.append(Server(self, f"s{number}", is_router=number < self.plan.num_routers))
            for number, (owner, num_lines) in enumerate(self.plan.num_lines):
                self.wanted.add(f"b{number}")
                at_s = self.source.uniform(0.2, self.plan.chaos_s / 2)
                self.scheduler.after(at_s, partial(self._submit, owner, num_lines, f"b{number}"))
            self._plan_faults()
            self.scheduler.run_for(self.plan.chaos_s)
            self._end_faults()
            if not self.scheduler.run_until(self._all_ended, self._takeover_s()):
                left = self._neglected()
                self.scheduler.run_for(self.plan.lease_s)
                self.violations += sorted(left & self._neglected())
            bound_s = self._bound_s()
            if not self.scheduler.run_until(self._all_ended, bound_s):
                self.violations.append(f"not ended {bound_s:.1f} s after the last fault: {self._open()}")
            self._check_results()
            self._bury()
        self.violations += self.scheduler.errors

    # ---- Clients ----

    def _submit(self, owner: str, num_lines: int, label: str) -> None:
        serving = [server for server in self.servers if server.is_serving]
        if not serving:
            self.scheduler.after(0.5, partial(self._submit, owner, num_lines, label))
            return
        server = self.source.choice(serving)
        window_s = 3600
        if "short windows" in self.plan.faults and self.source.random() < 0.5:
            window_s = self.source.randint(1, 5)
        if "fatal lines" in self.plan.faults:
            self.poison.add(f"{label}-{self.source.randrange(num_lines)}")
        server.process.spawn(self._submit_to(server, owner, num_lines, label, window_s))
        self.scheduler.after(_CLIENT_S, partial(self._submit_again, owner, num_lines, label))

    def _submit_again(self, owner: str, num_lines: int, label: str) -> None:
        """Another batch: the first may have been created, its answer lost."""
        if label.rstrip("'") in self.wanted:
            self._submit(owner, num_lines, f"{label}'")

    async def _submit_to(self, server: Server, owner: str, num_lines: int, label: str, window_s: int) -> None:
        content = b"".join(_line(f"{label}-{number}") for number in range(num_lines))
        try:
            batch = await submit(server.manager, content, window_s, owner)
        except (Busy, StorageFull, NotFound, asyncio.CancelledError) as error:
            self.scheduler.note(f"{label} is refused: {error!r}")
            return
        self.scheduler.note(f"{label} of {owner} has {num_lines} lines at {server.name}, window {window_s} s")
        self.created[batch.id] = owner, num_lines, label
        self.wanted.discard(label.rstrip("'"))
        if owner == "late":
            bound_s = self._late_s()
            self.scheduler.after(bound_s, partial(self._check_late, batch.id, bound_s))
        if "cancellations" in self.plan.faults and self.source.random() < 0.5:
            await asyncio.sleep(self.source.uniform(0, self.plan.chaos_s / 2))
            with contextlib.suppress(Busy, Conflict, asyncio.CancelledError):
                await server.manager.cancel_batch(owner, batch.id)
                self.scheduler.note(f"{label} is cancelled")
                self.cancelled.add(batch.id)

    # ---- Faults ----

    def _plan_faults(self) -> None:
        plan, source = self.plan, self.source
        acts: dict[str, Callable[[], None]] = {
            "partitions": self._cut_off,
            "pauses": lambda: self._any_server().process.pause(source.uniform(0, 2 * plan.lease_s)),
            "clock jumps": self._jump,
            "full disks": self._fill_disk,
            "dead engines": lambda: self._any_server().engine.die(source.uniform(0, 2 * plan.lease_s)),
            "silent engines": lambda: source.choice(list(self.engines.values())).block(
                source.uniform(0, 4 * TIMEOUT_S)
            ),
            "kills": lambda: self._any_server().kill(self._away_s()),
            "stops": lambda: self._any_server().stop(self._away_s()),
        }
        for kind, act in acts.items():
            if kind in plan.faults:
                for _ in range(source.randint(1, 3)):
                    self.scheduler.after(source.uniform(0.1, plan.chaos_s), partial(self._act, kind, act))

    def _act(self, kind: str, act: Callable[[], None]) -> None:
        if self.is_chaotic:
            self.scheduler.note(kind)
            act()

    def _any_server(self) -> Server:
        return self.source.choice(self.servers)

    def _away_s(self) -> float:
        """Where others serve, it may be for good."""
        lease_s = self.plan.lease_s
        may_stay_away = sum(server.is_serving for server in self.servers) > 1
        return self.source.choice([0.1, 3 * lease_s, 1e9 if may_stay_away else lease_s / 2])

    def _cut_off(self) -> None:
        server = self._any_server()
        server.is_cut_off = True
        self.scheduler.after(self.source.uniform(0, 3 * self.plan.lease_s), partial(self._join, server))

    def _join(self, server: Server) -> None:
        server.is_cut_off = False

    def _jump(self) -> None:
        seconds = self.source.choice([-1.0, 1.0, 10.0]) * self.plan.lease_s
        self.jumped_s += seconds
        self.went_back_s += max(0.0, -seconds)

    def _fill_disk(self) -> None:
        self.is_disk_full = True
        self.scheduler.after(self.source.uniform(0, self.plan.lease_s), self._free_disk)

    def _free_disk(self) -> None:
        self.is_disk_full = False

    def _end_faults(self) -> None:
        """Servers that are away stay so for as long as was said; one that serves is there."""
        self.scheduler.note("the faults end")
        self.is_chaotic = False
        self._free_disk()
        for server in self.servers:
            server.is_cut_off = False
            server.process.resume()
        for engine in self.engines.values():
            engine.wake()
        if all(server.process.is_dead for server in self.servers):
            self.servers[0].start()

        if self.plan.is_mild and any(server.is_serving for server in self.servers):
            self._submit("late", _LATE_LINES, "late")

    # ---- What must hold ----

    def _takeover_s(self) -> float:
        """Two leases after the last fault. The database's clock may have gone back, and calls may hang."""
        hang_s = _LONGEST_HANG_S if "partitions" in self.plan.faults else 0.0
        engine_s = TIMEOUT_S + 1.0 if self.plan.num_routers else 0.0  # until a router knows that one is back
        return 2 * self.plan.lease_s + self.went_back_s + hang_s + engine_s

    def _neglected(self) -> set[str]:
        """Parts that somebody should run: of a server that is dead, or of one that knows nothing of them."""
        if not self.plan.is_shared:
            return set()
        serving = [server for server in self.servers if server.is_serving and server.engine.is_up]
        known = {
            (job.lease.batch_id, part, job.lease.token)
            for server in serving
            for job in server.manager._jobs.values()
            if job.lease is not None
            for part in job.lease.parts
        }
        alive = {server.holder for server in self.servers if server.is_serving}
        found = set()
        for row in self.query("SELECT batch_id, part, token, holder FROM leases WHERE holder IS NOT NULL"):
            lease = row["batch_id"], row["part"], row["token"]
            is_orphan = row["holder"] in {server.holder for server in serving} and lease not in known
            is_left = row["holder"] not in alive and any(server.has_room for server in serving)
            if is_orphan or is_left:
                found.add(f"{lease} of {row['holder']} is {'an orphan' if is_orphan else 'not taken over'}")
        return found

    def note_lost(self, names: Collection[str]) -> None:
        if len(names) == 1:
            self.lost_alone.update(list(names))

    def note_run(self, server: Server, line: BatchLine) -> None:
        """A line that is done does not run again, but where its server has lost the lease and cannot know."""
        if line.custom_id not in self.durable:
            return
        if not self.plan.is_shared:
            self.violations.append(f"{line.custom_id} is done, and runs again")
            return
        held = {
            (row["batch_id"], row["part"], row["token"])
            for row in self.query("SELECT * FROM leases WHERE holder = ?", server.holder)
        }
        for job in server.manager._jobs.values():
            lease = job.lease
            is_of_line = (
                lease is not None
                and self.created.get(lease.batch_id, ("", 0, ""))[2] == (line.custom_id.rpartition("-")[0])
            )
            if lease is None or not is_of_line or (job.lines and not is_marked(job.lines, line.number)):
                continue
            if all((lease.batch_id, part, lease.token) in held for part in lease.parts):
                self.violations.append(f"{line.custom_id} is done, and runs again on {server.name}")

    def _bound_s(self) -> float:
        """Of what is left, if the servers that were away return and whoever waits to retry does so."""
        num_lines = sum(num_lines for _, num_lines in self.plan.num_lines)
        num_losses = 4 * len(self.poison)
        return 3 * self.plan.lease_s + 30.0 + 2 * _LINE_S * num_lines + num_losses * self.plan.lease_s

    def _late_s(self) -> float:
        """What a late owner's lines take beside one flood, with half of one server: it waits for no other's.

        Its batch is claimed twice and checked, each line of the flood in its way ends, and then its own run.
        """
        num_turns = math.ceil(_LATE_LINES / (self.plan.capacity / 2)) + 1
        return num_turns * _LINE_S + 4 * self.plan.lease_s / _PERIODS_PER_LEASE + 50 * CALL_S

    def _check_late(self, batch_id: str, bound_s: float) -> None:
        (row,) = self.query("SELECT status FROM batches WHERE id = ?", batch_id)
        if row["status"] not in _FINAL:
            self.violations.append(f"the late owner waits longer than {bound_s:.2f} s beside a flood")

    def query(self, statement: str, *values: Any) -> list[Any]:
        if self._reader is None:
            self._reader = sqlite3.connect(self.database)
            self._reader.row_factory = sqlite3.Row
        return self._reader.execute(statement, values).fetchall()

    def _all_ended(self) -> bool:
        """Asked after every step, so the database is asked seldom."""
        if self.scheduler.clock.now_s() < self._ask_at_s:
            return False
        self._ask_at_s = self.scheduler.clock.now_s() + self.plan.lease_s / 5
        return not (self.wanted or self._open())

    def _open(self) -> list[str]:
        found = self.query("SELECT id, status FROM batches")
        return [f"{row['id']} {row['status']}" for row in found if row["status"] not in _FINAL]

    def note_durable(self, group: Any) -> None:
        for result in group:
            name, run = result.line.custom_id, (result.response or {}).get("body", {}).get("run")
            if name in self.durable:
                self.violations.append(f"{name} was recorded twice: runs {self.durable[name]} and {run}")
            self.durable[name] = run

    def _check_results(self) -> None:
        rows = {row["id"]: row for row in self.query("SELECT * FROM batches")}
        for batch_id, (_, num_lines, label) in self.created.items():
            if batch_id not in rows:
                self.violations.append(f"{label} is lost")
            elif rows[batch_id]["status"] in _FINAL:
                self._check_batch(rows[batch_id], label, num_lines)
        for table in ("leases", "results", "suspects"):
            left = {row["batch_id"] for row in self.query(f"SELECT batch_id FROM {table}")}
            self.violations += [
                f"{each} has ended, and has {table}" for each in left if rows[each]["status"] in _FINAL
            ]

    def _check_batch(self, row: Any, label: str, num_lines: int) -> None:
        found = Counter[str]()
        status, output = row["status"], self._content(row["output_file_id"])
        errors = self._content(row["error_file_id"])
        expect = partial(self._expect, f"{label}, {status}:")
        for line in output + errors:
            name = line["custom_id"]
            found[name] += 1
            run = ((line["response"] or {}).get("body") or {}).get("run")
            expect(self.durable.get(name, run) == run, f"{name} has another result than the one recorded")
            code = (line["error"] or {}).get("code")
            may_be = {"batch_cancelled", "batch_expired"} if status in ("cancelled", "expired") else set()
            if name in self.poison or self.lost_alone[name] >= _LOSSES_OF_THE_GUILTY:
                may_be = may_be | {"engine_error"}
            expect(code is None or code in may_be, f"{name} has {code}")
        names = {f"{label}-{number}" for number in range(num_lines)}
        has_run = bool(row["in_progress_at"])
        if has_run:
            expect(set(found) == names, f"without results: {sorted(names - set(found))}")
        expect(max(found.values(), default=1) == 1, "lines have several results")
        recorded = {name for name in self.durable if name in names}
        expect(recorded <= set(found), f"recorded results are lost: {sorted(recorded - set(found))}")
        counts = row["num_total"], row["num_completed"], row["num_failed"]
        expect(
            not has_run or counts == (num_lines, len(output), len(errors)), f"counts {counts}, lines {found}"
        )
        expect(row["input_tokens"] == 2 * len(output), "usage")
        expect(status != "failed", f"failed: {row['errors']}")
        expect((row["id"] in self.cancelled) <= (status == "cancelled"), "was cancelled")

    def _expect(self, what: str, holds: bool, otherwise: str) -> None:
        if not holds:
            self.violations.append(f"{what} {otherwise}")

    def _content(self, file_id: str | None) -> list[Any]:
        if file_id is None:
            return []
        path = self.files / file_id
        return [json.loads(line) for line in path.read_bytes().splitlines()]

    # ---- The machine below ----

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """Ids of the seed, no waits for a disk, and this world's database clock and faults."""
        ids = random.Random(self.seed)
        self.database.parent.mkdir(exist_ok=True)
        shutil.copy(str(empty_database().url.database), self.database)
        with (
            self.connected(),
            mock.patch("uuid.uuid4", side_effect=lambda: uuid.UUID(int=ids.getrandbits(128), version=4)),
            mock.patch("os.fsync"),
            mock.patch.object(storage, "open_database", self._open_database),
            mock.patch.object(line_runner, "_TURN_S", _TURN_S),
            mock.patch.object(database_results, "write_all", self._write_all),
            mock.patch.object(results, "write_all", self._write_all),
        ):
            yield

    def _open_database(self, url: str | None, data_dir: Path) -> Engine:
        engine = open_database(url, data_dir)
        known = empty_database()
        engine.dialect, engine._compiled_cache = known.dialect, known._compiled_cache
        event.listen(engine, "connect", self._configure)
        engine.dispose()
        next(server for server in self.servers if server.folder == data_dir).listen(engine)
        return engine

    def _configure(self, connection: Any, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")
        connection.create_function("julianday", 1, lambda _: 2440587.5 + self.database_time_s() / _DAY_S)

    def _write_all(self, file: int, data: bytes) -> None:
        if self.is_disk_full:
            write_all(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(file, data)

    def _bury(self) -> None:
        self.is_over = True
        for server in self.servers:
            server.stop()
        self.scheduler.run_until(lambda: not any(server.is_stopping for server in self.servers), 15.0)
        for process in self.scheduler.processes:
            process.bury()
        for server in self.servers:
            server.manager._lock.release()


def _line(custom_id: str) -> bytes:
    body = {"prompt": custom_id}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


def run_seed(seed: int) -> World:
    """Run the world of a seed in memory, where the machine has a file system there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="backfill-world-", dir=memory if memory.is_dir() else None
    ) as name:
        world = World(seed, Path(name))
        world.run()
    return world


if __name__ == "__main__":
    sys.exit(run_seeds(run_seed))
