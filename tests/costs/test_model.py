from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backfill.core.block import pack_block_ref
from backfill.core.plan import ScheduledSlice
from backfill.core.request import RequestId
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel, PiecewiseLinear
from tests.builders import linear_cost
from tests.shared import examples

Slice = tuple[int, int, bool]

# Whole numbers: sums are exact, and a limit between two of them needs no rounding.
MODEL = CostModel(
    rows_s=PiecewiseLinear((1.0, 5.0, 9.0, 21.0), (7.0, 7.0, 11.0, 47.0)),
    sampled_s=PiecewiseLinear((0.0, 1.0, 4.0), (0.0, 3.0, 6.0)),
    request_s=2.0,
    prefill_pair_s=0.125,
    prefill_context_s=0.5,
    decode_context_s=0.25,
)

slices = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40), st.booleans()), max_size=12)


@given(before=slices, added=st.tuples(st.integers(0, 50), st.integers(1, 40), st.booleans()))
def test_take_undoes_put(before: list[Slice], added: Slice) -> None:
    load = StepLoad.of(before)
    load.put(*added)
    assert load != StepLoad.of(before)
    load.take(*added)
    assert load == StepLoad.of(before)


@given(before=slices)
def test_pairs_are_the_tokens_each_new_token_attends_to(before: list[Slice]) -> None:
    attended = [
        position + 1
        for start, count, _ in before
        if count > 1 or start == 0
        for position in range(start, start + count)
    ]
    assert StepLoad.of(before).prefill_pairs == sum(attended)


