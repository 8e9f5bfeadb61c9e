"""An engine whose profile is wrong, on a device whose true cost is known."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.plan import Resume, StepOutcome, StepPlan, WeightTransfers
from backfill.core.request import ServiceClass
from backfill.costs import refine
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.load import StepLoad
from backfill.costs.model import PiecewiseLinear
from backfill.costs.profile import CostProfile
from backfill.costs.profiler import FULL
from backfill.costs.refine import ProfileRefiner
from backfill.engine.engine import Engine
from backfill.engine.messages import ProfileRefined
from backfill.engine.process import EngineLoop
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.scheduling.objectives import achievable_slo, impossible_slo, server_slo
from backfill.scheduling.policies.slo import SloPolicy
from backfill.scheduling.prediction import StepPredictor
from experiments.layered_device import LayeredDevice, LayeredExecutor
from tests.builders import make_info, make_request
from tests.costs.test_profiler import TRUTH
from tests.costs.test_refine import CAPACITY, Service, coarse_profile, scaled
from tests.engine.test_process import ScriptedChannel

CONFIG = SchedulerConfig(policy="slo", max_num_seqs=64, max_num_batched_tokens=2048)


class LearningEngine:
    """An engine with a coarse profile whose long prompts are predicted far too slow."""

    def __init__(self, profile: CostProfile | None = None) -> None:
        self.clock = VirtualClock()
        info = make_info(num_blocks=4000, block_size=16, num_layers=30, max_model_len=8192)
        profile = profile or coarse_profile(scaled(TRUTH, 1.5, 8.0))
        self.saved: list[CostProfile] = []
        grid = (StepLoad.of(shape) for shape in FULL.shapes(CAPACITY))
        self.refiner = ProfileRefiner(profile, grid, self.clock, self.saved.append)
        executor = SimulatedExecutor(info, DeviceBehaviour(TRUTH), self.clock)
        self.is_disturbed = False
        self.engine = Engine(
            CONFIG, executor, self.clock, profile, self.refiner, is_disturbed=lambda _: self.is_disturbed
        )
        self._rng = random.Random(5)

    @property
    def profile(self) -> CostProfile:
        assert self.engine.profile is not None
        return self.engine.profile

    def serve_chats(self, num_requests: int, service_class: ServiceClass = ServiceClass.ONLINE) -> None:
        """Serve up to four at a time, each to its end."""
        while num_requests > 0:
            batch = min(num_requests, self._rng.randint(1, 4))
            num_requests -= batch
            for _ in range(batch):
                prompt_tokens = round(6000 ** self._rng.uniform(0.3, 1.0))
                self.engine.add(
                    make_request(
                        prompt_tokens,
                        self._rng.randint(1, 12),
                        service_class=service_class,
                        arrived_at_s=self.clock.now_s(),
                    )
                )
            while self.engine.has_unfinished:
                self.engine.step()

    def refine(self) -> CostProfile | None:
        self.clock.advance(30.0)
        return self.engine.refine_profile()


def prompt_error(profile: CostProfile) -> float:
    return statistics.median(
        abs(profile.cost.prefill_time_s(count, 2048) / TRUTH.prefill_time_s(count, 2048) - 1)
        for count in (20, 100, 300, 1000, 2500, 5000)
    )


@pytest.fixture(scope="module")
def learned() -> list[CostProfile]:
    """What an engine has at its start, and after each of four times that it refines it."""
    learning = LearningEngine()
    profiles = [learning.profile]
    for _ in range(4):
        learning.serve_chats(60)
        learning.refine()
        profiles.append(learning.profile)
    assert learning.saved[-1] == learning.profile == learning.refiner.profile
    return profiles


def test_an_engine_learns_what_its_steps_cost(learned: list[CostProfile]) -> None:
    found = list(map(prompt_error, learned))
    assert found[0] > 0.5
    assert found[1] < found[0]
    assert found[-1] < 0.12, "steps of more than some 200 tokens are not run"
    assert learned[-1].quality == "refined"


def test_a_refined_model_is_used_everywhere_and_one_fit_changes_no_objective() -> None:
    learning = LearningEngine()
    engine, slo = learning.engine, learning.engine.default_slo
    predictor = engine.predictor
    assert predictor is not None
    learning.serve_chats(60)
    assert predictor.time_scale < 0.9
    spread = predictor.worst_scale / predictor.time_scale
    refined = learning.refine()
    assert refined is not None
    assert predictor.cost is refined.cost
    assert predictor.time_scale == 1.0
    assert predictor.worst_scale == pytest.approx(spread)
    assert engine.default_slo == slo
    # Suspended slices get the time that the new model leaves beside a step of decodes.
    learning.serve_chats(20)
    step = engine.stats().step
    assert step.seconds == pytest.approx(step.predicted_s, rel=0.3)


def test_a_profile_with_only_a_new_error_keeps_the_correction() -> None:
    learning = LearningEngine(coarse_profile(TRUTH))
    predictor = learning.engine.predictor
    assert predictor is not None
    learning.serve_chats(60)
    predictor.observe(1.0, 1.3)
    learned = predictor.time_scale
    refined = learning.refine()
    assert refined is not None and refined.cost == TRUTH
    assert predictor.time_scale == learned != 1.0


@pytest.mark.parametrize(
    ("every", "is_learned"), [(250, False), pytest.param(2, True, marks=pytest.mark.slow)]
)
def test_rare_steps_that_a_hypervisor_disturbs_are_not_learned(every: int, is_learned: bool) -> None:
    learning = LearningEngine(coarse_profile(TRUTH))
    engine, numbers = learning.engine, itertools.count()
    predictor, run = engine.predictor, engine.executor.run
    assert predictor is not None

    def run_disturbed(plan: StepPlan) -> StepOutcome:
        learning.is_disturbed = next(numbers) % every == every - 1
        if learning.is_disturbed:
            learning.clock.advance(2.0 * engine.default_slo.tpot_s)
        return run(plan)

    engine.executor.run = run_disturbed  # type: ignore[method-assign]
    wanted = predictor._errors.share
    learning.serve_chats(200)
    assert next(numbers) > 600
    assert (predictor.time_scale > 1.2) == is_learned
    assert (predictor.worst_scale > 1.2) == is_learned
    assert (predictor._errors.share > wanted) == is_learned, "the late gaps were not its own"
    refined = learning.refine()
    assert refined is not None and refined.error.median < 0.01, "the profile is of the others"


@pytest.mark.parametrize("every", [100, 20, 5])
def test_gaps_are_in_time_however_many_steps_a_hypervisor_disturbs(every: int) -> None:
    """Disturbed ones take 1.3 times as long."""
    predictor, rng, num_kept = StepPredictor(TRUTH), random.Random(1), 0
    for number in range(8000):
        predicted_s = 0.1 * predictor.usable_share
        is_disturbed = rng.randrange(every) == 0
        step_s = predicted_s * rng.lognormvariate(0.0, 0.02) * (1.3 if is_disturbed else 1.0)
        kept = predictor.keeps(step_s, 0.1)
        predictor.observe_gaps(int(kept), 1, is_disturbed=is_disturbed)
        predictor.observe(predicted_s, step_s, is_disturbed=is_disturbed)
        num_kept += kept and number >= 4000
    assert num_kept >= 0.98 * 4000


def test_nothing_is_fitted_while_an_online_request_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    learning = LearningEngine()
    for _ in range(3):  # the first fits come sooner
        learning.serve_chats(20)
        learning.refine()
    fitted_at_s = learning.clock.now_s()
    fits: list[float] = []
    monkeypatch.setattr(learning.refiner, "refine", lambda: fits.append(learning.clock.now_s()))
    learning.serve_chats(10)
    learning.clock.advance(fitted_at_s + 40.0 - learning.clock.now_s())
    request = make_request()
    learning.engine.arrive(request)
    learning.engine.refine_profile()
    assert not fits, "it has arrived"
    learning.engine.admit_arrived()
    learning.engine.refine_profile()
    assert not fits, "it is unfinished"
    learning.engine.abort([request.request_id])
    learning.engine.add(make_request(service_class=ServiceClass.OFFLINE))
    learning.engine.refine_profile()
    assert len(fits) == 1, "offline work can wait"


def test_a_server_that_is_never_idle_fits_each_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    learning = LearningEngine()
    for _ in range(3):
        learning.serve_chats(20)
        learning.refine()
    fitted_at_s = [learning.clock.now_s()]

    def fit() -> None:
        fitted_at_s.append(learning.clock.now_s())
        fit_anew()

    fit_anew = learning.refiner.refine
    monkeypatch.setattr(learning.refiner, "refine", fit)
    for _ in range(2):
        learning.serve_chats(20)
        learning.engine.add(make_request())
        due_at_s = fitted_at_s[-1] + 60.0
        learning.clock.advance(due_at_s - 1.0 - learning.clock.now_s())
        learning.engine.refine_profile()
        learning.clock.advance(1.0)
        learning.engine.refine_profile()
        assert fitted_at_s[-1] == pytest.approx(due_at_s)
    assert len(fitted_at_s) == 3


def test_a_refit_that_fails_ends_the_refining_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learning = LearningEngine()
    learning.serve_chats(20)

    def fail() -> None:
        raise ValueError("no fit")

    monkeypatch.setattr(learning.refiner, "refine", fail)
    before = learning.profile
    for _ in range(2):
        assert learning.refine() is None
        learning.serve_chats(20)
    assert learning.profile is before
    (record,) = caplog.records
    assert "cannot be refined" in record.getMessage() and record.exc_info is not None


def test_the_refiner_ignores_steps_with_another_interval_than_the_profiles() -> None:
    clock = VirtualClock()
    info = replace(make_info(num_blocks=100, num_layers=12), offload_interval=3)
    executor = LayeredExecutor(info, LayeredDevice(TRUTH, layer_transfer_s=0.001), clock)
    profile = coarse_profile(TRUTH)
    refiner = ProfileRefiner(profile, (), clock)
    observed: list[float] = []
    refiner.observe = lambda plan, seconds, **_: observed.append(seconds)  # type: ignore[method-assign]
    engine = Engine(CONFIG, executor, clock, profile, refiner)
    engine.add(make_request(8, 20))
    engine.step()
    engine.step()
    assert len(observed) == 2
    run = executor.run
    other = WeightTransfers(interval=4)
    executor.run = lambda plan: replace(run(plan), weight_transfers=other)  # type: ignore[method-assign]
    engine.step()
    assert len(observed) == 2


def test_the_refiner_ignores_stopped_and_resumed_steps() -> None:
    learning = LearningEngine()
    engine = learning.engine
    observed: list[Any] = []
    learning.refiner.observe = lambda plan, seconds, **_: observed.append(plan)  # type: ignore[method-assign]
    engine.add(make_request(1500, service_class=ServiceClass.OFFLINE))

    class ArrivalInStep:
        at_s = learning.clock.now_s() + 0.1

        def next_at_s(self) -> float:
            return self.at_s

        def deliver(self) -> None:
            self.at_s = math.inf
            engine.arrive(make_request(arrived_at_s=learning.clock.now_s()))

    assert isinstance(engine.executor, SimulatedExecutor)
    engine.executor.events = ArrivalInStep()
    engine.step()
    assert engine.num_stopped_steps == 1
    assert observed == []
    while engine.has_unfinished:
        engine.step()
    assert observed
    assert not any(isinstance(plan.work, Resume) for plan in observed)


@pytest.mark.parametrize("num_rounds", [0, 1, 4], ids=["coarse", "refined once", "refined"])
def test_nothing_is_refused_that_a_run_would_meet(learned: list[CostProfile], num_rounds: int) -> None:
    """200 random prompts, each with an objective between what it really needs alone and three times that."""
    profile = learned[num_rounds]
    rng = random.Random(11)
    for _ in range(200):
        num_tokens = round(8000 ** rng.random())
        needed = achievable_slo(TRUTH, CONFIG, num_tokens)
        impossible = impossible_slo(profile, CONFIG, num_tokens)
        assert impossible.ttft_s <= needed.ttft_s * rng.uniform(1.0, 3.0)
        assert impossible.tpot_s <= needed.tpot_s * rng.uniform(1.0, 3.0)
    known_tokens = min(1000, profile.known_chunk_tokens)  # as if one step had the prompt, in no more time
    absurd = achievable_slo(TRUTH, CONFIG, known_tokens).ttft_s / 4
    assert (impossible_slo(profile, CONFIG, 1000).ttft_s > absurd) == (num_rounds > 0)


def test_large_chunks_are_not_refused_for_what_small_ones_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Served in chunks of up to 128 tokens; the profile has larger ones at more than twice their time."""
    monkeypatch.setattr(refine, "_MOST_PER_ROW", 10.0)  # else refining does not leave it so
    x = (1.0, 16.0, 128.0, 256.0, 2048.0)
    *y, last = map(TRUTH.rows_s, x)
    wrong = replace(TRUTH, rows_s=PiecewiseLinear(x, (*y, y[-1] + 2.2 * (last - y[-1]))))
    service = Service(coarse_profile(wrong))
    rng = random.Random(5)
    for _ in range(6):
        for _ in range(100):
            decodes = [(rng.randint(1, 1000), 1, True)] * rng.choice((1, 2, 4, 9))
            start = rng.randrange(0, 4000, 64)
            service.serve(rng.choice((decodes, [*decodes, (start, 64, False)], [(start, 128, False)])))
        service.refine()
    refined = service.refiner.profile
    assert refined.known_tokens > 3000 and refined.known_chunk_tokens == 128
    for num_tokens in (1000, 2000, 4000):
        needed = achievable_slo(TRUTH, CONFIG, num_tokens)
        assert impossible_slo(refined, CONFIG, num_tokens).ttft_s < needed.ttft_s
        as_if_known = replace(refined, known_chunk_tokens=2048)
        assert impossible_slo(as_if_known, CONFIG, num_tokens).ttft_s > needed.ttft_s


