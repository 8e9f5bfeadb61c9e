"""The cost model: how long a step of a given load takes.

BROS (section 4.1) fits one linear model for the prefill requests of a batch and one for its decodes, and
adds the two. Both fits then include the time to read the weights, which a batch pays once. On every device
measured here the time of a matrix product is not linear in its rows: it is flat while the bytes of the
weights bound it, then linear. So row-wise work is one monotone piecewise-linear function of the step's
tokens. Attention differs between the phases and has a linear term for each (docs/coserving.md).
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import msgspec

from backfill.costs.load import StepLoad

NonNegative = Annotated[float, msgspec.Meta(ge=0.0, le=sys.float_info.max)]
"""A finite number of at least 0, checked where a profile is read."""


@dataclass(frozen=True, slots=True)
class PiecewiseLinear:
    """A non-decreasing function through (x[i], y[i]): flat before ``x[0]``, linear after ``x[-1]``."""

    x: tuple[NonNegative, ...]
    y: tuple[NonNegative, ...]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.x) < 2:
            raise ValueError(f"needs two or more points, got {len(self.x)} x and {len(self.y)} y")
        if any(b <= a for a, b in zip(self.x, self.x[1:], strict=False)):
            raise ValueError(f"x must ascend, got {self.x}")
        if any(b < a for a, b in zip(self.y, self.y[1:], strict=False)) or self.y[0] < 0:
            raise ValueError(f"y must not be negative or descend, got {self.y}")

    def __call__(self, at: float) -> float:
        x, y = self.x, self.y
        if at <= x[0]:
            return y[0]
        i = bisect_right(x, at, 1, len(x) - 1)
        x0, y0 = x[i - 1], y[i - 1]
        return y0 + (at - x0) * (y[i] - y0) / (x[i] - x0)

    def scaled(self, factor: float) -> PiecewiseLinear:
        return PiecewiseLinear(self.x, tuple(factor * y for y in self.y))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step, as a sum over the terms of its ``StepLoad``.

    Attributes:
        rows_s: all row-wise work, reading the weights included, by the step's tokens.
        sampled_s: output projection and sampler, by the rows sampled; 0 at 0 rows.
        request_s: per request.
        prefill_pair_s: per (new token, attended token) pair of prefill slices.
        prefill_context_s: per cached token that prefill slices read.
        decode_context_s: per cached token that decode slices read.
    """

    rows_s: PiecewiseLinear
    sampled_s: PiecewiseLinear
    request_s: NonNegative
    prefill_pair_s: NonNegative
    prefill_context_s: NonNegative
    decode_context_s: NonNegative

    @property
    def terms(self) -> tuple[PiecewiseLinear, PiecewiseLinear, float, float, float, float]:
        """Its fields, for a model that has one more."""
        return (
            self.rows_s,
            self.sampled_s,
            self.request_s,
            self.prefill_pair_s,
            self.prefill_context_s,
            self.decode_context_s,
        )

    def step_time_s(self, load: StepLoad) -> float:
        """Predicted seconds; 0 for an empty step."""
        if load.num_tokens == 0:
            return 0.0
        return (
            self.rows_s(load.num_tokens)
            + (self.sampled_s(load.num_sampled) if load.num_sampled else 0.0)
            + self.request_s * load.num_requests
            + self.prefill_pair_s * load.prefill_pairs
            + self.prefill_context_s * load.prefill_context_tokens
            + self.decode_context_s * load.decode_context_tokens
        )

    def steps_time_s(self, load: StepLoad, step_tokens: int) -> float:
        """Seconds of a load in full steps of ``step_tokens``, with the rest of its tokens in one more."""
        num_full, num_rest = divmod(load.num_tokens, step_tokens)
        num_steps = num_full + (num_rest > 0)
        if num_steps == 0:
            return 0.0
        return (
            num_full * self.rows_s(step_tokens)
            + (self.rows_s(num_rest) if num_rest else 0.0)
            + num_steps * self.sampled_s(load.num_sampled / num_steps)
            + self.request_s * load.num_requests
            + self.prefill_pair_s * load.prefill_pairs
            + self.prefill_context_s * load.prefill_context_tokens
            + self.decode_context_s * load.decode_context_tokens
        )

    def slowed(self, factor: float) -> CostModel:
        """Of a device on which every step takes so many times as long."""
        return CostModel(
            self.rows_s.scaled(factor),
            self.sampled_s.scaled(factor),
            factor * self.request_s,
            factor * self.prefill_pair_s,
            factor * self.prefill_context_s,
            factor * self.decode_context_s,
        )

    def time_with_s(self, load: StepLoad, start: int, num_tokens: int, num_sampled: int) -> float:
        """Seconds of the step with one more slice; ``load`` is unchanged."""
        load.put(start, num_tokens, num_sampled)
        seconds = self.step_time_s(load)
        load.take(start, num_tokens, num_sampled)
        return seconds

    def max_tokens(
        self,
        load: StepLoad,
        start: int,
        num_pending: int,
        limit_s: float,
        at_most: int | None = None,
        num_sampled: Callable[[int], int] | None = None,
    ) -> int:
        """Most tokens that one request can add to a step of at most ``limit_s``; 0 when none fits.

        Args:
            start: cached tokens of the request.
            num_pending: tokens it has left to compute; the last one samples.
            at_most: a further bound on the tokens; default ``num_pending``.
            num_sampled: rows with logits among so many tokens; default that of the last pending one.
        """

        trial = StepLoad()

        def fits(num_tokens: int) -> bool:
            sampled = num_tokens == num_pending if num_sampled is None else num_sampled(num_tokens)
            trial.become(load, start, num_tokens, sampled)
            return self.step_time_s(trial) <= limit_s

        high = num_pending if at_most is None else min(at_most, num_pending)
        if high <= 0 or fits(high):
            return max(high, 0)
        low = 0  # fits or is 0; high does not fit
        while high - low > 1:
            # Rounded up: one token after cached ones is a decode and may cost more than two, so it is
            # tried only when two do not fit.
            middle = (low + high + 1) // 2
            if fits(middle):
                low = middle
            else:
                high = middle
        return low

    def prefill_time_s(
        self,
        num_tokens: int,
        chunk_tokens: int,
        counted_tokens: int | None = None,
        *,
        num_computed_tokens: int = 0,
    ) -> float:
        """Seconds to the first token of a prompt computed alone in chunks.

        Args:
            counted_tokens: of a chunk, at most so many count; default all.
            num_computed_tokens: of the prompt, those whose KV is there.
        """
        total, start = 0.0, num_computed_tokens
        while start < num_tokens:
            chunk = min(chunk_tokens, num_tokens - start)
            counted = chunk if counted_tokens is None else min(counted_tokens, chunk)
            total += self.step_time_s(StepLoad.of([(start, counted, start + chunk == num_tokens)]))
            start += chunk
        return total

    @lru_cache(maxsize=16)  # noqa: B019 - a process has a few models, and a policy asks in every step
    def efficient_step_sizes(self, fraction: float, at_most: int) -> tuple[int, ...]:
        """Step sizes in tokens, ascending, whose cost per token is at most ``1 / fraction`` times the least.

        Larger ones than the first gain at most ``1 - fraction`` of throughput, and every arrival waits longer
        for them. Candidates are the knots of ``rows_s`` and ``at_most``. On GPUs the knots are multiples of a
        matrix product's tile: one token more costs a whole tile.

        Sizes beyond all of these count too, for steps that hold as many decodes already: a model that was
        fitted beside other programs may take a few tokens for the best size, and larger steps correct it.
        """
        candidates = sorted({*(int(x) for x in self.rows_s.x if 1 <= x <= at_most), at_most})
        cost = {x: self.rows_s(x) / x for x in candidates}
        most = min(cost.values()) / fraction
        efficient = [x for x in candidates if cost[x] <= most]
        return tuple(x for x in candidates if x in efficient or x > efficient[-1])

    def efficient_prefill_s(self, decodes: StepLoad, fraction: float, at_most: int) -> float:
        """Seconds of the smallest step with prompts beside ``decodes`` at ``fraction`` of the best rate.

        Candidates are the knots of ``rows_s`` and ``at_most`` tokens. The decodes alone if they leave none.
        """
        sizes = sorted({*(int(x) for x in self.rows_s.x if decodes.num_tokens < x <= at_most), at_most})
        steps = [
            (num_tokens / seconds, seconds)
            for num_tokens in (size - decodes.num_tokens for size in sizes)
            if num_tokens > 0 and (seconds := self.time_with_s(decodes, 0, num_tokens, False)) > 0.0
        ]
        if not steps:
            return self.step_time_s(decodes)
        best = max(rate for rate, _ in steps)
        return next(seconds for rate, seconds in steps if rate >= fraction * best)
