from __future__ import annotations

from dataclasses import asdict, replace

import msgspec
import pytest

from backfill.core.block import BlockCopy
from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.counters import TierBlocks
from backfill.core.plan import (
    BlockCopies,
    Compute,
    CopyDirections,
    ScheduledSlice,
    StepPlan,
    TokenLogprobs,
)
from backfill.core.request import FinishReason, PriorityLevel, Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO
from backfill.engine.engine import Engine
from backfill.engine.messages import (
    AbortRequests,
    AddRequest,
    FromEngine,
    ProfileRefined,
    Ready,
    StepReport,
    Stop,
    ToEngine,
    TokenOutput,
)
from backfill.execution.simulated_executor import hashed_token
from backfill.scheduling.committed import prompt_progress
from tests.builders import ScriptedExecutor, make_info, make_profile, make_request
from tests.integrity import check_scheduler


def make_engine(**info: int) -> tuple[Engine, ScriptedExecutor]:
    executor = ScriptedExecutor(make_info(**info))
    return Engine(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32), executor, VirtualClock()
    ), executor


def sampled(name: str, num_tokens: int) -> list[int]:
    """What a request of the default prompt samples."""
    return [hashed_token(RequestId(name), position, make_info()) for position in range(4, 4 + num_tokens)]


def run_to_end(engine: Engine) -> list[TokenOutput]:
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
        check_scheduler(engine.scheduler)
    return outputs


def test_every_request_gets_its_tokens_and_one_last_output() -> None:
    engine, _ = make_engine()
    for name in ("a", "b"):
        assert engine.add(make_request(request_id=name, max_tokens=3)) is None
    outputs = run_to_end(engine)
    for name in ("a", "b"):
        mine = [output for output in outputs if output.request_id == name]
        assert [output.token_id for output in mine] == sampled(name, 3)
        assert [output.finish_reason for output in mine] == [None, None, FinishReason.LENGTH]


def test_the_last_output_tells_when_a_request_was_preempted() -> None:
    engine, _ = make_engine(num_blocks=3, block_size=4)  # two requests need five
    requests = [make_request(max_tokens=6, request_id=name, arrived_at_s=i) for i, name in enumerate("ab")]
    for request in requests:
        engine.add(request)
    last = {each.request_id: each for each in run_to_end(engine) if each.finish_reason is not None}
    assert [last[each.request_id].num_preemptions for each in requests] == [0, 1]
    assert [len(last[each.request_id].pauses) for each in requests] == [0, 1]


def test_the_steps_of_relegated_requests_are_online_ones() -> None:
    config = SchedulerConfig(policy="slo")
    engine = Engine(config, ScriptedExecutor(make_info()), VirtualClock(), make_profile())
    late = make_request(8, 2, arrived_at_s=-100.0)
    engine.add(late)
    engine.step()
    assert late.priority_level is PriorityLevel.RELEGATED
    assert engine.stats().step.kind == "online"


def test_a_request_that_can_never_be_served_is_refused_and_the_engine_continues() -> None:
    engine, _ = make_engine(max_model_len=20)
    refusals = [
        engine.add(make_request(prompt_tokens=15, max_tokens=6)),
        engine.add(make_request(prompt_token_ids=[1000])),
        engine.add(make_request(prompt_token_ids=[-1])),
    ]
    for refusal, reason in zip(refusals, ("context length", "token ids", "token ids"), strict=True):
        assert refusal is not None
        assert refusal.finish_reason is FinishReason.ERROR
        assert reason in (refusal.message or "")
    assert not engine.has_unfinished
    assert engine.add(make_request(max_tokens=1)) is None
    assert len(run_to_end(engine)) == 1


def test_a_failing_step_ends_requests_that_have_sent_tokens_and_no_others() -> None:
    engine, executor = make_engine()
    executor.fail_at_step = 1
    for i in range(3):
        engine.add(make_request(request_id=f"in{i}", max_tokens=4))
    engine.step()
    engine.add(make_request(request_id="new", max_tokens=4))
    waiting = make_request(request_id="waiting", max_tokens=2, arrived_at_s=1.0)
    engine.add(waiting)
    outputs = run_to_end(engine)
    failed = {o.request_id: o.num_lost for o in outputs if o.finish_reason is FinishReason.ERROR}
    assert failed == {"in0": 4, "in1": 4, "in2": 4}, "with how many they were in the step"
    assert [o.token_id for o in outputs if o.request_id == "new"] == sampled("new", 4)
    assert waiting.finish_reason is FinishReason.LENGTH
    assert engine.scheduler.kv.counts.referenced == 0


