"""How many tokens requests will generate, from those of requests with similar prompts.

Source: BlendServe (section 3.2), with second moments: Mem grows with the square of the output length, so a
    mean length is not enough (docs/blending.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from backfill.blending.resources import Floats, Ints
from backfill.blending.tree import PrefixTree

PRIOR_OUTPUT_TOKENS = 256.0
"""Mean output length before any request has finished, about that of a chat answer; exponentially
distributed.
"""


class Moments(NamedTuple):
    """E[d] and E[d^2] of an output length d, of each prompt."""

    mean: Floats
    square: Floats


@dataclass(slots=True)
class OutputHistory:
    """Output lengths of all finished requests whose length was not known before."""

    count: int = 0
    total: float = 0.0
    total_square: float = 0.0

    def add(self, num_output_tokens: int) -> None:
        self.count += 1
        self.total += num_output_tokens
        self.total_square += num_output_tokens * num_output_tokens

    @property
    def moments(self) -> tuple[float, float]:
        """E[d] and E[d^2]; a prior without data."""
        if self.count == 0:
            return PRIOR_OUTPUT_TOKENS, 2 * PRIOR_OUTPUT_TOKENS**2
        return self.total / self.count, self.total_square / self.count


def output_moments(
    tree: PrefixTree, observed: Ints, known: Ints, limit: Ints, history: OutputHistory
) -> Moments:
    """Estimates of every prompt's output length.

    A known length is itself. Else it is distributed as those observed below the deepest node of the
    prompt's path with any. That is the subtree's own average, or that of its nearest siblings together.
    Without any it is as the history.

    Args:
        observed: output tokens of finished requests; 0 for the others and for those of known length.
        known: output tokens of requests of known length; 0 for the others.
        limit: most output tokens of each request.
    """
    count = tree.counts(observed > 0)
    lengths = observed.astype(np.float64)
    total, total_square = tree.sums(lengths), tree.sums(lengths * lengths)
    source = tree.nearest(count > 0)[tree.leaf_parent]
    prior_mean, prior_square = history.moments
    has_data = count[source] > 0
    num = np.maximum(count[source], 1)
    mean = np.where(has_data, total[source] / num, prior_mean)
    square = np.where(has_data, total_square[source] / num, prior_square)
    mean, square = _bounded(mean, square, limit.astype(np.float64))
    is_known = known > 0
    exact = known.astype(np.float64)
    return Moments(np.where(is_known, exact, mean), np.where(is_known, exact * exact, square))


def _bounded(mean: Floats, square: Floats, limit: Floats) -> Moments:
    """Moments that a length in [1, limit] can have, the nearest to the given ones."""
    mean = np.clip(mean, 1.0, limit)
    return Moments(mean, np.clip(square, mean * mean, mean * limit))


def choose_samples(is_unknown: Sequence[bool], share: float, phase: float) -> tuple[list[int], float]:
    """Every (1 / share)-th prompt of unknown length in sorted order, so that they spread over all subtrees.

    Args:
        phase: in [0, 1): how much of the way to the next sample lies behind.

    Returns: indices, and the phase that the next prompts begin with.
    """
    chosen: list[int] = []
    for index, unknown in enumerate(is_unknown):
        if not unknown:
            continue
        phase += share
        if phase >= 1.0:
            phase -= 1.0
            chosen.append(index)
    return chosen, phase
