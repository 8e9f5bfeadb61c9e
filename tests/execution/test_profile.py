from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from filelock import FileLock

from backfill.core.block import block_index
from backfill.core.clock import VirtualClock
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.measured_on import MeasuredOn
from backfill.core.plan import Compute, ScheduledSlice, StepOutcome, StepPlan
from backfill.core.request import RequestId, ServiceClass
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.load import StepLoad
from backfill.costs.profile import CostProfile, Quality
from backfill.costs.profiler import Shape, StepTimer
from backfill.engine.analyzer import record_key
from backfill.engine.engine import Engine
from backfill.engine.process import load_engine
from backfill.execution import profile as execution_profile
from backfill.execution.create import create_torch_executor
from backfill.execution.machine import StolenTime
from backfill.execution.profile import (
    create_refiner,
    load_or_measure_profile,
    measure_profile,
    profile_key,
    profile_path,
    save_for_next_start,
    save_in_cache,
)
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.execution.torch_executor import TorchExecutor
from tests.api.servers import wait_until
from tests.builders import make_info, make_profile, make_request
from tests.execution.tiny import cache_fixture, dummy_config
from tests.models.quantized import Case, save_quantized_model

Loaded: TypeAlias = tuple[EngineConfig, TorchExecutor]


@pytest.fixture(autouse=True, scope="module")
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    config = dummy_config(tmp_path_factory.mktemp("model"))
    return config, create_torch_executor(config)


cache = cache_fixture()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[CostProfile]:
    """Instead of timing steps, gives a made-up profile and notes it here."""
    profiles: list[CostProfile] = []

    def fake(config: EngineConfig, executor: TorchExecutor, *_: object) -> CostProfile:
        key = profile_key(config, executor)
        profiles.append(replace(make_profile(), key=key, provenance=f"measured {len(profiles)}"))
        return profiles[-1]

    monkeypatch.setattr(execution_profile, "measure_profile", fake)
    return profiles