@pytest.mark.parametrize("num_admitted", [0, 1, 2])
@pytest.mark.parametrize("service_class", ServiceClass)
def test_requests_that_have_sent_nothing_survive_a_failed_step_once(
    service_class: ServiceClass, num_admitted: int
) -> None:
    engine, executor = make_engine()
    executor.num_admitted_by_failure = num_admitted
    for name in ("a", "b"):
        engine.add(make_request(request_id=name, max_tokens=3, service_class=service_class))
    executor.fail_at_step = 0
    assert engine.step() == []
    check_scheduler(engine.scheduler)
    outputs = run_to_end(engine)
    for name in ("a", "b"):
        mine = [output.token_id for output in outputs if output.request_id == name]
        assert mine == sampled(name, 3)
    engine.step()
    assert executor.num_tokens == {}, "the executor was told to forget all"


def test_a_request_is_retried_once() -> None:
    engine, executor = make_engine()
    engine.add(make_request(request_id="a"))
    for step in range(2):
        executor.fail_at_step = step
        outputs = engine.step()
    (output,) = outputs
    assert (output.finish_reason, output.num_lost) == (FinishReason.ERROR, 1)
    assert not engine.has_unfinished


def test_a_retried_request_may_be_aborted_before_it_runs_again() -> None:
    engine, executor = make_engine()
    engine.add(make_request(request_id="a"))
    executor.fail_at_step = 0
    engine.step()
    engine.abort([RequestId("a")])
    engine.add(make_request(request_id="a", max_tokens=2))
    assert [output.token_id for output in run_to_end(engine)] == sampled("a", 2)


class NotingBus:
    """A bus that halves the engine's share, and notes what it is told of steps.

    Attributes:
        objectives: of each step, whether it has one; empty while the engine is idle.
    """

    share = load = 0.0

    def __init__(self) -> None:
        self.objectives: list[bool] = []
        self.num_in_flight: list[int] = []
        self.computed_s: list[float] = []

    def begin_step(
        self, plan: StepPlan, objective_s: float, num_in_flight: int, *, has_objective: bool
    ) -> StepPlan:
        self.objectives.append(has_objective)
        self.num_in_flight.append(num_in_flight)
        return replace(plan, bus_share=0.5)

    def count_copies(self, num_bytes: int) -> None:
        pass

    def end_step(self, computed_s: float, interval: int | None) -> None:
        self.computed_s.append(computed_s)

    def idle(self) -> None:
        self.objectives.clear()

    def least_step_s(self) -> float:
        return 0.0


def test_an_engine_whose_last_step_failed_is_on_no_bus() -> None:
    engine, executor = make_engine()
    engine._bus = bus = NotingBus()
    engine.add(make_request(request_id="a"))
    for step in range(3):  # the last one has no slices: it releases the request
        assert engine.has_work and (step == 0 or bus.objectives)
        executor.fail_at_step = step
        engine.step()
    assert engine.num_failed_steps_in_a_row == 3
    assert not (engine.has_work or bus.objectives)


def test_an_engine_without_online_requests_has_no_objective_on_the_bus() -> None:
    engine, _ = make_engine()
    engine._bus = bus = NotingBus()
    engine.add(make_request(request_id="a", service_class=ServiceClass.OFFLINE, max_tokens=3))
    engine.step()
    engine.add(make_request(request_id="b", service_class=ServiceClass.ONLINE, max_tokens=3))
    engine.step()
    assert bus.objectives == [False, True]


def test_only_a_step_with_slices_resets_the_count_of_failures() -> None:
    engine, executor = make_engine()
    engine.add(make_request(request_id="a", max_tokens=3))
    for step in range(2):
        executor.fail_at_step = step
        engine.step()
    engine.step()
    assert executor.plans[-1].released and not executor.plans[-1].slices
    assert engine.num_failed_steps_in_a_row == 2
    engine.add(make_request())
    engine.step()
    assert engine.num_failed_steps_in_a_row == 0


def test_aborting_frees_everything_whenever_it_comes() -> None:
    engine, executor = make_engine()
    engine.add(make_request(request_id="a", max_tokens=5))
    engine.add(make_request(request_id="b", max_tokens=5))
    engine.step()
    engine.abort([RequestId("a"), RequestId("unknown"), RequestId("a")])
    outputs = run_to_end(engine)
    assert {output.request_id for output in outputs} == {"b"}
    engine.step()
    assert executor.num_tokens == {}
    assert engine.scheduler.kv.counts.referenced == 0


