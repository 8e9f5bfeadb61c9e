from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from backfill.costs.fit import nnls

Array = NDArray[np.float64]


def error(a: Array, b: Array, x: Array) -> float:
    return float(np.linalg.norm(a @ x - b))


def best_of_all_subsets(a: Array, b: Array) -> float:
    """The least error of any x >= 0: some set of columns has it as its unconstrained best."""
    least = float(np.linalg.norm(b))
    for size in range(1, a.shape[1] + 1):
        for columns in itertools.combinations(range(a.shape[1]), size):
            x = np.zeros(a.shape[1])
            x[list(columns)] = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
            if x.min() >= 0:
                least = min(least, error(a, b, x))
    return least


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("num_rows", "num_columns"), [(12, 5), (5, 5), (3, 5), (40, 7)])
def test_no_other_x_is_better(seed: int, num_rows: int, num_columns: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(num_rows, num_columns)), rng.normal(size=num_rows)
    x = nnls(a, b)
    assert x.min() >= 0
    assert error(a, b, x) == pytest.approx(best_of_all_subsets(a, b), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_an_exact_solution_is_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, x = rng.random((200, 26)), np.maximum(rng.normal(size=26), 0)
    assert nnls(a, a @ x) == pytest.approx(x, abs=1e-9)


def test_columns_may_depend_on_each_other() -> None:
    rng = np.random.default_rng(0)
    a = rng.random((50, 4))
    a = np.hstack([a, a, a[:, :1] + a[:, 1:2], np.zeros((50, 2))])
    b = rng.random(50)
    x = nnls(a, b)
    assert x.min() >= 0
    assert error(a, b, x) == pytest.approx(error(a[:, :4], b, nnls(a[:, :4], b)), abs=1e-9)


def test_a_weight_that_would_be_negative_is_zero() -> None:
    assert nnls(np.eye(3), np.array([-1.0, 2.0, 0.0])).tolist() == [0.0, 2.0, 0.0]
    assert nnls(-np.ones((4, 2)), np.ones(4)).tolist() == [0.0, 0.0]
