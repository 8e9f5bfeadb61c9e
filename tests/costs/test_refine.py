"""Refining a profile with served steps whose true cost model is known."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from backfill.core.clock import VirtualClock
from backfill.core.plan import Compute, ScheduledSlice, StepPlan
from backfill.core.request import RequestId
from backfill.costs.fit import TimedStep
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.costs.profile import CostProfile, FitError
from backfill.costs.profiler import FULL, Capacity
from backfill.costs.refine import ProfileRefiner, ServedStep, StepSample, corrected
from backfill.execution import machine
from tests.builders import make_profile
from tests.costs.test_profiler import TRUTH

Shape = Sequence[tuple[int, int, bool]]

CAPACITY = Capacity(
    kv_tokens=50_000, block_size=16, max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=2048
)
GRID = [StepLoad.of(shape) for shape in FULL.shapes(CAPACITY)]


def scaled(cost: CostModel, rows: float = 1.0, rest: float = 1.0) -> CostModel:
    """The model with scaled times of rows and of attention."""
    return replace(
        cost,
        rows_s=replace(cost.rows_s, y=tuple(rows * y for y in cost.rows_s.y)),
        prefill_pair_s=rest * cost.prefill_pair_s,
        prefill_context_s=rest * cost.prefill_context_s,
        decode_context_s=rest * cost.decode_context_s,
    )


def coarse_profile(cost: CostModel) -> CostProfile:
    return replace(make_profile(cost), quality="coarse", error=FitError(0.3, 0.9, 18))


class Service:
    """Serves random steps; each takes its true time, with noise."""

    def __init__(
        self,
        profile: CostProfile,
        noise: float = 0.05,
        truth: CostModel = TRUTH,
        grid: Sequence[StepLoad] = GRID,
    ) -> None:
        self.clock = VirtualClock()
        self.saved: list[CostProfile] = []
        self.refiner = ProfileRefiner(profile, grid, self.clock, self.saved.append)
        self.truth = truth
        self._rng = random.Random(3)
        self.noise = noise

    def serve(self, shape: Shape, stolen: float = 0.0) -> None:
        """``stolen``: seconds that a hypervisor takes beside it, over the step's own."""
        slices = tuple(
            ScheduledSlice(RequestId(str(index)), start, count, (), samples)
            for index, (start, count, samples) in enumerate(shape)
        )
        seconds = self.truth.step_time_s(StepLoad.of(shape)) * self._rng.lognormvariate(0.0, self.noise)
        seconds *= 1.0 + stolen
        self.clock.advance(seconds)
        self.refiner.observe(StepPlan(step=0, work=Compute(slices)), seconds, is_disturbed=stolen > 0.0)

    def serve_chats(self, num_steps: int, most_tokens: int = 1000) -> None:
        """Prompts of up to ``most_tokens``, and decodes after them."""
        for _ in range(num_steps):
            decodes = [
                (self._rng.randint(1, most_tokens), 1, True) for _ in range(self._rng.choice((1, 2, 4, 9)))
            ]
            prompt = (0, round(most_tokens ** self._rng.random()), True)
            self.serve(self._rng.choice((decodes, decodes, [prompt], [*decodes, prompt])))

    def refine(self) -> CostProfile | None:
        self.clock.advance(30.0)
        assert self.refiner.is_due
        return self.refiner.refine()


def errors(cost: CostModel, shapes: Sequence[Shape], truth: CostModel = TRUTH) -> list[float]:
    loads = [StepLoad.of(shape) for shape in shapes]
    return [abs(cost.step_time_s(load) / truth.step_time_s(load) - 1) for load in loads]


CHAT_SHAPES: list[Shape] = [
    *([(0, count, True)] for count in (3, 20, 50, 100, 200, 400, 800)),
    *([(context, 1, True)] * batch for context in (50, 200, 700) for batch in (1, 2, 4, 8)),
]


