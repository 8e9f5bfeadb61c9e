"""Engines on one bus choose their intervals together, each for itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from backfill.bus.file import BusFile, BusUse
from backfill.bus.member import OBJECTIVE_SHARE, BusMember, OffloadedModel
from backfill.core.clock import VirtualClock
from backfill.core.config import GIB, EngineConfig, SchedulerConfig
from backfill.core.errors import ConfigError, InsufficientMemory
from backfill.core.plan import Compute, StepPlan
from backfill.core.request import ServiceClass
from backfill.engine.engine import Engine
from backfill.engine.process import load_engine
from backfill.execution import profile
from backfill.execution.torch_executor import TorchExecutor
from backfill.offloading.coordinator import BusInstance
from backfill.offloading.residency import LinkWish, SharedLinkPolicy, Situation, StepNeed, residencies
from tests.builders import flat_cost, make_profile, make_request
from tests.execution.tiny import cache_fixture, model_fixture, tiny_config
from tests.offloading.test_residency import offline, online

MODEL = OffloadedModel(stage_layers=(30,), layer_bytes=10_000_000, interval=4)
PLAN = StepPlan(0, Compute(()))
OBJECTIVE_S = 0.1 / OBJECTIVE_SHARE
NEEDED = 7 * 10_000_000 / 0.1  # bytes per second of an engine


@dataclass
class OnBus:
    file: BusFile
    member: BusMember
    clock: VirtualClock
    interval: int = MODEL.interval
    share: float = 1.0

    def step(self, computed_s: float = 0.02) -> int:
        plan = self.member.begin_step(PLAN, OBJECTIVE_S)
        self.interval = plan.offload_interval or self.interval
        self.share = self.share if plan.bus_share is None else plan.bus_share
        assert self.share == self.member.share
        self.member.end_step(computed_s)
        self.clock.advance(computed_s)
        return self.interval


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[OnBus]]:
    """Two engines on a bus that is enough for both; and for one at interval 2."""
    both = []
    for _ in range(2):
        file, clock = BusFile(tmp_path / "bus", 2.2 * NEEDED), VirtualClock()
        both.append(OnBus(file, BusMember(file, MODEL, clock), clock))
    yield both
    for each in both:
        each.file.close()


def test_the_largest_interval_is_that_of_the_same_memory() -> None:
    assert MODEL.max_interval == 4  # 7 layers and two staging buffers
    assert OffloadedModel((30,), 1, 1).max_interval == 1
    assert OffloadedModel((30,), 1, 15).max_interval == 30
    assert OffloadedModel((15, 15), 1, 4).max_interval == 5  # 3 of 15 layers are offloaded
    assert OffloadedModel((15, 15), 1, 6).max_interval == 15  # 2 or 1
    assert OffloadedModel((16, 14), 1, 5).max_interval == 5  # 3 of 16, and 2 of 14
    assert OffloadedModel((14, 16), 1, 5).max_interval == 5


def test_an_engine_alone_transfers_no_more_than_its_buffers_need(engines: list[OnBus]) -> None:
    """A smaller interval would save memory that nobody uses."""
    first, second = engines
    assert [first.step() for _ in range(3)] == [4, 4, 4]
    assert first.member.share == pytest.approx(1.0)
    assert first.member.load == pytest.approx(1 / 2.2)
    assert second.member.load == 0.0


def test_an_engine_transfers_less_where_its_buffers_allow_it(engines: list[OnBus]) -> None:
    first, _ = engines
    member = BusMember(first.file, OffloadedModel((30,), 10_000_000, 15), first.clock)
    plans = [member.begin_step(PLAN, OBJECTIVE_S) for _ in range(3)]
    assert plans == [replace(PLAN, offload_interval=16, bus_share=member.share), PLAN, PLAN]


def test_with_several_steps_in_flight_more_is_transferred_in_the_time_of_one(engines: list[OnBus]) -> None:
    file = engines[0].file
    member = BusMember(file, OffloadedModel((16, 16), 10_000_000, 4), engines[0].clock)
    # How many there are changes with every few steps, and at most one of each stage is whole.
    for num_in_flight, load in ((1, 1.0), (2, 2.0), (1, 2.0), (3, 2.0)):
        member.begin_step(PLAN, OBJECTIVE_S, num_in_flight)
        assert member.load == pytest.approx(load * 8 / 7 / 2.2)


def test_stages_together_need_what_the_model_needs(tmp_path: Path) -> None:
    """Two of 16 layers, of which each offloads 4, and 8 of one of 32."""
    needs = []
    for stage_layers in ((32,), (16, 16)):
        file = BusFile(tmp_path / "bus", 1e9)
        member = BusMember(file, OffloadedModel(stage_layers, 10_000_000, 4), VirtualClock())
        member.begin_step(PLAN, OBJECTIVE_S)
        assert member.load == pytest.approx(8 * 10_000_000 / 0.1 / 1e9)
        needs.append(member.least_step_s())
        file.close()
    assert needs == pytest.approx([8 * 10_000_000 / 1e9] * 2)


def test_two_share_the_bus(engines: list[OnBus]) -> None:
    first, second = engines
    for _ in range(4):
        first.step()
        second.step()
    assert first.interval == second.interval == 4
    assert first.member.load == second.member.load == pytest.approx(2 / 2.2)
    assert first.member.share == second.member.share == pytest.approx(0.5)


def test_an_idle_engine_leaves_the_bus_to_the_other(engines: list[OnBus]) -> None:
    first, second = engines
    for _ in range(2):
        first.step()
        second.step()
    assert first.member.share == pytest.approx(0.5)
    second.member.idle()
    assert second.member.share == 0.0
    first.step()
    assert first.member.share == pytest.approx(1.0)
    second.step()
    first.step()
    assert first.member.share == pytest.approx(0.5)


def test_an_engine_that_ends_leaves_the_bus_to_the_other(engines: list[OnBus], tmp_path: Path) -> None:
    first, _ = engines
    third = BusFile(tmp_path / "bus", first.file.bytes_per_s)
    third.publish(BusUse(BusInstance(third.name, 30, 10_000_000, 0.1, min_interval=4, max_interval=4)))
    for _ in range(3):
        first.step()
        assert first.member.share == pytest.approx(0.5)
    third.close()
    first.clock.advance(0.2)  # it says nothing any more, and that is noticed after a while
    first.step()
    assert first.member.share == pytest.approx(1.0)


def test_engines_that_need_more_than_the_bus_has_say_so(
    engines: list[OnBus], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    third = BusFile(tmp_path / "bus", engines[0].file.bytes_per_s)
    third.publish(BusUse(BusInstance(third.name, 30, 10_000_000, step_s=0.1, max_interval=1)))
    for each in engines * 2:
        assert each.step() == 4
    assert engines[0].member.load == pytest.approx((30 + 7 + 7) / 7 / 2.2)
    assert caplog.text.count("of its bandwidth for their objectives") == 2
    third.close()


def test_needs_that_are_about_all_of_the_bus_are_said_once(
    engines: list[OnBus], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = engines[0]
    third = BusFile(tmp_path / "bus", first.file.bytes_per_s)
    loads = []
    for step_s in (0.39, 0.33, 0.39, 0.33):
        third.publish(BusUse(BusInstance(third.name, 30, 10_000_000, step_s=step_s, max_interval=1)))
        first.clock.advance(1.0)
        first.step()
        loads.append(first.member.load)
    assert [each > 1.0 for each in loads] == [False, True, False, True]
    assert caplog.text.count("of its bandwidth for their objectives") == 1
    third.close()


def test_kv_copies_are_taken_off_what_weights_share(engines: list[OnBus]) -> None:
    first, _ = engines
    first.step()
    assert first.member.load == pytest.approx(1 / 2.2)
    first.member.count_copies(int(1.1 * NEEDED))
    first.clock.advance(1.0)
    first.step()
    assert first.member.load == pytest.approx(1 / 1.1, rel=0.1)
    first.clock.advance(1.0)
    first.step()
    assert first.member.load == pytest.approx(1 / 2.2)  # nothing was copied since


@pytest.mark.parametrize("method", ["publish", "uses"])
def test_a_table_that_cannot_be_used_leaves_interval_and_share(
    engines: list[OnBus], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    first, second = engines
    first.step()
    second.step()
    with monkeypatch.context() as changed:
        changed.setattr(second.file, method, fail)
        for _ in range(3):
            second.clock.advance(1.0)
            second.member.count_copies(int(NEEDED))  # there is news to tell
            assert second.step() == 4
            assert second.member.share == pytest.approx(0.5)
            second.step()  # it is not read again so soon, which does not mean that it can be
        second.member.idle()
    assert caplog.text.count("the bus cannot be used, and the interval stays as it is: stopped") == 1
    second.clock.advance(1.0)
    second.step()
    second.member.idle()
    assert second.member.share == 0.0
    (_, use) = first.file.uses()
    assert use == BusUse()


def test_small_changes_are_not_told(engines: list[OnBus]) -> None:
    first, _ = engines
    first.step(0.020)
    first.step(0.020)
    generation = first.file.generation
    for step in range(20):
        first.step(0.0200 + step % 2 * 0.0015)
    assert first.file.generation == generation
    for _ in range(20):
        first.step(0.030)
    assert first.file.generation > generation


def test_steps_that_take_longer_than_the_objective_hide_their_transfers(engines: list[OnBus]) -> None:
    first, _ = engines
    for _ in range(4):
        first.step(2 * OBJECTIVE_S)
    (use, _) = first.file.uses()
    assert use.instance is not None
    assert use.instance.step_s == pytest.approx(2 * OBJECTIVE_S)
    assert first.member.load <= 1.0


class Dividing:
    """An engine on a bus whose memory may be divided for intervals 2 to 8, and what it does."""

    def __init__(self, file: BusFile, clock: VirtualClock) -> None:
        choices = residencies(32, 2, 8, num_blocks=100, layer_bytes=20, block_bytes=1)
        model = OffloadedModel((32,), LAYER_BYTES, 8)
        self.member = BusMember(file, model, clock, divides_memory=True)
        self.policy = SharedLinkPolicy(choices, (32,), self.member)
        self._clock = clock

    def step(self, situation: Situation) -> int:
        """Returns: the interval that memory is divided for; it is streamed from this step on."""
        interval = self.policy.choose(replace(situation, now_s=self._clock.now_s())).interval
        assert self.member.begin_step(PLAN, 0.1).offload_interval is None
        self.member.end_step(0.008, interval)
        self._clock.advance(0.05)
        return interval


LAYER_BYTES = 1_000_000
# A step of 8 ms may take 12, so 4 transfers of interval 8 in it need a third of a GB/s.
ONLINE = online(wanted_blocks=100, transfer_s=LAYER_BYTES / 1.6e9)
OFFLINE_ONLY = offline(transfer_s=LAYER_BYTES / 1.6e9)


@pytest.fixture
def dividing(tmp_path: Path) -> Iterator[list[Dividing]]:
    files, clock = [BusFile(tmp_path / "bus", 1.6e9) for _ in range(3)], VirtualClock()
    yield [Dividing(file, clock) for file in files]
    for file in files:
        file.close()


def test_engines_with_offline_work_divide_the_bus_and_then_their_memory(dividing: list[Dividing]) -> None:
    first, second, _ = dividing
    for _ in range(8):
        alone = first.step(OFFLINE_ONLY)
    assert alone == 2
    assert first.member.share == pytest.approx(1.0)
    seconds = [second.step(OFFLINE_ONLY) for _ in range(8) if first.step(OFFLINE_ONLY)]
    assert seconds[-1] == 2, "16 layers in 0.09 s are a tenth of the bus"
    assert first.member.share == pytest.approx(0.5)


def test_an_interval_that_a_plan_brings_stays_when_the_share_changes(dividing: list[Dividing]) -> None:
    first, second, _ = dividing
    first.step(OFFLINE_ONLY)
    plan = replace(PLAN, offload_interval=5)
    assert first.member.begin_step(plan, 0.1) == plan
    second.step(OFFLINE_ONLY)
    second.step(OFFLINE_ONLY)
    changed = first.member.begin_step(plan, 0.1)
    assert changed == replace(plan, bus_share=first.member.share)
    assert first.member.share == pytest.approx(0.5)


def test_an_idle_engine_has_no_grant_until_it_works_again(dividing: list[Dividing]) -> None:
    first, *_ = dividing
    wish = LinkWish(2, 8, None)
    assert first.member.ask(wish) is None
    first.member.begin_step(PLAN, 0.1)
    granted = first.member.ask(wish)
    assert granted is not None and granted.interval == 2
    first.member.idle()
    assert first.member.ask(wish) is None
    first.member.begin_step(PLAN, 0.1)
    assert first.member.ask(wish) == granted


def test_a_change_of_residency_changes_what_an_engine_needs(dividing: list[Dividing]) -> None:
    first, second, third = dividing
    for _ in range(4):
        first.step(ONLINE)
    load = first.member.load
    assert load == pytest.approx(4 * LAYER_BYTES / 0.012 / 1.6e9)
    wanting = replace(ONLINE, wanted_blocks=math.inf)
    for _ in range(8):
        interval = first.step(wanting)
    assert interval == 3
    assert first.member.load == pytest.approx(10 / 4 * load)
    for _ in range(8):
        for each in (second, third):
            each.step(replace(ONLINE, decodes=StepNeed(0.009, 0.008)))
        interval = first.step(wanting)
    assert interval == 4, "the others need their part of the bus"
    assert first.member.load == pytest.approx((8 + 2 * 4 * 12 / 9) / 4 * load)


def test_while_online_work_needs_the_bus_offline_work_has_the_rest(dividing: list[Dividing]) -> None:
    """The offline engine's memory is divided for interval 2 and cannot change at once: it is slowed down."""
    offline_one, *others = dividing
    patient = replace(OFFLINE_ONLY, compute_s=lambda scale: 1e-3)
    for _ in range(4):
        assert offline_one.step(OFFLINE_ONLY) in (8, 2)
    tight = replace(ONLINE, decodes=StepNeed(0.0085, 0.008))
    for _ in range(4):
        for each in others:
            assert each.step(tight) == 8
        offline_one.member.begin_step(PLAN, 0.013)  # it streams as before
    needed = 4 * LAYER_BYTES / 0.0085
    assert [each.member.share * 1.6e9 for each in others] == pytest.approx([needed] * 2, rel=0.01)
    assert others[0].member.load <= 1.0
    assert offline_one.member.share == pytest.approx(1 - 2 * needed / 1.6e9, rel=0.01)
    assert offline_one.step(patient) >= 2
    least_s = others[0].member.least_step_s()
    assert least_s == pytest.approx(4 * LAYER_BYTES / (1.6e9 - needed), rel=0.01)


