"""Which line is next: what the pool is told of lines, and what becomes of them."""

from __future__ import annotations

import errno
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.blending.pool import OfflinePool
from backfill.blending.requests import OrderName, PlannedRequest, PoolRequest
from backfill.preparation import line_pool
from backfill.preparation.line_pool import WINDOW_LINES, LinePool
from backfill.preparation.lines import BatchLine
from backfill.preparation.messages import START, LinesTaken, OnlineTraffic, Position
from backfill.preparation.spool import Span, Spool
from tests.preparation.pool_doubles import (
    RESOURCES,
    index_all,
    lines_of,
    make_pool,
    open_file,
    prompts,
    take_all,
)
from tests.shared import examples


def numbers(found: Sequence[tuple[int, BatchLine]]) -> list[int]:
    return [line.number for _, line in found]


def reused(found: Sequence[tuple[int, BatchLine]]) -> list[int | None]:
    return [line.generation.request.num_reused_tokens for _, line in found if line.generation is not None]


def test_lines_come_back_as_they_were_prepared_with_what_others_need_of_them(tmp_path: Path) -> None:
    pool = make_pool()
    shared = [1, 2, 3, 4, 5]
    open_file(pool, tmp_path / "in", prompts([*shared, 6], [*shared[:2], 7], [*shared, 8], [9]), owner="a")
    assert index_all(pool) == 4
    found = take_all(pool, "a")
    assert numbers(found) == [1, 2, 3, 4]
    assert reused(found) == [5, 2, 0, 0]
    (_, first), *_ = found
    assert first.generation is not None
    assert first.generation.request.prompts == [[1, 2, 3, 4, 5, 6]]
    assert (first.custom_id, first.generation.request.owner) == ("r0", "a")
    assert first.generation.created > 0, "when it was taken"
    open_file(pool, tmp_path / "choices", lines_of({"prompt": [1, 2], "n": 3}, {"prompt": [1, 2]}))
    index_all(pool)
    assert reused(take_all(pool)) == [None, 0], "several choices share a prompt, whatever others need"


@pytest.mark.parametrize(("order", "is_grouped"), [("fcfs", False), ("dfs", True)])
def test_the_order_is_that_of_the_pool(tmp_path: Path, order: OrderName, is_grouped: bool) -> None:
    pool = make_pool(order)
    bodies = [{"prompt": [n % 4] * 50 + [n], "max_tokens": 2, "ignore_eos": True} for n in range(40)]
    open_file(pool, tmp_path / "in", lines_of(*bodies))
    index_all(pool)
    groups = [number % 4 for number in numbers(take_all(pool))]
    num_changes = sum(one != other for one, other in itertools.pairwise(groups))
    assert num_changes == 3 if is_grouped else num_changes == 39


def test_lines_are_taken_before_the_file_is_indexed_and_of_the_asked_owner_only(tmp_path: Path) -> None:
    pool = make_pool()
    open_file(pool, tmp_path / "a", prompts(*[[n] for n in range(100)]), 1, owner="a")
    open_file(pool, tmp_path / "b", prompts([1], [2]), 2, owner="b")
    assert not pool.take("a", 5).lines
    pool.index(1, START, 3)
    assert not pool.take("b", 5).lines
    assert numbers([(each.reader_id, each.line) for each in pool.take("a", 2).lines]) == [1, 2]
    index_all(pool, 2)
    assert [each.reader_id for each in pool.take("b", 5).lines] == [2, 2]


def test_requests_of_another_salt_or_owner_share_nothing(tmp_path: Path) -> None:
    for scope, salts, expected in (
        ("owner", ("", "s", "t", ""), [4, 0, 0, 0]),
        ("owner", ("s", "", "s", "t"), [4, 0, 0, 0]),
        ("global", ("", "", "", ""), [4, 4, 4, 0]),
    ):
        pool = make_pool()
        pool.scope = scope  # type: ignore[assignment]
        bodies = [{"prompt": [1, 2, 3, 4, 5 + index], "salt": salt} for index, salt in enumerate(salts)]
        open_file(pool, tmp_path / "in", lines_of(*bodies), owner="alice")
        index_all(pool)
        assert reused(take_all(pool, "alice")) == expected


