"""Policies by name."""

from __future__ import annotations

import logging

from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.scheduling.baselines import FcfsPolicy, OnlineOnlyPolicy, PriorityPolicy, RoundRobinPolicy
from backfill.scheduling.policy import Policy
from backfill.scheduling.slo_policy import SloPolicy, SloPolicyConfig

logger = logging.getLogger(__name__)

DEFAULT_SLO = SLO(ttft_s=1.0, tpot_s=0.15)
# A default objective is widened to this multiple of what one request alone needs.
_DEFAULT_HEADROOM = 4.0


def create_policy(config: SchedulerConfig, cost: CostModel | None, *, can_abort: bool) -> Policy:
    """The policy of ``config.policy``.

    Args:
        cost: of the model on its device; only ``slo`` needs it.
        can_abort: the executor stops offline steps at safepoints.
    Raises: ConfigError when the objectives are below what one request alone needs.
    """
    if config.policy == "slo":
        if cost is None:
            raise ConfigError("--policy slo needs a cost profile of the model: run `backfill profile`.")
        return SloPolicy(
            SloPolicyConfig(
                default_slo=_default_slo(config.slo, cost), promote_before_s=config.promote_before_s
            ),
            cost,
            max_step_tokens=config.max_num_batched_tokens,
            can_abort=can_abort,
        )
    simple: dict[str, type[Policy]] = {
        policy.name: policy for policy in (OnlineOnlyPolicy, FcfsPolicy, PriorityPolicy, RoundRobinPolicy)
    }
    return simple[config.policy]()


def achievable_slo(cost: CostModel, num_prompt_tokens: int = 1) -> SLO:
    """The least objectives that one request alone, with nothing beside it, can meet."""
    prompt_s = cost.step_time_s(StepLoad.of([(0, num_prompt_tokens, True)]))
    return SLO(ttft_s=prompt_s, tpot_s=cost.step_time_s(StepLoad.of([(num_prompt_tokens, 1, True)])))


def _default_slo(asked: SLO | None, cost: CostModel) -> SLO:
    least = achievable_slo(cost)
    if asked is not None:
        for option, value, needed in (
            ("--ttft-slo", asked.ttft_s, least.ttft_s),
            ("--tpot-slo", asked.tpot_s, least.tpot_s),
        ):
            if value < needed:
                raise ConfigError(
                    f"{option} {value:g}: one request alone needs {needed:.3g} s on this device; give at least that."
                )
        return asked
    chosen = SLO(
        ttft_s=max(DEFAULT_SLO.ttft_s, _DEFAULT_HEADROOM * least.ttft_s),
        tpot_s=max(DEFAULT_SLO.tpot_s, _DEFAULT_HEADROOM * least.tpot_s),
    )
    logger.info(
        "objectives of online requests: first token within %.3g s, every next within %.3g s",
        chosen.ttft_s,
        chosen.tpot_s,
    )
    return chosen
