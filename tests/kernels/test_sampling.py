"""Tokens that kernels draw, beside a plain reading of ``RowSampling``."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backfill.kernels.base import Kernels
from backfill.kernels.cpu import CpuKernels, available_isas
from backfill.kernels.sampling import RowSampling
from tests.kernels.reference import ReferenceKernels
from tests.shared import examples

MAKERS: dict[str, Any] = {
    "reference": ReferenceKernels,
    **{isa: (lambda isa=isa: CpuKernels(isa)) for isa in available_isas()},
}
Row: TypeAlias = tuple[torch.Tensor, RowSampling, NDArray[np.float64]]  # with the weights of what it keeps
# Shares of a mass that are closer to a boundary than rounded sums are told apart by no one.
NEAR = 1e-4


class TooNear(Exception):
    pass


@pytest.fixture(scope="module", params=MAKERS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    made: Kernels = MAKERS[request.param]()
    return made


def sampling(
    num_rows: int = 1,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    uniform: float | NDArray[np.float64] = 0.5,
) -> RowSampling:
    return RowSampling(
        np.full(num_rows, temperature, np.float32),
        np.full(num_rows, top_k, np.int64),
        np.full(num_rows, top_p, np.float64),
        np.full(num_rows, min_p, np.float32),
        np.broadcast_to(np.asarray(uniform, np.float64), num_rows).copy(),
    )


def kept_weights(row: NDArray[np.float64], how: RowSampling) -> NDArray[np.float64]:
    """By token; 0 for those that the filters of the one row leave out.

    Raises: TooNear where rounding decides what they leave out.
    """
    weights = np.exp((row - row.max()) / how.temperature[0].astype(np.float64))
    order = np.argsort(-weights, kind="stable")
    kept = order[: how.top_k[0] or len(row)]
    shares = weights[kept] / weights[kept].sum()
    before = np.cumsum(shares) - shares
    if how.top_p[0] < 1.0:
        if np.abs(before - how.top_p[0]).min() < NEAR:
            raise TooNear
        kept = kept[before < how.top_p[0]]
    if how.min_p[0] > 0.0:
        if np.abs(weights / how.min_p[0] - 1.0).min() < NEAR:
            raise TooNear
        kept = kept[weights[kept] >= how.min_p[0]]
    found = np.zeros_like(weights)
    found[kept] = weights[kept]
    return found


@st.composite
def rows(draw: st.DrawFn) -> Row:
    size = draw(st.sampled_from([1, 2, 5, 31, 64, 500, 513, 1024, 1100, 5000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.normal(size=size) * draw(st.sampled_from([0.0, 0.5, 3.0, 20.0]))
    if draw(st.booleans()):  # few values: many equals
        logits = np.round(logits)
    if size > 2 and draw(st.booleans()):
        logits[rng.random(size) < 0.5] = -np.inf
        logits[rng.integers(size)] = 1.0
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    how = sampling(
        temperature=draw(st.sampled_from([0.1, 0.7, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 40, 700, 10_000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.999, 0.95, 0.5, 0.013])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.001, 0.05, 0.4, 1.0])) * 0.993,
        uniform=draw(st.floats(0.0, 1.0, exclude_max=True)),
    )
    rounded = torch.tensor(logits, dtype=torch.float32).to(dtype)
    try:
        return rounded[None], how, kept_weights(rounded.double().numpy(), how)
    except TooNear:
        reject()


@settings(max_examples=examples(150))
@given(case=rows())
def test_a_token_is_one_that_passes_the_filters(kernels: Kernels, case: Row) -> None:
    logits, how, weights = case
    (token_id,) = kernels.sample(logits, how)
    # Which of equals pass is not said.
    assert logits[0, token_id] >= logits[0, torch.from_numpy(weights > 0.0)].min()


@settings(max_examples=examples(150))
@given(case=rows())
def test_the_draw_is_where_its_share_of_the_weights_is(case: Row) -> None:
    """In the order of tokens, on the CPU. So equal shares of ``uniform`` give each its own."""
    logits, how, weights = case
    for isa in available_isas():
        (token_id,) = CpuKernels(isa).sample(logits, how)
        reached = np.cumsum(weights) / weights.sum()
        share = weights[token_id] / weights.sum()
        assert reached[token_id] - share - NEAR <= how.uniform[0] <= reached[token_id] + NEAR


@pytest.mark.parametrize("filters", [{}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.02}])
def test_tokens_come_as_often_as_they_are_likely(kernels: Kernels, filters: dict[str, Any]) -> None:
    """Evenly spaced shares count exactly, but for where they begin."""
    num_rows, size = 2000, 700
    row = torch.randn(size, generator=torch.Generator().manual_seed(3)) * 2
    how = sampling(num_rows, uniform=(np.arange(num_rows) + 0.5) / num_rows, **filters)
    found = np.bincount(kernels.sample(row.expand(num_rows, -1), how), minlength=size)
    weights = kept_weights(row.double().numpy(), how)
    np.testing.assert_allclose(found, num_rows * weights / weights.sum(), atol=1.01)


def test_rows_are_drawn_alone(kernels: Kernels) -> None:
    """Whatever the others are, however many threads draw them, and wherever they lie in memory."""
    generator = torch.Generator().manual_seed(4)
    wide = torch.randn(70, 4097, generator=generator) * 3
    logits = wide[:, :4096]
    how = RowSampling(
        np.tile([0.0, 0.8, 1.0, 0.8, 1.3], 14).astype(np.float32),
        np.tile([0, 0, 40, 0, 5], 14).astype(np.int64),
        np.tile([1.0, 1.0, 0.9, 0.8, 1.0], 14),
        np.tile([0.0, 0.0, 0.0, 0.01, 0.0], 14).astype(np.float32),
        np.random.default_rng(5).random(70),
    )
    together = kernels.sample(logits, how)
    alone = [
        kernels.sample(logits[i : i + 1], RowSampling(*(each[i : i + 1] for each in how))) for i in range(70)
    ]
    assert [[each] for each in together] == alone


def test_no_share_draws_what_has_no_weight(kernels: Kernels) -> None:
    """Not where the sums of two parts meet, whose rounding differs from that of the walk inside them."""
    for seed in range(2):
        row = torch.randn(2048, generator=torch.Generator().manual_seed(seed)) * 2
        row[512:528] = float("-inf")
        weights = kept_weights(row.double().numpy(), sampling())
        share = weights[:512].sum() / weights.sum()
        how = sampling(4001, uniform=share * (1.0 + np.linspace(-3e-7, 3e-7, 4001)))
        token_ids = np.array(kernels.sample(row.expand(4001, -1), how))
        assert not ((token_ids >= 512) & (token_ids < 528)).any()


@pytest.mark.parametrize("how", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_no_distribution_gives_some_token(value: float, how: dict[str, Any]) -> None:
    """A broken model must not make the process read beyond the row."""
    logits = torch.full((3, 100), value)
    logits[1, 50:] = 0.0
    for isa in available_isas():
        assert all(0 <= each < 100 for each in CpuKernels(isa).sample(logits, sampling(3, **how)))


@pytest.mark.parametrize(
    ("named", "logits", "how"),
    [
        ("logits", torch.zeros(4), sampling(4)),
        ("logits", torch.zeros(4, 8).T, sampling(8)),
        ("logits", torch.zeros(1, 4, dtype=torch.int32), sampling(1)),
        ("logits", torch.zeros(1, 4, device="meta"), sampling(1)),
        ("temperature", torch.zeros(1, 4), sampling(2)),
        ("top_p", torch.zeros(1, 4), sampling(1)._replace(top_p=np.ones(1, np.float32))),
        ("uniform", torch.zeros(2, 4), sampling(2)._replace(uniform=np.ones(4)[::2])),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    kernels: Kernels, named: str, logits: torch.Tensor, how: RowSampling
) -> None:
    with pytest.raises(ValueError, match=f"^{named}: expected"):
        kernels.sample(logits, how)