class Recorder:
    """A pool in the order of arrival that remembers what it was told."""

    learned = None

    def __init__(self) -> None:
        self.requests: list[PoolRequest] = []
        self.told: list[tuple[str, Any]] = []
        self._waiting: list[PoolRequest] = []

    def add(self, requests: Sequence[PoolRequest], *, merges_all: bool) -> None:
        self.requests += requests
        self._waiting += requests

    def take(self, group: str | None = None, *, now_s: float = 0.0) -> PlannedRequest | None:
        found = next((each for each in self._waiting if each.group == group), None)
        if found is not None:
            self._waiting.remove(found)
            return PlannedRequest(found.request_id, 1, 1.0)
        return None

    def finish(self, request_id: int, num_output_tokens: int) -> None:
        self.told.append(("finish", (request_id, num_output_tokens)))

    def cancel(self, request_ids: Sequence[int]) -> None:
        self.told.append(("cancel", sorted(request_ids)))
        self._waiting = [each for each in self._waiting if each.request_id not in request_ids]

    def note_progress(self, request_id: int, num_output_tokens: int) -> None:
        self.told.append(("progress", (request_id, num_output_tokens)))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def recorded(recorder: Recorder) -> LinePool:
    as_pool: Any = recorder
    return LinePool(lambda learned: (as_pool, None))


def test_the_pool_is_told_limits_known_lengths_owners_and_deadlines(
    recorder: Recorder, recorded: LinePool, tmp_path: Path
) -> None:
    bodies: list[tuple[dict[str, Any], int | None]] = [
        ({"max_tokens": 9}, None),
        ({"max_tokens": 9, "ignore_eos": True}, 9),
        ({"max_tokens": 9, "ignore_eos": True, "stop": ["x"]}, None),
        ({"max_tokens": 9, "ignore_eos": True, "stop_token_ids": [3]}, None),
        ({"max_tokens": 9, "min_tokens": 9}, 9),
        ({"max_tokens": 9, "min_tokens": 8}, None),
    ]
    content = lines_of(*({"prompt": [1, 2], **body} for body, _ in bodies))
    open_file(recorded, tmp_path / "in", content, owner="a", complete_by_s=5.0)
    index_all(recorded)
    found = [(each.max_output_tokens, each.known_output_tokens) for each in recorder.requests]
    assert found == [(9, known) for _, known in bodies]
    assert {(each.group, each.complete_by_s) for each in recorder.requests} == {("a", 5.0)}


def test_the_pool_is_told_what_becomes_of_lines(
    recorder: Recorder, recorded: LinePool, tmp_path: Path
) -> None:
    open_file(recorded, tmp_path / "in", prompts([1], [2], [3], [4], [5]), 7)
    index_all(recorded, 7)
    recorded.take("", 4)
    recorded.note_progress(7, {1: 10, 5: 1, 9: 1})  # line 5 was not taken, and there is no line 9
    recorded.note_progress(8, {1: 1})
    recorded.end(7, 1, 20)
    recorded.end(7, 1, 20)
    recorded.end(7, 2, None)
    recorded.note_progress(7, {1: 30, 2: 30})
    recorded.end(7, 5, 5)  # not taken
    recorded.end(8, 1, 5)  # unknown
    recorded.close(7)
    recorded.close(7)
    ids = [each.request_id for each in recorder.requests]
    assert recorder.told == [
        ("progress", (ids[0], 10)),
        ("finish", (ids[0], 20)),
        ("cancel", [ids[1]]),
        ("cancel", ids[2:]),
    ]


def test_lines_with_nothing_to_compute_go_first_and_are_not_in_the_pool(
    recorder: Recorder, recorded: LinePool, tmp_path: Path
) -> None:
    content = lines_of({"prompt": [1]}, {"prompt": "refused"}, {"prompt": [2]}, {"prompt": "refused"})
    open_file(recorded, tmp_path / "in", content, 1)
    open_file(recorded, tmp_path / "too", content, 2)
    index_all(recorded, 1)
    index_all(recorded, 2)
    recorded.close(2)
    assert len(recorder.requests) in (2, 4)
    first = recorded.take("", 1).lines[0]
    assert (first.reader_id, first.line.number) == (1, 2)
    assert first.line.refusal is not None
    recorded.note_progress(1, {2: 5})
    assert numbers(take_all(recorded))[:1] == [4]
    recorded.end(1, 2, None)
    assert not [told for told in recorder.told if told[0] == "progress"]


def test_a_full_disk_makes_a_batch_run_in_the_order_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append, is_full = Spool.append, False

    def refuse(self: Spool, records: Sequence[bytes]) -> Any:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(self, records)

    monkeypatch.setattr(Spool, "append", refuse)
    pool = make_pool()
    open_file(pool, tmp_path / "in", prompts(*[[n] for n in range(300)]))
    position = pool.index(0, START, 10).position
    is_full = True
    found: list[tuple[int, BatchLine]] = []
    for _ in range(100):
        while (indexed := pool.index(0, position, 50)).num_lines:
            position = indexed.position
        assert pool._num_waiting < 10 + 50 + WINDOW_LINES
        found += [(each.reader_id, each.line) for each in pool.take("", 20).lines]
    assert numbers(found) == list(range(1, 301))
    assert all(line.generation is not None for _, line in found)
    assert caplog.text.count("No space left on device") == 1