@pytest.mark.parametrize(
    ("rows", "rest"), [(2.0, 1.0), (0.5, 1.0), (1.3, 5.0), (1.0, 0.2), (3.0, 3.0)], ids=str
)
def test_a_wrong_profile_becomes_right_where_it_is_used(rows: float, rest: float) -> None:
    profile = coarse_profile(scaled(TRUTH, rows, rest))
    service = Service(profile)
    found = [statistics.median(errors(profile.cost, CHAT_SHAPES))]
    for _ in range(4):
        service.serve_chats(200)
        service.refine()
        found.append(statistics.median(errors(service.refiner.profile.cost, CHAT_SHAPES)))
    refined = service.refiner.profile
    assert refined.quality == "refined"
    assert refined == service.saved[-1]
    assert found[-1] < 0.05
    assert max(errors(refined.cost, CHAT_SHAPES)) < 0.2
    assert refined.error.median < 0.08 and refined.error.p95 < 0.25
    assert refined.error.num_steps > 30
    assert 512 <= refined.known_tokens <= 1000
    assert refined.known_chunk_tokens == refined.known_tokens, "no prompt was in two steps"


@pytest.mark.parametrize(("quiet_of_ten", "learned"), [(4, 1.0), (0, 1.5)])
def test_steps_beside_stolen_time_are_left_out_unless_all_are_such(quiet_of_ten: int, learned: float) -> None:
    service = Service(coarse_profile(TRUTH), noise=0.0)
    for number in range(200):
        service.serve([(300, 1, True)] * 8, stolen=0.0 if number % 10 < quiet_of_ten else 0.5)
        service.serve([(700, 1, True)] * 2, stolen=0.0 if number % 10 < quiet_of_ten else 0.5)
    service.refine()
    load = StepLoad.of([(300, 1, True)] * 8)
    assert service.refiner.profile.cost.step_time_s(load) == pytest.approx(
        learned * TRUTH.step_time_s(load), rel=0.02
    )


def test_steps_that_are_always_beside_stolen_time_are_learned_beside_others_that_never_are() -> None:
    """Stolen time is counted in ticks of 10 ms, so a long step always has some, and most short ones none."""
    service = Service(coarse_profile(TRUTH), noise=0.0)
    load = StepLoad.of([(0, 512, True)])
    for _ in range(100):
        service.serve([(0, 512, True)], stolen=0.5)
        service.serve([(300, 1, True)] * 8)
    service.refine()
    assert service.refiner.profile.cost.step_time_s(load) > 1.35 * TRUTH.step_time_s(load)


def test_stolen_time_is_of_the_mean_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64, a little of each would else be more than all of a step."""
    stolen_s = iter([5.0, 5.64, 5.64, 6.28, 6.92, 7.56])
    monkeypatch.setattr(machine, "_processor_seconds", lambda: [*[0.0] * 7, next(stolen_s)])
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    stolen = machine.StolenTime()
    assert (stolen.take_s(), stolen.take_s()) == pytest.approx((0.01, 0.0))
    found = []
    for seconds, idle_s in ((0.1, 0.0), (1.0, 0.0), (0.1, 1.0), (0.01, 0.0)):
        monkeypatch.setattr(stolen, "_read_at_s", time.monotonic() - seconds - idle_s)
        found.append(stolen.disturbs(seconds))
    assert found == [True, False, False, False], "10 ms are much of a tenth alone; a short step does not look"


def test_where_nothing_was_ever_stolen_it_is_hardly_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for beside every step."""
    clock, read_s, reads = VirtualClock(), [0.0] * 8, list[float]()

    def read() -> list[float]:
        reads.append(clock.now_s())
        return read_s

    monkeypatch.setattr(machine, "_processor_seconds", read)
    monkeypatch.setattr(time, "monotonic", clock.now_s)
    stolen = machine.StolenTime()
    for _ in range(25):
        clock.advance(1.0)
        assert stolen.take_s() == 0.0
    assert reads == [0.0, 10.0, 20.0]
    read_s[-1] = 1.0
    clock.advance(10.0)
    assert stolen.take_s() > 0.0
    assert stolen.take_s() == 0.0
    assert len(reads) == 5, "from now on it is"


def test_unserved_loads_follow_the_speed_of_served_ones() -> None:
    """The machine was half as fast when it was measured; since then only decodes were served."""
    service = Service(coarse_profile(scaled(TRUTH, 2.0, 2.0)))
    for _ in range(100):
        service.serve([(300, 1, True)] * 8)
        service.serve([(700, 1, True)] * 2)
    refined = service.refine()
    assert refined is not None
    prompts: list[Shape] = [[(0, count, True)] for count in (16, 128, 1024)]
    assert max(errors(refined.cost, prompts)) < 0.2
    assert refined.known_tokens == refined.known_chunk_tokens == 0, "it knows of no prompt"