def test_the_least_step_is_that_of_what_others_leave(engines: list[OnBus]) -> None:
    first, second = engines
    alone_s = 7 * MODEL.total_layer_bytes / (2.2 * NEEDED)
    assert first.member.least_step_s() == pytest.approx(alone_s)
    second.step()
    assert first.member.least_step_s() == pytest.approx(alone_s * 2.2 / 1.2)
    second.member.idle()
    assert first.member.least_step_s() == pytest.approx(alone_s)


NUM_LAYERS = 12
GIB_PER_S = 0.005  # of the bus: a step transfers for longer than a busy machine computes


cache = cache_fixture("module")
model_dir = model_fixture("llama", num_hidden_layers=NUM_LAYERS)


def config_of(model_dir: Path, **changes: Any) -> EngineConfig:
    scheduler = SchedulerConfig(prefix_caching=False, tpot_slo=0.5)
    return tiny_config(model_dir, **{"offload_interval": 2, "scheduler": scheduler, **changes})


def generate(engine: Engine, max_tokens: int = 24) -> list[int]:
    request = make_request(prompt_token_ids=list(range(5, 45)), max_tokens=max_tokens, ignore_eos=True)
    engine.add(request)
    while engine.has_work:
        engine.step()
    return request.output_token_ids


def fail(*_: object) -> None:
    raise OSError("stopped")


