"""How the engine's loop handles commands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.plan import StepOutcome, StepPlan
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.slo import SLO
from backfill.core.structured import StructuredOutputsParams
from backfill.costs.profile import Quality
from backfill.engine.engine import Engine
from backfill.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    FromEngine,
    Stop,
    ToEngine,
    TokenOutput,
)
from backfill.engine.options import check_profile
from backfill.engine.process import EngineLoop, _serve
from backfill.models.config import ModelConfig
from tests.builders import ScriptedExecutor, flat_cost, make_info, make_profile, make_request
from tests.models.tiny import save_tiny_llama_config


class ScriptedChannel:
    """Gives its commands, then Stop once ``until`` says so of all that was sent."""

    def __init__(self, *commands: ToEngine, until: Callable[[Sequence[FromEngine]], bool]) -> None:
        self.sent: list[FromEngine] = []
        self._until = until
        self._commands: list[ToEngine] = [*commands, Stop()]

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def receive(self) -> ToEngine | None:
        until_s = time.monotonic() + 60.0
        while len(self._commands) == 1 and not self._until(self.sent):
            assert time.monotonic() < until_s, "the engine has fallen silent"
            time.sleep(0.001)
        return self._commands.pop(0) if self._commands else None

    def close(self) -> None:
        pass


def add(request_id: str, **fields: Any) -> AddRequest:
    return AddRequest(make_request(2, 2, request_id=request_id, **fields))


class RecordingEngine(Engine):
    """Records added requests."""

    def __init__(self) -> None:
        super().__init__(SchedulerConfig(), ScriptedExecutor(make_info()), VirtualClock())
        self.added: list[Request] = []

    def add(self, request: Request) -> TokenOutput | None:
        self.added.append(request)
        return super().add(request)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"policy": "fcfs", "victims": "latest"}, ["victims has no effect with policy fcfs"]),
        ({"policy": "fcfs", "safepoints": False}, ["safepoints has no effect with policy fcfs"]),
        (
            {"policy": "slo", "safepoints": False, "preemption": "discard", "max_stop_s": 0.1},
            ["preemption has no effect with safepoints off", "max_stop_s has no effect with safepoints off"],
        ),
        (
            {"policy": "priority", "kv_restore": "blocking", "promote_before": 5.0},
            [
                "promote_before has no effect with policy priority",
                "kv_restore has no effect with checkpointing none",
            ],
        ),
        (
            {"policy": "slo", "prefix_caching": False, "prefix_cache_scope": "global"},
            ["prefix_cache_scope has no effect with prefix_caching off"],
        ),
        ({"policy": "slo", "checkpointing": "eager", "kv_restore": "blocking", "victims": "latest"}, []),
    ],
    ids=str,
)
def test_options_without_effect_are_named_at_the_start(
    options: dict[str, Any], expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(scheduler=SchedulerConfig(**options))
    config.validate()

    def load(config: EngineConfig) -> Engine:
        info = make_info(num_host_blocks=4)
        return Engine(config.scheduler, ScriptedExecutor(info), VirtualClock(), make_profile())

    channel: Any = ScriptedChannel(until=lambda _: True)
    _serve(config, channel, load)
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == expected


@pytest.mark.parametrize(
    ("options", "quality", "expected"),
    [
        ({}, "full", "tpot_slo is widened to 0.4 s from 0.15: one request alone is predicted to need 0.1 s"),
        (
            {},
            "coarse",
            "tpot_slo is widened to 0.4 s from 0.15, until served steps show that the device is faster: "
            "one request alone is predicted to need 0.1 s",
        ),
        (
            {"min_tpot_slo": 0.9},
            "coarse",
            "tpot_slo is widened to 0.9 s from 0.15: its floor is min_tpot_slo",
        ),
        ({"tpot_slo": 0.2, "min_ttft_slo": 1.0}, "coarse", None),
    ],
)
def test_a_widened_default_is_told_and_whether_it_may_return(
    options: dict[str, Any], quality: Quality, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(scheduler=SchedulerConfig(policy="slo", **options))
    profile = replace(make_profile(flat_cost(0.1)), quality=quality)

    def load(config: EngineConfig) -> Engine:
        return Engine(config.scheduler, ScriptedExecutor(make_info()), VirtualClock(), profile)

    channel: Any = ScriptedChannel(until=lambda _: True)
    with caplog.at_level("INFO"):
        _serve(config, channel, load)
    told = [each.getMessage() for each in caplog.records if "_slo" in each.getMessage()]
    assert told == ([] if expected is None else [expected])


def test_an_engine_that_ends_after_failed_steps_says_so() -> None:
    class Failing(ScriptedExecutor):
        def run(self, plan: StepPlan) -> StepOutcome:
            raise RuntimeError("the device is gone")

    def load(config: EngineConfig) -> Engine:
        return Engine(config.scheduler, Failing(make_info()), VirtualClock())

    channel: Any = ScriptedChannel(until=lambda _: True)
    commands, closed = [add(str(number)) for number in range(9)], threading.Event()
    channel.receive = lambda: commands.pop() if commands else closed.wait(60) and None
    channel.close = closed.set
    with pytest.raises(SystemExit):
        _serve(EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1)), channel, load)
    failed = channel.sent[-1]
    assert isinstance(failed, EngineFailed) and "5 steps in a row failed" in failed.message


def test_objectives_and_windows_reach_the_engine() -> None:
    slo = SLO(0.5, 0.1)
    engine = RecordingEngine()
    channel: Any = ScriptedChannel(
        add("a", service_class=ServiceClass.ONLINE, slo=slo),
        add("b", service_class=ServiceClass.OFFLINE, complete_by_s=77.0),
        until=lambda _: not engine.has_unfinished,
    )
    EngineLoop(engine, channel, heartbeat_s=60.0).run()
    assert [(request.slo, request.complete_by_s) for request in engine.added] == [(slo, None), (None, 77.0)]


def test_each_step_is_reported_once() -> None:
    engine = RecordingEngine()
    channel: Any = ScriptedChannel(
        add("a", service_class=ServiceClass.ONLINE),
        AbortRequests([RequestId("unknown")]),
        until=lambda _: not engine.has_unfinished,
    )
    EngineLoop(engine, channel, heartbeat_s=60.0).run()
    executor = engine.executor
    assert isinstance(executor, ScriptedExecutor)
    reported = [message.stats.step.num_tokens for message in channel.sent]
    assert [num_tokens for num_tokens in reported if num_tokens] == [
        plan.num_tokens for plan in executor.plans if plan.slices
    ]


class SlowGrammars:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.compiling: list[Future[None]] = []

    def compile(self, params: StructuredOutputsParams) -> Future[None]:
        self.compiling.append(Future())
        return self.compiling[-1]


def test_a_request_arrives_when_its_grammar_is_compiled_and_others_do_not_wait() -> None:
    engine, grammars = RecordingEngine(), SlowGrammars()
    engine.grammars = grammars  # type: ignore[assignment]

    def finish_compiling(sent: Sequence[FromEngine]) -> bool:
        names = [request.request_id for request in engine.added]
        if names == ["plain"] and not engine.has_unfinished:
            for future in grammars.compiling:
                if not future.done():
                    future.set_result(None)
        return names == ["plain", "first"] and not engine.has_unfinished

    structured = StructuredOutputsParams(regex="a")
    channel: Any = ScriptedChannel(
        add("first", structured_outputs=structured),
        add("aborted", structured_outputs=structured),
        AbortRequests([RequestId("aborted")]),
        add("plain"),
        until=finish_compiling,
    )
    EngineLoop(engine, channel, heartbeat_s=60.0).run()
    assert [request.request_id for request in engine.added] == ["plain", "first"]


def test_an_abort_does_not_come_between_the_compiling_and_the_arrival() -> None:
    """Else the engine would not know the request yet, and then compute all of it for nobody."""
    engine, grammars = RecordingEngine(), SlowGrammars()
    engine.grammars = grammars  # type: ignore[assignment]
    checking = threading.Event()

    class Compiling(set[RequestId]):
        def __contains__(self, request_id: object) -> bool:
            checking.set()
            time.sleep(0.05)  # for the abort, if it does not wait
            return super().__contains__(request_id)

    def finish_compiling(sent: Sequence[FromEngine]) -> bool:
        return not engine.has_unfinished

    structured = StructuredOutputsParams(regex="a")
    channel: Any = ScriptedChannel(
        add("first", structured_outputs=structured),
        AbortRequests([RequestId("first")]),
        until=finish_compiling,
    )
    loop = EngineLoop(engine, channel, heartbeat_s=60.0)
    loop._compiling = Compiling()
    receive = channel.receive

    def compile_before_the_abort() -> ToEngine | None:
        command = receive()
        if isinstance(command, AbortRequests):
            threading.Thread(target=grammars.compiling[0].set_result, args=(None,)).start()
            checking.wait()
        return command

    channel.receive = compile_before_the_abort
    commands_at_arrival = []
    arrive = engine.arrive

    def recorded(request: Request) -> None:
        commands_at_arrival.append(list(loop._commands))
        arrive(request)

    engine.arrive = recorded  # type: ignore[method-assign]
    loop.run()
    assert commands_at_arrival == [[]], "the abort is behind it"


@pytest.mark.parametrize("has_unserved", [False, True])
def test_an_engine_without_a_step_reports_all_the_same(has_unserved: bool) -> None:
    config = SchedulerConfig(policy="online-only")
    engine = Engine(config, ScriptedExecutor(make_info()), VirtualClock())
    if has_unserved:
        engine.add(make_request(service_class=ServiceClass.OFFLINE))
    channel: Any = ScriptedChannel(until=lambda sent: len(sent) >= 4)
    EngineLoop(engine, channel, heartbeat_s=0.01).run()
    assert engine.has_unfinished == has_unserved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_llama_config(tmp_path)
    return tmp_path


def check(folder: Path, path: Path | None) -> None:
    check_profile(EngineConfig(model_dir=str(folder), profile=path))


def test_a_profile_of_the_model_is_good_whatever_its_device(folder: Path) -> None:
    make_profile(model=ModelConfig.from_folder(folder).shape_key).save(folder / "profile.json")
    check(folder, folder / "profile.json")
    check(folder, None)


def test_a_profile_that_cannot_serve_is_refused_without_the_model_being_loaded(folder: Path) -> None:
    make_profile().save(folder / "other.json")
    (folder / "old.json").write_text('{"format": 1}')
    (folder / "corrupt.json").write_text("{")
    for name, reason in (
        ("other", "is of another model"),
        ("old", "is not of format"),
        ("corrupt", "is not JSON"),
        ("absent", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check(folder, folder / f"{name}.json")