def test_times_that_a_busy_machine_left_beyond_the_served_steps_are_forgotten() -> None:
    """Large steps that look 20 times as long as they are are never planned, so none of them is served."""
    rows = TRUTH.rows_s
    spoilt = replace(rows, y=tuple(20.0 * y if x > 256 else y for x, y in zip(rows.x, rows.y, strict=True)))
    service = Service(coarse_profile(replace(TRUTH, rows_s=spoilt)))
    large: Shape = [(0, 1024, True)]
    assert errors(service.refiner.profile.cost, [large])[0] > 5
    for _ in range(3):
        service.serve_chats(200, most_tokens=200)
        service.refine()
    assert errors(service.refiner.profile.cost, [large])[0] < 0.5
    assert max(errors(service.refiner.profile.cost, [[(0, 100, True)], [(100, 1, True)] * 4])) < 0.1


def test_known_tokens_and_known_chunk_tokens_are_kept_apart() -> None:
    service = Service(coarse_profile(TRUTH))
    for _ in range(100):
        service.serve([(4000, 64, False), *[(300, 1, True)] * 8])
        service.serve([(1000, 128, False), (0, 96, True)])
    refined = service.refine()
    assert refined is not None
    assert (refined.known_tokens, refined.known_chunk_tokens) == (4064, 128)


def test_fewer_kinds_of_steps_than_the_model_has_terms_refine_it() -> None:
    """With a small context, or a small limit on a step's tokens."""
    small = replace(CAPACITY, max_model_len=16, max_num_seqs=1)
    grid = [StepLoad.of(shape) for shape in FULL.shapes(small)]
    service = Service(coarse_profile(scaled(TRUTH, 2.0)), grid=grid)
    for _ in range(40):
        service.serve([(0, 8, True)])
        service.serve([(8, 1, True)])
    refined = service.refine()
    assert refined is not None
    assert max(errors(refined.cost, [[(0, 8, True)], [(8, 1, True)]])) < 0.1


def test_a_model_is_kept_if_no_other_is_better_and_its_error_is_updated() -> None:
    service = Service(coarse_profile(TRUTH), noise=0.01)
    for shape in CHAT_SHAPES * 20:
        service.serve(shape)
    refined = service.refine()
    assert refined is not None
    assert refined.cost == TRUTH
    assert refined.quality == "refined"
    assert refined.error.median < 0.08
    for shape in CHAT_SHAPES * 20:
        service.serve(shape)
    assert service.refine() is None
    assert service.saved == [refined], "what moved by a little is not worth telling of"


