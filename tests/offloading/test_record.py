from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.errors import ConfigError
from backfill.core.measured_on import MeasuredOn
from backfill.offloading.interval import LayerTimes, smallest_interval, step_time_s
from backfill.offloading.loads import FULL_LOADS, QUICK_LOADS, is_within, never_falling
from backfill.offloading.record import PerformanceRecord, Phase, RecordedLoad

KEY = MeasuredOn("model", "device", "dtype")
NUM_LAYERS = 12


def load(phase: Phase, batch_size: int, length: int, compute_s: float = 0.001) -> RecordedLoad:
    return RecordedLoad(phase, batch_size, length, compute_s, other_s=0.002)


RECORD = PerformanceRecord(
    KEY,
    NUM_LAYERS,
    layer_bytes=1000,
    transfer_s=0.004,
    loads=(
        load("decode", 1, 128),
        load("decode", 1, 512, 0.0012),
        load("decode", 8, 128, 0.002),
        load("decode", 32, 128, 0.004),
        load("prefill", 1, 256, 0.008),
    ),
    provenance="by hand",
)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (("decode", 1, 1), ("decode", 1, 128)),
        (("decode", 1, 128), ("decode", 1, 128)),
        (("decode", 1, 129), ("decode", 1, 512)),
        (("decode", 2, 60), ("decode", 8, 128)),
        (("decode", 9, 128), ("decode", 32, 128)),
        (("decode", 2, 129), None),  # recorded apart, not together
        (("decode", 33, 1), None),
        (("prefill", 1, 100), ("prefill", 1, 256)),
        (("prefill", 2, 100), None),
    ],
)
def test_a_load_counts_as_the_next_larger_recorded_one(
    asked: tuple[Phase, int, int], found: tuple[Phase, int, int] | None
) -> None:
    nearest = RECORD.find(*asked)
    assert found == (None if nearest is None else (nearest.phase, nearest.batch_size, nearest.length))
    assert (RECORD.smallest_interval(*asked, 10.0) is None) == (found is None)


def test_the_interval_is_that_of_the_recorded_times() -> None:
    times = LayerTimes(NUM_LAYERS, 0.002, 0.004, 0.002)
    assert RECORD.times_of(RECORD.loads[2]) == times
    for objective_s, interval in ((0.048, 1), (0.028, 2), (0.024, None), (0.001, None)):
        assert smallest_interval(times, objective_s) == interval
        assert RECORD.smallest_interval("decode", 8, 128, objective_s) == interval


def test_objectives_are_rounded_down_to_two_milliseconds() -> None:
    """A step of 47 ms: 0.0479 s counts as 0.046 s. What is a multiple stays one."""
    exact = replace(RECORD, transfer_s=0.047 / NUM_LAYERS)
    assert step_time_s(exact.times_of(exact.loads[2]), 1) == pytest.approx(0.047)
    assert exact.smallest_interval("decode", 8, 128, 0.0479) == 2
    assert exact.smallest_interval("decode", 8, 128, 0.048) == 1
    for number in range(1, 600):
        least = LayerTimes(1, number * 0.002, 0.0)
        assert (
            replace(
                RECORD,
                num_layers=1,
                transfer_s=0.0,
                loads=(RecordedLoad("decode", 1, 1, least.compute_s, 0.0),),
            ).smallest_interval("decode", 1, 1, number * 0.002)
            == 1
        )


DELAYED = replace(
    RECORD,
    typical_transfer_s=0.003,
    transfer_runs_s=(0.006, 0.004, 0.0035),
    delays_s=(0.001, 0.001, 0.002, 0.004, 0.006, 0.010, 0.016),
)


def test_few_transfers_in_a_row_may_all_be_slow() -> None:
    assert [DELAYED.run_transfer_s(number) for number in (1, 2, 3, 4, 12)] == [
        0.006, 0.004, 0.004, 0.0035, 0.0035,
    ]  # fmt: skip
    assert RECORD.run_transfer_s(4) == RECORD.transfer_s


def test_delays_are_those_of_the_next_longer_stretch() -> None:
    found = [DELAYED.delay_s(seconds) for seconds in (0.0005, 0.001, 0.0011, 0.026, 0.064, 0.128)]
    assert found == pytest.approx([0.001, 0.001, 0.001, 0.010, 0.016, 0.032])
    assert RECORD.delay_s(1.0) == 0.0


def test_a_step_may_be_late_for_its_computation_or_its_transfers() -> None:
    """A decode of 8 computes for 26 ms and is up to 10 late."""
    eight = RECORD.loads[2]
    assert DELAYED.step_s(eight, None) == pytest.approx(0.036)
    assert DELAYED.step_s(eight, 12) == pytest.approx(0.036)
    # 12 transfers of 3 ms, and 10 of lateness of which two transfers hide 6.
    assert step_time_s(replace(DELAYED, transfer_s=0.003).times_of(eight), 1) == pytest.approx(0.036)
    assert DELAYED.step_s(eight, 1) == pytest.approx(max(0.036 + 0.004, 12 * 0.0035))
    assert RECORD.step_s(eight, 1) == pytest.approx(0.048)


