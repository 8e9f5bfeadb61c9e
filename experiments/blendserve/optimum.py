"""What requests take at least: seconds of compute and memory at the best rates, perfectly overlapped.

Source: BlendServe (sections 2.4 and 5.2), whose achievable optimum this is, request by request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backfill.costs.load import StepLoad
from backfill.simulation.replay import Lengths
from experiments.blendserve.overlap import OverlappedCostModel
from experiments.blendserve.sources import SourceRequests

_MAX_STEP_TOKENS = 2048

Floats = NDArray[np.float64]


class Work(NamedTuple):
    """Seconds of either resource, each as if alone on the device."""

    compute_s: float = 0.0
    memory_s: float = 0.0

    def plus(self, other: Work) -> Work:
        return Work(self.compute_s + other.compute_s, self.memory_s + other.memory_s)

    def over(self, seconds: float) -> Work:
        return Work(self.compute_s / seconds, self.memory_s / seconds)


@dataclass(frozen=True, slots=True)
class WorkModel:
    """Work at the rates of the cheapest step size.

    Attributes:
        row_s: of a token's row-wise work.
        sampled_row_s: what one more sampled row adds to a large step.
    """

    cost: OverlappedCostModel
    row_s: float
    sampled_row_s: float

    @classmethod
    def of(cls, cost: OverlappedCostModel) -> WorkModel:
        sizes = cost.efficient_step_sizes(1.0, _MAX_STEP_TOKENS)
        x, y = cost.sampled_s.x, cost.sampled_s.y
        return cls(cost, min(cost.rows_s(size) / size for size in sizes), (y[-1] - y[-2]) / (x[-1] - x[-2]))

    def least_s(self, work: Work, online: Work | None = None) -> float:
        """Seconds in which the work can be done, with both resources perfectly overlapped.

        Args:
            online: what else the device does, in seconds of either resource a second; inf where that is
                all that it can do.
        """
        beside, times = online or Work(), []
        for compute, memory in self.cost.overlap.weights:
            left = 1.0 - compute * beside.compute_s - memory * beside.memory_s
            needed = compute * work.compute_s + memory * work.memory_s
            times.append(needed / left if left > 0.0 else float("inf"))
        return max(times)

    def least_of_steps_s(self, work: Work, num_rows: int, num_steps: int) -> float:
        """As ``least_s``, in no fewer than ``num_steps`` steps: a request yields one token a step.

        Every step reads the weights. So where there are fewer rows than so many steps of the cheapest size
        have, steps are smaller and their rows cost more. It is a lower bound: what a step takes of both
        resources, weighted, is at least the convex hull of that over step sizes, and its mean over the
        steps is at least the hull at their mean size.

        Args:
            work: with its rows at ``row_s``.
            num_rows: tokens computed.
        """
        times = []
        for compute, memory in self.cost.overlap.weights:
            rows_s = self._least_rows_s(num_rows, num_steps, compute, memory)
            rest_s = compute * (work.compute_s - self.row_s * num_rows) + memory * work.memory_s
            times.append(rows_s + rest_s)
        return max(times)

    def _least_rows_s(self, num_rows: int, num_steps: int, compute: float, memory: float) -> float:
        """Least weighted seconds of all rows in at least so many steps, each of at least a row."""
        knots = [size for size in self.cost.rows_s.x if 1 < size < _MAX_STEP_TOKENS]
        sizes = np.array([1.0, *knots, float(_MAX_STEP_TOKENS)])
        loads = [self.cost.resources_s(StepLoad(num_tokens=int(size))) for size in sizes]
        weighted = np.array([compute * compute_s + memory * memory_s for compute_s, memory_s in loads])
        least = float((weighted / sizes).min())
        mean_size = num_rows / num_steps
        if mean_size >= sizes[int(np.argmin(weighted / sizes))]:
            return num_rows * least
        # The hull at the mean size is the least of the chords across it.
        x0, y0 = sizes[sizes <= mean_size][:, None], weighted[sizes <= mean_size][:, None]
        x1, y1 = sizes[sizes > mean_size][None, :], weighted[sizes > mean_size][None, :]
        chords = y0 + (mean_size - x0) * (y1 - y0) / (x1 - x0)
        return num_steps * float(chords.min())

    def prompt_s(self, own: Floats, shared: Floats) -> Floats:
        """Seconds of compute of prompts of which ``own`` tokens come after ``shared`` cached ones."""
        cost = self.cost
        return np.asarray(
            self.row_s * own
            + cost.prefill_pair_s * (own * shared + own * (own + 1) / 2)
            + cost.prefill_context_s * shared
        )

    def decode(self, prompt: float, output: float) -> Work:
        """Of so many output tokens after a prompt, whose last row yields the first of them."""
        if output < 1:
            return Work()
        steps = output - 1
        return Work(
            self.row_s * steps + self.sampled_row_s * output,
            self.cost.decode_context_s * (steps * prompt + steps * (steps - 1) / 2),
        )

    def of_requests(self, requests: Iterable[Lengths]) -> Work:
        """Of requests without common prefixes."""
        total = Work()
        for prompt, output in requests:
            prefill_s = float(self.prompt_s(np.array(float(prompt)), np.array(0.0)))
            total = total.plus(Work(prefill_s)).plus(self.decode(prompt, output))
        return total


class PoolWork:
    """What the requests of a pool take, by their number.

    A prefix is computed once. That is charged in equal parts to the requests that have it.

    Attributes:
        num_rows: tokens computed.
    """

    def __init__(self, parts: Sequence[SourceRequests], model: WorkModel) -> None:
        self._model = model
        self._prompts = np.concatenate([part.prompt_tokens for part in parts]).tolist()
        self._outputs = np.concatenate([part.output_tokens for part in parts]).tolist()
        prefill = []
        for part in parts:
            own, prefix = part.own_tokens.astype(np.float64), float(part.prefix_tokens)
            after_prefix = model.prompt_s(own, np.full(len(part), prefix))
            with_prefix = model.prompt_s(own + prefix, np.zeros(len(part)))
            is_first = part.shared_tokens < part.prefix_tokens
            extra = np.bincount(part.prefixes[is_first], (with_prefix - after_prefix)[is_first])
            prefill.append(after_prefix + extra[part.prefixes] / np.bincount(part.prefixes)[part.prefixes])
        self._prefill_s = np.concatenate(prefill).tolist()
        self.num_rows = sum(
            int((part.prompt_tokens - part.shared_tokens + part.output_tokens - 1).sum()) for part in parts
        )

    def of(self, number: int, num_output_tokens: int) -> Work:
        """Of a request that has generated so many tokens; nothing before the first."""
        if num_output_tokens < 1:
            return Work()
        decode = self._model.decode(self._prompts[number], num_output_tokens)
        return Work(self._prefill_s[number]).plus(decode)

    @property
    def total(self) -> Work:
        found = [self.of(number, output) for number, output in enumerate(self._outputs)]
        return Work(sum(each.compute_s for each in found), sum(each.memory_s for each in found))