def test_a_profile_that_keeps_its_model_gets_the_latest_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quiet hour, then one in which another process takes the CPU at random."""
    service = Service(coarse_profile(TRUTH), noise=0.02)
    monkeypatch.setattr(ProfileRefiner, "_fit", lambda *_: scaled(TRUTH, 1.5))
    service.serve_chats(400)
    quiet = service.refine()
    assert quiet is not None and quiet.error.p95 < 0.1 and quiet.certain_share > 0.6
    service.noise = 1.0
    for _ in range(4):
        service.serve_chats(400)
        service.refine()
    noisy = service.refiner.profile
    assert noisy.cost == TRUTH
    assert noisy.error.p95 > 0.5 and noisy.certain_share == 0.0
    assert service.saved[-1] == noisy


def test_single_slow_steps_do_not_count() -> None:
    service = Service(coarse_profile(scaled(TRUTH, 1.5)), noise=0.02)
    for number in range(400):
        service.truth = scaled(TRUTH, 10.0) if number % 10 == 0 else TRUTH
        service.serve_chats(1)
    refined = service.refine()
    assert refined is not None
    assert statistics.median(errors(refined.cost, CHAT_SHAPES)) < 0.05


def test_a_fit_is_due_after_enough_steps_and_enough_time() -> None:
    service = Service(coarse_profile(TRUTH))
    refiner = service.refiner
    service.serve_chats(31)
    assert not refiner.is_due
    service.serve_chats(1)
    assert refiner.is_due, "a first time as soon as there are enough"
    service.serve_chats(32)  # enough to hold out
    refiner.refine()
    fitted_at_s = service.clock.now_s()
    while service.clock.now_s() < fitted_at_s + 29.0:
        service.serve_chats(1)
        assert not refiner.is_due
    service.clock.advance(1.0)
    assert refiner.is_due
    refiner.refine()
    service.clock.advance(100.0)
    assert not refiner.is_due, "nothing was served since"


def test_fits_beside_online_requests_are_15_s_apart_then_30_and_then_a_minute() -> None:
    service = Service(coarse_profile(TRUTH))
    refiner, clock, last_s = service.refiner, service.clock, service.clock.now_s()
    for interval_s in (15.0, 30.0, 60.0, 60.0):
        service.serve_chats(64)
        clock.advance(last_s + interval_s - 1.0 - clock.now_s())
        assert refiner.is_due == (interval_s > 30.0 or last_s == 0.0)
        assert not refiner.is_overdue
        clock.advance(1.0)
        assert refiner.is_overdue
        refiner.refine()
        last_s = clock.now_s()


def test_what_was_no_fit_delays_none() -> None:
    service = Service(coarse_profile(TRUTH))
    refiner, clock = service.refiner, service.clock
    service.serve_chats(32)
    clock.advance(15.0)
    assert refiner.is_overdue
    assert refiner.refine() is None, "too few are held out"
    assert not refiner.is_due, "until others were served"
    while not refiner.is_overdue:
        service.serve_chats(1)
    while (refined := refiner.refine()) is None:
        service.serve_chats(32)
        assert refiner.is_overdue
    assert refined.quality == "refined"


def test_too_few_steps_of_a_kind_change_nothing() -> None:
    service = Service(coarse_profile(scaled(TRUTH, 2.0)))
    for shape in CHAT_SHAPES * 2:
        service.serve(shape)
    assert service.refine() is None
    assert service.refiner.profile.quality == "coarse"


def test_the_sample_is_bounded_and_keeps_the_latest_of_each_kind() -> None:
    sample = StepSample()
    rng = random.Random(1)
    for number in range(5000):
        load = StepLoad.of([(rng.randint(1, 8000), 1, True)] * rng.randint(1, 256))
        sample.add(ServedStep(TimedStep(load, 1.0 + number)))
    strata = sample._strata
    assert len(strata) <= 128
    assert all(len(each.fitted) <= 9 and len(each.held_out) <= 9 for each in strata.values())
    assert max(step.seconds for step in sample.held_out()) > 4900
    assert not {id(s) for each in strata.values() for s in each.fitted} & set(map(id, sample.held_out()))


STARTED: list[Shape] = [
    [(0, 1, True)],
    [(0, 16, True)],
    [(16, 1, True)],
    [(0, 128, False)],
    [(16, 1, True)] * 32,
    [(256, 1, True)] * 8,
]


def started(truth: CostModel = TRUTH) -> list[TimedStep]:
    """The steps that a start times."""
    loads = [StepLoad.of(shape) for shape in STARTED]
    return [TimedStep(load, truth.step_time_s(load)) for load in loads]


@pytest.mark.parametrize(("factor", "sampled"), [(1.5, 1.0), (3.0, 1.0), (2.0, 4.0)], ids=str)
def test_a_start_corrects_a_profile_that_is_too_slow(factor: float, sampled: float) -> None:
    """Refined by served steps while other programs ran, sampling ones more than others."""
    slow = TRUTH.slowed(factor)
    spoilt = replace(slow, sampled_s=slow.sampled_s.scaled(sampled))
    profile = replace(make_profile(spoilt), quality="refined", error=FitError(0.3, 0.9, 18))
    found = corrected(profile, started(), GRID)
    assert found.quality == "coarse", "it refuses nobody until served steps have refined it"
    assert max(errors(found.cost, STARTED)) < 0.2
    assert max(errors(found.cost, [[(0, 1024, False)], [(1000, 1, True)] * 8])) < 0.4
    assert found.error.median < 0.1 and found.error.num_steps == len(STARTED)


@pytest.mark.parametrize("factor", [0.2, 0.8, 1.0, 1.25], ids=str)
def test_a_start_keeps_a_profile_that_is_about_right_or_fast(factor: float) -> None:
    """The first steps of a start may be slow ones."""
    profile = replace(make_profile(TRUTH.slowed(factor)), quality="refined")
    assert corrected(profile, started(), GRID) is profile
    assert corrected(profile, [], GRID) is profile, "no step fits"