def test_the_lines_ahead_are_bounded_and_no_batch_waits_for_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_pool, "MAX_LINES", 200)
    pool = make_pool()
    open_file(pool, tmp_path / "a", prompts(*[[n] for n in range(300)]), 1, owner="a")
    open_file(pool, tmp_path / "b", prompts(*[[n] for n in range(300)]), 2, owner="b")
    assert index_all(pool, 1) == 200
    assert index_all(pool, 2) == WINDOW_LINES
    assert len(take_all(pool, "a")) == 200
    monkeypatch.setattr(line_pool, "MAX_TOKENS", 100)
    open_file(pool, tmp_path / "c", prompts(*[[n, n] for n in range(300)]), 3, owner="c")
    assert index_all(pool, 3, group=1) == WINDOW_LINES
    pool.close(2)
    pool.close(3)
    assert pool._num_waiting == pool._num_waiting_tokens == 0


def test_a_file_whose_lines_cannot_be_read_back_is_closed_and_the_owners_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()
    open_file(pool, tmp_path / "good", prompts([1], [2]), 1)
    open_file(pool, tmp_path / "bad", prompts([3], [4], [5]), 2)
    for reader_id in (1, 2):
        index_all(pool, reader_id)
    read, bad = Spool.read, pool._readers[2].spool

    def refuse(self: Spool, span: Span) -> bytes:
        if self is bad:
            raise OSError(errno.EIO, "bad sector")
        return read(self, span)

    monkeypatch.setattr(Spool, "read", refuse)
    taken = pool.take("", 5)
    assert [(each.reader_id, each.line.number) for each in taken.lines] == [(1, 1), (1, 2)]
    assert taken.unreadable == 2
    assert "bad: its lines are prepared again" in caplog.text and "bad sector" in caplog.text
    assert pool.take("", 5) == LinesTaken([])
    open_file(pool, tmp_path / "bad", prompts([3], [4], [5]), 2, is_spooled=False)
    index_all(pool, 2)
    assert numbers(take_all(pool)) == [1, 2, 3]


ORDERS: tuple[OrderName, ...] = ("fcfs", "dfs", "random", "batchllm", "blend")


class Driver:
    """Uses a pool at random, and knows what must come of it."""

    def __init__(self, folder: Path, order: OrderName, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = make_pool(order)
        self.folder = folder
        self.left: dict[int, set[int]] = {}  # of open readers: lines that were not taken
        self.running: dict[int, set[int]] = {}
        self.owners: dict[int, str] = {}
        self.positions: dict[int, Position] = {}
        self.seen: Counter[tuple[int, int]] = Counter()

    def open(self) -> None:
        rng, reader_id = self.rng, len(self.owners)
        self.owners[reader_id] = rng.choice("ab")
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 5))]
        content = [{"prompt": rng.choice([prompt, prompt[:1], "refused"])} for _ in range(rng.randint(1, 50))]
        path = self.folder / str(reader_id)
        open_file(self.pool, path, lines_of(*content), reader_id, owner=self.owners[reader_id])
        self.left[reader_id] = set(range(1, len(content) + 1))
        self.running[reader_id], self.positions[reader_id] = set(), START

    def index(self, reader_id: int, max_lines: int) -> int:
        indexed = self.pool.index(reader_id, self.positions[reader_id], max_lines)
        self.positions[reader_id] = indexed.position
        return indexed.num_lines

    def take(self, owner: str, max_lines: int) -> int:
        taken = self.pool.take(owner, max_lines).lines
        for each in taken:
            assert self.owners[each.reader_id] == owner
            self.left[each.reader_id].remove(each.line.number)
            self.running[each.reader_id].add(each.line.number)
            self.seen[each.reader_id, each.line.number] += 1
        return len(taken)

    def close(self, reader_id: int) -> None:
        self.pool.close(reader_id)
        del self.left[reader_id], self.running[reader_id]

    def end_one(self, reader_id: int) -> None:
        if self.running[reader_id]:
            number = self.rng.choice(sorted(self.running[reader_id]))
            self.running[reader_id].remove(number)
            self.pool.end(reader_id, number, self.rng.choice((None, 0, 3)))

    def note_progress(self) -> None:
        """Of lines that run, and of others."""
        rng = self.rng
        told = {rng.randint(1, 50): rng.randint(1, 5) for _ in range(rng.randint(0, 9))}
        self.pool.note_progress(rng.randrange(len(self.owners) + 1), told)

    def step(self) -> None:
        rng = self.rng
        if not self.left or rng.random() < 0.1:
            self.open()
            return
        if rng.random() < 0.2:
            self.note_progress()
        reader_id, kind = rng.choice(sorted(self.left)), rng.random()
        if kind < 0.4:
            self.index(reader_id, rng.randint(1, 40))
        elif kind < 0.7:
            self.take(self.owners[reader_id], rng.randint(1, 9))
        elif kind < 0.95:
            self.end_one(reader_id)
        else:
            self.close(reader_id)

    def drain(self) -> None:
        for reader_id in self.left:
            while self.index(reader_id, 30):
                pass
        for owner in "ab":
            while self.take(owner, 4):
                pass


