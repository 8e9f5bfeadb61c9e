"""Policies without objectives, to compare with: what engines do today."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from backfill.core.request import PriorityLevel, Request
from backfill.costs.model import CostModel
from backfill.scheduling.policy import PreemptionKey, StepBudget, StepView

_ONLINE = StepBudget(levels=frozenset({PriorityLevel.ONLINE}))
_OFFLINE = StepBudget(levels=frozenset({PriorityLevel.PROMOTED, PriorityLevel.OFFLINE}))
_ALL = StepBudget(levels=frozenset(PriorityLevel))
_COPY_S = 0.1  # about one step


class _Baseline:
    """The least urgent request is preempted; the clock and the cost model play no part."""

    name: str
    stops_steps = False

    @property
    def time_scale(self) -> float:
        return 1.0

    def resume_s(self, view: StepView) -> float:
        return math.inf

    def preemption_key(self, request: Request, lost_tokens: float) -> PreemptionKey:
        return (request.priority_level is not PriorityLevel.ONLINE, *request.order_key)

    def copy_s(self, view: StepView) -> float:
        return _COPY_S

    def ttft_deadline_at_s(self, request: Request) -> float:
        return math.inf

    def promote_at_s(self, request: Request) -> float:
        return math.inf

    def observe(self, predicted_s: float, observed_s: float) -> None:
        pass

    def set_cost_model(self, cost: CostModel) -> None:
        pass


class OnlineOnlyPolicy(_Baseline):
    """Offline requests are never served: a lower bound on online latency."""

    name = "online-only"

    def next_budgets(self, view: StepView) -> Sequence[StepBudget]:
        return (_ONLINE,)


class FcfsPolicy(_Baseline):
    """One queue for both classes, in order of arrival: vLLM's default."""

    name = "fcfs"

    def next_budgets(self, view: StepView) -> Sequence[StepBudget]:
        return (_ALL,)

    def preemption_key(self, request: Request, lost_tokens: float) -> PreemptionKey:
        return request.order_key


class PriorityPolicy(_Baseline):
    """Online first, always, and no time limit: ConServe's vLLM++ (section 6.1).

    A waiting online request does not preempt a running offline one; that is vLLM's rule too.
    """

    name = "priority"

    def next_budgets(self, view: StepView) -> Sequence[StepBudget]:
        return (_ONLINE, _OFFLINE)


class RoundRobinPolicy(_Baseline):
    """Steps of online requests alternate with steps of offline ones (BROS, section 2.2)."""

    name = "round-robin"

    def __init__(self) -> None:
        self._offline_first = True

    def next_budgets(self, view: StepView) -> Sequence[StepBudget]:
        self._offline_first = not self._offline_first
        first, second = (_OFFLINE, _ONLINE) if self._offline_first else (_ONLINE, _OFFLINE)
        return (first, replace(second, only_if_empty=True))
