"""Log probabilities that kernels find, beside numpy's in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backfill.kernels.base import Kernels
from backfill.kernels.cpu import CpuKernels, available_isas
from tests.kernels.reference import ReferenceKernels
from tests.shared import examples

MAKERS: dict[str, Any] = {
    "reference": ReferenceKernels,
    **{isa: (lambda isa=isa: CpuKernels(isa)) for isa in available_isas()},
}


@pytest.fixture(scope="module", params=MAKERS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    made: Kernels = MAKERS[request.param]()
    return made


def log_softmax(row: torch.Tensor) -> NDArray[np.float64]:
    values = row.double().numpy()
    shifted = values - values.max()
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return found


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    size = draw(st.sampled_from([1, 2, 5, 31, 64, 500, 513, 1024, 1100, 5000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.normal(size=size) * draw(st.sampled_from([0.0, 0.5, 3.0, 20.0])) + rng.normal() * 10
    if draw(st.booleans()):  # few values: many equals
        logits = np.round(logits)
    if draw(st.booleans()):
        logits = np.sort(logits)
    if size > 2 and draw(st.booleans()):
        logits[rng.random(size) < 0.5] = -np.inf
        logits[rng.integers(size)] = 1.0
    return torch.tensor(logits, dtype=torch.float32).to(
        draw(st.sampled_from([torch.float32, torch.bfloat16]))
    )


@settings(max_examples=examples(150))
@given(row=rows(), data=st.data())
def test_a_row_is_scored_as_numpy_does(kernels: Kernels, row: torch.Tensor, data: st.DataObject) -> None:
    token_id = data.draw(st.integers(0, len(row) - 1))
    num_top = data.draw(st.integers(0, 20))
    (found,) = kernels.score(row[None], [token_id], [num_top])
    expected, values = log_softmax(row), row.double().numpy()
    assert found.rank == 1 + (values > values[token_id]).sum()
    assert found.logprob == pytest.approx(expected[token_id], abs=2e-5)
    ids = [each for each, _ in found.top]
    assert len(set(ids)) == len(ids) == min(num_top, np.isfinite(values).sum())
    order = np.argsort(-values, kind="stable")[: len(ids)]
    np.testing.assert_array_equal(values[ids], values[order])
    np.testing.assert_allclose([each for _, each in found.top], expected[order], atol=2e-5)
    if isinstance(kernels, CpuKernels):
        assert ids == order.tolist(), "of equals the first ones"


def test_rows_are_scored_alone(kernels: Kernels) -> None:
    """Whatever the others are, however many threads score them, and wherever they lie in memory."""
    wide = torch.randn(70, 4097, generator=torch.Generator().manual_seed(4)) * 3
    logits = wide.bfloat16()[:, :4096]
    token_ids = np.random.default_rng(5).integers(4096, size=70).tolist()
    num_top = [0, 1, 5, 20, 3] * 14
    together = kernels.score(logits, token_ids, num_top)
    alone = [kernels.score(logits[i : i + 1], token_ids[i : i + 1], num_top[i : i + 1]) for i in range(70)]
    assert [[each] for each in together] == alone


@pytest.mark.parametrize(
    "row", [[0.0, 1e-8, 2e-8, 0.0] + [0.0] * 5000, [3e38, -3e38, 0.0, 1.0]], ids=["near", "far apart"]
)
def test_ranks_are_of_logits_and_not_of_rounded_logarithms(kernels: Kernels, row: list[float]) -> None:
    for token_id in range(4):
        (found,) = kernels.score(torch.tensor([row]), [token_id], [3])
        assert found.rank == 1 + sum(each > row[token_id] for each in row)
        assert [row[each] for each, _ in found.top] == sorted(row, reverse=True)[:3]


def test_nothing_beside_a_row_is_read(kernels: Kernels) -> None:
    for size in (1, 7, 31, 100, 513):
        wide = torch.full((3, size + 64), 1e30)
        wide[:, :size] = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
        logits = wide[:, :size]
        assert kernels.score(logits, [0] * 3, [5] * 3) == kernels.score(logits.clone(), [0] * 3, [5] * 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_no_distribution_names_tokens_of_the_row(value: float) -> None:
    """A broken model must not make the process read or write beyond the row."""
    logits = torch.full((3, 100), value)
    logits[1, 50:] = torch.arange(50.0)
    for isa in available_isas():
        for found, count in zip(
            CpuKernels(isa).score(logits, [0, 60, 99], [20, 3, 0]), [20, 3, 0], strict=True
        ):
            ids = [token_id for token_id, _ in found.top]
            assert len(set(ids)) == len(ids) <= count
            assert all(0 <= token_id < 100 for token_id in ids)
        if value != float("inf"):
            assert [each for each, _ in CpuKernels(isa).score(logits[1:2], [0], [2])[0].top] == [99, 98]


def test_no_rows(kernels: Kernels) -> None:
    assert kernels.score(torch.zeros(0, 8), [], []) == []


@pytest.mark.parametrize(
    ("named", "logits", "token_ids", "num_top"),
    [
        ("logits", torch.zeros(4), [0], [0]),
        ("logits", torch.zeros(4, 8).T, [0] * 8, [0] * 8),
        ("token_ids", torch.zeros(2, 4), [0], [0, 0]),
        ("token_ids", torch.zeros(1, 4), [4], [0]),
        ("token_ids", torch.zeros(1, 4), [-1], [0]),
        ("num_top", torch.zeros(1, 4), [0], [-1]),
        ("num_top", torch.zeros(1, 4), [0], []),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    kernels: Kernels, named: str, logits: torch.Tensor, token_ids: list[int], num_top: list[int]
) -> None:
    with pytest.raises(ValueError, match=f"^{named}: expected"):
        kernels.score(logits, token_ids, num_top)