@settings(max_examples=examples(40))
@given(order=st.sampled_from(ORDERS), seed=st.integers(0, 2**32), num_steps=st.integers(1, 80))
def test_each_line_is_taken_once_whatever_happens(
    order: OrderName, seed: int, num_steps: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    driver = Driver(tmp_path_factory.mktemp("pool"), order, seed)
    for _ in range(num_steps):
        driver.step()
    driver.drain()
    assert not any(driver.left.values())
    assert set(driver.seen.values()) <= {1}
    pool = driver.pool
    for reader_id in list(driver.left):
        driver.close(reader_id)
    assert pool._num_waiting == pool._num_waiting_tokens == 0
    assert not (pool._by_id or pool._unpooled or pool._to_plan)
    assert pool._forecast is None or not pool._forecast._ids


def test_the_pool_knows_what_online_traffic_uses(tmp_path: Path) -> None:
    planner = OfflinePool("blend", RESOURCES, kv_tokens=10_000)
    pool = LinePool(lambda learned: (planner, None))
    pool.note_online(OnlineTraffic(100.0, 1e6, 50))  # no line waits, so it is of no use
    open_file(pool, tmp_path / "in", prompts([1, 2, 3]))
    index_all(pool)
    pool.note_online(OnlineTraffic(1000.0, 2e6, 50))
    assert planner.online.compute_frac == pytest.approx(1000.0 * RESOURCES.token_s)
    assert planner.online.memory_frac == pytest.approx(2e6 * RESOURCES.cached_token_s)


def test_namespaces_of_closed_files_are_forgotten(tmp_path: Path) -> None:
    pool = make_pool()
    salted = lines_of(*({"prompt": [1, 2], "salt": f"s{number}"} for number in range(20)))
    kept = lines_of({"prompt": [1, 2], "salt": "s3"})
    open_file(pool, tmp_path / "in", salted)
    open_file(pool, tmp_path / "other", kept, reader_id=1)
    index_all(pool)
    index_all(pool, 1)
    assert len(pool._namespaces) == 20
    pool.close(0)
    assert [salt for _, salt in pool._namespaces] == ["s3"]


def test_lines_that_have_ended_tell_how_long_answers_are_and_do_not_run(tmp_path: Path) -> None:
    """Here two outputs each. What needs no estimate, or cannot be prepared, tells nothing."""
    bodies = [{"prompt": [number % 2, 5, number], "max_tokens": 50, "n": 2} for number in range(8)]
    bodies += [{"prompt": [0, 5, 9], "max_tokens": 50, "ignore_eos": True}, {"prompt": "refused"}]
    observed = {1: 20, 2: 80, 9: 50, 10: 3}
    pool = make_pool("blend")
    open_file(pool, tmp_path / "in", lines_of(*bodies), done=bytes([0b11111110, 0b111]), observed=observed)
    first = pool.index(0, START, 2)
    assert (first.num_lines, first.is_end, first.is_held_up) == (0, False, False)
    assert pool.index(0, first.position, 20).num_lines == 0
    assert not take_all(pool)
    open_file(pool, tmp_path / "in", lines_of(*bodies), done=bytes([0b00000110, 0b110]), observed=observed)
    assert pool.index(0, START, 20).num_lines == 6
    taken = [each for _ in range(6) for each in pool.take("", 1).lines]
    assert sorted(each.line.number for each in taken) == [3, 4, 5, 6, 7, 8]
    assert {(each.line.number % 2, each.tokens.expected_output_tokens) for each in taken if each.tokens} == {
        (1, 10.0),
        (0, 40.0),
    }


def test_lengths_that_no_plan_had_go_with_their_reader(tmp_path: Path) -> None:
    """It is opened again for them, and they would count twice."""
    pool, added = make_pool("blend"), list[PoolRequest]()
    lines = lines_of(*({"prompt": [number], "max_tokens": 50} for number in range(3)))
    for _ in range(2):
        open_file(pool, tmp_path / "in", lines, done=b"\6", observed={1: 20, 2: 30})
        pool.index(0, START, 2)
    with mock.patch.object(pool._planner(), "add", lambda requests, **_: added.extend(requests)):
        index_all(pool)
    assert sorted(each.observed_output_tokens or 0 for each in added) == [0, 20, 30]
