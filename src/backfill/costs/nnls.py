"""Non-negative least squares for the few terms of a cost model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def nnls(a: Array, b: Array) -> Array:
    """The x >= 0 with the least ``|a @ x - b|``.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, chapter 23). In each round the
    variable whose growth lowers the error most becomes free; variables that would turn negative are held at 0
    again. Tens of columns take milliseconds. scipy has the same, at the cost of a slow import.

    Args:
        a: [num_rows, num_columns]; there may be more columns than rows.
        b: [num_rows].
    """
    if a.shape[0] > a.shape[1]:  # the same problem with as many rows as columns
        q, a = np.linalg.qr(a)
        b = q.T @ b
    num_columns = a.shape[1]
    x = np.zeros(num_columns)
    is_free = np.zeros(num_columns, dtype=bool)
    is_refused = np.zeros(num_columns, dtype=bool)  # freed at this x, then held at 0 again
    tolerance = 10 * np.finfo(float).eps * float(np.abs(a).sum(axis=0).max()) * max(a.shape)
    for _ in range(10 * num_columns):
        gain = a.T @ (b - a @ x)
        gain[is_free | is_refused] = -np.inf
        entering = int(np.argmax(gain))
        if gain[entering] <= tolerance:
            break
        is_free[entering] = True
        moved = _descend(a, b, x, is_free)
        if is_free[entering] or not np.array_equal(moved, x):
            is_refused[:] = False
        else:  # it depends linearly on the free ones: its gain was a rounding error
            is_refused[entering] = True
        x = moved
    return x


def _descend(a: Array, b: Array, x: Array, is_free: NDArray[np.bool_]) -> Array:
    """The best point of the free columns from ``x`` on; columns that would turn negative are held at 0."""
    x = x.copy()
    while is_free.any():
        best = np.zeros_like(x)
        best[is_free] = np.linalg.lstsq(a[:, is_free], b, rcond=None)[0]
        is_blocked = is_free & (best <= 0)
        if not is_blocked.any():
            return best
        moves = x[is_blocked] - best[is_blocked]
        shares = np.divide(x[is_blocked], moves, out=np.zeros_like(moves), where=moves > 0)
        x += shares.min() * (best - x)
        is_free &= ~(is_blocked & (x <= 1e-12 * max(float(x.max()), 1e-300)))
        x[~is_free] = 0.0
    return x
