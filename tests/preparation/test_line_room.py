"""What lines cost, which have room in the KV cache, and how a file is divided."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.blending.requests import OrderName
from backfill.blending.resources import ResourceModel
from backfill.core.block import KVLayout
from backfill.core.counters import ClassCounters, TierBlocks
from backfill.costs.model import PiecewiseLinear
from backfill.engine.messages import ClassStats, EngineStats, StepReport, StepStats
from backfill.models.config import ModelConfig
from backfill.preparation.client import PreparationClient
from backfill.preparation.division import Division, spread
from backfill.preparation.line_file import is_marked
from backfill.preparation.line_pool import LinePool
from backfill.preparation.lines import parse_line
from backfill.preparation.messages import KVRoom, LineSelection, OnlineTraffic, PreparationSetup
from backfill.preparation.resources import create_pool, resources_of, typical_resources
from backfill.protocol.preparer import ServedModel
from tests.builders import linear_cost, make_profile
from tests.preparation.facts import FACTS
from tests.preparation.pool_doubles import KV_TOKENS, index_all, lines_of, make_pool, open_file, take_all
from tests.shared import examples

# Reading KV is dear beside them: lines with long outputs are memory-bound, those with long prompts are not.
SLOW_READS = ResourceModel(token_s=1e-5, prompt_pair_s=1e-10, cached_token_s=1e-7)
LONG = 4000  # tokens: two outputs of so many fit the KV, beside two of 1,500
SHORTER = 1500


def mixed_pool(folder: Path, order: OrderName = "blend", **fields: Any) -> LinePool:
    """Three lines with long outputs, two with shorter ones, and many with long prompts."""
    bodies = [
        {"prompt": [1000 + number] * 10, "max_tokens": length, "ignore_eos": True, **fields}
        for number, length in enumerate((LONG, LONG, LONG, SHORTER, SHORTER))
    ]
    bodies += [{"prompt": [number] * 1000, "max_tokens": 1, "ignore_eos": True} for number in range(60)]
    pool = make_pool(order, SLOW_READS)
    open_file(pool, folder / "in", lines_of(*bodies))
    index_all(pool)
    return pool


def take_sparse(pool: LinePool, count: int) -> list[tuple[int, int]]:
    """Take lines until so many of them have long outputs. Returns: numbers and lengths of these."""
    found: list[tuple[int, int]] = []
    while len(found) < count:
        (each,) = pool.take("", 1).lines
        assert each.line.generation is not None
        length = each.line.generation.request.samplings[0].max_tokens
        if length > 1:
            found.append((each.line.number, length))
    return found


def lengths(found: Sequence[tuple[int, int]]) -> list[int]:
    return [length for _, length in found]


def test_a_long_line_is_passed_over_while_the_kv_is_promised_and_none_is_held_back(tmp_path: Path) -> None:
    pool = mixed_pool(tmp_path)
    assert lengths(take_sparse(pool, 4)) == [LONG, LONG, SHORTER, SHORTER]
    last = take_all(pool)
    assert len(last) > 50
    (_, line) = last[-1]
    assert line.generation is not None
    assert line.generation.request.samplings[0].max_tokens == LONG, "when no other one waits"


def test_progress_and_ends_free_the_kv_for_a_long_line(tmp_path: Path) -> None:
    for frees in ("progress", "end", "no answer"):
        pool = mixed_pool(tmp_path)
        first = take_sparse(pool, 2)
        for number, _ in first:
            if frees == "progress":
                pool.note_progress(0, {number: LONG - 100})
            else:
                pool.end(0, number, LONG if frees == "end" else None)
        assert lengths(take_sparse(pool, 1)) == [LONG], frees


def test_a_closed_file_holds_no_kv(tmp_path: Path) -> None:
    pool = mixed_pool(tmp_path)
    take_sparse(pool, 2)
    open_file(pool, tmp_path / "again", (tmp_path / "in").read_bytes())  # in its place
    index_all(pool)
    assert lengths(take_sparse(pool, 3)) == [LONG, LONG, SHORTER]


def test_the_kv_of_online_requests_is_left_to_them(tmp_path: Path) -> None:
    pool = mixed_pool(tmp_path)
    pool.note_online(OnlineTraffic(0.0, 0.0, KV_TOKENS // 2))
    assert lengths(take_sparse(pool, 2)) == [LONG, SHORTER]
    pool.note_online(OnlineTraffic(0.0, 0.0, 0))
    assert lengths(take_sparse(pool, 1)) == [LONG]


def test_the_room_follows_the_pool_while_the_engine_runs(tmp_path: Path) -> None:
    pool = mixed_pool(tmp_path)
    pool.note_room(KVRoom(KV_TOKENS // 2, 0))
    assert lengths(take_sparse(pool, 2)) == [LONG, SHORTER]
    pool.note_room(KVRoom(KV_TOKENS, 0))
    assert lengths(take_sparse(pool, 1)) == [LONG]


def test_what_is_kept_for_online_requests_is_a_part_of_what_is_left_to_them(tmp_path: Path) -> None:
    for held, kept in ((KV_TOKENS // 2, 0), (0, KV_TOKENS // 2), (KV_TOKENS // 2, KV_TOKENS // 2)):
        pool = mixed_pool(tmp_path)
        pool.note_online(OnlineTraffic(0.0, 0.0, held))
        pool.note_room(KVRoom(KV_TOKENS, kept))
        assert lengths(take_sparse(pool, 2)) == [LONG, SHORTER]


def test_the_engine_s_reports_tell_the_room_and_what_online_requests_have_of_it(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = ServedModel(names=("m",), root="m", folder=small_model, created=0)
    for order, rooms in (("blend", [(100, 35), (80, 45)]), ("fcfs", [])):
        client, sent = PreparationClient(PreparationSetup(model=served, order=order)), list[object]()
        client.on_report(report_of(50, 0), 9.0)
        client.configure(FACTS)
        monkeypatch.setattr(client.files, "send", sent.append)
        client.on_report(report_of(100, 30), 10.0)
        client.on_report(report_of(90, 30), 10.5)
        client.on_report(report_of(80, 40), 11.0)
        assert sent == [KVRoom(*(num * FACTS.info.block_size for num in room)) for room in rooms]


def test_lengths_of_lines_are_read_where_the_order_asks_for_them(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = ServedModel(names=("m",), root="m", folder=small_model, created=0)
    for order, lengths_read in (("blend", {1: 5}), ("fcfs", {})):
        client = PreparationClient(PreparationSetup(model=served, order=order))
        monkeypatch.setattr(client.files, "launch", lambda: None)
        assert client.open_lines(LineSelection(path="a", max_line_bytes=9, observed={1: 5})).observed == (
            lengths_read
        )


def report_of(num_blocks: int, num_protected_blocks: int) -> StepReport:
    idle = ClassStats(0, 0, ClassCounters())
    stats = EngineStats(idle, idle, 0.0, 0, 0.0, 0, StepStats("none", 0, 0.0, 0.0))
    blocks = {"num_blocks": num_blocks, "num_protected_blocks": num_protected_blocks}
    return StepReport([], msgspec.structs.replace(stats, device_blocks=TierBlocks(online=5), **blocks))


def test_the_choices_of_a_line_need_kv_each(tmp_path: Path) -> None:
    assert lengths(take_sparse(mixed_pool(tmp_path, n=2), 2)) == [LONG, SHORTER]


def test_other_orders_ask_for_no_room(tmp_path: Path) -> None:
    assert lengths(take_sparse(mixed_pool(tmp_path, "fcfs"), 5)) == [LONG] * 3 + [SHORTER] * 2


def test_expectations_of_running_lines_are_corrected_with_their_progress(tmp_path: Path) -> None:
    """Lines of unknown length are expected to have 256 tokens, until 32 of them end after two."""
    pool = make_pool("blend")
    open_file(pool, tmp_path / "in", lines_of(*({"prompt": [n], "max_tokens": 900} for n in range(60))))
    index_all(pool)
    taken = [each.line.number for each in pool.take("", 40).lines]
    forecast = pool._forecast
    assert forecast is not None
    before = forecast.free().most_output_tokens(0)
    pool.note_progress(0, {taken[0]: 5})
    for number in taken[1:33]:
        pool.end(0, number, 2)
    for number in taken[33:]:
        pool.end(0, number, None)
    assert forecast.free().most_output_tokens(0) > before
    pool.note_progress(0, {taken[0]: 6})
    tokens_to_go, _ = forecast.free().ends
    assert 0 < tokens_to_go < 250


@pytest.fixture
def model(small_model: Path) -> ModelConfig:
    return ModelConfig.from_folder(small_model)


def test_without_a_profile_costs_follow_from_the_dimensions(model: ModelConfig) -> None:
    assert resources_of(FACTS.info, None, model) == typical_resources(model, dtype_bytes=4)
    half = replace(FACTS.info, dtype="bfloat16")
    assert resources_of(half, None, model) == typical_resources(model)
    codes = replace(half, kv_dtype="int8")
    layouts = (KVLayout(model.num_layers, model.num_kv_heads, model.head_dim, 16, size) for size in (1, 2))
    of_codes, of_halves = (layout.block_bytes for layout in layouts)
    assert resources_of(codes, None, model).cached_token_s == pytest.approx(
        resources_of(half, None, model).cached_token_s * of_codes / of_halves
    )


def test_a_profile_says_what_was_measured(model: ModelConfig) -> None:
    cost = replace(linear_cost(token_s=0.002), prefill_pair_s=3e-7, decode_context_s=5e-6)
    measured = resources_of(FACTS.info, make_profile(cost), model)
    assert measured.token_s == pytest.approx(0.002)
    assert (measured.prompt_pair_s, measured.cached_token_s) == (3e-7, 5e-6)


def test_a_term_that_was_measured_as_nothing_is_in_proportion_to_the_others(model: ModelConfig) -> None:
    typical = typical_resources(model, dtype_bytes=4)
    measured = resources_of(FACTS.info, make_profile(linear_cost(token_s=0.002)), model)
    assert measured.cached_token_s / measured.token_s == pytest.approx(
        typical.cached_token_s / typical.token_s
    )
    nothing = replace(linear_cost(), rows_s=PiecewiseLinear((0.0, 1.0), (0.0, 0.0)))
    assert resources_of(FACTS.info, make_profile(nothing), model) == typical


def test_the_room_is_that_of_the_kv_and_only_the_blend_asks_for_it(small_model: Path) -> None:
    _, forecast = create_pool("blend", FACTS.info, FACTS.profile, small_model)
    assert forecast is not None
    assert forecast.kv_tokens == FACTS.info.num_blocks * FACTS.info.block_size
    assert 0 < forecast.slack_tokens < forecast.kv_tokens
    for order in ("fcfs", "dfs", "random", "batchllm"):
        assert create_pool(order, FACTS.info, FACTS.profile, small_model)[1] is None


RESOURCES = ResourceModel(1e-5, 1e-9, 1e-8)


def division_of(num_lines: int, order: str = "blend") -> Division:
    division = Division(order, RESOURCES)  # type: ignore[arg-type]
    for number in range(1, num_lines + 1):
        body = {"prompt": f"document {number % 8} " * 100 + str(number), "max_tokens": 4}
        request = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        division.add(parse_line(number, json.dumps(request).encode(), 10_000))
    return division


def numbers_in(part: bytes) -> set[int]:
    return {number for number in range(8 * len(part)) if is_marked(part, number)}


def test_each_line_is_in_one_part_and_each_run_finds_the_same() -> None:
    for order in ("blend", "fcfs"):
        parts = division_of(64, order).parts()
        assert parts == division_of(64, order).parts()
        assert len(parts) > 8
        assert sorted(number for part in parts for number in numbers_in(part)) == list(range(1, 65))
        halves = [numbers_in(part) for part in division_of(64, order).parts_of(2)]
        assert halves[0] | halves[1] == set(range(1, 65)) and not halves[0] & halves[1]
    assert division_of(4).parts() == [] == division_of(0).parts()


def test_lines_that_begin_alike_are_in_one_part() -> None:
    first, second = ({number % 8 for number in numbers_in(part)} for part in division_of(64).parts_of(2))
    assert len(first & second) <= 2, "only those on the cuts are computed twice"


@pytest.mark.parametrize("order", ["blend", "fcfs"])
@given(num_lines=st.integers(1, 200), num_parts=st.integers(1, 40))
@settings(max_examples=examples(50), deadline=None)
def test_parts_of_a_file_that_is_too_large_to_plan_are_even(
    order: str, num_lines: int, num_parts: int
) -> None:
    with mock.patch("backfill.preparation.division.MAX_PLANNED_BYTES", 0):
        parts = [numbers_in(part) for part in division_of(num_lines, order).parts_of(num_parts)]
    assert sorted(number for part in parts for number in part) == list(range(1, num_lines + 1))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= (max(1, num_lines // (16 * num_parts)) if order == "blend" else 1)
    assert min(sizes) > 0 or num_lines < num_parts


def test_parts_that_follow_each_other_are_from_all_over_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server takes some that follow each other: it has lines of all kinds, in `fcfs` those of the file."""
    half = division_of(64).parts()[:8]
    assert {number % 8 for part in half for number in numbers_in(part)} == set(range(8))
    parts = division_of(64, "fcfs").parts()
    assert [number for part in parts for number in sorted(numbers_in(part))] == list(range(1, 65))
    monkeypatch.setattr("backfill.preparation.division.MAX_PLANNED_BYTES", 0)
    parts = division_of(64).parts()
    first, last = sorted(numbers_in(parts[0])), sorted(numbers_in(parts[-1]))
    assert first[0] <= 16 and first[-1] > 48 and last[0] <= 16 and last[-1] > 48
    assert sorted(number for part in parts for number in numbers_in(part)) == list(range(1, 65))
    assert [len(spread(range(num))) for num in range(9)] == list(range(9))
    assert spread(range(8)) == [0, 4, 2, 6, 1, 5, 3, 7]
