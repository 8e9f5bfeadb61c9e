"""Policies by name."""

from __future__ import annotations

from backfill.core.config import SchedulerConfig
from backfill.core.errors import ConfigError
from backfill.costs.model import CostModel
from backfill.scheduling.baselines import FcfsPolicy, OnlineOnlyPolicy, PriorityPolicy, RoundRobinPolicy
from backfill.scheduling.objectives import server_slo
from backfill.scheduling.policy import Policy
from backfill.scheduling.slo_policy import SloPolicy, SloPolicyConfig

_BASELINES: dict[str, type[Policy]] = {
    "online-only": OnlineOnlyPolicy,
    "fcfs": FcfsPolicy,
    "priority": PriorityPolicy,
    "round-robin": RoundRobinPolicy,
}


def create_policy(config: SchedulerConfig, cost: CostModel | None, *, can_stop: bool) -> Policy:
    """The policy of ``config.policy``; with ``can_stop``, the executor can stop offline slices at safepoints.

    Raises: ConfigError if ``slo``, which needs a cost model, has none.
    """
    if config.policy == "slo":
        if cost is None:
            raise ConfigError("`policy` slo needs a cost profile of the model: run `backfill profile`.")
        return SloPolicy(
            SloPolicyConfig(
                default_slo=server_slo(config, cost),
                promote_before_s=config.promote_before,
                victims=config.victims,
            ),
            cost,
            max_step_tokens=config.max_num_batched_tokens,
            can_stop=can_stop and config.safepoints,
        )
    return _BASELINES[config.policy]()
