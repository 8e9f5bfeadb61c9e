"""The dual scanner: which end of the order the next request comes from.

Source: BlendServe (section 3.4). docs/blending.md derives that the rule here meets its two equations.
"""

from __future__ import annotations

import math

from backfill.blending.resources import Cost, Expected, Floats, Ints, Work
from backfill.blending.waiting import Waiting


class Blend:
    """What the requests in flight use of each resource in a step, by expectation.

    A request that generates d tokens runs for d steps. Over these it uses Comp / d and Mem / d a step in
    the mean, and Mem / d is its mean KV footprint times the time to read a token.
    """

    def __init__(self) -> None:
        self._per_step = Work()
        self.num_requests = 0

    def add(self, expected: Expected) -> None:
        self.num_requests += 1
        self._per_step.add(*_per_step(expected))

    def remove(self, expected: Expected) -> None:
        self.num_requests -= 1
        self._per_step.remove(*_per_step(expected))
        if self.num_requests == 0:
            self._per_step = Work()  # no rounding errors pile up

    def needs_compute(self, target_density: float) -> bool:
        """Whether the next request should be a compute-bound one, to come nearer to the density."""
        return self._per_step.compute_s <= target_density * self._per_step.memory_s


def _per_step(expected: Expected) -> Cost:
    num_steps, cost = expected.output_tokens, expected.cost
    return Cost(cost.compute_s / num_steps, cost.memory_s / num_steps)


MOST_PASSED = 1024
"""Waiting prompts that a search for one of few output tokens passes over."""


class Cursor:
    """Prompts in an order, consumed from both ends. Those that no longer wait are passed over.

    Args:
        output_tokens: expected, of every prompt.
    """

    __slots__ = ("_keys", "_left", "_output_tokens", "_right", "_sequence", "_waiting")

    def __init__(self, sequence: Ints, keys: Floats, output_tokens: Floats, waiting: Waiting) -> None:
        self._sequence = sequence.tolist()
        self._keys = keys.tolist()
        self._output_tokens = output_tokens
        self._waiting = waiting
        self._left = 0
        self._right = len(self._sequence) - 1

    def first(self) -> tuple[float, int] | None:
        """Key and index of the leftmost waiting prompt."""
        while self._left <= self._right:
            index = self._sequence[self._left]
            if index in self._waiting:
                return self._keys[self._left], index
            self._left += 1
        return None

    def last(self, most_output_tokens: float = math.inf) -> tuple[float, int] | None:
        """Key and index of the rightmost waiting prompt, of those expected to generate no more.

        None also where the last ``MOST_PASSED`` waiting ones are expected to generate more.
        """
        while self._left <= self._right and self._sequence[self._right] not in self._waiting:
            self._right -= 1
        num_passed = num_gone = 0
        for at in range(self._right, self._left - 1, -1):
            index = self._sequence[at]
            if index not in self._waiting:
                num_gone += 1
            elif self._output_tokens[index] <= most_output_tokens:
                found = self._keys[at], index
                break
            elif (num_passed := num_passed + 1) == MOST_PASSED:
                found = None
                break
        else:
            found = None
        if num_gone > MOST_PASSED:
            self._leave_out_gone()
        return found

    def _leave_out_gone(self) -> None:
        """Those that left behind one that stays would be passed in every search."""
        kept = [at for at in range(self._left, self._right + 1) if self._sequence[at] in self._waiting]
        self._sequence = [self._sequence[at] for at in kept]
        self._keys = [self._keys[at] for at in kept]
        self._left, self._right = 0, len(kept) - 1
