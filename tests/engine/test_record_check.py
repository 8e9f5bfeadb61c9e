"""A performance record that does not say what is served is corrected, or said to be wrong."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from backfill.core.measured_on import MeasuredOn
from backfill.core.plan import Compute, ScheduledSlice, StepPlan
from backfill.core.request import RequestId
from backfill.engine.record_check import NUM_STEPS, RecordCheck
from backfill.offloading.record import PerformanceRecord, RecordedLoad
from tests.builders import flat_cost

NUM_LAYERS = 10
LOADS = tuple(
    RecordedLoad("decode", batch_size, length, 1e-4 * (10 + batch_size) * (1 + length / 1e4), 0.001)
    for batch_size in (1, 4, 16)
    for length in (128, 1024)
)
RECORD = PerformanceRecord(
    MeasuredOn("model", "device", "dtype"),
    NUM_LAYERS,
    1000,
    0.006,
    LOADS,
    "few steps.",
    typical_transfer_s=0.004,
)


class Checked:
    """A check, and what it saves."""

    def __init__(self, record: PerformanceRecord = RECORD, *, has_own_link: bool = True) -> None:
        self.saved: list[PerformanceRecord] = []
        self._was_saved = threading.Event()
        self.check = RecordCheck(record, self._save, has_own_link=has_own_link)

    def _save(self, record: PerformanceRecord) -> None:
        self.saved.append(record)
        self._was_saved.set()

    def serve(
        self, ratio: float, transfer_s: float = 0.004, batch_size: int = 4, number: int = NUM_STEPS
    ) -> None:
        plan = decodes(batch_size, 128)
        (load,) = [each for each in LOADS if (each.batch_size, each.length) == (min(batch_size, 16), 128)]
        for _ in range(number):
            self.check.observe(plan, ratio * RECORD.times_of(load).resident_step_s, transfer_s)

    def wait_saved(self) -> PerformanceRecord:
        assert self._was_saved.wait(60.0)
        return self.saved[-1]


def decodes(batch_size: int, length: int) -> StepPlan:
    slices = (ScheduledSlice(RequestId(str(index)), length, 1, (), True) for index in range(batch_size))
    return StepPlan(0, Compute(tuple(slices)))


@pytest.mark.parametrize(
    ("ratios", "batch_size"),
    [
        ([0.9], 4),
        ([1.15], 4),
        pytest.param([1.0, 1.0, 4.0], 4, id="some slow ones"),
        pytest.param([5.0], 17, id="larger than recorded"),
    ],
)
def test_steps_that_are_no_reason_to_change_the_record(ratios: list[float], batch_size: int) -> None:
    checked = Checked()
    for _ in range(5 * NUM_STEPS):
        for ratio in ratios:
            checked.serve(ratio, batch_size=batch_size, number=1)
    assert checked.check.record is RECORD


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_a_record_that_is_off_is_scaled_by_what_it_is_off_by(
    ratio: float, caplog: pytest.LogCaptureFixture
) -> None:
    checked = Checked(replace(RECORD, others_share=0.5))
    checked.serve(ratio, number=NUM_STEPS - 1)
    assert checked.check.record.loads == LOADS
    checked.serve(ratio, number=1)
    corrected = checked.wait_saved()
    assert corrected.loads[0].compute_s == pytest.approx(ratio * LOADS[0].compute_s, rel=0.1)
    assert corrected.transfer_s == RECORD.transfer_s
    assert corrected.others_share == 0.0
    assert corrected.provenance.startswith("few steps. Corrected by")
    assert "what the performance record says, which is corrected" in caplog.text
    checked.serve(ratio, number=3 * NUM_STEPS)
    assert checked.saved == [corrected], "now it is right"
    checked._was_saved.clear()
    checked.serve(1.0)
    assert checked.wait_saved().provenance.count("Corrected") == 1


def test_transfers_count_apart_and_not_on_a_bus() -> None:
    checked = Checked()
    checked.serve(1.0, transfer_s=0.008)
    corrected = checked.wait_saved()
    assert corrected.loads == LOADS
    assert corrected.transfer_s == pytest.approx(2 * RECORD.transfer_s)
    assert corrected.typical_transfer_s == pytest.approx(0.008)
    shared = Checked(has_own_link=False)
    shared.serve(1.0, transfer_s=0.008)
    assert shared.check.record is RECORD


def test_steps_of_other_kinds_than_recorded_say_nothing() -> None:
    checked = Checked()
    decode, chunk = (
        ScheduledSlice(RequestId(name), 64, size, (), True) for name, size in (("a", 1), ("b", 9))
    )
    longer = decode._replace(start=1025)
    for slices in ((decode, chunk), (chunk,), (longer,) * 16):
        for _ in range(NUM_STEPS):
            checked.check.observe(StepPlan(0, Compute(slices)), 5.0, 0.004)
    assert checked.check.record is RECORD


def test_a_step_that_is_said_to_take_no_time_is_compared_too() -> None:
    (load,) = LOADS[:1]
    checked = Checked(replace(RECORD, loads=(replace(load, compute_s=0.0, other_s=0.0),), is_thorough=True))
    checked.check._cost = flat_cost(0.0)
    checked.check.observe(decodes(1, 128), 0.01, 0.0)


def test_a_thorough_record_is_left_alone_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    checked = Checked(replace(RECORD, is_thorough=True))
    checked.serve(2.0, number=5 * NUM_STEPS)
    assert checked.saved == []
    assert caplog.text.count("`backfill profile --offload` measures it thoroughly again") == 1
