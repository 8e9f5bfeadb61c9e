"""Two classes under latency objectives (ConServe, sections 4.2 and 4.5)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from backfill.core.config import VictimOrder
from backfill.core.request import PriorityLevel
from backfill.core.slo import SLO
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.scheduling.fill import serve
from backfill.scheduling.policy import (
    MIN_PREFILL_CHUNK_TOKENS,
    BatchBuilder,
    ChunkLimits,
    Policy,
    PreemptionKey,
    R,
    RequestView,
    Snapshot,
)
from backfill.scheduling.prediction import StepPredictor

# Offline work is limited once online requests leave less than 1 / this of the pool free.
_HEADROOM_FACTOR = 1.5
_ONLINE, _PROMOTED, _OFFLINE = (
    frozenset({PriorityLevel.ONLINE}),
    frozenset({PriorityLevel.PROMOTED}),
    frozenset({PriorityLevel.OFFLINE}),
)
_BELOW_ONLINE = frozenset(PriorityLevel) - _ONLINE


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
        reserve_decay_s: time constant with which the peak of the online requests' blocks decays.
        victims: within one priority level, the request that loses least work is preempted first
            (``least-lost``), or the latest.
    """

    default_slo: SLO
    margin: float = 0.1
    step_efficiency: float = 0.8
    unsafe_ttft_share: float = 0.25
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
    promotes = True

    def __init__(
        self, config: SloPolicyConfig, predictor: StepPredictor, *, max_step_tokens: int, can_stop: bool
    ) -> None:
        self.config = config
        self._predictor = predictor
        self._max_step_tokens = max_step_tokens
        self._can_stop = can_stop
        self._sizes: tuple[CostModel, Sequence[int]] | None = None
        self._peak_blocks = 0.0
        self._peak_at_s: float | None = None

    def build(self, view: Snapshot[R], batch: BatchBuilder[R]) -> None:
        online = _online(view)
        reserved = self._reserve(view)
        if not online and not view.waiting[PriorityLevel.ONLINE]:
            self._build_offline_batch(view, batch, reserved)
            return
        tightest, slack = self._tpot(online, view.now_s)
        usable = (1.0 - self.config.margin) / self._predictor.correction.upper
        # Offline work makes steps longer, so online requests hold their blocks longer. It gets less time as
        # they fill the pool. The shape was found by simulation (docs/coserving.md).
        free_share = 1.0 - view.online_blocks / view.num_blocks
        headroom = min(1.0, _HEADROOM_FACTOR * free_share) ** 2
        bound = min(tightest * headroom, slack, self._ttft_slack(online, view.now_s)) * usable
        is_overloaded = self._misses_first_tokens(view, online, tightest * usable)
        if view.suspended_s:
            bound = 0.0  # the suspended slices resume first
        serve(
            view,
            batch,
            _ONLINE,
            ChunkLimits(
                max_step_s=math.inf if is_overloaded else min(tightest, slack) * usable,
                guarantees_progress=True,
            ),
            may_preempt=_BELOW_ONLINE,
        )
        promoted_s = min(tightest, self.config.default_slo.tpot_s) * usable
        serve(
            view,
            batch,
            _PROMOTED,
            ChunkLimits(max_step_s=promoted_s, step_sizes=self._step_sizes),
            may_preempt=_OFFLINE,
        )
        if not batch.num_prefill_tokens:
            limits = ChunkLimits(max_step_s=bound, step_sizes=self._step_sizes)
            serve(view, batch, _OFFLINE, limits, reserved_blocks=reserved)

    def resume_s(self, view: Snapshot[RequestView]) -> float:
        """Slack of the online decodes less the time of their own step; 0 while there is an online prompt."""
        online = _online(view)
        if view.waiting[PriorityLevel.ONLINE] or any(request.last_token_at_s is None for request in online):
            return 0.0
        if not online:
            return math.inf
        _, slack = self._tpot(online, view.now_s)
        decode = StepLoad.of((request.num_computed_tokens, 1, True) for request in online)
        usable_s = slack * (1.0 - self.config.margin) / self._predictor.correction.upper
        return max(0.0, usable_s - self._predictor.cost.step_time_s(decode))

    def preemption_key(self, request: RequestView, lost_tokens: float) -> PreemptionKey:
        """Offline requests first: by least lost work, then by least to restore. Then online, latest first."""
        level = request.priority_level
        if level is PriorityLevel.ONLINE or self.config.victims == "latest":
            return (level.value, *request.order_key)
        return (level.value, -lost_tokens, -request.num_computed_tokens, *request.order_key)

    def copy_s(self, view: Snapshot[RequestView]) -> float:
        """As long as one step may take: the tightest TPOT objective (section 4.5)."""
        tightest, _ = self._tpot(_online(view), view.now_s)
        return min(tightest, self.config.default_slo.tpot_s)

    @property
    def _step_sizes(self) -> Sequence[int]:
        cost = self._predictor.cost
        if self._sizes is None or self._sizes[0] is not cost:
            sizes = cost.efficient_step_sizes(self.config.step_efficiency, self._max_step_tokens)
            self._sizes = cost, sizes
        return self._sizes[1]

    def _build_offline_batch(self, view: Snapshot[R], batch: BatchBuilder[R], reserved: int) -> None:
        limits = ChunkLimits()
        if not self._can_stop:
            ttft_s = self.config.default_slo.ttft_s
            upper = self._predictor.correction.upper
            limits = ChunkLimits(max_step_s=ttft_s * self.config.unsafe_ttft_share / upper)
        serve(view, batch, _PROMOTED, limits, may_preempt=_OFFLINE)
        serve(view, batch, _OFFLINE, limits, reserved_blocks=reserved)

    def _tpot(self, online: Sequence[RequestView], now_s: float) -> tuple[float, float]:
        """The tightest TPOT objective and the least slack of the online decodes; inf without any."""
        tightest = slack = math.inf
        for request in online:
            if request.last_token_at_s is not None:
                assert request.slo is not None
                tightest = min(tightest, request.slo.tpot_s)
                slack = min(slack, request.next_token_by_s - now_s)
        return tightest, slack

    def _misses_first_tokens(self, view: Snapshot[R], online: Sequence[R], limit_s: float) -> bool:
        """Whether a prompt would miss its TTFT objective if no step took longer than ``limit_s``.

        The estimate computes prompts one after another, each step beside the present decodes. A prompt that
        would be late even alone does not count: longer gaps of other requests cannot save it. A prompt that
        is late because it waited does count: in overload all prompts are late, and waiting makes it worse.
        """
        prefilling = [each for each in online if not each.is_decoding]
        waiting = view.waiting[PriorityLevel.ONLINE]
        if limit_s == math.inf or not (prefilling or waiting):
            return False
        cost, upper = self._predictor.cost, self._predictor.correction.upper
        load = StepLoad.of((each.num_computed_tokens, 1, True) for each in online if each.is_decoding)
        chunk = max(MIN_PREFILL_CHUNK_TOKENS, cost.max_tokens(load, 0, self._max_step_tokens, limit_s))
        token_s = upper * cost.time_with_s(load, 0, chunk, False) / chunk
        first_token_at_s = view.now_s
        for request in itertools.chain(prefilling, waiting):
            first_token_at_s += request.num_pending_tokens * token_s
            is_prompt = request.last_token_at_s is None
            if is_prompt and first_token_at_s > request.next_token_by_s and self._is_feasible(request):
                return True
        return False

    def _is_feasible(self, request: RequestView) -> bool:
        """Whether the request alone would meet its TTFT objective."""
        assert request.slo is not None
        alone_s = self._predictor.cost.prefill_time_s(request.num_prompt_tokens, self._max_step_tokens)
        return self._predictor.correction.mean * alone_s <= request.slo.ttft_s

    def _ttft_slack(self, online: Sequence[RequestView], now_s: float) -> float:
        """Least slack of the first tokens that can still be in time."""
        slacks = (request.next_token_by_s - now_s for request in online if request.last_token_at_s is None)
        return min((slack for slack in slacks if slack > 0), default=math.inf)

    def _reserve(self, view: Snapshot[R]) -> int:
        """Blocks to keep free for online requests: their decaying peak, less those that they hold now.

        Blocks that can be reclaimed count as free.
        """
        elapsed_s = 0.0 if self._peak_at_s is None else view.now_s - self._peak_at_s
        self._peak_at_s = view.now_s
        decayed = self._peak_blocks * math.exp(-elapsed_s / self.config.reserve_decay_s)
        self._peak_blocks = max(decayed, float(view.online_blocks))
        wanted = min(int(self._peak_blocks) - view.online_blocks, view.num_blocks // 2)
        return max(0, wanted - view.reclaimable_blocks)


def _online(view: Snapshot[R]) -> Sequence[R]:
    """Online requests that run or are being restored: they wait for their next token."""
    restoring = [each for each in view.restoring if each.priority_level is PriorityLevel.ONLINE]
    return [*view.running[PriorityLevel.ONLINE], *restoring]
