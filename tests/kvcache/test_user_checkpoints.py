"""Checkpoint policies of the user's own (``--checkpointing module:Class``)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.request import Request, ServiceClass
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.profile import CopySpeed
from backfill.engine.engine import Engine
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.kvcache.checkpointing import PoolView, UserCheckpoints
from backfill.kvcache.content import Evictable
from backfill.kvcache.copies import CopyLimits
from backfill.kvcache.manager import KVCacheManager
from tests.builders import linear_cost, make_info, make_request
from tests.integrity import check_scheduler

DOCUMENT = (Path(__file__).parent.parent.parent / "docs" / "kv-cache.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
VIEW = PoolView(num_blocks=100, num_free=20, num_checkpointed=5)

MODULE = """
class Nothing:
    pass

class Fussy:
    def __init__(self, setting):
        self.setting = setting

class Broken:
    def __init__(self):
        raise OSError("no such file")
    def max_blocks(self, view):
        return 1

class Failing:
    checkpoints_at_preemption = False
    def max_blocks(self, view):
        raise ZeroDivisionError("division by zero")

class Choosing:
    checkpoints_at_preemption = False
    def max_blocks(self, view):
        return view.num_blocks
    def choose(self, candidates):
        return [(each.request_id, 1) for each in candidates if each.request_id == "second"] + [("gone", 9)]

class Torn(Choosing):
    def choose(self, candidates):
        return [each.request_id for each in candidates]

class Half(Failing):
    def max_blocks(self, view):
        return 0.5

constant = 7
"""


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_policies.py").write_text(MODULE)
    (tmp_path / "torn.py").write_text("def max_blocks(")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "my_checkpoints.py").write_text(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)


def served(checkpointing: str) -> Engine:
    """An engine that has served an offline request with this checkpoint policy."""
    clock, cost = VirtualClock(), linear_cost()
    info = make_info(num_blocks=40, num_host_blocks=40)
    executor = SimulatedExecutor(info, DeviceBehaviour(cost, CopySpeed(1e9, 1e9)), clock)
    engine = Engine(SchedulerConfig(checkpointing=checkpointing), executor, clock)
    request = make_request(40, 20, service_class=ServiceClass.OFFLINE, ignore_eos=True)
    engine.add(request)
    while engine.has_work:
        engine.step()
        check_scheduler(engine.scheduler)
    assert len(request.output_token_ids) == 20
    return engine


def num_checkpointed_tokens(engine: Engine) -> int:
    return engine.scheduler.counters[ServiceClass.OFFLINE].num_checkpointed_tokens


def test_the_documented_policy_keeps_its_share_copied() -> None:
    engine = served("my_checkpoints:FixedShare")
    assert num_checkpointed_tokens(engine) == 12, "of 15 blocks of 4 tokens, a quarter"
    policy = UserCheckpoints("my_checkpoints:FixedShare")
    assert policy.max_blocks(VIEW) == 80 // 4 - 5
    assert policy.checkpoints_at_preemption, "where it says nothing"


def test_without_free_blocks_a_policy_may_ask_for_more_than_there_are(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text("class All:\n    max_blocks = lambda self, view: 10**9\n")
    assert num_checkpointed_tokens(served("greedy:All")) == 56


@pytest.mark.parametrize("name", ["Failing", "Half"])
def test_a_policy_that_fails_is_logged_once_and_asks_for_nothing(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = served(f"own_policies:{name}")
    assert num_checkpointed_tokens(engine) == 0
    (record,) = caplog.records
    assert f"own_policies:{name} failed" in record.getMessage()
    assert record.exc_info is not None


LIMITS = CopyLimits(20, 20)


def running(name: str) -> tuple[Request, Request, KVCacheManager]:
    """Two requests with 4 full blocks each, and copies that begin before one step."""
    cache = KVCacheManager(20, 4, 20, policy=UserCheckpoints(f"own_policies:{name}"))
    first, second = (
        make_request(16, request_id=each, service_class=ServiceClass.OFFLINE) for each in ("first", "second")
    )
    for request in (first, second):
        cache.allocate(request, cache.match(request), Evictable.ALL)
        cache.start(request)
        cache.grow(request, 16, Evictable.ALL)
        cache.commit(request, 16)
    return first, second, cache


def test_a_policy_may_choose_whose_blocks_are_copied() -> None:
    _, second, cache = running("Choosing")
    blocks = [ref >> 1 for ref in cache.table(second.request_id)]
    for step in range(4):
        assert [copy.device for copy in cache.take_copies(LIMITS, 0.0).checkpoint] == [blocks[step]]
    assert not cache.take_copies(LIMITS, 0.0), "all of it is copied, and nothing else is asked for"


def test_a_choice_that_cannot_be_read_counts_as_none(caplog: pytest.LogCaptureFixture) -> None:
    *_, cache = running("Torn")
    assert not cache.take_copies(LIMITS, 0.0) and not cache.take_copies(LIMITS, 0.0)
    assert len(caplog.records) == 1


def test_a_policy_says_whether_preempted_requests_are_copied() -> None:
    assert not UserCheckpoints("own_policies:Failing").checkpoints_at_preemption


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Policy", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("no.such.module:Policy", "no.such.module cannot be imported: ModuleNotFoundError"),
        ("torn:Policy", "torn cannot be imported: SyntaxError"),
        ("script:Policy", "script cannot be imported: SystemExit: 3"),
        ("own_policies:Absent", "own_policies has no class Absent"),
        ("own_policies:constant", "own_policies has no class constant"),
        ("own_policies:Nothing", "Nothing has no method `max_blocks`"),
        ("own_policies:Fussy", r"Fussy\(\) raises TypeError: .*setting"),
        ("own_policies:Broken", r"Broken\(\) raises OSError: no such file"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused_with_the_reason(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^`checkpointing` {path}: {message}"):
        UserCheckpoints(path)