def test_the_key_says_model_processor_threads_micro_batches_and_dtype(
    running: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = profile_key(*running)
    assert key.model.startswith("llama-3x48-")
    assert key.dtype == "float32"
    assert key.device.endswith(", 1 threads")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    other = profile_key(*running)
    assert other.device.endswith(", 3 threads")
    assert (other.model, other.dtype) == (key.model, key.dtype)
    config, executor = running
    split = profile_key(replace(config, num_micro_batches=2), executor)
    assert split == replace(other, device=f"{other.device}, 2 micro-batches")


def test_the_key_says_what_transfers_are_held_to(running: Loaded) -> None:
    config, executor = running
    offloaded = replace(config, offload_interval=2)
    key = profile_key(offloaded, executor)
    assert key.device.endswith(", offload interval 2")
    on_bus = profile_key(replace(offloaded, offload_bus="left", offload_bus_gib_per_s=0.5), executor)
    assert on_bus == replace(key, device=f"{key.device}, bus of 0.5 GiB/s")


def test_the_key_is_of_the_model_and_not_of_its_folder(running: Loaded, tmp_path: Path) -> None:
    config, executor = running
    key = profile_key(config, executor)
    copied = dummy_config(tmp_path / "copy")
    assert profile_key(copied, executor) == key
    wider = dummy_config(tmp_path / "wider", intermediate_size=96)
    assert profile_key(wider, executor).model != key.model
    bfloat16 = create_torch_executor(replace(config, dtype="bfloat16"))
    assert profile_key(replace(config, dtype="bfloat16"), bfloat16) == replace(key, dtype="bfloat16")
    int8 = create_torch_executor(replace(config, kv_dtype="int8"))
    assert profile_key(replace(config, kv_dtype="int8"), int8) == replace(key, dtype="float32-kv-int8")


@pytest.mark.parametrize(
    ("case", "types"),
    [
        (Case("pack-quantized", scale_type=torch.bfloat16), "compressed-tensors-int4-6.00-bits"),
        (Case("pack-quantized", group=16, scale_type=torch.bfloat16), "compressed-tensors-int4-8.00-bits"),
        (Case("pack-quantized", scale_type=torch.float32), "compressed-tensors-int4-9.00-bits"),
        (Case("pack-quantized", group=24), ""),  # all are dequantized
    ],
)
def test_keys_say_how_wide_weights_are(case: Case, types: str, cache: Path, tmp_path: Path) -> None:
    save_quantized_model(case, tmp_path)
    config = EngineConfig(model_dir=str(tmp_path), device="cpu", dtype="bfloat16", threads=1, kv_gib=0.01)
    expected = "-".join(filter(None, ("bfloat16", types)))
    assert record_key(config).dtype == expected
    assert profile_key(config, create_torch_executor(config)).dtype == expected


def test_each_key_has_its_own_file_in_the_cache(cache: Path) -> None:
    key = MeasuredOn("llama-3x48-abc", "a processor, 4 threads", "float32")
    others = [
        replace(key, model="llama-3x64-abc"),
        replace(key, device="a processor, 8 threads"),
        replace(key, dtype="bfloat16"),
    ]
    paths = [profile_path(each) for each in (key, *others)]
    assert len(set(paths)) == 4
    assert profile_path(key) == paths[0]
    assert all(path.parent == cache / "profiles" and path.suffix == ".json" for path in paths)


def test_a_real_executor_is_measured_where_nothing_is_saved_and_not_where_it_is(
    running: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, executor = running
    profile = load_or_measure_profile(config, executor)
    assert profile.key == profile_key(config, executor)
    assert profile.num_layers == 3
    assert 0 < profile.cost.step_time_s(StepLoad.of([(0, 64, True)])) < 5
    assert not executor._states, "requests of the profiler were left"
    assert profile.quality == "coarse"

    def fail(*_: object) -> None:
        pytest.fail("it was measured although it is saved")

    monkeypatch.setattr(execution_profile, "measure_profile", fail)
    # It may rightly be corrected: other programs may have slowed what was timed above alone.
    monkeypatch.setattr(execution_profile, "corrected", lambda saved, timed, grid: saved)
    assert load_or_measure_profile(config, executor) == profile


@pytest.mark.parametrize("quality", ["coarse", "refined", "full"])
def test_a_start_corrects_a_saved_profile_that_is_too_slow_unless_it_is_full(
    running: Loaded, quality: Quality, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cost = make_profile().cost.slowed(1e4)
    saved = profile_of(running, quality=quality, cost=cost)
    saved.save(profile_path(saved.key))
    found = load_or_measure_profile(*running)
    if quality == "full":
        assert found == saved and not caplog.messages
        return
    load = StepLoad.of([(0, 64, True)])
    assert found.cost.step_time_s(load) < 0.1 * cost.step_time_s(load)
    assert found.quality == "coarse"
    assert caplog.messages[-1].startswith("the saved cost profile is too slow")
    assert saved_profile(running) == saved, "what served steps show is saved, not this"


@pytest.mark.parametrize(("slower", "num_steps"), [(1.0, 3), (0.5, 3), (2.0, 4)], ids=str)
def test_a_start_times_few_steps_of_a_profile_that_is_right(
    running: Loaded, monkeypatch: pytest.MonkeyPatch, slower: float, num_steps: int
) -> None:
    saved = profile_of(running, quality="refined", cost=make_profile().cost)
    timed: list[Shape] = []

    def step_time(_: object, shape: Shape) -> float:
        timed.append(shape)
        return saved.cost.step_time_s(StepLoad.of(shape)) / slower

    monkeypatch.setattr(StepTimer, "time", step_time)
    monkeypatch.setattr(execution_profile, "_CHECK_S", math.inf)
    saved.save(profile_path(saved.key))
    load_or_measure_profile(*running)
    assert len(set(timed)) == num_steps
    assert (len(timed) == 2 * num_steps) == (slower <= 1.0), "more rounds only of one that seems wrong"


def test_the_first_step_of_its_kind_tells_nothing(running: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 1.6 times as long, so a profile that is as much too slow would look right by it."""
    truth = make_profile().cost
    saved = profile_of(running, quality="refined", cost=truth.slowed(1.6))
    timed = set[Shape]()

    def step_time(_: object, shape: Shape) -> float:
        seconds = truth.step_time_s(StepLoad.of(shape)) * (1.0 if shape in timed else 1.6)
        timed.add(shape)
        return seconds

    monkeypatch.setattr(StepTimer, "time", step_time)
    saved.save(profile_path(saved.key))
    assert load_or_measure_profile(*running).quality == "coarse"


def saved_profile(running: Loaded) -> CostProfile:
    return CostProfile.load(profile_path(profile_key(*running)))


def profile_of(running: Loaded, **fields: Any) -> CostProfile:
    return replace(make_profile(), key=profile_key(*running), **fields)


def test_a_coarse_profile_is_kept_for_the_next_start(
    running: Loaded, measured: list[CostProfile], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert load_or_measure_profile(*running) == saved_profile(running)
    begun = [line for line in caplog.messages if line.startswith("measuring what steps cost")]
    assert len(begun) == 1, "said before the wait, and only then"
    assert len(measured) == 1


def test_what_refines_itself_never_replaces_a_full_profile(
    running: Loaded,
) -> None:
    for quality, next_quality in (("coarse", "refined"), ("refined", "refined"), ("full", "full")):
        profile_of(running, quality=quality).save(profile_path(profile_key(*running)))
        save_for_next_start(profile_of(running, quality="refined"))
        assert saved_profile(running).quality == next_quality


def test_a_full_profile_that_is_saved_between_check_and_save_stays(
    running: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile_of(running, quality="coarse").save(profile_path(profile_key(*running)))
    checked, may_save = threading.Event(), threading.Event()
    is_full = execution_profile._is_full

    def check(path: Path) -> bool:
        found = is_full(path)
        checked.set()
        assert may_save.wait(60.0)
        return found

    monkeypatch.setattr(execution_profile, "_is_full", check)
    refined, full = (profile_of(running, quality=quality) for quality in ("refined", "full"))
    first = threading.Thread(target=save_for_next_start, args=(refined,))
    second = threading.Thread(target=save_in_cache, args=(full,), kwargs={"keep_full": False})
    first.start()
    assert checked.wait(60.0)
    second.start()
    second.join(0.1)  # time enough to save, could it
    may_save.set()
    first.join(60.0)
    second.join(60.0)
    assert saved_profile(running) == full


def test_a_lock_that_is_never_released_stops_nothing(
    running: Loaded,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(execution_profile, "_LOCK_TIMEOUT_S", 0.0)
    path = profile_path(profile_key(*running))
    path.parent.mkdir(parents=True)
    with FileLock(path.with_suffix(".lock")), caplog.at_level(logging.WARNING):
        save_for_next_start(profile_of(running, quality="coarse"))
    assert "cannot be saved" in caplog.messages[-1] and not path.exists()


def test_a_profile_that_cannot_be_saved_stops_nothing(
    running: Loaded, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("no folder")
    with caplog.at_level(logging.WARNING):
        save_for_next_start(profile_of(running, quality="coarse"))
    (warning,) = caplog.records
    assert "cannot be saved: Not a directory" in warning.getMessage()


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("quality", ["coarse", "refined", "full"])
def test_all_but_a_full_profile_are_refined_and_a_named_file_is_left_alone(
    running: Loaded, tmp_path: Path, quality: Quality, is_named: bool
) -> None:
    config, executor = running
    profile = profile_of(running, quality=quality)
    if is_named:
        path = tmp_path / "named.json"
        profile.save(path)
        config = replace(config, profile=str(path))
    clock = VirtualClock()
    refiner = create_refiner(config, executor.info, profile, clock)
    assert (refiner is None) == (quality == "full")
    if refiner is None:
        return
    scheduled = ScheduledSlice(RequestId("a"), 100, 1, (), samples=True)
    for _ in range(32):
        refiner.observe(StepPlan(step=0, work=Compute((scheduled,))), 0.02)
    refined = refiner.refine()
    assert refined is not None
    if is_named:
        assert CostProfile.load(path) == profile
        assert not profile_path(profile.key).exists()
    else:
        wait_until(lambda: profile_path(profile.key).exists(), "the profile to be saved")
        assert CostProfile.load(profile_path(profile.key)) == refined


@pytest.mark.parametrize("quality", ["refined", "full"])
def test_stolen_time_is_looked_for_once_a_step(
    running: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quality: Quality
) -> None:
    path, asked = tmp_path / "named.json", list[float]()
    profile_of(running, quality=quality).save(path)
    monkeypatch.setattr(StolenTime, "disturbs", lambda _, seconds: bool(asked.append(seconds)))
    engine = load_engine(replace(running[0], profile=str(path)))
    engine.add(make_request(prompt_token_ids=[5, 6, 7], max_tokens=3, ignore_eos=True))
    num_steps = 0
    while engine.has_unfinished:
        engine.step()
        num_steps += 1
    assert len(asked) == num_steps and min(asked) > 0.0
    engine.executor.close()


def test_steps_go_on_while_a_disk_hangs_and_the_latest_profile_is_saved(
    running: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, disk_answers, saved = threading.Event(), threading.Event(), list[CostProfile]()

    def hang(profile: CostProfile) -> None:
        begun.set()
        assert disk_answers.wait(60.0)
        saved.append(profile)

    monkeypatch.setattr(execution_profile, "save_for_next_start", hang)
    config, executor = running
    clock, info = VirtualClock(), make_info(num_blocks=100)
    cost = make_profile().cost
    twice = replace(cost, rows_s=replace(cost.rows_s, y=tuple(2 * y for y in cost.rows_s.y)))
    profile = profile_of(running, cost=twice, quality="coarse")
    refiner = create_refiner(config, executor.info, profile, clock)
    assert refiner is not None
    engine = Engine(
        SchedulerConfig(policy="slo"),
        SimulatedExecutor(info, DeviceBehaviour(cost), clock),
        clock,
        profile,
        refiner,
    )
    engine.add(make_request(max_tokens=100, service_class=ServiceClass.OFFLINE))
    for _ in range(40):
        engine.step()
    first = engine.refine_profile()
    assert first is not None
    assert begun.wait(60.0)
    while engine.has_unfinished:
        engine.step()
    later = [replace(first, provenance=text) for text in ("second", "third")]
    for each in later:
        refiner._on_refined(each)
    assert not saved
    disk_answers.set()
    wait_until(lambda: len(saved) == 2, "a second profile")
    assert saved == [first, later[-1]]


def test_measuring_touches_only_what_it_times_and_keeps_to_the_limits_of_the_configuration(
    running: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, executor = running
    filled: list[int] = []
    monkeypatch.setattr(executor, "fill_kv_pool", filled.append)
    plans: list[StepPlan] = []
    run = executor.run

    def record(plan: StepPlan) -> StepOutcome:
        plans.append(plan)
        return run(plan)

    monkeypatch.setattr(executor, "run", record)
    few = replace(config, scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16))
    measure_profile(few, executor, execution_profile.QUICK)
    used = {block_index(ref) for plan in plans for scheduled in plan.slices for ref in scheduled.blocks}
    assert filled == [max(used) + 1]
    assert filled[0] < executor.info.num_blocks
    loads = [StepLoad.of_slices(plan.slices) for plan in plans]
    assert max(load.num_requests for load in loads) == 8
    assert max(load.num_tokens for load in loads) == 16


def test_the_profile_that_is_named_is_used(
    running: Loaded, measured: list[CostProfile], tmp_path: Path
) -> None:
    config, executor = running
    key = profile_key(config, executor)
    replace(make_profile(), key=key, provenance="saved").save(profile_path(key))
    named = replace(make_profile(), key=key, provenance="named")
    named.save(tmp_path / "named.json")
    config = replace(config, profile=str(tmp_path / "named.json"))
    assert load_or_measure_profile(config, executor) == named
    assert not measured


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("of another model", "another model"),
        ("not a profile", "is not JSON"),
        (None, "cannot be read: No such file"),
    ],
)
def test_the_profile_that_is_named_must_be_a_good_one(
    running: Loaded,
    measured: list[CostProfile],
    tmp_path: Path,
    content: str | None,
    message: str,
) -> None:
    config, executor = running
    path = tmp_path / "named.json"
    if content == "of another model":
        replace(make_profile(), key=replace(profile_key(config, executor), model="other")).save(path)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_or_measure_profile(replace(config, profile=str(path)), executor)
    assert str(path) in str(caught.value)
    assert not measured, "what the user named is not replaced by something else"


@pytest.mark.parametrize("damage", ["torn", "other key", "older format"])
def test_a_saved_profile_that_is_no_good_is_measured_again(
    running: Loaded,
    measured: list[CostProfile],
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    config, executor = running
    path = profile_path(profile_key(config, executor))
    make_profile().save(path)
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "older format":
        path.write_text(path.read_text().replace('"format": 4', '"format": 3'))
    with caplog.at_level(logging.WARNING):
        profile = load_or_measure_profile(config, executor)
    assert measured == [profile]
    (warning,) = caplog.records
    assert str(path) in warning.getMessage()
    assert "It is measured quickly instead." in warning.getMessage()


def test_a_cache_that_cannot_be_entered_holds_no_profile(
    running: Loaded,
    measured: list[CostProfile],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simulated, since a test may run as root, whom no permissions stop."""
    stat = os.stat

    def no_stat(path: Any, *arguments: Any, **keywords: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and str(path).startswith(str(cache)):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *arguments, **keywords)

    monkeypatch.setattr(os, "stat", no_stat)
    assert measured == [load_or_measure_profile(*running)]
