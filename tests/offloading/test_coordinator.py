"""Intervals of several engines on one bus, against an enumeration of all combinations."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.offloading.coordinator import (
    BusInstance,
    BusPlan,
    attainable_step_s,
    coordinate,
)
from backfill.offloading.interval import offloaded_layers, smallest_interval, step_time_s


@st.composite
def instance_named(draw: st.DrawFn, name: str) -> BusInstance:
    num_layers = draw(st.integers(1, 9))
    compute_s = draw(st.sampled_from([0.0, 0.001, 0.003]))
    other_s = draw(st.sampled_from([0.0, 0.002]))
    spare = draw(st.sampled_from([0.5, 1.0, 1.1, 2.0]))  # below 1 the objective cannot be met
    max_interval = draw(st.none() | st.integers(1, num_layers))
    return BusInstance(
        name,
        num_layers,
        layer_bytes=draw(st.integers(1, 40)),
        step_s=max(0.001, spare * (num_layers * compute_s + other_s)),
        compute_s=compute_s,
        other_s=other_s,
        min_interval=draw(st.integers(1, num_layers)),
        max_interval=max_interval,
    )


@st.composite
def buses(draw: st.DrawFn) -> tuple[list[BusInstance], float]:
    names = "abcd"[: draw(st.integers(1, 4))]
    instances = [draw(instance_named(name)) for name in names]
    most = sum(choices[0][0] for choices in map(choices_of, instances))
    return instances, draw(st.floats(0.01, 1.1)) * max(most, 1.0)


def choices_of(instance: BusInstance) -> list[tuple[float, int]]:
    """Demand and memory saved of every interval, the largest demand first."""
    found = [
        (instance.demand(interval), instance.saved_bytes(interval))
        for interval in instance.intervals
        if instance.demand(interval) < math.inf
    ]
    if not found:
        interval = instance.max_interval
        demand = instance.demand(interval)
        if demand == math.inf:
            num_bytes = len(offloaded_layers(instance.num_layers, interval)) * instance.layer_bytes
            demand = num_bytes / instance.step_s
        found = [(demand, instance.saved_bytes(interval))]
    return sorted(found, reverse=True)


def enumerated(instances: list[BusInstance], bandwidth: float) -> tuple[int, float] | None:
    """Memory saved and demand of the best valid combination of all (the paper's figure 8)."""
    best: tuple[int, float] | None = None
    for combination in itertools.product(*map(choices_of, instances)):
        demand = sum(each[0] for each in combination)
        saved = sum(each[1] for each in combination)
        if demand <= bandwidth * (1 + 1e-9) and (best is None or (saved, -demand) > (best[0], -best[1])):
            best = saved, demand
    return best


def saved_bytes(instances: list[BusInstance], plan: BusPlan) -> int:
    return sum(each.saved_bytes(plan.of[each.name].interval) for each in instances)


@given(buses())
def test_no_valid_combination_saves_more(bus: tuple[list[BusInstance], float]) -> None:
    instances, bandwidth = bus
    plan = coordinate(instances, bandwidth)
    assert set(plan.of) == {each.name for each in instances}
    demand = sum(each.demand for each in plan.of.values())
    assert plan.load == pytest.approx(demand / bandwidth)
    best = enumerated(instances, bandwidth)
    assert plan.fits == (best is not None)
    if best is not None:
        assert saved_bytes(instances, plan) == best[0]
        assert demand == pytest.approx(best[1])
    else:
        assert demand == pytest.approx(sum(choices_of(each)[-1][0] for each in instances))
    for each in instances:
        assigned = plan.of[each.name]
        most = each.num_layers if each.max_interval is None else each.max_interval
        assert assigned.interval is None or assigned.interval <= most
        assert (assigned.interval is not None) or each.max_interval is None


@given(buses())
def test_engines_agree_whatever_the_order_of_their_table(
    bus: tuple[list[BusInstance], float],
) -> None:
    instances, bandwidth = bus
    for ordered in itertools.permutations(instances):
        assert coordinate(ordered, bandwidth) == coordinate(instances, bandwidth)


@given(buses())
def test_steps_take_as_long_as_they_may_with_the_bandwidth_assigned(
    bus: tuple[list[BusInstance], float],
) -> None:
    instances, bandwidth = bus
    plan = coordinate(instances, bandwidth)
    shares = [each.bytes_per_s for each in plan.of.values()]
    assert sum(shares) <= bandwidth * (1 + 1e-9)
    for each in instances:
        assigned = plan.of[each.name]
        if assigned.interval is None or each.demand(assigned.interval) == math.inf:
            continue
        step_s = step_time_s(each.times(assigned.bytes_per_s), assigned.interval)
        assert step_s <= each.step_s * max(1.0, plan.load) * (1 + 1e-6)


@given(instance_named("a"), st.integers(1, 9))
def test_the_demand_is_the_least_bandwidth_that_meets_the_objective(
    instance: BusInstance, interval: int
) -> None:
    interval = min(interval, instance.num_layers)
    demand = instance.demand(interval)
    if demand == math.inf:
        assert step_time_s(instance.times(1e15), interval) > instance.step_s * (1 - 1e-6)
        return
    assert step_time_s(instance.times(demand * 1.001), interval) <= instance.step_s * (1 + 1e-9)
    assert step_time_s(instance.times(demand * 0.99), interval) > instance.step_s
    num_offloaded = len(offloaded_layers(instance.num_layers, interval))
    printed = num_offloaded * instance.layer_bytes / instance.step_s
    assert demand >= printed * (1 - 1e-9)


@given(instance_named("a"), st.floats(1.0, 1e5))
def test_an_engine_alone_has_an_interval_of_its_record(instance: BusInstance, bandwidth: float) -> None:
    recorded = smallest_interval(instance.times(bandwidth), instance.step_s * (1 - 1e-6))
    if recorded is None:
        return
    alone = replace(instance, min_interval=recorded, max_interval=instance.num_layers)
    plan = coordinate([alone], bandwidth)
    assert plan.fits
    assert saved_bytes([alone], plan) == alone.saved_bytes(recorded)


def of_layers(name: str, **changes: object) -> BusInstance:
    """30 layers of 10 MB in 0.1 s: with interval 1 it needs 3 GB/s."""
    instance = BusInstance(name, 30, 10_000_000, step_s=0.1, max_interval=30)
    return replace(instance, **changes)  # type: ignore[arg-type]


def test_the_bandwidth_goes_where_it_saves_most() -> None:
    # 300 ms for a step: a third of the demand for the same memory.
    patient, quick = of_layers("patient", step_s=0.3), of_layers("quick")
    plan = coordinate([quick, patient], 1.5e9)
    assert plan.of["patient"].interval == 1
    assert plan.of["quick"].interval == 6  # 0.5 GB/s are left
    assert saved_bytes([quick, patient], plan) == (28 + 3) * 10_000_000
    assert plan.load == 1.0


def test_one_that_has_no_work_leaves_the_bus_to_the_other() -> None:
    both = coordinate([of_layers("a"), of_layers("b")], 3e9)
    assert both.of["a"].interval != 1 or both.of["b"].interval != 1
    assert coordinate([of_layers("a")], 3e9).of["a"].interval == 1


def test_if_nothing_fits_all_are_slowed_down_alike() -> None:
    plan = coordinate([of_layers("a", max_interval=2), of_layers("b", max_interval=4)], 1.1e9)
    assert not plan.fits
    assert [plan.of[name].interval for name in "ab"] == [2, 4]
    assert plan.load == pytest.approx(2.2 / 1.1)  # 15 and 7 of 30 layers
    assert [plan.of[name].bytes_per_s for name in "ab"] == pytest.approx([0.75e9, 0.35e9])


def test_an_engine_that_saves_the_same_with_all_its_intervals_has_the_one_of_least_demand() -> None:
    """One layer is offloaded with interval 30, two with 15; neither saves anything."""
    alone = of_layers("a", min_interval=15, layer_bytes=100_000_000)
    plan = coordinate([alone], 100e9)
    assert plan.of["a"].interval == 16
    assert plan.of["a"].demand == alone.demand(30) < alone.demand(15)


def test_two_of_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="different names"):
        coordinate([of_layers("a"), of_layers("a")], 1e9)


