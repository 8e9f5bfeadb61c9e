"""The default: two classes under latency objectives, after ConServe (4.2, 4.5), BROS (4.2) and relegation."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import merge

from backfill.core.config import VictimOrder
from backfill.core.request import PriorityLevel, RequestId, order_key
from backfill.core.slo import SLO
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.scheduling.fill import admit, serve, split
from backfill.scheduling.objectives import least_tpot_slo
from backfill.scheduling.policy import (
    MIN_PREFILL_CHUNK_TOKENS,
    Admission,
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
# Part of what the decodes have banked that one step may take.
_BANK_SHARE = 0.5
# Time by which offline decodes may lengthen a step that computes an online prompt.
_BESIDE_PROMPTS = 0.2
# Prompts that are weighed against each other; those behind them wait.
_MAX_WEIGHED = 512
_ONLINE, _RELEGATED, _PROMOTED, _OFFLINE = (frozenset({level}) for level in PriorityLevel)
_BELOW_ONLINE = _RELEGATED | _PROMOTED | _OFFLINE
_BELOW_RELEGATED = _PROMOTED | _OFFLINE


@dataclass(frozen=True, slots=True, kw_only=True)
class SloPolicyConfig:
    """
    Attributes:
        default_slo: of online requests that bring none.
        step_efficiency: beside online requests, the steps of offline prompts are no larger than needed to
            bring the cost a token down to its minimum divided by this. Larger steps make arrivals wait and
            gain little.
        offline_efficiency: the same for steps without online requests. Their throughput has saturated at
            that size: larger ones would gain nothing that is worth the wait of an arrival.
        prompt_step_share: part of the TTFT objective that a step without online decodes may take, so that
            who arrives in it can still be in time.
        unsafe_ttft_share: part of the TTFT objective that a purely offline step may take where the executor
            cannot stop it.
        reserve_decay_s: time constant with which the peak of the online requests' blocks decays.
        victims: within one priority level, the request that loses least work is preempted first
            (``least-lost``), or the latest.
    """

    default_slo: SLO
    step_efficiency: float = 0.8
    offline_efficiency: float = 0.95
    prompt_step_share: float = 0.5
    unsafe_ttft_share: float = 0.25
    reserve_decay_s: float = 60.0
    victims: VictimOrder = "least-lost"


class SloPolicy(Policy):
    """Online requests meet their objectives; offline work uses the time and blocks that they leave.

    Every online request has a deadline for its next token. A step ends before the deadlines of the tokens
    that it computes. It holds all decodes of requests that are in time, then prompts by deadline, without
    those that others would make late: as many first tokens as possible are in time. Requests that cannot be
    in time any more are relegated (``LevelRule``) and get what is left, then offline work does, unless the
    step computes an online prompt.

    Without online requests steps are as large as throughput needs, and stop when an online request arrives.

    Each rule, and where the policy differs from the papers: docs/coserving.md. With ``can_stop``, the
    executor can stop offline slices at safepoints.
    """

    stops_steps = True
    protects_online_cache = True
    promotes = True
    relegates = True
    orders_by_deadline = True

    def __init__(
        self, config: SloPolicyConfig, predictor: StepPredictor, *, max_step_tokens: int, can_stop: bool
    ) -> None:
        self.config = config
        self._predictor = predictor
        self._max_step_tokens = max_step_tokens
        self._can_stop = can_stop
        self._sizes: dict[float, tuple[CostModel, Sequence[int]]] = {}  # by efficiency
        self._peak_blocks = 0.0
        self._peak_at_s: float | None = None

    def build(self, view: Snapshot[R], batch: BatchBuilder[R]) -> None:
        reserved = self._reserve(view)
        online = _online(view)
        if not online and not any(view.waiting[level] for level in _ONLINE | _RELEGATED):
            self._build_offline_batch(view, batch, reserved)
            return
        limit_s = self._serve_in_time(view, batch)
        self._serve_relegated(view, batch, limit_s)
        if not batch.num_prefill_tokens:
            self._serve_offline(view, batch, online, reserved)
        else:
            self._serve_offline_decodes(view, batch, online)

    def resume_s(self, view: Snapshot[RequestView]) -> float:
        """Slack of the online decodes less the time of their own step; 0 while there is an online prompt.

        Relegated requests do not count: the blocks that they wait for may be those of the suspended slices.
        """
        online = _everywhere(view, PriorityLevel.ONLINE)
        if view.waiting[PriorityLevel.ONLINE] or any(each.last_token_at_s is None for each in online):
            return 0.0
        if not online:
            return math.inf
        slack_s = self._slack_s(online, view.now_s)
        return max(
            0.0,
            slack_s * self._predictor.usable_share - self._predictor.cost.step_time_s(_decode_load(online)),
        )

    def preemption_key(self, request: RequestView, lost_tokens: float) -> PreemptionKey:
        """Offline requests first: by least lost work, then by least to restore. Then online, latest first."""
        level = request.priority_level
        if level in _ONLINE | _RELEGATED or self.config.victims == "latest":
            return (level.value, *request.order_key)
        return (level.value, -lost_tokens, -request.num_computed_tokens, *request.order_key)

    def step_limit_s(self, view: Snapshot[RequestView]) -> float:
        """The least slack of the online decodes, and of the first tokens that can still be in time."""
        online = _online(view)
        prompts: Sequence[RequestView] = [*online, *view.waiting[PriorityLevel.ONLINE]]
        slack_s = min(self._slack_s(online, view.now_s), _ttft_slack(prompts, view.now_s))
        return slack_s * self._predictor.usable_share

    def set_default_slo(self, slo: SLO) -> None:
        self.config = replace(self.config, default_slo=slo)

    def _step_sizes(self, efficiency: float) -> Sequence[int]:
        cost, known = self._predictor.cost, self._sizes.get(efficiency)
        if known is None or known[0] is not cost:
            known = cost, cost.efficient_step_sizes(efficiency, self._max_step_tokens)
            self._sizes[efficiency] = known
        return known[1]

    def _serve_in_time(self, view: Snapshot[R], batch: BatchBuilder[R]) -> float:
        """Decodes of requests that are in time, then prompts. Returns: the limit of the step's time."""
        decodes, prefills = split(view.running[PriorityLevel.ONLINE])
        batch.add_decodes(decodes)
        decodes_s = batch.predicted_s
        everywhere: Sequence[RequestView] = decodes
        if view.restoring or view.elsewhere:
            everywhere = [each for each in _everywhere(view, PriorityLevel.ONLINE) if each.is_decoding]
        limit_s = self._limit_s(everywhere, view.now_s, decodes_s)
        waiting = view.waiting[PriorityLevel.ONLINE]
        if not prefills and not waiting:
            return limit_s
        prompts = list(itertools.islice(merge(prefills, waiting, key=order_key), _MAX_WEIGHED))
        load = _decode_load(decodes)
        in_time = self._in_time(prompts, load, view.now_s, limit_s)
        if decodes and len(in_time) < len(prompts):
            banked_s = self._limit_s(everywhere, view.now_s, decodes_s, _BANK_SHARE)
            more = self._in_time(prompts, load, view.now_s, banked_s)
            if len(more) > len(in_time):
                limit_s, in_time = banked_s, more
        chosen = [each for each in prompts if each.request_id in in_time]
        chosen.sort(
            key=lambda each: each.last_token_at_s is None
        )  # those in the middle of their answers first
        late = [each for each in prompts if each.request_id not in in_time]
        limit_s = self._add_prompts(view, batch, chosen, limit_s)
        self._add_prompts(view, batch, late, limit_s)
        return limit_s

    def _limit_s(
        self, decodes: Sequence[RequestView], now_s: float, decodes_s: float, bank_share: float = 0.0
    ) -> float:
        """Limit of the step's time, as predicted, for the gaps of the decodes that are in time.

        An objective that is tighter than the load allows does not stop the others: it counts as the least
        one that leaves prompts their share of a step, but as no more than the server's own.

        Args:
            decodes: those that are not for this step among them.
            decodes_s: of a step of those that are, alone.
            bank_share: part of what each decode has banked that the step may take too.
        """
        if not decodes:
            return (
                self.config.prompt_step_share * self.config.default_slo.ttft_s * self._predictor.usable_share
            )
        if bank_share:
            slack = min([each.next_token_by_s + bank_share * max(0.0, each.banked_s) for each in decodes])
        else:
            slack = min([each.next_token_by_s for each in decodes])
        latest_s = min([each.last_token_at_s or 0.0 for each in decodes]) + self.config.default_slo.tpot_s
        own_s, default_s = ((at_s - now_s) * self._predictor.usable_share for at_s in (slack, latest_s))
        return max(own_s, min(least_tpot_slo(decodes_s), default_s))

    def _in_time(
        self, prompts: Sequence[R], decodes: StepLoad, now_s: float, limit_s: float
    ) -> Collection[RequestId]:
        """The most prompts whose first tokens can all be in time (Moore and Hodgson's algorithm).

        They are computed one after another by deadline, beside the decodes, in steps of ``limit_s``. Whenever
        one would be late, the longest so far is left out; of several, the one with the earliest deadline.
        That is done for each priority that clients gave, the more urgent ones first. Requests that compute
        lost KV again are in the middle of their answers: they are always in.
        """
        cost, scale = self._predictor.cost, self._predictor.worst_scale
        chunk = max(MIN_PREFILL_CHUNK_TOKENS, cost.max_tokens(decodes, 0, self._max_step_tokens, limit_s))
        token_s = scale * cost.time_with_s(decodes, 0, chunk, False) / chunk
        resumed = [each for each in prompts if each.last_token_at_s is not None]
        in_time = {each.request_id for each in resumed}
        ends_at_s = now_s + token_s * sum(each.num_pending_tokens for each in resumed)
        new = (each for each in prompts if each.last_token_at_s is None)
        for _, of_priority in itertools.groupby(new, lambda each: each.order_key[0]):
            chosen: list[tuple[int, float, RequestId]] = []  # a heap, the longest first
            for request in of_priority:
                num_tokens, by_s = request.num_pending_tokens, request.next_token_by_s
                heapq.heappush(chosen, (-num_tokens, by_s, request.request_id))
                ends_at_s += num_tokens * token_s
                if ends_at_s > by_s:
                    ends_at_s += heapq.heappop(chosen)[0] * token_s
            in_time.update(request_id for _, _, request_id in chosen)
        return in_time

    def _add_prompts(
        self, view: Snapshot[R], batch: BatchBuilder[R], prompts: Iterable[R], limit_s: float
    ) -> float:
        """Add chunks of prompts in this order. Returns: the limit, lowered to the deadlines of those it ends.

        A waiting prompt is admitted only while a step of all decodes, its own among them, keeps the gaps.
        """
        holders = _holders(view, PriorityLevel.ONLINE)
        holding = {each.request_id for each in holders}
        load, may_admit = _decode_load(holders), True
        for request in prompts:
            if not batch.has_headroom:
                break
            limits = ChunkLimits(max_step_s=limit_s, guarantees_progress=True)
            if request.request_id in holding:
                batch.try_add(request, limits)
            elif may_admit:
                load.put(request.num_prompt_tokens, 1, True)
                may_admit = self._keeps_gaps(load) or load.num_requests == 1
                if may_admit:
                    admission = batch.try_admit(request, limits, may_preempt=_BELOW_ONLINE)
                    may_admit = admission is not Admission.REFUSED
            if batch.tokens_of(request) == request.num_pending_tokens:
                slack = (request.next_token_by_s - view.now_s) * self._predictor.usable_share
                if slack >= batch.predicted_s:
                    limit_s = min(limit_s, slack)
        return limit_s

    def _tpot_s(self, request: RequestView) -> float:
        """The TPOT objective by which a request bounds offline work; a relegated one's is not tighter than
        the server's."""
        if request.slo is None:
            return math.inf
        tpot_s = request.slo.tpot_s
        is_relegated = request.priority_level is PriorityLevel.RELEGATED
        return max(tpot_s, self.config.default_slo.tpot_s) if is_relegated else tpot_s

    def _slack_s(self, online: Sequence[RequestView], now_s: float) -> float:
        """The least slack of the online decodes; inf without any."""
        tpot_s = self._tpot_s
        return min(
            [
                last_at_s + tpot_s(each) - now_s
                for each in online
                if (last_at_s := each.last_token_at_s) is not None
            ],
            default=math.inf,
        )

    def _keeps_gaps(self, decodes: StepLoad) -> bool:
        """Whether a step of these decodes keeps to the server's TPOT objective."""
        return (
            self._predictor.cost.step_time_s(decodes)
            <= self.config.default_slo.tpot_s * self._predictor.usable_share
        )

    def _serve_relegated(self, view: Snapshot[R], batch: BatchBuilder[R], limit_s: float) -> None:
        """Online requests that are too late, as far as there is time: prompts by deadline, then decodes.

        Decodes that have waited for a TTFT objective go first: answers stand still no longer than that while
        prompts come.
        """
        waiting = view.waiting[PriorityLevel.RELEGATED]
        decodes, prefills = split(view.running[PriorityLevel.RELEGATED])
        if not (waiting or decodes or prefills):
            return
        long_ago_s = view.now_s - self.config.default_slo.ttft_s
        batch.add_decodes([each for each in decodes if (each.last_token_at_s or 0.0) <= long_ago_s], limit_s)
        limits = ChunkLimits(max_step_s=limit_s)
        for request in prefills:
            batch.try_add(request, limits)
        admit(batch, waiting, limits, may_preempt=_BELOW_RELEGATED)
        batch.add_decodes([each for each in decodes if not batch.tokens_of(each)], limit_s)

    def _serve_offline(
        self, view: Snapshot[R], batch: BatchBuilder[R], online: Sequence[RequestView], reserved: int
    ) -> None:
        """Promoted requests, then the others, in the time that all online requests leave."""
        ttft_slack_s = _ttft_slack(online, view.now_s)
        bound_s = min(self._slack_s(online, view.now_s), ttft_slack_s) * self._predictor.usable_share
        tightest_s = min([self._tpot_s(each) for each in online if each.is_decoding], default=math.inf)
        # Offline work makes steps longer, so online requests hold their blocks longer. It gets less time as
        # they fill the pool. The shape was found by simulation (docs/coserving.md).
        free_share = 1.0 - view.online_blocks / view.num_blocks
        headroom = min(1.0, _HEADROOM_FACTOR * free_share) ** 2
        lowered_s = min(tightest_s * headroom * self._predictor.usable_share, bound_s)
        sizes = self._step_sizes(self.config.step_efficiency)
        promoted = ChunkLimits(max_step_s=bound_s, step_sizes=sizes)
        serve(view, batch, _PROMOTED, promoted, may_preempt=_OFFLINE)
        limits = ChunkLimits(max_step_s=lowered_s, step_sizes=sizes)
        serve(view, batch, _OFFLINE, limits, reserved_blocks=reserved)

    def _serve_offline_decodes(
        self, view: Snapshot[R], batch: BatchBuilder[R], online: Sequence[RequestView]
    ) -> None:
        """Offline decodes beside an online prompt, as far as they hardly delay its first token."""
        prompts: Sequence[RequestView] = [*online, *view.waiting[PriorityLevel.ONLINE]]
        slack_s = min(self._slack_s(online, view.now_s), _ttft_slack(prompts, view.now_s))
        limit_s = min(slack_s * self._predictor.usable_share, batch.predicted_s * (1.0 + _BESIDE_PROMPTS))
        for level in (PriorityLevel.PROMOTED, PriorityLevel.OFFLINE):
            decodes, _ = split(view.running[level])
            batch.add_decodes(decodes, limit_s)

    def _build_offline_batch(self, view: Snapshot[R], batch: BatchBuilder[R], reserved: int) -> None:
        """Steps are as large as throughput needs: an arrival has the less to wait for, or to stop."""
        unsafe_s = self.config.unsafe_ttft_share * self.config.default_slo.ttft_s
        limits = ChunkLimits(
            max_step_s=math.inf if self._can_stop else unsafe_s * self._predictor.usable_share,
            step_sizes=self._step_sizes(self.config.offline_efficiency),
        )
        serve(view, batch, _PROMOTED, limits, may_preempt=_OFFLINE)
        serve(view, batch, _OFFLINE, limits, reserved_blocks=reserved)

    def _reserve(self, view: Snapshot[R]) -> int:
        """Blocks to keep free for online requests: their decaying peak, less those that they hold now.

        Blocks that can be reclaimed count as free.
        """
        elapsed_s = 0.0 if self._peak_at_s is None else max(0.0, view.now_s - self._peak_at_s)
        self._peak_at_s = view.now_s
        decayed = self._peak_blocks * math.exp(-elapsed_s / self.config.reserve_decay_s)
        self._peak_blocks = max(decayed, float(view.online_blocks))
        wanted = min(int(self._peak_blocks) - view.online_blocks, view.num_blocks // 2)
        return max(0, wanted - view.reclaimable_blocks)


def _holders(view: Snapshot[R], level: PriorityLevel) -> Sequence[R]:
    """Requests of a level that run or are being restored."""
    running = view.running[level]
    if not view.restoring:
        return running
    return [*running, *(each for each in view.restoring if each.priority_level is level)]


def _everywhere(view: Snapshot[RequestView], level: PriorityLevel) -> Sequence[RequestView]:
    """The same, with those that are not for this step.

    Those that are late and still being restored are left out: no step that begins now brings their token.
    """
    elsewhere, holders = view.elsewhere.get(level, ()), _holders(view, level)
    if not (elsewhere or view.restoring):
        return holders
    late = {each.request_id for each in view.restoring if each.next_token_by_s <= view.now_s}
    return [each for each in (*holders, *elsewhere) if each.request_id not in late]


def _online(view: Snapshot[RequestView]) -> Sequence[RequestView]:
    """Online requests that run or are being restored: they wait for their next token."""
    return [*_everywhere(view, PriorityLevel.ONLINE), *_everywhere(view, PriorityLevel.RELEGATED)]


def _decode_load(requests: Iterable[RequestView]) -> StepLoad:
    load = StepLoad()
    load.put_decodes([each.num_computed_tokens or 1 for each in requests])
    return load


def _ttft_slack(online: Sequence[RequestView], now_s: float) -> float:
    """Least slack of the first tokens that can still be in time."""
    slacks = [each.next_token_by_s - now_s for each in online if each.last_token_at_s is None]
    return min((slack for slack in slacks if slack > 0), default=math.inf)