def test_load_of_scheduled_slices_and_of_a_copy() -> None:
    shape = [(0, 6, True), (5, 1, True), (3, 4, False)]
    scheduled = tuple(
        ScheduledSlice(RequestId(f"r{i}"), start, count, (pack_block_ref(i),), samples)
        for i, (start, count, samples) in enumerate(shape)
    )
    load = StepLoad.of_slices(scheduled)
    assert load == StepLoad.of(shape)
    other = load.copy()
    other.put(0, 5, True)
    assert load == StepLoad.of(shape)
    assert other == StepLoad.of([*shape, (0, 5, True)])


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (-3, 2.0),  # flat on the left
        (0.5, 2.0),
        (1, 2.0),
        (2, 3.0),
        (3, 4.0),
        (5, 4.0),  # a flat segment
        (7, 4.0),
        (8, 6.0),
        (9, 8.0),
        (12, 14.0),  # the last segment, continued
    ],
)
def test_piecewise_linear(at: float, expected: float) -> None:
    assert PiecewiseLinear((1.0, 3.0, 7.0, 9.0), (2.0, 4.0, 4.0, 8.0))(at) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ((1.0,), (1.0,), "two or more points"),
        ((), (), "two or more points"),
        ((1.0, 2.0), (1.0,), "2 x and 1 y"),
        ((2.0, 1.0), (1.0, 2.0), "x must ascend"),
        ((1.0, 1.0), (1.0, 2.0), "x must ascend"),
        ((1.0, 2.0, 3.0), (1.0, 3.0, 2.0), "y must not be negative or descend"),
        ((1.0, 2.0), (-1.0, 2.0), "y must not be negative or descend"),
    ],
)
def test_piecewise_linear_refuses(x: tuple[float, ...], y: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PiecewiseLinear(x, y)


def plain_time_s(model: CostModel, shape: list[Slice]) -> float:
    """The documented sum of terms, slice by slice."""
    if not shape:
        return 0.0
    num_sampled = sum(samples for _, _, samples in shape)
    seconds = model.rows_s(sum(count for _, count, _ in shape))
    seconds += model.sampled_s(num_sampled) if num_sampled else 0.0
    for start, count, _ in shape:
        seconds += model.request_s
        if count == 1 and start > 0:
            seconds += model.decode_context_s * start
        else:
            pairs = sum(position + 1 for position in range(start, start + count))
            seconds += model.prefill_pair_s * pairs + model.prefill_context_s * start
    return seconds


@given(shape=slices)
def test_step_time_is_the_sum_of_its_terms(shape: list[Slice]) -> None:
    assert MODEL.step_time_s(StepLoad.of(shape)) == pytest.approx(plain_time_s(MODEL, shape))


def test_rows_that_are_not_sampled_cost_no_sampling() -> None:
    from_the_first = replace(MODEL, sampled_s=PiecewiseLinear((1.0, 2.0), (5.0, 6.0)))
    unsampled, sampled = StepLoad.of([(0, 4, False)]), StepLoad.of([(0, 4, True)])
    difference = from_the_first.step_time_s(sampled) - from_the_first.step_time_s(unsampled)
    assert difference == pytest.approx(5.0)
    assert from_the_first.step_time_s(StepLoad()) == 0.0


@given(before=slices, added=st.tuples(st.integers(0, 50), st.integers(1, 40), st.booleans()))
def test_time_with_does_not_change_the_load(before: list[Slice], added: Slice) -> None:
    load = StepLoad.of(before)
    assert MODEL.time_with_s(load, *added) == MODEL.step_time_s(StepLoad.of([*before, added]))
    assert load == StepLoad.of(before)


@st.composite
def models(draw: st.DrawFn) -> CostModel:
    whole = st.integers(0, 4).map(float)
    knots = sorted(draw(st.sets(st.integers(1, 30), min_size=2, max_size=4)))
    values = sorted(draw(st.lists(st.integers(0, 40), min_size=len(knots), max_size=len(knots))))
    return CostModel(
        PiecewiseLinear(tuple(map(float, knots)), tuple(map(float, values))),
        PiecewiseLinear((0.0, 1.0), (0.0, draw(whole))),
        draw(whole),
        draw(whole),
        draw(whole),
        draw(whole),
    )


DEAR_DECODES = replace(MODEL, decode_context_s=4.0)


@settings(max_examples=examples(120), deadline=None)
@given(
    model=models(),
    before=slices,
    start=st.integers(0, 20),
    num_pending=st.integers(0, 30),
    limit_of=st.integers(1, 30),
    beyond_s=st.sampled_from((-0.013, 0.013)),  # not the times themselves: they may differ by a rounding
    at_most=st.one_of(st.none(), st.integers(0, 35)),
)
# A decode pays for its context; two tokens are a prefill, which does not.
@example(DEAR_DECODES, [], 20, 3, 2, 0.013, None)
@example(DEAR_DECODES, [], 20, 30, 2, 0.013, 3)
def test_max_tokens_is_the_most_that_fits(
    model: CostModel,
    before: list[Slice],
    start: int,
    num_pending: int,
    limit_of: int,
    beyond_s: float,
    at_most: int | None,
) -> None:
    load = StepLoad.of(before)
    limit_s = model.time_with_s(load, start, limit_of, limit_of == num_pending) + beyond_s
    found = model.max_tokens(load, start, num_pending, limit_s, at_most)
    high = num_pending if at_most is None else min(at_most, num_pending)
    fitting = [
        count
        for count in range(1, high + 1)
        if model.step_time_s(StepLoad.of([*before, (start, count, count == num_pending)])) <= limit_s
    ]
    assert found == max(fitting, default=0)
    assert load == StepLoad.of(before)


def test_a_prompt_is_computed_in_chunks_and_the_last_one_samples() -> None:
    chunks = [(0, 8, False), (8, 8, False), (16, 4, True)]
    assert MODEL.prefill_time_s(20, 8) == pytest.approx(sum(plain_time_s(MODEL, [chunk]) for chunk in chunks))
    assert MODEL.prefill_time_s(20, 20) == pytest.approx(plain_time_s(MODEL, [(0, 20, True)]))
    assert MODEL.prefill_time_s(20, 500) == MODEL.prefill_time_s(20, 20)
    assert MODEL.prefill_time_s(0, 8) == 0.0
    assert MODEL.prefill_time_s(20, 8, num_computed_tokens=8) == pytest.approx(
        sum(plain_time_s(MODEL, [chunk]) for chunk in chunks[1:])
    )


def test_a_load_is_computed_in_full_steps() -> None:
    cost = linear_cost(token_s=0.001, step_s=0.05)
    many = StepLoad.of([(0, 10, True)] * 25)
    assert cost.steps_time_s(many, 100) == pytest.approx(0.25 + 3 * 0.05)
    assert cost.steps_time_s(StepLoad(), 100) == 0.0
    context = linear_cost(token_s=0.001, context_s=0.01)
    for num_tokens in (7, 100, 250):
        chunks = [
            (start, min(100, num_tokens - start), start + 100 >= num_tokens)
            for start in range(0, num_tokens, 100)
        ]
        predicted = context.steps_time_s(StepLoad.of(chunks), 100)
        assert predicted == pytest.approx(context.prefill_time_s(num_tokens, 100))


def test_only_a_part_of_a_large_chunk_may_count() -> None:
    chunks = [(0, 3, False), (8, 3, False), (16, 3, True)]
    counted = MODEL.prefill_time_s(20, 8, counted_tokens=3)
    assert counted == pytest.approx(sum(plain_time_s(MODEL, [chunk]) for chunk in chunks))
    assert MODEL.prefill_time_s(20, 8, counted_tokens=8) == MODEL.prefill_time_s(20, 8)


@pytest.mark.parametrize(
    ("x", "y", "fraction", "at_most", "sizes"),
    [
        # Flat up to 64 rows, as if the bytes of the weights bound it, then 1 ms a row.
        ((1.0, 64.0, 128.0, 512.0), (0.064, 0.064, 0.128, 0.512), 0.9, 512, (64, 128, 512)),
        ((1.0, 64.0, 128.0, 512.0), (0.064, 0.064, 0.128, 0.512), 0.9, 32, (32,)),
        # 11, 2, 1.25 and 1.1 a row
        ((1.0, 10.0, 40.0, 100.0), (11.0, 20.0, 50.0, 110.0), 1.0, 100, (100,)),
        ((1.0, 10.0, 40.0, 100.0), (11.0, 20.0, 50.0, 110.0), 0.88, 100, (40, 100)),
        ((1.0, 10.0, 40.0, 100.0), (11.0, 20.0, 50.0, 110.0), 0.5, 100, (10, 40, 100)),
        ((16.0, 64.0), (1.0, 4.0), 0.9, 8, (8,)),  # no knot is within the limit
        ((0.0, 10.0, 100.0), (5.0, 6.0, 60.0), 0.9, 100, (10, 100)),
        ((1.0, 64.0, 65.0, 128.0), (1.0, 1.0, 2.0, 2.0), 0.8, 128, (64, 128)),  # not just after a tile
    ],
)
def test_efficient_steps_end_where_more_rows_gain_little(
    x: tuple[float, ...], y: tuple[float, ...], fraction: float, at_most: int, sizes: tuple[int, ...]
) -> None:
    model = replace(MODEL, rows_s=PiecewiseLinear(x, y))
    assert model.efficient_step_sizes(fraction, at_most) == sizes


def test_prompts_are_computed_efficiently_in_the_smallest_step_that_decodes_leave_enough_of() -> None:
    model = replace(MODEL, rows_s=PiecewiseLinear((1.0, 10.0, 100.0, 1000.0), (1.0, 2.0, 11.0, 101.0)))
    model = replace(model, request_s=0.0, prefill_pair_s=0.0, prefill_context_s=0.0, decode_context_s=0.0)
    nothing, decodes = StepLoad(), StepLoad.of([(5, 1, False)] * 50)
    assert model.efficient_prefill_s(nothing, 0.9, 1000) == 11.0
    assert model.efficient_prefill_s(nothing, 1.0, 1000) == 101.0
    assert model.efficient_prefill_s(decodes, 0.9, 1000) == 101.0, "the decodes are half of 100 tokens"
    assert model.efficient_prefill_s(decodes, 0.4, 1000) == 11.0
    assert model.efficient_prefill_s(decodes, 0.9, 50) == model.step_time_s(decodes), "no token is left"
