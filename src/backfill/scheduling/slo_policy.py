"""Two classes under latency objectives (ConServe, sections 4.2 and 4.5)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from backfill.core.config import VictimOrder
from backfill.core.request import PriorityLevel, Request
from backfill.core.slo import SLO
from backfill.costs.correction import BiasCorrection
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.scheduling.policy import (
    MIN_PREFILL_CHUNK_TOKENS,
    Policy,
    PreemptionKey,
    StepBudget,
    StepView,
)
from backfill.scheduling.queues import order_key

# Part of its completion window that a request may spend promoted.
_MAX_PROMOTED_SHARE = 0.5
# Offline work is limited once online requests leave less than 1 / this of the pool free.
_HEADROOM_FACTOR = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SloPolicyConfig:
    """
    Attributes:
        default_slo: of online requests that bring none.
        margin: part of an objective kept for what the cost model does not include: planning, sampling's
            tail, delivery to the client.
        step_efficiency: beside online requests, the steps of offline prompts are no larger than needed to
            bring the cost a token down to its minimum divided by this. Larger steps make arrivals wait and
            gain little.
        unsafe_ttft_share: part of the TTFT objective that a purely offline step may take where the executor
            cannot stop it.
        promote_before_s: an offline request is promoted this long before its completion window ends, or
            after half of the window if that is later.
        reserve_decay_s: time constant with which the peak of the online requests' blocks decays.
        victims: within one priority level, the request that loses least work is preempted first
            (``least-lost``), or the latest.
    """

    default_slo: SLO
    margin: float = 0.1
    step_efficiency: float = 0.8
    unsafe_ttft_share: float = 0.25
    promote_before_s: float = 3600.0
    reserve_decay_s: float = 60.0
    victims: VictimOrder = "least-lost"


class SloPolicy(Policy):
    """Online requests meet their objectives; offline work uses the time and blocks that they leave.

    A step's time is bounded by the least slack of its online decodes and by the tightest TPOT objective.
    Online requests are scheduled first and may preempt offline ones. The rest of the time goes to offline
    decodes, then to chunks of offline prompts, unless the step computes an online prompt. If such short steps
    would make prompts miss their TTFT objectives, the online part has no bound, as under ``fcfs``. Without
    online requests there is no bound: the largest batch that fits runs, and is stopped at a safepoint when
    an online request arrives.

    Where this differs from the paper, and why: docs/coserving.md. With ``can_stop``, the executor can stop
    offline slices at safepoints.
    """

    stops_steps = True
    protects_online_cache = True

    def __init__(
        self, config: SloPolicyConfig, cost: CostModel, *, max_step_tokens: int, can_stop: bool
    ) -> None:
        self.config = config
        self.correction = BiasCorrection()
        self._max_step_tokens = max_step_tokens
        self._can_stop = can_stop
        self.set_cost_model(cost)
        self._peak_blocks = 0.0
        self._peak_at_s: float | None = None

    @property
    def time_scale(self) -> float:
        return self.correction.mean

    def slo_of(self, request: Request) -> SLO:
        return request.slo or self.config.default_slo

    def next_budgets(self, view: StepView) -> Sequence[StepBudget]:
        reserved = self._reserve(view)
        online = view.online
        if not online and not view.waiting[PriorityLevel.ONLINE]:
            return self._offline_batching(reserved)
        tightest, slack = self._tpot(online, view.now_s)
        usable = (1.0 - self.config.margin) / self.correction.upper
        # Offline work makes steps longer, so online requests hold their blocks longer. It gets less time as
        # they fill the pool. The shape was found by simulation (docs/coserving.md).
        free_share = 1.0 - view.online_blocks / view.num_blocks
        headroom = min(1.0, _HEADROOM_FACTOR * free_share) ** 2
        bound = min(tightest * headroom, slack, self._ttft_slack(online, view.now_s)) * usable
        is_overloaded = self._misses_first_tokens(view, online, tightest * usable)
        if view.suspended_s:
            bound = 0.0  # the suspended slices resume first
        return (
            StepBudget(
                levels=frozenset({PriorityLevel.ONLINE}),
                max_step_s=math.inf if is_overloaded else min(tightest, slack) * usable,
                guarantees_progress=True,
                may_preempt=True,
            ),
            StepBudget(
                levels=frozenset({PriorityLevel.PROMOTED}),
                max_step_s=min(tightest, self.config.default_slo.tpot_s) * usable,
                step_sizes=self._step_sizes,
                may_preempt=True,
            ),
            StepBudget(
                levels=frozenset({PriorityLevel.OFFLINE}),
                max_step_s=bound,
                mixes_with_prefill=False,
                step_sizes=self._step_sizes,
                reserved_blocks=reserved,
            ),
        )

    def resume_s(self, view: StepView) -> float:
        """Slack of the online decodes less the time of their own step; 0 while there is an online prompt."""
        online = view.online
        if view.waiting[PriorityLevel.ONLINE] or any(request.last_token_at_s is None for request in online):
            return 0.0
        if not online:
            return math.inf
        _, slack = self._tpot(online, view.now_s)
        decode = StepLoad.of((request.num_computed_tokens, 1, True) for request in online)
        usable_s = slack * (1.0 - self.config.margin) / self.correction.upper
        return max(0.0, usable_s - self._cost.step_time_s(decode))

    def preemption_key(self, request: Request, lost_tokens: float) -> PreemptionKey:
        """Offline requests first: by least lost work, then by least to restore. Then online, latest first."""
        level = request.priority_level
        if level is PriorityLevel.ONLINE or self.config.victims == "latest":
            return (level.value, *request.order_key)
        return (level.value, -lost_tokens, -request.num_computed_tokens, *request.order_key)

    def copy_s(self, view: StepView) -> float:
        """As long as one step may take: the tightest TPOT objective (section 4.5)."""
        tightest, _ = self._tpot(view.online, view.now_s)
        return min(tightest, self.config.default_slo.tpot_s)

    def ttft_deadline_at_s(self, request: Request) -> float:
        return request.arrived_at_s + self.slo_of(request).ttft_s

    def promote_at_s(self, request: Request) -> float:
        if request.complete_by_s is None:
            return math.inf
        window_s = request.complete_by_s - request.arrived_at_s
        return request.complete_by_s - min(self.config.promote_before_s, _MAX_PROMOTED_SHARE * window_s)

    def observe(self, predicted_s: float, observed_s: float) -> None:
        self.correction.observe(predicted_s, observed_s)

    def set_cost_model(self, cost: CostModel) -> None:
        self._cost = cost
        self._step_sizes = cost.efficient_step_sizes(self.config.step_efficiency, self._max_step_tokens)
        self.correction.restart()

    def _offline_batching(self, reserved: int) -> Sequence[StepBudget]:
        limit = math.inf
        if not self._can_stop:
            limit = self.config.default_slo.ttft_s * self.config.unsafe_ttft_share / self.correction.upper
        return (
            StepBudget(levels=frozenset({PriorityLevel.PROMOTED}), max_step_s=limit, may_preempt=True),
            StepBudget(levels=frozenset({PriorityLevel.OFFLINE}), max_step_s=limit, reserved_blocks=reserved),
        )

    def _tpot(self, online: Sequence[Request], now_s: float) -> tuple[float, float]:
        """The tightest TPOT objective and the least slack of the online decodes; inf without any."""
        tightest = slack = math.inf
        for request in online:
            if request.last_token_at_s is not None:
                tpot_s = self.slo_of(request).tpot_s
                tightest = min(tightest, tpot_s)
                slack = min(slack, request.last_token_at_s + tpot_s - now_s)
        return tightest, slack

    def _misses_first_tokens(self, view: StepView, online: Sequence[Request], limit_s: float) -> bool:
        """Whether a prompt would miss its TTFT objective if no step took longer than ``limit_s``.

        The estimate computes prompts one after another, each step beside the present decodes. A prompt that
        would be late even alone does not count: longer gaps of other requests cannot save it. A prompt that
        is late because it waited does count: in overload all prompts are late, and waiting makes it worse.
        """
        prefilling = sorted((each for each in online if not each.is_decoding), key=order_key)
        waiting = view.waiting[PriorityLevel.ONLINE]
        if limit_s == math.inf or not (prefilling or waiting):
            return False
        load = StepLoad.of((each.num_computed_tokens, 1, True) for each in online if each.is_decoding)
        chunk = max(MIN_PREFILL_CHUNK_TOKENS, self._cost.max_tokens(load, 0, self._max_step_tokens, limit_s))
        token_s = self.correction.upper * self._cost.time_with_s(load, 0, chunk, False) / chunk
        first_token_at_s = view.now_s
        for request in itertools.chain(prefilling, waiting):
            first_token_at_s += request.num_pending_tokens * token_s
            is_prompt = request.last_token_at_s is None
            if (
                is_prompt
                and first_token_at_s > self.ttft_deadline_at_s(request)
                and self._is_feasible(request)
            ):
                return True
        return False

    def _is_feasible(self, request: Request) -> bool:
        """Whether the request alone would meet its TTFT objective."""
        alone_s = self._cost.prefill_time_s(request.num_prompt_tokens, self._max_step_tokens)
        return self.correction.mean * alone_s <= self.slo_of(request).ttft_s

    def _ttft_slack(self, online: Sequence[Request], now_s: float) -> float:
        """Least slack of the first tokens that can still be in time."""
        slacks = (
            self.ttft_deadline_at_s(request) - now_s for request in online if request.last_token_at_s is None
        )
        return min((slack for slack in slacks if slack > 0), default=math.inf)

    def _reserve(self, view: StepView) -> int:
        """Blocks to keep free for online requests: their decaying peak, less those that they hold now.

        Blocks that can be reclaimed count as free.
        """
        elapsed_s = 0.0 if self._peak_at_s is None else view.now_s - self._peak_at_s
        self._peak_at_s = view.now_s
        decayed = self._peak_blocks * math.exp(-elapsed_s / self.config.reserve_decay_s)
        self._peak_blocks = max(decayed, float(view.online_blocks))
        wanted = min(int(self._peak_blocks) - view.online_blocks, view.num_blocks // 2)
        return max(0, wanted - view.reclaimable_blocks)
