"""``offload_interval`` auto: the record is measured or loaded, and the interval follows from it."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backfill.bus.throttle import open_bus
from backfill.core.clock import VirtualClock
from backfill.core.config import GIB, EngineConfig, SchedulerConfig
from backfill.core.errors import ConfigError, InsufficientMemory
from backfill.core.measured_on import MeasuredOn
from backfill.core.slo import SLO
from backfill.costs.profile import CostProfile
from backfill.costs.profiler import Capacity, profile_executor
from backfill.engine import analyzer
from backfill.engine.analyzer import Analysis, analyze, load_or_measure_record, record_key, record_path
from backfill.engine.interval_choice import (
    _save_correction,
    create_record_check,
    on_bus,
    with_chosen_interval,
)
from backfill.engine.process import load_engine
from backfill.execution.create import create_torch_executor, target_of
from backfill.execution.torch_executor import TorchExecutor
from backfill.offloading.loads import LoadGrid
from backfill.offloading.record import PerformanceRecord, Phase, RecordedLoad
from backfill.parallel import create as parallel
from backfill.parallel.memories import memories_of
from backfill.scheduling.objectives import impossible_objectives
from experiments.layered_device import LayeredDevice, LayeredExecutor
from tests.builders import flat_cost, make_info, make_request
from tests.costs.test_profiler import SMALL_GRID
from tests.execution.tiny import cache_fixture, model_fixture, tiny_config

NUM_LAYERS = 12
SMALL = LoadGrid(batch_sizes=(1, 4), prompt_lengths=(16, 32), context_lengths=(32,), rounds=2, longest_s=9.0)


cache = cache_fixture()
model_dir = model_fixture("llama", num_hidden_layers=NUM_LAYERS)


@pytest.fixture
def config(model_dir: Path) -> EngineConfig:
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, ttft_slo=0.5, tpot_slo=0.1)
    automatic: dict[str, Any] = {"device_memory": 1.0, "offload_interval": "auto", "scheduler": scheduler}
    return tiny_config(model_dir, kv_gib=1 / 256, threads=None, **automatic)


Save = Callable[..., None]


@pytest.fixture
def save(config: EngineConfig) -> Save:
    """Saves a record: a layer takes 1 ms in decodes and 3 ms in prefills, the rest of a step 2 ms."""

    def save_record(transfer_s: float, **changes: Any) -> None:
        phases: tuple[tuple[Phase, float], ...] = (("decode", 0.001), ("prefill", 0.003))
        loads = tuple(RecordedLoad(phase, 1, 64, compute_s, 0.002) for phase, compute_s in phases)
        record = PerformanceRecord(record_key(config), NUM_LAYERS, 4096, transfer_s, loads)
        record = replace(record, **changes)
        record.save(record_path(record.key))

    return save_record


def chosen(config: EngineConfig, **objectives: Any) -> int | str:
    changed = replace(config.scheduler, **objectives)
    return with_chosen_interval(replace(config, scheduler=changed)).offload_interval


def test_a_record_is_measured_on_the_model(config: EngineConfig) -> None:
    done: list[tuple[int, int]] = []
    analysis = analyze(config, SMALL, lambda *counts: done.append(counts))
    record = analysis.record
    assert record.key == record_key(config)
    assert record.num_layers == NUM_LAYERS
    # Outputs of q, k and v, of o, of gate and up, and of down are padded to panels of 32.
    layer_bytes = (48 * 96 + 48 * 64 + 48 * 160 + 80 * 64 + 2 * 48) * 4
    assert layer_bytes <= record.layer_bytes <= layer_bytes + 8192
    # A step may have 8 requests, and so 4 prompts of 16 tokens, but no more.
    shapes = {(each.phase, each.batch_size, each.length) for each in record.loads}
    prefills = {("prefill", 1, 16), ("prefill", 1, 32), ("prefill", 4, 16)}
    decodes: set[tuple[Phase, int, int]] = {
        ("decode", batch_size, length)
        for batch_size in (1, 4, 8)
        for length in (32, 254)  # and the longest context that a request can have
    }
    assert shapes == decodes | prefills
    assert (record.max_num_seqs, record.max_num_batched_tokens) == (8, 64)
    assert all(each.compute_s > 0.0 and each.other_s > 0.0 for each in record.loads)
    assert record.transfer_s == max(analysis.alone_s, analysis.beside_s)
    assert min(analysis.alone_s, analysis.beside_s) > 0.0
    assert done == [(number, 18) for number in range(1, 19)]
    assert 0.0 < record.typical_transfer_s <= record.transfer_s
    assert record.transfer_runs_s[0] == pytest.approx(record.transfer_s)
    assert record.delays_s
    assert 0.0 <= record.others_share <= 1.0
    assert not record.is_thorough


def test_the_measured_executor_leaves_no_memory_behind(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a start the model is loaded again at once, before garbage would be collected."""
    made: list[weakref.ref[TorchExecutor]] = []

    def create(given: EngineConfig) -> TorchExecutor:
        executor = create_torch_executor(given)
        made.append(weakref.ref(executor))
        return executor

    monkeypatch.setattr(parallel, "create_torch_executor", create)
    gc.disable()
    try:
        analyze(config, SMALL)
        assert [each() for each in made] == [None]
    finally:
        gc.enable()


