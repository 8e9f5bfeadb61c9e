"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.core.slo import SLO
from backfill.scheduling.policies.baselines import (
    FcfsPolicy,
    OnlineOnlyPolicy,
    PriorityPolicy,
    RoundRobinPolicy,
)
from backfill.scheduling.policies.bros import BrosPolicy
from backfill.scheduling.policies.conserve import ConServePolicy
from backfill.scheduling.policies.slo import SloPolicy
from backfill.scheduling.policy import Policy
from backfill.scheduling.prediction import StepPredictor

PolicyFactory = Callable[[SchedulerConfig, StepPredictor | None], Policy]
"""Makes a policy for a configuration; the predictor is None without a cost profile."""

_BASELINES: dict[str, type[Policy]] = {
    "online-only": OnlineOnlyPolicy,
    "fcfs": FcfsPolicy,
    "priority": PriorityPolicy,
    "round-robin": RoundRobinPolicy,
}


def create_policy(
    config: SchedulerConfig, predictor: StepPredictor | None, *, default_slo: SLO, can_stop: bool
) -> Policy:
    """The policy of ``config.policy``.

    Args:
        predictor: predicts steps; None without a cost profile.
        default_slo: the server's objectives.
        can_stop: the executor can stop offline slices at safepoints.
    Raises: ConfigError if the policy needs a cost profile and there is none.
    """
    if not config.needs_cost_model:
        return _BASELINES[config.policy]()
    if predictor is None:
        raise ConfigError(
            f"`policy` {config.policy} needs a cost profile of the model: run `backfill profile`."
        )
    if config.policy == "conserve":
        return ConServePolicy(predictor, default_slo=default_slo)
    if config.policy == "bros":
        chunk_tokens = config.max_chunk_tokens
        return BrosPolicy(
            predictor,
            max_num_seqs=config.max_num_seqs,
            max_chunk_tokens=chunk_tokens,
        )
    return SloPolicy(
        predictor,
        default_slo=default_slo,
        max_step_tokens=config.max_num_batched_tokens,
        can_stop=can_stop and config.safepoints,
        victims=config.victims,
    )