def test_a_machine_that_is_late_without_offloading_may_be_as_late_with_it() -> None:
    eight = RECORD.loads[2]
    assert DELAYED.meets(eight, None, 0.030), "typically it is in time"
    assert DELAYED.meets(eight, 2, 0.030)
    assert not DELAYED.meets(eight, 1, 0.030)
    assert not DELAYED.meets(eight, None, 0.024)
    assert DELAYED.smallest_interval("decode", 8, 128, 0.030) == 2
    assert DELAYED.smallest_interval("decode", 8, 128, 0.042) == 1


STAGES = replace(DELAYED, stage_layers=(7, 5))


def test_a_step_passes_all_stages_and_each_offloads_of_its_own_layers() -> None:
    """What is outside the layers is in the last one's time; where it is late, the first may hide less."""
    eight = RECORD.loads[2]
    assert (RECORD.stages, STAGES.stages) == ((12,), (7, 5))
    assert STAGES.intervals == range(1, 8)
    assert [STAGES.saves_memory(each) for each in (1, 2, 3)] == [True, True, False]
    assert STAGES.step_s(eight, None) == DELAYED.step_s(eight, None)

    def stage_s(num_layers: int, interval: int, transfer_s: float, other_s: float = 0.0) -> float:
        return step_time_s(LayerTimes(num_layers, eight.compute_s, transfer_s, other_s), interval)

    exact = replace(STAGES, delays_s=())
    # Runs of 3 and of 2 transfers.
    assert exact.step_s(eight, 2) == stage_s(7, 2, 0.004) + stage_s(5, 2, 0.004, eight.other_s)
    assert exact.step_s(eight, 1) == stage_s(7, 1, 0.0035) + stage_s(5, 1, 0.0035, eight.other_s)
    # With 6 only the first stage offloads; with 5 each has one staging buffer.
    assert STAGES.step_s(eight, 6) == stage_s(7, 6, 0.003) + stage_s(5, 6, 0.003, eight.other_s) + 0.010
    slow = replace(STAGES, typical_transfer_s=0.02)
    late_s = max(0.0, slow.delay_s(0.026) - 0.02)
    assert slow.step_s(eight, 5) == stage_s(7, 5, 0.02) + stage_s(5, 5, 0.02, eight.other_s) + late_s


def test_no_interval_is_larger_than_the_largest_stage() -> None:
    """A transfer of 20 ms hides in a step of 26, but not in the 14 of the first stage."""
    slow = replace(RECORD, transfer_s=0.020)
    assert slow.smallest_interval("decode", 8, 128, 0.026) == 7
    assert replace(slow, stage_layers=(7, 5)).smallest_interval("decode", 8, 128, 0.026) is None
    assert replace(slow, stage_layers=(7, 5)).smallest_interval("decode", 8, 128, 0.034) == 6


def test_transfers_that_take_no_less_than_a_bus_needs() -> None:
    slower = DELAYED.with_transfers_of(0.0038)
    assert slower.transfer_s == 0.004
    assert slower.typical_transfer_s == 0.0038
    assert slower.transfer_runs_s == (0.006, 0.004, 0.0038)


def test_a_record_is_the_same_after_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "record.json"
    for record in (RECORD, DELAYED, STAGES):
        record.save(path)
        assert PerformanceRecord.load(path) == record
    assert [each.name for each in path.parent.iterdir()] == ["record.json"]


def test_a_record_of_an_earlier_release_is_of_one_stage(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    RECORD.save(path)
    content = json.loads(path.read_text())
    del content["stage_layers"]
    path.write_text(json.dumps(content))
    assert PerformanceRecord.load(path) == RECORD


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 0}, "is not of format 1"),
        ({"transfer_s": -1.0}, r"is damaged \(.*transfer_s"),
        ({"num_layers": 0}, r"is damaged \(.*num_layers"),
        ({"stage_layers": [7, 4]}, r"is damaged \(stages of \(7, 4\) layers do not have 12"),
        ({"loads": [{"phase": "both"}]}, r"is damaged \(.*loads"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "record.json"
    RECORD.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=rf"record {path} {message}.* run `backfill profile --offload`"):
        PerformanceRecord.load(path)


times = st.floats(0.0, 0.1)
phases: st.SearchStrategy[Phase] = st.sampled_from(["prefill", "decode"])
measured = st.builds(
    RecordedLoad, phases, st.sampled_from([1, 2, 4]), st.sampled_from([16, 32]), times, times
)


@given(st.lists(measured, unique_by=lambda each: (each.phase, each.batch_size, each.length)))
def test_larger_loads_never_take_less(loads: list[RecordedLoad]) -> None:
    raised = {(each.phase, each.batch_size, each.length): each for each in never_falling(loads)}
    for each in loads:
        shape = (each.phase, each.batch_size, each.length)
        assert raised[shape].compute_s >= each.compute_s
        assert raised[shape].other_s >= each.other_s
        for other, larger in raised.items():
            if is_within(shape, other):
                assert raised[shape].compute_s <= larger.compute_s
                assert raised[shape].other_s <= larger.other_s


@pytest.mark.parametrize("grid", [FULL_LOADS, QUICK_LOADS])
def test_loads_are_powers_of_two_and_no_load_precedes_one_within_it(grid: object) -> None:
    loads = (FULL_LOADS if grid is FULL_LOADS else QUICK_LOADS).loads()
    assert len(loads) == len(set(loads))
    for index, each in enumerate(loads):
        assert each[1].bit_count() == each[2].bit_count() == 1
        assert not any(is_within(later, each) for later in loads[index + 1 :])
