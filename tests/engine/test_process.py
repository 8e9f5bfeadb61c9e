"""What the engine's loop makes of commands."""

from __future__ import annotations

from typing import Any

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO
from backfill.engine.engine import Engine
from backfill.engine.messages import AbortRequests, AddRequest, FromEngine, Stop, ToEngine, TokenOutput
from backfill.engine.process import EngineLoop
from tests.builders import ScriptedExecutor, make_info


class ScriptedChannel:
    """Gives one command for each time the loop listens, then Stop once it would wait."""

    def __init__(self, *commands: ToEngine) -> None:
        self.sent: list[FromEngine] = []
        self._commands = list(commands)

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def receive(self, *, wait: bool) -> list[ToEngine]:
        if self._commands:
            return [self._commands.pop(0)]
        return [Stop()] if wait else []


def add(request_id: str, **fields: Any) -> AddRequest:
    return AddRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=[5, 6],
        sampling=SamplingParams(max_tokens=2),
        priority=0,
        arrived_at_s=0.0,
        **fields,
    )


class NotingEngine(Engine):
    """Keeps the requests it was given."""

    def __init__(self) -> None:
        super().__init__(SchedulerConfig(), ScriptedExecutor(make_info()), VirtualClock())
        self.added: list[Request] = []

    def add(self, request: Request) -> TokenOutput | None:
        self.added.append(request)
        return super().add(request)


def test_objectives_and_windows_reach_the_engine() -> None:
    slo = SLO(0.5, 0.1)
    engine = NotingEngine()
    channel: Any = ScriptedChannel(
        add("a", service_class=ServiceClass.ONLINE, slo=slo),
        add("b", service_class=ServiceClass.OFFLINE, complete_by_s=77.0),
    )
    EngineLoop(engine, channel).run()
    assert [(request.slo, request.complete_by_s) for request in engine.added] == [(slo, None), (None, 77.0)]


def test_each_step_is_reported_once() -> None:
    channel: Any = ScriptedChannel(
        add("a", service_class=ServiceClass.ONLINE), AbortRequests([RequestId("unknown")])
    )
    engine = NotingEngine()
    EngineLoop(engine, channel).run()
    executor = engine.executor
    assert isinstance(executor, ScriptedExecutor)
    reported = [message.stats.step.num_tokens for message in channel.sent]
    assert [num_tokens for num_tokens in reported if num_tokens] == [
        plan.num_tokens for plan in executor.plans if plan.slices
    ]
