"""Engines on one bus choose their intervals together, each for itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.config import GIB, EngineConfig, SchedulerConfig
from backfill.core.errors import ConfigError, InsufficientMemory
from backfill.engine.bus import OBJECTIVE_SHARE, BusMember, OffloadedModel
from backfill.engine.engine import Engine
from backfill.engine.process import load_engine
from backfill.execution import offloading
from backfill.execution.bus import Bus
from backfill.execution.bus_file import BusFile, BusUse
from backfill.offloading.coordinator import BusInstance
from tests.builders import make_request
from tests.models.tiny import save_tiny_model

MODEL = OffloadedModel(num_layers=30, layer_bytes=10_000_000, num_buffers=25, interval=4)
OBJECTIVE_S = 0.1 / OBJECTIVE_SHARE
NEEDED = 7 * 10_000_000 / 0.1  # bytes per second of an engine


@dataclass
class OnBus:
    bus: Bus
    member: BusMember
    clock: VirtualClock
    intervals: list[int]

    def step(self, computed_s: float = 0.02) -> int:
        self.member.begin_step(OBJECTIVE_S)
        self.member.end_step(computed_s)
        self.clock.advance(computed_s)
        return self.intervals[-1]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[OnBus]]:
    """Two engines on a bus that is enough for both; and for one at interval 2."""
    both = []
    for _ in range(2):
        bus, clock = Bus(BusFile(tmp_path / "bus", 2.2 * NEEDED)), VirtualClock()
        intervals: list[int] = []
        both.append(OnBus(bus, BusMember(bus, MODEL, clock, intervals.append), clock, intervals))
    yield both
    for each in both:
        each.bus.file.close()


def test_the_largest_interval_is_that_of_the_same_memory() -> None:
    assert MODEL.max_interval == 4  # 7 layers and two staging buffers
    assert OffloadedModel(30, 1, 2, 1).max_interval == 1
    assert OffloadedModel(30, 1, 30, 15).max_interval == 30


def test_an_engine_alone_transfers_no_more_than_its_buffers_need(engines: list[OnBus]) -> None:
    """A smaller interval would save memory that nobody uses."""
    first, second = engines
    assert [first.step() for _ in range(3)] == [4, 4, 4]
    assert first.member.share == pytest.approx(1.0)
    assert first.member.load == pytest.approx(1 / 2.2)
    assert second.member.load == 0.0


def test_an_engine_transfers_less_where_its_buffers_allow_it(engines: list[OnBus]) -> None:
    first, _ = engines
    given: list[int] = []
    member = BusMember(first.bus, OffloadedModel(30, 10_000_000, 30, 15), first.clock, given.append)
    member.begin_step(OBJECTIVE_S)
    assert given == [16], "one layer is offloaded and not two"


def test_two_share_the_bus(engines: list[OnBus]) -> None:
    first, second = engines
    for _ in range(4):
        first.step()
        second.step()
    assert first.intervals[-1] == second.intervals[-1] == 4
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
    third = BusFile(tmp_path / "bus", first.bus.file.bytes_per_s)
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
    third = BusFile(tmp_path / "bus", engines[0].bus.file.bytes_per_s)
    third.publish(BusUse(BusInstance(third.name, 30, 10_000_000, step_s=0.1, max_interval=1)))
    for each in engines * 2:
        assert each.step() == 4
    assert engines[0].member.load == pytest.approx((30 + 7 + 7) / 7 / 2.2)
    assert caplog.text.count("of its bandwidth for their objectives") == 2
    third.close()


def test_kv_copies_are_taken_off_what_weights_share(engines: list[OnBus]) -> None:
    first, _ = engines
    first.step()
    assert first.member.load == pytest.approx(1 / 2.2)
    first.bus.copies.num_bytes += int(1.1 * NEEDED)
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
        changed.setattr(second.bus.file, method, fail)
        for _ in range(3):
            second.clock.advance(1.0)
            second.bus.copies.num_bytes += int(NEEDED)  # there is news to tell
            assert second.step() == 4
            assert second.member.share == pytest.approx(0.5)
        second.member.idle()
    assert caplog.text.count("the bus cannot be used, and the interval stays as it is: stopped") == 1
    second.clock.advance(1.0)
    second.step()
    second.member.idle()
    assert second.member.share == 0.0
    (_, use) = first.bus.file.uses()
    assert use == BusUse()


def test_small_changes_are_not_told(engines: list[OnBus]) -> None:
    first, _ = engines
    first.step(0.020)
    first.step(0.020)
    generation = first.bus.file.generation
    for step in range(20):
        first.step(0.0200 + step % 2 * 0.0015)
    assert first.bus.file.generation == generation
    for _ in range(20):
        first.step(0.030)
    assert first.bus.file.generation > generation


def test_steps_that_take_longer_than_the_objective_hide_their_transfers(engines: list[OnBus]) -> None:
    first, _ = engines
    for _ in range(4):
        first.step(2 * OBJECTIVE_S)
    (use, _) = first.bus.file.uses()
    assert use.instance is not None
    assert use.instance.step_s == pytest.approx(2 * OBJECTIVE_S)
    assert first.member.load <= 1.0


NUM_LAYERS = 12


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder, num_hidden_layers=NUM_LAYERS)
    return folder


def config_of(model_dir: Path, **changes: Any) -> EngineConfig:
    config: dict[str, Any] = {
        "model_dir": str(model_dir),
        "device": "cpu",
        "dtype": "float32",
        "block_size": 8,
        "kv_gib": 1 / 64,
        "offload_interval": 2,
        "scheduler": SchedulerConfig(prefix_caching=False, tpot_slo=0.5),
    }
    return EngineConfig(**config | changes)


def generate(engine: Engine) -> list[int]:
    request = make_request(prompt_token_ids=list(range(5, 45)), max_tokens=24, ignore_eos=True)
    engine.add(request)
    while engine.has_work:
        engine.step()
    return request.output_token_ids


def fail(*_: object) -> None:
    raise OSError("stopped")


@pytest.fixture
def shared(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(offloading, "cache_root", lambda: tmp_path)
    return config_of(model_dir, offload_bus=str(tmp_path / "bus"), offload_bus_gib_per_s=0.05)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[int]:
    return generate(load_engine(config_of(model_dir, offload_interval="none")))


def test_an_engine_on_a_bus_generates_the_same(
    shared: EngineConfig, expected: list[int], tmp_path: Path
) -> None:
    engine = load_engine(shared)
    assert generate(engine) == expected
    stats = engine.stats()
    assert stats.offload_interval == 2
    assert stats.bus_share == 0.0  # it is idle
    assert 0.0 < stats.bus_load < 1.0
    assert stats.bus_wait_s > 0.0
    other = BusFile(tmp_path / "bus", 0.05 * GIB)
    assert other.uses() == [BusUse(), BusUse()]
    need = BusInstance(other.name, 1, int(2 * 0.05 * GIB), step_s=1.0, max_interval=1)
    other.publish(BusUse(need))
    assert generate(engine) == expected
    assert engine.stats().bus_load > 2.0
    assert engine.stats().offload_interval == 2
    other.close()


def test_an_engine_whose_bus_fails_goes_on(
    shared: EngineConfig, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(shared)
    monkeypatch.setattr(BusFile, "publish", fail)
    assert generate(engine) == expected
    assert engine.num_failed_steps_in_a_row == 0
    assert engine.stats().offload_interval == 2


def test_a_start_that_fails_leaves_the_bus(shared: EngineConfig, tmp_path: Path) -> None:
    with pytest.raises(InsufficientMemory):
        load_engine(replace(shared, kv_gib=None, device_memory=0.0001))
    other = BusFile(tmp_path / "bus", 0.05 * GIB)
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
            r"`offload_bus_gib_per_s` must be a finite number from 0\.001, got 0",
        ),
        (
            {"offload_bus": "left", "offload_bus_gib_per_s": 1.0, "offload_interval": "none"},
            "`offload_bus` is of no use with `offload_interval` none",
        ),
    ],
)
def test_a_bus_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(Path(), **changes).validate()