def test_stats_count_by_class() -> None:
    engine, _ = make_engine()
    engine.add(make_request(max_tokens=5))
    engine.add(make_request(max_tokens=5, service_class=ServiceClass.OFFLINE))
    engine.step()
    stats = engine.stats()
    assert (stats.online.num_running, stats.offline.num_running) == (1, 1)
    assert stats.step.num_tokens == 8
    assert stats.kv_usage_frac == 2 / 16
    assert (stats.num_empty_blocks, stats.num_referenced_blocks) == (14, 2)
    assert stats.device_blocks == TierBlocks(online=1, offline=1, empty=14)
    assert stats.host_blocks == TierBlocks()
    assert stats.step.kind == "mixed"
    assert engine.stats().step.kind == "none", "a step is reported once"


def test_a_step_reports_how_far_online_prompts_are() -> None:
    engine, executor = make_engine(num_blocks=64)
    for each in (
        make_request(request_id="offline", prompt_tokens=40, service_class=ServiceClass.OFFLINE),
        make_request(request_id="long", prompt_tokens=70, max_tokens=2),
    ):
        engine.add(each)
    executor.fail_at_step = 1
    progress = []
    while engine.has_unfinished:
        engine.step()
        progress.append(engine.stats().step.prompt_progress)
    assert progress[:4] == [(("long", 32),), (("long", 0),), (("long", 64),), ()]
    assert not any(progress[4:]), "its first token tells the rest"


def test_a_step_reports_no_chunk_of_a_prompt_that_a_later_step_computes() -> None:
    request = make_request(request_id="long", prompt_tokens=70)
    request.num_computed_tokens = 64
    slices = tuple(ScheduledSlice(RequestId(name), 0, 32, (), samples=False) for name in ("long", "aborted"))
    assert prompt_progress(StepPlan(0, Compute(slices)), {request.request_id: request}) == (("long", 32),)


def test_messages_are_equal_after_encoding_and_decoding() -> None:
    sampling = SamplingParams(max_tokens=3, logit_bias={4: 1.5}, stop_token_ids=(1, 2), logprobs=2)
    request = Request(
        request_id=RequestId("r"),
        prompt_token_ids=[1, 2],
        sampling=sampling,
        service_class=ServiceClass.OFFLINE,
        priority=-3,
        arrived_at_s=1.25,
        slo=SLO(0.5, 0.1),
        complete_by_s=9.5,
    )
    added = msgspec.msgpack.decode(msgspec.msgpack.encode(AddRequest(request)), type=ToEngine)
    assert isinstance(added, AddRequest)
    assert asdict(added.request) == asdict(request)
    commands: list[ToEngine] = [
        AbortRequests([RequestId("r")]),
        Stop(),
    ]
    for command in commands:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=ToEngine) == command
    logprobs = TokenLogprobs(-0.5, 1, ((7, -0.5), (8, -1.5)))
    engine, executor = make_engine()
    reports: list[FromEngine] = [
        Ready(executor.info, SLO(1.0, 0.1)),
        Ready(executor.info, SLO(1.0, 0.1), make_profile()),
        ProfileRefined(make_profile(), SLO(1.0, 0.1)),
        StepReport(
            [
                TokenOutput(RequestId("r"), 7, logprobs),
                TokenOutput(RequestId("r"), 8, finish_reason=FinishReason.STOP, stop_token_id=8),
                TokenOutput(RequestId("r"), 8, num_preemptions=2, pauses=((1.5, 2.5), (3.0, 4.0))),
                TokenOutput(RequestId("s"), None, finish_reason=FinishReason.ERROR, num_lost=3),
            ],
            engine.stats(),
        ),
    ]
    for report in reports:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=FromEngine) == report


@pytest.mark.parametrize("begins_copies", [False, True])
def test_the_engine_stops_planning_after_a_plan_that_does_nothing_and_no_other(
    begins_copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = make_engine()
    engine.add(make_request())
    copies = BlockCopies(checkpoint=(BlockCopy(0, 0),) * begins_copies, blocking=CopyDirections.CHECKPOINT)
    with monkeypatch.context() as patched:
        patched.setattr(engine.scheduler, "plan_step", lambda now_s: StepPlan(0, Compute(()), copies=copies))
        engine.step()
    assert engine.has_work is begins_copies
    engine.add(make_request())
    assert engine.has_work
    run_to_end(engine)
