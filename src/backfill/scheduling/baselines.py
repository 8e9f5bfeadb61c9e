"""Policies without objectives, to compare with: what engines do today."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from backfill.core.request import PriorityLevel, Request
from backfill.scheduling.policy import Policy, PreemptionKey, StepBudget, StepView

_ONLINE = StepBudget(levels=frozenset({PriorityLevel.ONLINE}))
_OFFLINE = StepBudget(levels=frozenset({PriorityLevel.PROMOTED, PriorityLevel.OFFLINE}))
_ALL = StepBudget(levels=frozenset(PriorityLevel))


class OnlineOnlyPolicy(Policy):
    """Offline requests are never served: a lower bound on online latency."""

    def next_budgets(self, view: StepView) -> Sequence[StepBudget]:
        return (_ONLINE,)


class FcfsPolicy(Policy):
    """One queue for both classes, in order of arrival: vLLM's default."""

    def next_budgets(self, view: StepView) -> Sequence[StepBudget]:
        return (_ALL,)

    def preemption_key(self, request: Request, lost_tokens: float) -> PreemptionKey:
        return request.order_key


class PriorityPolicy(Policy):
    """Online first, always, and no time limit: ConServe's vLLM++ (section 6.1).

    A waiting online request does not preempt a running offline one; that is vLLM's rule too.
    """

    def next_budgets(self, view: StepView) -> Sequence[StepBudget]:
        return (_ONLINE, _OFFLINE)


class RoundRobinPolicy(Policy):
    """Steps of online requests alternate with steps of offline ones (BROS, section 2.2)."""

    def __init__(self) -> None:
        self._offline_first = True

    def next_budgets(self, view: StepView) -> Sequence[StepBudget]:
        self._offline_first = not self._offline_first
        first, second = (_OFFLINE, _ONLINE) if self._offline_first else (_ONLINE, _OFFLINE)
        return (first, replace(second, only_if_empty=True))