def test_the_measured_executor_does_not_divide_memory_anew_and_is_on_no_bus(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[EngineConfig] = []

    def create(given: EngineConfig) -> TorchExecutor:
        created.append(given)
        raise InsufficientMemory("too small")

    monkeypatch.setattr(parallel, "create_torch_executor", create)
    given = replace(config, min_offload_interval=1, offload_bus="left", offload_bus_gib_per_s=1.0)
    with pytest.raises(InsufficientMemory):
        analyze(given, SMALL)
    (measured,) = created
    assert (measured.offload_interval, measured.min_offload_interval) == (1, None)
    assert (measured.offload_bus, measured.offload_bus_gib_per_s) == (None, None)


@pytest.mark.parametrize("limits", [{"longest_s": 0.0}, {"budget_s": 0.0}])
def test_loads_beyond_the_limits_of_the_grid_are_left_out(config: EngineConfig, limits: Any) -> None:
    """The smallest one of each phase is measured in any case."""
    loads = analyze(config, replace(SMALL, **limits)).record.loads
    assert {(each.phase, each.batch_size, each.length) for each in loads} == {
        ("decode", 1, 32), ("prefill", 1, 16),
    }  # fmt: skip


def test_a_context_without_any_load_is_refused(config: EngineConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"no load to time .* one request of 32 tokens is needed; raise `max_"
    ):
        analyze(replace(config, max_model_len=16), SMALL)


def test_a_record_is_measured_once(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyzer, "QUICK_LOADS", SMALL)
    monkeypatch.setattr(analyzer.OthersMeter, "share", lambda _self: 0.0)
    first = load_or_measure_record(config)
    monkeypatch.setattr(analyzer, "analyze", pytest.fail)
    assert load_or_measure_record(config) == first
    fewer = replace(config.scheduler, max_num_seqs=4)
    assert load_or_measure_record(replace(config, offload_interval=3, scheduler=fewer)) == first


@pytest.mark.parametrize(
    "limit", ["max_num_seqs", pytest.param("max_num_batched_tokens", marks=pytest.mark.slow)]
)
def test_a_record_of_smaller_steps_is_measured_again(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(analyzer.OthersMeter, "share", lambda _self: 0.0)
    monkeypatch.setattr(analyzer, "QUICK_LOADS", SMALL)
    assert load_or_measure_record(config).max_num_seqs == 8
    larger: Any = {limit: 65}
    again = load_or_measure_record(replace(config, scheduler=replace(config.scheduler, **larger)))
    assert getattr(again, limit) == 65
    assert load_or_measure_record(config) == again


@pytest.mark.parametrize(
    ("measured", "now", "is_thorough", "is_kept"),
    [(0.2, 0.0, False, True), (0.6, 0.1, False, False), (0.6, 0.4, False, True), (0.6, 0.1, True, True)],
)
def test_a_quick_record_of_a_busy_machine_is_measured_again_when_it_is_quieter(
    config: EngineConfig,
    save: Save,
    monkeypatch: pytest.MonkeyPatch,
    measured: float,
    now: float,
    is_thorough: bool,
    is_kept: bool,
) -> None:
    monkeypatch.setattr(analyzer, "_SAMPLED_S", 0.0)
    monkeypatch.setattr(analyzer.OthersMeter, "share", lambda _self: now)
    save(0.004, others_share=measured, is_thorough=is_thorough)
    record = PerformanceRecord.load(record_path(record_key(config)))
    again = replace(record, transfer_s=0.005)
    monkeypatch.setattr(analyzer, "analyze", lambda *_: Analysis(again, 0.0, 0.0))
    assert load_or_measure_record(config) == (record if is_kept else again)


def test_a_record_of_a_busy_machine_is_said_to_be(
    config: EngineConfig, save: Save, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(0.004, others_share=0.6, max_num_seqs=1)
    busy = replace(PerformanceRecord.load(record_path(record_key(config))), max_num_seqs=8)
    monkeypatch.setattr(analyzer, "analyze", lambda *_: Analysis(busy, 0.0, 0.0))
    assert load_or_measure_record(config).others_share == 0.6
    assert "other processes used 60 % of the processors meanwhile" in caplog.text


def test_a_corrected_record_is_for_the_next_start(config: EngineConfig, save: Save) -> None:
    assert create_record_check(replace(config, offload_interval=3)) is None, "there is no record"
    save(0.004)
    assert create_record_check(replace(config, offload_interval="none")) is None
    check = create_record_check(replace(config, offload_interval=3))
    assert check is not None
    _save_correction(check.record.scaled(2.0, 1.0))
    assert load_or_measure_record(config) == check.record.scaled(2.0, 1.0)
    thorough = replace(check.record, is_thorough=True)
    thorough.save(record_path(record_key(config)))
    _save_correction(check.record.scaled(3.0, 1.0))
    assert load_or_measure_record(config) == thorough


def test_a_damaged_record_is_measured_again(
    config: EngineConfig, save: Save, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(analyzer, "QUICK_LOADS", SMALL)
    save(0.004)
    path = record_path(record_key(config))
    path.write_text("{}")
    record = load_or_measure_record(config)
    assert "is not of format 1" in caplog.text
    assert PerformanceRecord.load(path) == record


def test_the_smallest_interval_that_holds_both_objectives(
    config: EngineConfig, save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    save(0.004)  # 12 layers: 48 ms, and a decode takes 14 ms without offloading
    assert chosen(config) == 1
    assert "offload_interval auto is 1: the smallest that holds a first token within 0.5 s" in caplog.text
    assert chosen(config, tpot_slo=0.030) == 2
    assert chosen(config, tpot_slo=0.018) == 3
    save(0.060)  # 5 ms in each layer's time, and 700 of all layers are too many for a first token
    assert chosen(config) == "none"
    assert chosen(config, tpot_slo=1.0) == 2
    assert chosen(config, ttft_slo=1.0, tpot_slo=1.0) == 1


def test_nothing_is_offloaded_where_all_fits_and_nobody_uses_what_it_saves(
    config: EngineConfig, save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    save(0.004)
    free = replace(config, device_memory=None)
    assert [chosen(config), chosen(free)] == [1, "none"]
    assert "offload_interval auto is none: all layers fit" in caplog.text, "a warning"
    bus = {"offload_bus": "left", "offload_bus_gib_per_s": 1000.0}
    assert [chosen(replace(free, **changes)) for changes in ({"min_offload_interval": 1}, bus)] == [1, 1]


def test_a_bus_makes_transfers_longer(config: EngineConfig, save: Save) -> None:
    save(0.004, layer_bytes=1 << 20)
    shared = replace(config, offload_bus="left", offload_bus_gib_per_s=1.0)  # a layer takes 1 ms
    assert chosen(shared, tpot_slo=0.030) == 2
    slower = replace(shared, offload_bus_gib_per_s=1 / 8)  # 8 ms
    assert chosen(slower, tpot_slo=0.030) == 4
    assert chosen(slower) == 1


def test_without_offloading_there_is_no_bus(config: EngineConfig, save: Save) -> None:
    save(0.004, layer_bytes=1 << 20)
    alone = with_chosen_interval(replace(config, offload_bus="left", offload_bus_gib_per_s=0.01))
    assert alone.offload_interval == "none"
    assert open_bus(alone) is None


def test_loads_beyond_the_record_are_named(
    config: EngineConfig, save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    save(0.004)
    chosen(config)
    assert "auto: decodes of more than 1 requests or more than 64 tokens are beyond the record" in caplog.text
    caplog.clear()
    few = replace(config, max_model_len=64)
    chosen(few, max_num_seqs=1)
    assert "beyond the record" not in caplog.text


def test_an_interval_that_is_given_stays(config: EngineConfig) -> None:
    for interval in ("none", 2):
        given = replace(config, offload_interval=interval)
        assert with_chosen_interval(given) is given


@pytest.mark.parametrize(("least", "found"), [(1, (2, 1)), (2, (2, None)), (5, (2, None))])
def test_the_chosen_interval_may_become_smaller_while_serving(
    config: EngineConfig, save: Save, least: int, found: tuple[int, int | None]
) -> None:
    save(0.004)
    slo = replace(config.scheduler, tpot_slo=0.030)
    given = replace(config, min_offload_interval=least, scheduler=slo)
    given.validate()
    config = with_chosen_interval(given)
    assert (config.offload_interval, config.min_offload_interval) == found


def test_where_no_interval_saves_memory_one_that_holds_may_become_smaller(
    config: EngineConfig, save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    save(0.006)  # a step of 14 ms has time for two transfers, and so many have a staging buffer each
    slo = replace(config.scheduler, tpot_slo=0.014)
    given = replace(config, min_offload_interval=2, scheduler=slo)
    changed = with_chosen_interval(given)
    assert (changed.offload_interval, changed.min_offload_interval) == (5, 2)
    save(0.060)
    none = with_chosen_interval(given)
    assert (none.offload_interval, none.min_offload_interval) == ("none", None)
    assert "offload_interval auto is none: no interval saves memory" in caplog.text
    assert "min_offload_interval has no effect" in caplog.text


def test_default_objectives_leave_room_for_one_request(config: EngineConfig, save: Save) -> None:
    unset = replace(config, scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64))
    loads = (RecordedLoad("decode", 1, 64, 0.020, 0.0), RecordedLoad("prefill", 1, 64, 0.001, 0.0))
    save(0.075, loads=loads)
    # A decode takes 0.24 s alone, so the default of 0.15 s is widened to 0.96; 12 transfers take 0.9.
    assert chosen(unset) == 1
    save(0.085, loads=loads)
    assert chosen(unset) == 2


def test_an_objective_that_no_request_can_meet_is_refused(config: EngineConfig, save: Save) -> None:
    save(0.004)
    with pytest.raises(
        ConfigError, match=r"`tpot_slo` 0\.01: one request alone needs 0\.014 s .* even without"
    ):
        chosen(config, tpot_slo=0.01)
    with pytest.raises(
        ConfigError, match=r"`ttft_slo` 0\.03: one request alone needs 0\.03[89] s on this device"
    ):
        chosen(config, ttft_slo=0.03)


def test_a_limit_that_only_smaller_intervals_fit_is_refused_with_both_ways_out(
    config: EngineConfig, save: Save
) -> None:
    """The objective needs interval 3; the memory has room for 2."""
    save(0.004)
    two = target_of(replace(config, offload_interval=2)).least_device_bytes([0])
    limited = replace(config, device_memory=(two + 4096) / GIB)
    with pytest.raises(ConfigError) as caught:
        chosen(limited, tpot_slo=0.018)
    message = str(caught.value)
    assert re.match(
        r"`offload_interval` auto: no interval that fits `device_memory` 0\.0\d+ GiB holds `tpot_slo` "
        r"0\.018\. Interval 2 fits and holds `tpot_slo` 0\.024 or more; interval 3 holds what is asked for "
        r"and needs `device_memory` 0\.\d{3} or more\.$",
        message,
    )
    assert chosen(limited, tpot_slo=0.024) == 2
    needed = float(re.findall(r"needs `device_memory` ([\d.]+)", message)[0])
    assert chosen(replace(config, device_memory=needed), tpot_slo=0.018) == 3


@pytest.mark.parametrize(
    ("tensor", "pipeline", "tpot_slo", "interval"), [(2, 1, 0.018, 3), (1, 2, 0.030, 2), (2, 2, 0.030, 2)]
)
def test_ranks_on_a_cpu_share_its_memory(
    config: EngineConfig, save: Save, tensor: int, pipeline: int, tpot_slo: float, interval: int
) -> None:
    """The objective needs another interval of 12 layers than of two stages with 6 each."""
    ranks = replace(config, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    ranks.validate()
    stages = () if pipeline == 1 else (6, 6)
    save(0.004, key=record_key(ranks), stage_layers=stages)
    one = target_of(replace(ranks, offload_interval=1), tensor, pipeline)
    least = one.least_device_bytes(range(tensor * pipeline))
    limited = replace(ranks, device_memory=(least + 4096) / GIB)
    assert chosen(limited, tpot_slo=1.0) == 1
    with pytest.raises(InsufficientMemory):
        chosen(replace(limited, device_memory=(least - 4096) / GIB), tpot_slo=1.0)
    with pytest.raises(ConfigError, match=r"no interval that fits `device_memory` .* holds") as caught:
        chosen(limited, tpot_slo=tpot_slo)
    advised, needed = re.findall(
        r"interval (\w+) holds .* needs `device_memory` ([\d.]+)", str(caught.value)
    )[0]
    assert advised == str(interval)
    assert chosen(replace(ranks, device_memory=float(needed)), tpot_slo=tpot_slo) == interval


def test_each_rank_on_cuda_has_a_memory_of_its_own(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = replace(config, kv_gib=None, tensor_parallel_size=2, pipeline_parallel_size=2)
    target = target_of(ranks, 2, 2)
    (shared,) = memories_of(target)
    assert list(shared.ranks) == [0, 1, 2, 3]
    on_gpus = replace(target, device=torch.device("cuda"))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda rank: SimpleNamespace(total_memory=1000 + rank)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = memories_of(on_gpus)
    assert [(list(each.ranks), each.available_bytes) for each in found] == [
        ([rank], int(0.9 * (1000 + rank))) for rank in range(4)
    ]  # fmt: skip
    parts = [target.least_device_bytes(each.ranks) for each in found]
    assert max(parts) < target.least_device_bytes(shared.ranks) <= sum(parts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", pytest.fail)
    with pytest.raises(ConfigError, match="needs 4 CUDA devices, and torch finds 3 here"):
        memories_of(on_gpus)


def test_stages_share_a_bus(config: EngineConfig, save: Save) -> None:
    save(0.004, layer_bytes=1 << 20)
    record = PerformanceRecord.load(record_path(record_key(config)))
    on_one = replace(config, offload_bus="left", offload_bus_gib_per_s=1 / 8)  # a layer takes 8 ms
    assert on_bus(record, on_one).transfer_s == pytest.approx(1 / 128)
    stages = replace(record, stage_layers=(4, 4, 4))
    assert on_bus(stages, on_one).transfer_s == pytest.approx(3 / 128)


def test_an_engine_that_starts_again_goes_on_with_what_its_corrected_record_has(
    config: EngineConfig, save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the test before, where the first start is refused."""
    save(0.004)
    two = target_of(replace(config, offload_interval=2)).least_device_bytes([0])
    limited = replace(config, device_memory=(two + 4096) / GIB, min_offload_interval=1)
    kept = replace(config.scheduler, tpot_slo=0.018, kept_slo=SLO(1.0, 0.018))
    found = with_chosen_interval(replace(limited, scheduler=kept))
    assert (found.offload_interval, found.min_offload_interval) == (2, 1)
    assert "auto: no interval that fits `device_memory` 0.0" in caplog.text
    impossible = replace(config.scheduler, tpot_slo=0.01, kept_slo=SLO(1.0, 0.01))
    assert with_chosen_interval(replace(limited, scheduler=impossible)).offload_interval != "auto"


def test_an_engine_that_starts_again_chooses_by_what_was_asked_for_not_by_what_was_widened(
    config: EngineConfig, save: Save
) -> None:
    save(0.004)
    limited = replace(config, device_memory=target_of(config).least_device_bytes([0]) / GIB)
    asked = replace(limited, scheduler=replace(config.scheduler, ttft_slo=0.5, tpot_slo=0.03))
    first = chosen(asked)
    again = replace(asked.scheduler, kept_slo=SLO(9.0, 0.9))
    assert first != chosen(replace(asked, scheduler=replace(again, tpot_slo=0.9)))
    assert chosen(replace(asked, scheduler=again)) == first


def test_a_least_interval_that_none_is_above_is_refused(config: EngineConfig, save: Save) -> None:
    save(0.004)
    with pytest.raises(ConfigError, match=f"must be below {NUM_LAYERS}, the layers .* got {NUM_LAYERS}"):
        with_chosen_interval(replace(config, min_offload_interval=NUM_LAYERS))


def test_a_limit_that_nothing_fits_is_refused(config: EngineConfig, save: Save) -> None:
    save(0.004)
    with pytest.raises(InsufficientMemory, match=r"`device_memory` 0\.001 GiB is too small with .* 1:"):
        chosen(replace(config, device_memory=0.001))


def test_an_engine_starts_with_the_chosen_interval(config: EngineConfig, save: Save) -> None:
    save(0.004)
    expected = create_torch_executor(replace(config, offload_interval="none"))
    engine = load_engine(config)
    assert engine.stats().offload_interval == 1
    assert engine.executor.info.num_blocks == expected.info.num_blocks
    request = make_request(prompt_token_ids=[5, 6, 7], max_tokens=3, ignore_eos=True)
    engine.add(request)
    while engine.has_unfinished:
        engine.step()
    assert len(request.output_token_ids) == 3


def test_requests_with_objectives_that_the_interval_cannot_meet_are_refused() -> None:
    """Select-N, section 4.5: the cost profile is measured with the interval, so admission knows its steps."""
    scheduler = SchedulerConfig(policy="slo")
    profiles = {interval: simulated_profile(interval) for interval in (None, 1)}
    asked = {"ttft": 0.05, "tpot": 0.05}
    assert impossible_objectives(asked, profiles[None], scheduler, 64) == {}
    refused = impossible_objectives(asked, profiles[1], scheduler, 64)
    # 12 transfers of 10 ms; a step computes for 12.
    assert refused == {"ttft": pytest.approx(0.12, abs=0.002), "tpot": pytest.approx(0.12, abs=0.002)}
    assert impossible_objectives({"tpot": refused["tpot"]}, profiles[1], scheduler, 64) == {}


def simulated_profile(interval: int | None) -> CostProfile:
    """A profile of a device whose layers take 1 ms, and the transfers of their weights 10 ms."""
    clock = VirtualClock()
    device = LayeredDevice(flat_cost(0.012), layer_transfer_s=0.01)
    info = replace(make_info(num_blocks=1000), num_layers=NUM_LAYERS, offload_interval=interval)
    capacity = Capacity(
        kv_tokens=info.num_blocks * info.block_size,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
    )
    executor = LayeredExecutor(info, device, clock)
    key = MeasuredOn("model", "device", "dtype")
    return profile_executor(executor, clock, capacity, SMALL_GRID, key=key, num_layers=NUM_LAYERS)
