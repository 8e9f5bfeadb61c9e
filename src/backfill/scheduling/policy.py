"""The interface of policies: what they see before a step, and what they decide."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from backfill.core.request import PriorityLevel, Request
from backfill.costs.model import CostModel

PreemptionKey: TypeAlias = tuple[float, ...]

# The smallest prefill chunk that is scheduled in a step that is over its time.
MIN_PREFILL_CHUNK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """Which requests a step may take, and under which limits.

    The scheduler fills a step budget by budget: running requests first, decodes before prefills.

    Attributes:
        levels: priority levels of the requests.
        max_step_s: limit of the predicted time of the whole step once a slice of this budget is added. The
            first slice of a step is exempt.
        mixes_with_prefill: False: skip this budget if an earlier one put a prefill into the step.
        step_sizes: tokens, ascending. Prefills of this budget fill the step up to the first size that leaves
            at least half of the smallest size to them. Empty: up to the step's limit.
        guarantees_progress: decodes are scheduled even past ``max_step_s``, and one prefill gets
            ``MIN_PREFILL_CHUNK_TOKENS``.
        may_preempt: waiting requests may preempt running requests of later budgets.
        reserved_blocks: free blocks that must be left after a waiting request is scheduled.
        only_if_empty: skip this budget if the step has a slice.
    """

    levels: frozenset[PriorityLevel]
    max_step_s: float = math.inf
    mixes_with_prefill: bool = True
    step_sizes: Sequence[int] = ()
    guarantees_progress: bool = False
    may_preempt: bool = False
    reserved_blocks: int = 0
    only_if_empty: bool = False


@dataclass(frozen=True, slots=True)
class StepView:
    """What a policy sees before a step. It holds live requests; a policy reads them and changes nothing.

    Attributes:
        online: online requests that run or are being restored: they wait for their next token.
        waiting: requests without device blocks, by priority level, the most urgent first.
        num_blocks: blocks in the device's pool.
        online_blocks: device blocks of running and restoring online requests.
        suspended_s: predicted seconds that the suspended slices still need; 0 without any.
        reclaimable_blocks: blocks that an online request can have at once though they are not empty:
            checkpointed ones of offline requests, and those that are protected from offline requests.
    """

    now_s: float
    online: Sequence[Request]
    waiting: Mapping[PriorityLevel, Sequence[Request]]
    num_blocks: int
    online_blocks: int
    suspended_s: float = 0.0
    reclaimable_blocks: int = 0


class Policy(ABC):
    """Chooses each step's budgets, and which request is preempted when blocks run out.

    The defaults are those of a policy without objectives: the clock and the cost model play no part.
    """

    stops_steps = False  # an arriving online request may stop a running step
    protects_online_cache = False  # offline requests may not evict what online ones used a short time ago

    @property
    def time_scale(self) -> float:
        """Observed over predicted step time, averaged over recent steps."""
        return 1.0

    @abstractmethod
    def next_budgets(self, view: StepView) -> Sequence[StepBudget]:
        """Budgets of the next step, in the order in which they are filled.

        Called at most once a step; a policy may update its own state here.
        """

    def resume_s(self, view: StepView) -> float:
        """Seconds for which suspended slices may run now; 0: not now, inf: to their end.

        Called only where slices are suspended, before ``next_budgets``. If they resume, ``next_budgets`` is
        not called for this step.
        """
        return math.inf

    def preemption_key(self, request: Request, lost_tokens: float) -> PreemptionKey:
        """The request with the greatest key is preempted first; by default the least urgent.

        ``lost_tokens`` would be recomputed. A token of a suspended slice counts by the share of the layers
        that it has passed.
        """
        return (request.priority_level is not PriorityLevel.ONLINE, *request.order_key)

    def copy_s(self, view: StepView) -> float:
        """Seconds of copying between device and host that may be in flight at any time."""
        return 0.1  # about one step

    def ttft_deadline_at_s(self, request: Request) -> float:
        """Deadline of an online request's first token; inf without an objective."""
        return math.inf

    def promote_at_s(self, request: Request) -> float:
        """When an offline request becomes ``PROMOTED``; inf for never."""
        return math.inf

    def observe(self, predicted_s: float, observed_s: float) -> None:  # noqa: B027
        """Learn from a step's predicted and observed time."""

    def set_cost_model(self, cost: CostModel) -> None:  # noqa: B027
        """Predict with this model from now on, and forget the errors of the previous one."""