def test_what_a_coarse_profile_predicted_would_have_been_refused() -> None:
    """The check above can fail."""
    coarse = LearningEngine().profile
    full = replace(coarse, quality="full", error=replace(coarse.error, p95=0.05))
    needed = achievable_slo(TRUTH, CONFIG, 6000)
    assert impossible_slo(full, CONFIG, 6000).ttft_s > needed.ttft_s


def test_the_loop_tells_of_a_refined_profile() -> None:
    learning = LearningEngine()
    learning.serve_chats(60)
    learning.clock.advance(30.0)
    channel: Any = ScriptedChannel(until=lambda sent: any(isinstance(each, ProfileRefined) for each in sent))
    EngineLoop(learning.engine, channel, heartbeat_s=0.01).run()
    assert [each.profile for each in channel.sent if isinstance(each, ProfileRefined)] == [learning.profile]
    assert learning.profile.quality == "refined"


def test_a_default_that_was_widened_on_a_busy_device_returns() -> None:
    slow = LearningEngine(coarse_profile(scaled(TRUTH, 20.0)))
    widened = slow.engine.default_slo
    assert widened.tpot_s > 0.15
    found = []
    for _ in range(3):
        slow.serve_chats(60)
        slow.refine()
        found.append(slow.engine.default_slo)
    ended, true = found[-1], server_slo(SchedulerConfig(), TRUTH)
    assert found[0] == widened and ended.tpot_s == 0.15
    assert ended.ttft_s == pytest.approx(true.ttft_s, rel=0.25) and true.ttft_s < widened.ttft_s / 10
    assert found == sorted(found, key=lambda slo: slo.tpot_s, reverse=True)
    request = make_request()
    slow.engine.arrive(request)
    assert request.slo == ended
    policy = slow.engine.scheduler.policy
    assert isinstance(policy, SloPolicy) and policy.default_slo == ended
