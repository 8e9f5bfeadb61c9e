"""Leases on batches, on a clock that the test moves."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Column, Engine, Float, Integer, MetaData, Table, delete, event, insert, select, update
from sqlalchemy.exc import OperationalError

from backfill.jobs.database import database_clock, open_database
from backfill.jobs.database_results import DatabaseResults
from backfill.jobs.leases import Lease, LeaseLost, Leases, add_lease
from backfill.jobs.lines import completed
from backfill.jobs.object_store import open_file_store
from backfill.jobs.records import (
    OPEN_STATUSES,
    BatchRecord,
    BatchStatus,
    FileRecord,
    LeasedPart,
    RecordedResult,
    SavedLosses,
)
from backfill.jobs.results import ResultsLost
from backfill.jobs.store import JobStore
from backfill.jobs.suspects import Losses, Suspects
from backfill.preparation.lines import BatchLine
from tests.shared import examples

DURATION_S = 10.0
clock = Table("clock", MetaData(), Column("id", Integer, primary_key=True), Column("now_s", Float))
NOW_S = select(clock.c.now_s).scalar_subquery()


class Server:
    """What one of several servers does to the database."""

    def __init__(self, engine: Engine, name: str, folder: Path) -> None:
        self.leases = Leases(engine, name, DURATION_S, NOW_S)
        self.store = JobStore(engine, self.leases)
        self.results = DatabaseResults(engine, open_file_store(str(folder), folder), self.leases)
        self.held: dict[str, Lease] = {}  # as it believes
        self.all: list[Lease] = []  # ever claimed

    def claim(self, *, has_answer: bool = True, **options: object) -> str | None:
        claimed = self.leases.claim(model_names=["m"], running=list(self.held.values()), **options)
        if claimed is None:
            return None
        if not has_answer:
            return claimed.batch.id
        lease, batch = claimed.lease, claimed.batch
        assert lease.batch_id == batch.id
        self.held[batch.id] = lease
        self.all.append(lease)
        return batch.id

    def suspects(self, batch_id: str) -> Suspects:
        """Of a batch that it holds, as it believes."""
        batch = self.store.get_batch("o", batch_id)
        found = Suspects(self.results.losses_of(batch, self.held[batch_id]), batch_id)
        found.load()
        return found

    def record(self, lease: Lease, number: int) -> bool:
        """Whether a result was recorded."""
        batch = self.store.get_batch("o", lease.batch_id)
        log = self.results.log_of(batch, lease)
        try:
            log.open()
            line = BatchLine(number=number, custom_id=f"r{number}", request_id="req")
            log.append([completed(line, {"usage": {"prompt_tokens": 2, "completion_tokens": 1}})])
        except LeaseLost:
            return False
        return True


def file_of(name: str) -> FileRecord:
    return FileRecord(
        id=f"file-{name}",
        owner="o",
        num_bytes=1,
        created_at=0,
        expires_at=None,
        filename="in.jsonl",
        purpose="batch",
    )


def add_batch(engine: Engine, number: int) -> str:
    file = file_of(f"{number}")
    batch = BatchRecord(
        id=f"batch_{number}",
        owner="o",
        endpoint="/v1/completions",
        input_file_id=file.id,
        completion_window="1h",
        status=BatchStatus.IN_PROGRESS,
        created_at=0,
        expires_at=1000 + number,
        output_blob=f"file-{number}-output",
        error_blob=f"file-{number}-error",
        output_retention_s=1,
    )
    store = JobStore(engine, Leases(engine, "front", DURATION_S, NOW_S))
    store.add_file(file)
    store.add_batch(batch, 100)
    return batch.id


def set_clock(engine: Engine, now_s: float) -> None:
    with engine.begin() as connection:
        connection.execute(update(clock).values(now_s=now_s))


@pytest.fixture
def engine(each_url: str, tmp_path: Path) -> Iterator[Engine]:
    opened = open_database(each_url, tmp_path)
    yield with_clock(opened)
    opened.dispose()


@pytest.fixture
def shared(database_url: str, tmp_path: Path) -> Iterator[Engine]:
    """PostgreSQL, where several threads act at once."""
    opened = open_database(database_url, tmp_path)
    yield with_clock(opened)
    opened.dispose()


def with_clock(engine: Engine) -> Engine:
    with engine.begin() as connection:
        clock.metadata.create_all(connection)
        connection.execute(insert(clock), {"id": 1, "now_s": 0.0})
    return engine


def servers(engine: Engine, folder: Path, num_servers: int = 2) -> list[Server]:
    return [Server(engine, f"s{number}", folder) for number in range(num_servers)]


class LeaseMachine(RuleBasedStateMachine):
    """Servers claim, renew, write, release, and die, in any order, as time goes by.

    The model knows for each batch who claimed it last, and until when nobody else may. Answers to claims are
    lost: what a server does not know that it holds, it may claim again at once.
    """

    engine: Engine
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        with self.engine.begin() as connection:
            for kind in (LeasedPart, BatchRecord, RecordedResult, FileRecord):
                connection.execute(delete(kind))
        self.now_s = 0.0
        set_clock(self.engine, 0.0)
        self.batches = [add_batch(self.engine, number) for number in range(2)]
        self.servers = servers(self.engine, self.folder, 3)
        self.holder: dict[str, Server | None] = dict.fromkeys(self.batches)
        self.ends_at_s = dict.fromkeys(self.batches, 0.0)
        self.tokens: dict[str, int] = dict.fromkeys(self.batches, 0)
        self.recorded: dict[str, int] = dict.fromkeys(self.batches, 0)

    @rule(seconds=st.sampled_from([4.0, 9.5, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        set_clock(self.engine, self.now_s)

    @rule(
        number=st.integers(0, 2),
        takes_over=st.sampled_from([True, True, True, False]),
        has_answer=st.sampled_from([True, True, False]),
    )
    def claim(self, number: int, takes_over: bool, has_answer: bool) -> None:
        server = self.servers[number]
        running = [batch for batch in self.batches if self.runs(server, batch)]
        claimed = server.claim(has_answer=has_answer, takes_over=takes_over)
        free = [
            batch
            for batch in self.batches
            if batch not in running
            and (self.holder[batch] in (None, server) or (takes_over and self.ends_at_s[batch] <= self.now_s))
        ]
        assert claimed == (free[0] if free else None), "whose window ends first"
        if claimed is not None:
            if has_answer:
                assert server.held[claimed].token == self.tokens[claimed] + 1, "tokens rise"
            self.tokens[claimed] += 1
            self.holder[claimed] = server
            self.ends_at_s[claimed] = self.now_s + DURATION_S

    @rule(number=st.integers(0, 2))
    def renew(self, number: int) -> None:
        server = self.servers[number]
        renewal = server.leases.renew(list(server.held.values()))
        mine = {batch for batch in self.batches if self.runs(server, batch)}
        assert {lease.batch_id: lease.token for lease in renewal.held} == {
            batch: self.tokens[batch] for batch in mine
        }
        for batch in mine:
            self.ends_at_s[batch] = self.now_s + DURATION_S

    @precondition(lambda self: any(server.all for server in self.servers))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        server, lease = self.any_claim(data)
        is_recorded = server.record(lease, self.recorded[lease.batch_id] + 1)
        assert is_recorded == self.is_held(server, lease)
        if is_recorded:
            self.recorded[lease.batch_id] += 1
            self.ends_at_s[lease.batch_id] = self.now_s + DURATION_S

    @precondition(lambda self: any(server.all for server in self.servers))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        server, lease = self.any_claim(data)
        server.leases.release(lease)
        if self.is_held(server, lease):
            self.holder[lease.batch_id] = None

    def any_claim(self, data: st.DataObject) -> tuple[Server, Lease]:
        """Of now or earlier, by a server that may have forgotten it, been slow or hung meanwhile."""
        return data.draw(
            st.sampled_from([(server, lease) for server in self.servers for lease in server.all])
        )

    def runs(self, server: Server, batch: str) -> bool:
        """The server holds it, and knows it."""
        lease = server.held.get(batch)
        return lease is not None and self.is_held(server, lease)

    def is_held(self, server: Server, lease: Lease) -> bool:
        return self.holder[lease.batch_id] is server and self.tokens[lease.batch_id] == lease.token

    @invariant()
    def what_was_recorded_is_there_once(self) -> None:
        for batch in self.batches:
            record = self.servers[0].store.get_batch("o", batch)
            assert record.request_counts.completed == self.recorded[batch]
            assert record.usage.input_tokens == 2 * self.recorded[batch]
        with self.engine.connect() as connection:
            assert len(connection.execute(select(RecordedResult.number)).all()) == sum(self.recorded.values())


def test_at_most_one_server_holds_a_batch_and_only_it_records(engine: Engine, tmp_path: Path) -> None:
    max_examples = examples(20 if engine.dialect.name == "sqlite" else 12)  # a server takes longer
    machine = type("Machine", (LeaseMachine,), {"engine": engine, "folder": tmp_path})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@settings(max_examples=examples(16), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    num_parts=st.lists(st.integers(1, 8), min_size=2, max_size=4),
    turns=st.lists(st.integers(0, 1), min_size=4, max_size=16),
    max_lines=st.integers(2, 12),
)
def test_each_owner_gets_its_share_of_lines_and_what_is_left(
    tmp_path_factory: pytest.TempPathFactory, num_parts: list[int], turns: list[int], max_lines: int
) -> None:
    """Servers claim in any order, of owners with parts of two lines; the first owner is the most urgent."""
    folder = tmp_path_factory.mktemp("leases")
    engine = with_clock(open_database(f"sqlite:///{folder / 'jobs.db'}", folder))
    batches = [add_batch(engine, number) for number in range(len(num_parts))]
    with engine.begin() as connection:
        for owner, (batch, count) in enumerate(zip(batches, num_parts, strict=True)):
            connection.execute(update(BatchRecord).where(BatchRecord.id == batch).values(owner=f"{owner}"))
            parts = [(3 << 2 * part).to_bytes(2, "little") for part in range(count)]
            add_lease(connection, batch, parts, first=1)
    left = {f"{owner}": count for owner, count in enumerate(num_parts)}
    of_server, running = [Counter[str](), Counter[str]()], [list[Lease](), list[Lease]()]
    both = servers(engine, folder)
    for number in turns:
        mine, held = of_server[number], of_server[0] + of_server[1]
        claimed = both[number].leases.claim(
            model_names=["m"], running=running[number], max_lines=max_lines, lines_of=mine, num_servers=2
        )
        num_counted = sum(min(num, max_lines) for num in mine.values())
        num_left = max_lines - mine.total()  # what is left may be of any owner
        full = {owner for owner, num in mine.items() if num_left <= 0 and num >= max_lines // len(mine)}
        may = [
            owner
            for owner, count in zip(left, num_parts, strict=True)
            if left[owner] and mine[owner] < count and owner not in full and num_counted < 2 * max_lines
        ]
        if not may:
            assert claimed is None
            continue
        assert claimed is not None
        running[number].append(claimed.lease)
        owner = claimed.batch.owner
        assert owner == min(may, key=lambda each: held[each])
        num_lines = int.from_bytes(claimed.lease.lines or b"", "little").bit_count()
        share = max(max_lines // len({*mine, owner}) - mine[owner], num_left, 1)
        assert num_lines <= share + 1
        left[owner] -= num_lines // 2
        mine[owner] += num_lines
    engine.dispose()


def test_claims_at_the_same_time_take_different_batches(shared: Engine, tmp_path: Path) -> None:
    made = [add_batch(shared, number) for number in range(24)]
    all_ready = threading.Barrier(6)

    def claim_all(server: Server) -> list[str]:
        all_ready.wait()
        found = []
        while (batch := server.claim()) is not None:
            found.append(batch)
        return found

    with ThreadPoolExecutor(6) as threads:
        claimed = list(threads.map(claim_all, servers(shared, tmp_path, 6)))
    assert sorted(batch for found in claimed for batch in found) == sorted(made)


def test_a_renewal_waits_for_a_part_of_its_lease_only(shared: Engine) -> None:
    leases = Leases(shared, "a", 1.0)
    add_batch(shared, 1)
    held = leases.claim(model_names=["m"])
    assert held is not None
    began_s = time.monotonic()
    with shared.begin() as hanging:
        leases.hold(hanging, held.lease)
        with pytest.raises(OperationalError):
            leases.renew([held.lease])
    assert time.monotonic() - began_s < 0.9
    assert leases.renew([held.lease]).held == [held.lease], "the next waits for nobody"


def test_many_owners_claim_no_more_than_twice_what_a_server_may_have(engine: Engine, tmp_path: Path) -> None:
    (server,) = servers(engine, tmp_path, 1)
    batch = add_batch(engine, 0)
    with engine.begin() as connection:
        add_lease(connection, batch, [b"\1"], first=1)
    held = {f"owner {number}": 1 for number in range(8)}
    assert server.claim(max_lines=4, lines_of=held) is None
    del held["owner 0"]
    assert server.claim(max_lines=4, lines_of=held) == batch


def test_what_one_owner_has_from_before_another_server_came_keeps_no_other_waiting(
    engine: Engine, tmp_path: Path
) -> None:
    (server,) = servers(engine, tmp_path, 1)
    batch = add_batch(engine, 0)
    assert server.claim(max_lines=4, lines_of={"flood": 32}) == batch


def test_a_claim_waits_for_a_write_that_has_begun(shared: Engine) -> None:
    short, long = (Leases(shared, name, duration_s) for name, duration_s in (("a", 0.05), ("b", 1000.0)))
    batch = add_batch(shared, 1)
    first = short.claim(model_names=["m"])
    assert first is not None
    with shared.begin() as writing, ThreadPoolExecutor(1) as threads:
        short.hold(writing, first.lease)
        time.sleep(0.1)  # the lease has ended
        assert long.claim(model_names=["m"]) is None, "its row is locked"
        renewing = threads.submit(short.renew, [first.lease])
        writing.commit()
        assert renewing.result().held == [first.lease]
    time.sleep(0.1)
    second = long.claim(model_names=["m"])
    assert second is not None
    with pytest.raises(LeaseLost, match=batch), shared.begin() as writing:
        short.hold(writing, first.lease)


def test_which_batches_a_server_claims(engine: Engine, tmp_path: Path) -> None:
    first, second, third = (add_batch(engine, number) for number in range(3))
    (server,) = servers(engine, tmp_path, 1)
    with engine.begin() as connection:
        connection.execute(update(BatchRecord).where(BatchRecord.id == first).values(model="another"))
        connection.execute(
            update(BatchRecord).where(BatchRecord.id == third).values(status=BatchStatus.CANCELLING)
        )
    assert server.claim(only_over=True) == third, "to end it takes no engine"
    assert server.claim(only_over=True) is None
    assert server.claim() == second
    assert server.claim() is None, "the other is of another model"
    set_clock(engine, 1000.5)
    assert server.claim(only_over=True, others_than=[second, third]) == first, "its window has ended"


def test_a_batch_that_has_ended_has_no_lease_and_no_rows(engine: Engine, tmp_path: Path) -> None:
    batch = add_batch(engine, 1)
    first, second = servers(engine, tmp_path)
    first.claim()
    assert first.record(first.held[batch], 1)
    ended = {"status": BatchStatus.COMPLETED, "completed_at": 5}
    set_clock(engine, 20.0)
    second.claim()
    in_progress = [BatchStatus.IN_PROGRESS]
    with pytest.raises(LeaseLost):
        first.store.change_batch(batch, ended, only_from=in_progress, lease=first.held[batch])
    lease = second.held[batch]
    assert second.store.change_batch(batch, ended, only_from=in_progress, lease=lease)
    assert second.store.change_batch(batch, ended, only_from=in_progress, lease=lease), "the answer was lost"
    with engine.connect() as connection:
        assert (
            connection.execute(select(LeasedPart.part)).all()
            == connection.execute(select(RecordedResult.number)).all()
            == []
        )
    assert not second.record(second.held[batch], 2)
    assert second.claim() is None


def test_the_end_of_a_batch_can_be_tried_again(engine: Engine, tmp_path: Path) -> None:
    batch = add_batch(engine, 1)
    (server,) = servers(engine, tmp_path, 1)
    server.claim()
    output = file_of("output")

    def end() -> bool:
        changes = {"status": BatchStatus.COMPLETED}
        lease = server.held[batch]
        return server.store.change_batch(
            batch, changes, only_from=OPEN_STATUSES, new_files=[output], lease=lease
        )

    def refuse(_: object) -> None:
        raise OperationalError("COMMIT", None, ConnectionError())

    event.listen(engine, "commit", refuse)
    with pytest.raises(OperationalError):
        end()
    event.remove(engine, "commit", refuse)
    add_batch(engine, 2)  # its input takes the place that the output had
    assert end()
    found = server.store.list_files("o", purpose=None, order="asc", limit=9, after=None)
    assert [file.id for file in found.items] == ["file-1", "file-2", output.id]


def test_results_that_vanish_from_the_database_are_noticed(engine: Engine, tmp_path: Path) -> None:
    batch = add_batch(engine, 1)
    (server,) = servers(engine, tmp_path, 1)
    server.claim()
    server.record(server.held[batch], 1)
    server.record(server.held[batch], 2)
    log = server.results.log_of(server.store.get_batch("o", batch), server.held[batch])
    log.open()
    log.check_intact()
    with engine.begin() as connection:
        connection.execute(delete(RecordedResult).where(RecordedResult.number == 1))
    with pytest.raises(ResultsLost):
        log.check_intact()


def test_lengths_are_known_of_parts_that_have_ended(engine: Engine, tmp_path: Path) -> None:
    """Of lines in other parts the short ones end first: they would tell too little."""
    batch = add_batch(engine, 1)
    first, second = servers(engine, tmp_path)
    with engine.begin() as connection:
        add_lease(connection, batch, [b"\6", b"\x18", b"\x60"], first=1)
    first.claim(max_lines=2)
    first.record(first.held[batch], 1)
    ended = first.held.pop(batch)
    first.record(ended, 2)
    first.leases.end_lines(ended)
    first.claim(max_lines=2)
    first.record(first.held[batch], 3)
    second.claim(max_lines=2)
    log = second.results.log_of(second.store.get_batch("o", batch), second.held[batch])
    log.open()
    assert log.done == b"\x0e"
    assert log.observed == {1: 1, 2: 1}


def test_which_lines_were_lost_is_known_to_the_server_that_goes_on(engine: Engine, tmp_path: Path) -> None:
    batch_id = add_batch(engine, 1)
    first, second = servers(engine, tmp_path)
    assert first.claim() == batch_id
    before = first.suspects(batch_id)
    before.note_lost(7, is_lone=True, is_only_line=True)
    for _ in range(2):
        before.save(before.encode())
    set_clock(engine, 2 * DURATION_S)
    assert second.claim() == batch_id
    after = second.suspects(batch_id)
    assert (len(after), after.of(7)) == (1, Losses(1, 1, 1))
    before.note_lost(8, is_lone=True, is_only_line=True)
    before.save(before.encode())  # too late
    assert len(second.suspects(batch_id)) == 1
    changes = {"status": BatchStatus.FAILED}
    assert second.store.change_batch(batch_id, changes, only_from=OPEN_STATUSES, lease=second.held[batch_id])
    with engine.connect() as connection:
        assert connection.execute(select(SavedLosses.losses)).all() == []


def test_the_database_clock_is_in_seconds(engine: Engine) -> None:
    with engine.connect() as connection:
        assert abs(connection.execute(select(database_clock(engine))).scalar_one() - time.time()) < 60