@pytest.fixture
def shared(model_dir: Path, tmp_path: Path) -> EngineConfig:
    return config_of(model_dir, offload_bus=str(tmp_path / "bus"), offload_bus_gib_per_s=GIB_PER_S)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[int]:
    return generate(load_engine(config_of(model_dir, offload_interval="none")))


def test_an_engine_on_a_bus_generates_the_same(
    shared: EngineConfig, expected: list[int], tmp_path: Path
) -> None:
    engine = load_engine(shared)
    assert generate(engine, 6) == expected[:6]
    stats = engine.stats()
    assert stats.offload_interval == 2
    assert stats.bus_share == 0.0  # it is idle
    assert 0.0 < stats.bus_load < 1.0
    assert stats.bus_wait_s > 0.0
    other = BusFile(tmp_path / "bus", GIB_PER_S * GIB)
    assert other.uses() == [BusUse(), BusUse()]
    need = BusInstance(other.name, 1, int(2 * GIB_PER_S * GIB), step_s=1.0, max_interval=1)
    other.publish(BusUse(need))
    assert generate(engine, 6) == expected[:6]
    assert engine.stats().bus_load > 2.0
    assert engine.stats().offload_interval == 2
    other.close()


def test_offline_work_takes_the_memory_of_weights_as_far_as_the_bus_allows(
    shared: EngineConfig,
    expected: list[int],
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an engine as ``run-batch`` starts it."""
    config = replace(
        shared,
        kv_gib=tiny_config(model_dir, 24).kv_gib,
        offload_interval=4,
        min_offload_interval=1,
        offload_bus_gib_per_s=4.0,
        max_model_len=128,
    ).for_offline_work()
    config.validate()
    # Requests in a step cost nothing, so more KV is worth its transfers.
    predicted = make_profile(flat_cost(0.05))
    monkeypatch.setattr(profile, "load_or_measure_profile", lambda *_: predicted)
    engine = load_engine(config)
    num_blocks, intervals = [engine.stats().num_blocks], set()
    other = BusFile(tmp_path / "bus", 4.0 * GIB)
    requests = [
        make_request(
            prompt_token_ids=list(range(5, 45)),
            max_tokens=24,
            ignore_eos=True,
            request_id=str(index),
            service_class=ServiceClass.OFFLINE,
        )
        for index in range(20)
    ]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        intervals.add(engine.stats().offload_interval)
        num_blocks.append(engine.stats().num_blocks)
        instances = [each.instance for each in other.uses() if each.instance is not None]
        assert not any(each.has_objective for each in instances)
    assert max(num_blocks) > num_blocks[0]
    assert intervals > {4}
    assert all(each.output_token_ids == expected for each in requests)
    other.close()


def test_an_engine_whose_bus_fails_goes_on(
    shared: EngineConfig, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(shared)
    monkeypatch.setattr(BusFile, "publish", fail)
    assert generate(engine, 6) == expected[:6]
    assert engine.num_failed_steps_in_a_row == 0
    assert engine.stats().offload_interval == 2


def test_a_start_that_fails_leaves_the_bus(shared: EngineConfig, tmp_path: Path) -> None:
    with pytest.raises(InsufficientMemory):
        load_engine(replace(shared, kv_gib=None, device_memory=0.0001))
    other = BusFile(tmp_path / "bus", GIB_PER_S * GIB)
    assert other.name == "00"
    other.close()


def test_a_start_without_a_profile_leaves_the_bus_and_the_model(
    shared: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, closed = TorchExecutor.close, []

    def noting(executor: TorchExecutor) -> None:
        closed.append(executor)
        close(executor)

    monkeypatch.setattr(TorchExecutor, "close", noting)
    monkeypatch.setattr(profile, "load_or_measure_profile", fail)
    with pytest.raises(OSError, match="stopped"):
        load_engine(replace(shared, scheduler=replace(shared.scheduler, policy="slo")))
    assert len(closed) == 1
    other = BusFile(tmp_path / "bus", GIB_PER_S * GIB)
    assert other.name == "00"
    other.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offload_bus": "left"}, "`offload_bus` and `offload_bus_gib_per_s` need each other"),
        ({"offload_bus_gib_per_s": 1.0}, "`offload_bus` and `offload_bus_gib_per_s` need each other"),
        ({"offload_bus": "", "offload_bus_gib_per_s": 1.0}, "`offload_bus` must be a name or a path, got ''"),
        (
            {"offload_bus": "left", "offload_bus_gib_per_s": 0.0},
            r"`offload_bus_gib_per_s` must be at least 0\.001, got 0",
        ),
        (
            {"offload_bus": "left", "offload_bus_gib_per_s": 1.0, "offload_interval": "none"},
            "`offload_bus` is of no use with `offload_interval` none",
        ),
    ],
)
def test_a_bus_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"offload_interval": 2, **changes}).validate()