@pytest.mark.parametrize(
    "changes", [{"max_interval": 31}, {"min_interval": 0}, {"step_s": 0.0}, {"layer_bytes": 0}]
)
def test_an_instance_that_cannot_be_is_an_error(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="got BusInstance"):
        of_layers("a", **changes)


def test_engines_without_an_objective_give_way() -> None:
    """Both demand 1 GB/s of 1.1."""
    online = of_layers("online", max_interval=3)
    offline = of_layers("offline", max_interval=3, has_objective=False)
    plan = coordinate([online, offline], 1.1e9)
    assert plan.of["online"].bytes_per_s == pytest.approx(1e9)
    assert plan.of["offline"].bytes_per_s == pytest.approx(0.1e9)
    assert plan.load <= 1.0 / 0.95 / 1.1 * (1 + 1e-9)
    tight = coordinate([online, offline], 1e9)
    assert tight.of["offline"].bytes_per_s == pytest.approx(0.05e9), "its work goes on"
    assert tight.load == pytest.approx(1 / 0.95)
    alike = coordinate([replace(each, has_objective=False) for each in (online, offline)], 1e9)
    assert [each.bytes_per_s for each in alike.of.values()] == pytest.approx([0.5e9, 0.5e9])


def test_what_an_engine_could_have_beside_the_others() -> None:
    """10 transfers of 10 MB at least. Another one needs 1 GB/s with any of its intervals."""
    own, other = of_layers("own", max_interval=3), of_layers("other", max_interval=3)
    assert attainable_step_s(own, [], 2e9) == pytest.approx(0.05)
    assert attainable_step_s(own, [other], 2e9) == pytest.approx(0.1)
    assert attainable_step_s(own, [replace(other, has_objective=False)], 2e9) == pytest.approx(0.05)
    assert attainable_step_s(own, [other], 1e9) == math.inf
    slow = replace(own, compute_s=0.01, step_s=0.3)
    assert attainable_step_s(slow, [other], 2e9) == pytest.approx(0.3)
    assert attainable_step_s(replace(slow, max_interval=None), [other], 1.1e9) == pytest.approx(0.3)


@given(buses())
def test_an_objective_that_is_attainable_fits(bus: tuple[list[BusInstance], float]) -> None:
    """Beside the least that the others need; and no shorter one does."""
    (own, *others), bandwidth = bus
    attainable_s = attainable_step_s(own, others, bandwidth)
    if attainable_s == math.inf:
        return
    free = replace(own, step_s=max(attainable_s, 1e-9) * (1 + 1e-6), min_interval=1)
    assert coordinate([free, *others], bandwidth * (1 + 1e-6)).fits
    if own.max_interval is not None and attainable_s > 1e-6:
        late = replace(free, step_s=attainable_s * 0.99)
        left = bandwidth - sum(choices_of(each)[-1][0] for each in others)
        assert all(late.demand(interval) > left for interval in range(1, own.max_interval + 1))
