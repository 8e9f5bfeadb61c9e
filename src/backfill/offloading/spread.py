"""How much longer than typically things take one after another: quantiles of sums of neighbouring times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from backfill.offloading.record import SHORTEST_STRETCH_S

QUANTILE = 0.99
_LEAST_STRETCHES = 16  # without overlap, of a length for it to count


def quantile(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(QUANTILE * len(values)) - 1]


def run_times_s(times_s: Sequence[float]) -> list[float]:
    """Of each in runs of 1, 2, 4 and so on of these times, the seconds that few runs exceed.

    What disturbs one of them disturbs its neighbours, so runs are taken as they were and not at random. Runs
    of which there are few apart from each other are left out.
    """
    found: list[float] = []
    length = 1
    while length == 1 or length * _LEAST_STRETCHES <= len(times_s):
        sums = list(_window_sums(times_s, length))
        found.append(quantile(sums) / length)
        length *= 2
    return found


def delays_s(stretches: Sequence[tuple[float, float]]) -> list[float]:
    """By how much few stretches of 1, 2, 4 ms and so on exceed what they typically take.

    Args:
        stretches: what each part of them typically takes and took, in order.
    """
    total_s = sum(typical_s for typical_s, _ in stretches)
    found: list[float] = []
    length_s = SHORTEST_STRETCH_S
    while length_s * _LEAST_STRETCHES <= total_s:
        found.append(max(0.0, quantile(list(_excesses_s(stretches, length_s)))))
        length_s *= 2
    return found


def _window_sums(values: Sequence[float], length: int) -> Iterator[float]:
    total = sum(values[:length])
    yield total
    for index in range(length, len(values)):
        total += values[index] - values[index - length]
        yield total


def _excesses_s(stretches: Sequence[tuple[float, float]], length_s: float) -> Iterator[float]:
    """Of the stretch that begins with each part and is typically just so long."""
    end = 0
    typical_s = excess_s = 0.0
    for first_s, took_s in stretches:
        while end < len(stretches) and typical_s < length_s:
            typical_s += stretches[end][0]
            excess_s += stretches[end][1] - stretches[end][0]
            end += 1
        if typical_s < length_s:
            return
        yield excess_s
        typical_s -= first_s
        excess_s -= took_s - first_s
