"""Results of BlendServe's runs that take no time."""

from __future__ import annotations

import numpy as np

from backfill.core.counters import ClassCounters
from experiments.blendserve.mix import MixSpec, draw_mix
from experiments.blendserve.pool import PoolResult


def invented(spec: MixSpec, order: str, interference: str, steps: str) -> PoolResult:
    """Of a run that did not take place: ``blend`` takes 1 / 1.25 of the others' time, and 0.9 is optimal."""
    mix = draw_mix(spec)
    seconds = 1000.0 / (1.25 if order == "blend" else 1.0)
    num_prompt_tokens = sum(int(part.prompt_tokens.sum()) for part in mix.parts.values())
    return PoolResult(
        drawn=mix.figures,
        num_requests={name: len(part) for name, part in mix.parts.items()},
        seconds=seconds,
        optimal_s=0.9 * 800.0,
        optimal_with_longest_s=0.95 * 800.0,
        num_tokens=2 * num_prompt_tokens,
        num_prompt_tokens=num_prompt_tokens,
        num_hit_tokens=300,
        num_sharable_tokens=400,
        num_steps=500,
        counters=ClassCounters(num_computed_tokens=1000, num_recomputed_tokens=10),
        compute_s=np.linspace(0.0, 0.1, 50),
        memory_s=np.linspace(0.1, 0.0, 50),
    )
