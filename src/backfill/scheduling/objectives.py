"""Objectives of a server, and the least that a request can be promised."""

from __future__ import annotations

import math

from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel

DEFAULT_SLO = SLO(ttft_s=1.0, tpot_s=0.15)
# A default objective is widened to this multiple of what one request alone needs.
_DEFAULT_HEADROOM = 4.0


def achievable_slo(cost: CostModel, config: SchedulerConfig, num_prompt_tokens: int = 1) -> SLO:
    """The least objectives that one request alone, with nothing beside it, can meet."""
    chunk_tokens = min(config.max_num_batched_tokens, config.max_prefill_chunk_tokens)
    return SLO(
        ttft_s=cost.prefill_time_s(num_prompt_tokens, chunk_tokens),
        tpot_s=cost.step_time_s(StepLoad.of([(num_prompt_tokens, 1, True)])),
    )


def server_slo(config: SchedulerConfig, cost: CostModel | None) -> SLO:
    """Objectives of online requests that bring none: the configured ones, else defaults.

    Args:
        cost: widens defaults that one request alone would hardly meet; None leaves them.
    Raises: ConfigError for a configured objective that one request alone cannot meet.
    """
    least = SLO(0.0, 0.0) if cost is None else achievable_slo(cost, config)
    return SLO(
        ttft_s=_objective("--ttft-slo", config.ttft_slo_s, DEFAULT_SLO.ttft_s, least.ttft_s),
        tpot_s=_objective("--tpot-slo", config.tpot_slo_s, DEFAULT_SLO.tpot_s, least.tpot_s),
    )


def _objective(option: str, asked_s: float | None, default_s: float, least_s: float) -> float:
    if asked_s is None:
        return max(default_s, _DEFAULT_HEADROOM * least_s)
    if asked_s < least_s:
        raise ConfigError(
            f"{option} {asked_s:g}: one request alone needs {math.ceil(1000 * least_s) / 1000:g} s on this "
            "device; give at least that."
        )
    return asked_s
