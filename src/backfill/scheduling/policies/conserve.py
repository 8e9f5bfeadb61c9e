"""ConServe's own policy, to be read beside the paper: algorithm 1 (sections 4.2 and 4.5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from backfill.core.request import PriorityLevel, RequestId
from backfill.core.slo import SLO
from backfill.scheduling.policy import (
    BatchBuilder,
    ChunkLimits,
    Policy,
    R,
    RequestView,
    Snapshot,
    admit,
    serve,
    split,
)
from backfill.scheduling.prediction import StepPredictor, decode_load

_ONLINE = frozenset({PriorityLevel.ONLINE})
_OFFLINE = frozenset({PriorityLevel.OFFLINE})
# Part of an objective kept for what the profile does not include. The paper names none.
MARGIN = 0.1


class ConServePolicy(Policy):
    """Algorithm 1: a budget for each step, online requests within it, offline ones in what they leave.

    The budget is the number of tokens that the profile gives for the objective: TPOT for a step with online
    decodes, TTFT otherwise (section 4.5). It is expressed as the step's predicted time, which is the same
    question. Of objectives that requests bring, the tightest counts. Unlike the policy ``slo`` it asks for
    the objective and not for what is left of it, and does not learn how far predictions are off.

    Lines of the algorithm, as the text describes them, are named beside the code. Algorithm 2, which stops a
    running step, is the engine's (``scheduling/arrival.py``).

    Args:
        default_slo: of online requests that bring none.
    """

    stops_steps = True
    stops_online_steps = False

    def __init__(self, predictor: StepPredictor, *, default_slo: SLO) -> None:
        self._predictor = predictor
        self._default_slo = default_slo

    def set_default_slo(self, slo: SLO) -> None:
        self._default_slo = slo

    def build(self, view: Snapshot[R], builder: BatchBuilder[R]) -> None:
        if not _online(view) and not view.waiting[PriorityLevel.ONLINE]:
            serve(view, builder, _OFFLINE)  # lines 20 to 22: the largest batch that fits
            return
        limits = ChunkLimits(max_step_s=self._budget_s(view))  # line 10
        # Lines 11 to 15. Offline tokens are excluded from the budget: none is in the step yet.
        decodes, prefills = split(view.running[PriorityLevel.ONLINE])
        builder.add_decodes(decodes)
        for request in prefills:
            builder.try_add(request, limits)
        admit(builder, view.waiting[PriorityLevel.ONLINE], limits, may_preempt=_OFFLINE)
        self._keep_running(view.running[PriorityLevel.OFFLINE], builder, limits)
        if not builder.batch.has_preempted:  # lines 17 to 19
            admit(builder, view.waiting[PriorityLevel.OFFLINE], limits)

    def resume_s(self, view: Snapshot[RequestView]) -> float:
        """What the TPOT objectives leave until the next decodes must run; 0 while there is an online prompt.

        The paper discards what it stops, which is ``preemption`` discard.
        """
        online = _online(view)
        if not online and not view.waiting[PriorityLevel.ONLINE]:
            return math.inf
        if view.waiting[PriorityLevel.ONLINE] or not all(each.is_decoding for each in online):
            return 0.0
        slack_s = min(each.next_token_by_s for each in online) - view.now_s
        return max(0.0, slack_s * (1.0 - MARGIN) - self._predictor.cost.step_time_s(decode_load(online)))

    def step_limit_s(self, view: Snapshot[RequestView], num_tokens: Mapping[RequestId, int]) -> float:
        """The objective that bounds the step bounds its copies too (section 4.5, last paragraph)."""
        has_online = _online(view) or view.waiting[PriorityLevel.ONLINE]
        return (1.0 - MARGIN) * self._objective_s(view) if has_online else math.inf

    def _keep_running(self, running: Sequence[R], builder: BatchBuilder[R], limits: ChunkLimits) -> None:
        """Lines 16 and 27 to 34: offline requests that run stay in the step, or are preempted, latest first.

        A prompt is cut to what is left, so it is preempted only where nothing is left.
        """
        decodes, prefills = split(running)
        num_kept, batch = builder.add_decodes(decodes, limits.max_step_s), builder.batch
        for request in reversed(decodes[num_kept:]):
            builder.preempt(request)
        for request in prefills:
            is_full = batch.predicted_s >= limits.max_step_s or not batch.has_headroom
            if not builder.try_add(request, limits) and is_full and batch.num_seqs:
                builder.preempt(request)

    def _budget_s(self, view: Snapshot[RequestView]) -> float:
        return self._objective_s(view) * (1.0 - MARGIN)

    def _objective_s(self, view: Snapshot[RequestView]) -> float:
        """The tightest TPOT objective of online requests that decode; without any, the tightest TTFT."""
        running = [*view.running[PriorityLevel.ONLINE], *view.in_other_steps.get(PriorityLevel.ONLINE, ())]
        slos = [each.slo or self._default_slo for each in running if each.is_decoding]
        if slos:
            return min(slo.tpot_s for slo in slos)
        prompts = (*_online(view), *view.waiting[PriorityLevel.ONLINE])
        return min((each.slo or self._default_slo).ttft_s for each in prompts)


def _online(view: Snapshot[RequestView]) -> Sequence[RequestView]:
    """Online requests that hold blocks, and those in other steps."""
    online = PriorityLevel.ONLINE
    return [*view.holders(online), *view.in_other_steps.get(online, ())]
