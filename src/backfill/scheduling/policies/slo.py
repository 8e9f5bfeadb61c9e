"""The default: two classes under latency objectives, after ConServe (4.2, 4.5), BROS (4.2) and relegation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from backfill.core.config import VictimOrder
from backfill.core.decaying_peak import DecayingPeak
from backfill.core.request import PriorityLevel, RequestId
from backfill.core.slo import SLO
from backfill.costs.load import StepLoad
from backfill.scheduling.first_tokens import is_new, least_spare_s, most_in_time, shortest_first
from backfill.scheduling.objectives import (
    least_tpot_slo,
    paying_step_s,
    prompt_step_s,
    share_in_time,
    throughput_step_s,
)
from backfill.scheduling.owner_shares import (
    in_places_of_owners,
    leaving_out,
    of_owner,
    prompts_in_turn,
    relegating,
    yielding_owners,
)
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
    admit,
    serve,
    split,
)
from backfill.scheduling.prediction import StepPredictor, decode_load

# Part of what the decodes have banked that one step may take.
_BANK_SHARE = 0.5
# Of the online requests that came together, those whose objectives bound steps where it is at least so many;
# and the part of the TTFT objective over which sockets and preparation spread what was sent together.
_LEAST_SHARE_IN_TIME, _BURST_SHARE = 0.25, 0.25
# Prompts that are weighed against each other; those behind them wait.
_MAX_WEIGHED = 512
# Time by which offline decodes may lengthen a step that computes an online prompt.
_BESIDE_PROMPTS = 0.2
# Offline work is limited once online requests leave less than 1 / this of the pool free.
_HEADROOM_FACTOR = 1.5
# Part of the TTFT objective that a purely offline step may take where the executor cannot stop it.
UNSTOPPABLE_TTFT_SHARE = 0.25

_ONLINE, _RELEGATED, _PROMOTED, _OFFLINE = (frozenset({level}) for level in PriorityLevel)
_BELOW_ONLINE = _RELEGATED | _PROMOTED | _OFFLINE
_BELOW_RELEGATED = _PROMOTED | _OFFLINE


class SloPolicy(Policy):
    """Online requests meet their objectives; offline work uses the time and blocks that they leave.

    ``build`` has the rules in order. Each gets what those before it leave. Every online request has a
    deadline for its next token, and a step ends before the deadlines of the tokens that it computes. Where
    the policy differs from the papers: docs/coserving.md.

    Args:
        default_slo: of online requests that bring none.
        can_stop: the executor can stop offline slices at safepoints.
        victims: within one priority level, the request that loses least work is preempted first
            (``least-lost``), or the latest.
        step_efficiency: beside online requests, the steps of offline prompts are no larger than needed to
            bring the cost a token down to its minimum divided by this. Larger steps make arrivals wait and
            gain little.
        offline_efficiency: the same for steps without online requests. Their throughput has saturated at
            that size: larger ones would gain nothing that is worth the wait of an arrival.
    """

    stops_steps = True
    protects_online_cache = True
    promotes = True
    relegates = True
    orders_by_deadline = True

    def __init__(
        self,
        predictor: StepPredictor,
        *,
        default_slo: SLO,
        max_step_tokens: int,
        can_stop: bool,
        victims: VictimOrder = "least-lost",
        step_efficiency: float = 0.8,
        offline_efficiency: float = 0.95,
    ) -> None:
        self.default_slo = default_slo
        self._predictor = predictor
        self._max_step_tokens = max_step_tokens
        self._can_stop = can_stop
        self._victims = victims
        self._step_efficiency = step_efficiency
        self._offline_efficiency = offline_efficiency
        self._peak_blocks = DecayingPeak()

    def set_default_slo(self, slo: SLO) -> None:
        self.default_slo = slo

    @property
    def most_given_s(self) -> float:
        return self.default_slo.ttft_s

    def build(self, view: Snapshot[R], builder: BatchBuilder[R]) -> None:
        if view.yielding_owner is not None and self._give_way(view, view.yielding_owner, builder):
            return
        reserved = self._reserved_blocks(view)
        online = view.delayed_online
        if not online and not any(view.waiting[level] for level in _ONLINE | _RELEGATED):
            self._fill_offline_step(view, builder, reserved)
            return
        view = relegating(view, yielding := yielding_owners(view))
        decodes, prefills = split(view.running[PriorityLevel.ONLINE])
        giving, others = of_owner(decodes, view.yielding_owner)
        builder.add_decodes(others)
        gaps_s = math.inf
        if others and (giving or view.is_shared):
            decodes_s = self._predictor.cost.step_time_s(decode_load(decodes))
            gaps_s = self._limit_s(others, view.now_s, decodes_s)
        builder.add_decodes(sorted(giving, key=lambda each: each.last_token_at_s or 0.0), gaps_s)
        if view.is_shared:  # steps of prompts are short then, and leave late answers no time
            late = [each for each in self._standing_still(view) if each.owner not in yielding]
            builder.add_decodes(late, min(gaps_s, self.default_slo.tpot_s * self._predictor.usable_share))
        limit_s = self._add_prompts_in_time(view, builder, decodes, prefills)
        if yielding and builder.batch.num_prefill_tokens:
            limit_s = min(limit_s, builder.batch.predicted_s * (1.0 + _BESIDE_PROMPTS))
        self._add_relegated(view, builder, limit_s)
        if builder.batch.num_prefill_tokens:
            self._add_offline_decodes(view, builder, online)
        else:
            self._add_offline(view, builder, online, reserved)

    def _give_way(self, view: Snapshot[R], owner: str, builder: BatchBuilder[R]) -> bool:
        """Compute prompts of other owners, alone with their decodes. Returns: whether any has room."""
        others = leaving_out(view, {owner})
        decodes, prefills = split(others.running[PriorityLevel.ONLINE])
        if not prefills and not others.waiting[PriorityLevel.ONLINE]:
            return False
        builder.add_decodes(decodes)
        self._add_prompts_in_time(others, builder, decodes, prefills)
        if not builder.batch.num_prefill_tokens:
            for each in decodes:
                builder.remove(each)
        return builder.batch.num_prefill_tokens > 0

    # Rule 1: all decodes of online requests that are in time. Rule 2: prompts, shorter ones first, without
    # those that would make others late: as many first tokens as possible are in time. Then the late ones.

    def _add_prompts_in_time(
        self, view: Snapshot[R], builder: BatchBuilder[R], decodes: Sequence[R], prefills: Sequence[R]
    ) -> float:
        """Returns: the limit of the step's time. The step holds the decodes already."""
        decodes_s = builder.batch.predicted_s
        delayed: Sequence[RequestView] = decodes
        if view.restoring or view.in_other_steps:
            delayed = [each for each in view.delayed(PriorityLevel.ONLINE) if each.is_decoding]
        limit_s = self._limit_s(delayed, view.now_s, decodes_s)
        waiting = view.waiting[PriorityLevel.ONLINE]
        if not prefills and not waiting:
            return max(limit_s, self._least_limit_s(view, builder.batch.load, decodes, ()))
        load, cost = decode_load(decodes), self._predictor.cost
        prompts = prompts_in_turn(prefills, waiting[:_MAX_WEIGHED], view.served)[:_MAX_WEIGHED]
        if view.is_flooded:  # prompts of others need not wait for long
            limit_s = min(limit_s, decodes_s + paying_step_s(cost, self._max_step_tokens))
        worst = self._predictor.worst_scale
        token_s = worst * self._token_s(load, limit_s)
        in_time = most_in_time(prompts, view.now_s, token_s)
        if decodes and len(in_time) < len(prompts) and not view.is_flooded:
            banked_s = self._limit_s(delayed, view.now_s, decodes_s, _BANK_SHARE)
            shorter_s = worst * self._token_s(load, banked_s)
            more = most_in_time(prompts, view.now_s, shorter_s)
            if len(more) > len(in_time):
                limit_s, token_s, in_time = banked_s, shorter_s, more
        chosen = shortest_first([e for e in prompts if e.request_id in in_time], view.now_s, token_s)
        late = [each for each in prompts if each.request_id not in in_time]
        least_s = self._least_limit_s(view, load, [*decodes, *chosen], late)
        prompts = in_places_of_owners(prompts, [*chosen, *late])
        return self._add_prompts(view, builder, prompts, max(limit_s, least_s), least_s)

    def _least_limit_s(
        self, view: Snapshot[R], decodes: StepLoad, served: Sequence[R], late: Sequence[R]
    ) -> float:
        """Where nearly all online requests are late, objectives make steps no shorter than throughput wants.

        Else the small steps of the few in time would cost all others, who wait behind them. With several
        owners, one's late requests make the steps of the others no longer, and leave room for who comes back.
        """
        relegated = PriorityLevel.RELEGATED
        late = [] if view.is_shared else [*late, *view.running[relegated], *view.waiting[relegated]]
        spread_s = _BURST_SHARE * self.default_slo.ttft_s
        if not late or share_in_time(served, late, spread_s) >= _LEAST_SHARE_IN_TIME:
            return 0.0
        late_decodes, predictor = decode_load(split(view.running[relegated])[0]), self._predictor
        ttft_s = self.default_slo.ttft_s * predictor.usable_share
        return throughput_step_s(predictor.cost, decodes, late_decodes, ttft_s, self._max_step_tokens)

    def _limit_s(
        self, decodes: Sequence[RequestView], now_s: float, decodes_s: float, bank_share: float = 0.0
    ) -> float:
        """Limit of the step's time, as predicted, for the gaps of the decodes that are in time.

        An objective that is tighter than the load allows does not stop the others: it counts as the least
        one that leaves prompts their share of a step, but as no more than the server's own.

        Args:
            decodes: those that are not for this step among them. Without any, who arrives waits for the step.
            decodes_s: of a step of those that are in it, alone, late ones too.
            bank_share: part of what each decode has banked that the step may take too.
        """
        usable, default = self._predictor.usable_share, self.default_slo
        if not decodes:
            usable_slo = SLO(default.ttft_s * usable, default.tpot_s * usable)
            paying_s = paying_step_s(self._predictor.cost, self._max_step_tokens)
            return prompt_step_s(usable_slo, decodes_s + paying_s)
        if bank_share:
            by_s = min([each.next_token_by_s + bank_share * max(0.0, each.banked_s) for each in decodes])
        else:
            by_s = min([each.next_token_by_s for each in decodes])
        default_by_s = min([each.last_token_at_s or 0.0 for each in decodes]) + default.tpot_s
        own_s, default_s = (by_s - now_s) * usable, (default_by_s - now_s) * usable
        return max(own_s, min(least_tpot_slo(decodes_s), default_s))

    def _token_s(self, decodes: StepLoad, limit_s: float) -> float:
        """Predicted seconds that each token of a prompt takes in such steps with the decodes."""
        cost = self._predictor.cost
        chunk = max(MIN_PREFILL_CHUNK_TOKENS, cost.max_tokens(decodes, 0, self._max_step_tokens, limit_s))
        return cost.time_with_s(decodes, 0, chunk, False) / chunk

    def _add_prompts(
        self,
        view: Snapshot[R],
        builder: BatchBuilder[R],
        prompts: Iterable[R],
        limit_s: float,
        least_s: float,
    ) -> float:
        """Add chunks of prompts in this order. Returns: the limit, lowered to the deadlines of those it ends.

        A waiting prompt is admitted only while a step of all decodes, its own among them, keeps to the
        server's TPOT objective, or to ``least_s``.
        """
        predictor, batch = self._predictor, builder.batch
        holders = view.holders(PriorityLevel.ONLINE)
        holding = {each.request_id for each in holders}
        load, may_admit = decode_load(holders), True
        for request in prompts:
            if not batch.has_headroom:
                break
            limits = ChunkLimits(max_step_s=limit_s, guarantees_progress=request.owner != view.yielding_owner)
            if request.request_id in holding:
                builder.try_add(request, limits)
            elif may_admit:
                load.put(request.num_prompt_tokens, 1, True)
                gap_s = max(self.default_slo.tpot_s * predictor.usable_share, least_s)
                keeps_gaps = predictor.cost.step_time_s(load) <= gap_s
                may_admit = keeps_gaps or load.num_requests == 1
                if may_admit:
                    admission = builder.try_admit(request, limits, may_preempt=_BELOW_ONLINE)
                    may_admit = admission is not Admission.REFUSED
            if batch.tokens_of(request.request_id) == request.num_pending_tokens:
                slack_s = (request.next_token_by_s - view.now_s) * predictor.usable_share
                if slack_s >= batch.predicted_s:
                    limit_s = min(limit_s, slack_s)
        return limit_s

    # Rule 3: requests that cannot be in time any more (``LevelRule``), as far as there is time.

    def _add_relegated(self, view: Snapshot[R], builder: BatchBuilder[R], limit_s: float) -> None:
        """Decodes that stand still, prompts by deadline, other decodes."""
        waiting = view.waiting[PriorityLevel.RELEGATED]
        decodes, prefills = split(view.running[PriorityLevel.RELEGATED])
        tokens_of = builder.batch.tokens_of
        builder.add_decodes([e for e in self._standing_still(view) if not tokens_of(e.request_id)], limit_s)
        limits = ChunkLimits(max_step_s=limit_s)
        for request in prefills:
            builder.try_add(request, limits)
        admit(builder, waiting, limits, may_preempt=_BELOW_RELEGATED)
        builder.add_decodes([each for each in decodes if not tokens_of(each.request_id)], limit_s)

    def _standing_still(self, view: Snapshot[R]) -> list[R]:
        """Relegated decodes that have waited for a TTFT objective."""
        decodes, _ = split(view.running[PriorityLevel.RELEGATED])
        since_s = view.now_s - self.default_slo.ttft_s
        return [each for each in decodes if (each.last_token_at_s or 0.0) <= since_s]

    # Rule 4: offline work, promoted requests first. Beside an online prompt, decodes alone.

    def _add_offline_decodes(
        self, view: Snapshot[R], builder: BatchBuilder[R], online: Sequence[RequestView]
    ) -> None:
        """Beside an online prompt, as far as they hardly delay its first token."""
        prompts: list[RequestView] = [*online, *view.waiting[PriorityLevel.ONLINE][:_MAX_WEIGHED]]
        longest_s = builder.batch.predicted_s * (1.0 + _BESIDE_PROMPTS)
        limit_s = min(self._usable_slack_s(online, prompts, view.now_s), longest_s)
        for level in (PriorityLevel.PROMOTED, PriorityLevel.OFFLINE):
            decodes, _ = split(view.running[level])
            builder.add_decodes(decodes, limit_s)

    def _add_offline(
        self, view: Snapshot[R], builder: BatchBuilder[R], online: Sequence[RequestView], reserved: int
    ) -> None:
        """Promoted requests, then the others, in the time that all online requests leave."""
        bound_s = self._usable_slack_s(online, online, view.now_s)
        tightest_s = min([self._tpot_s(each) for each in online if each.is_decoding], default=math.inf)
        # Offline work makes steps longer, so online requests hold their blocks longer. It gets less time as
        # they fill the pool. The shape was found by simulation (docs/coserving.md).
        free_share = 1.0 - view.online_blocks / view.num_blocks
        headroom = min(1.0, _HEADROOM_FACTOR * free_share) ** 2
        lowered_s = min(tightest_s * headroom * self._predictor.usable_share, bound_s)
        sizes = self._predictor.cost.efficient_step_sizes(self._step_efficiency, self._max_step_tokens)
        promoted = ChunkLimits(max_step_s=bound_s, step_sizes=sizes)
        serve(view, builder, _PROMOTED, promoted, may_preempt=_OFFLINE)
        limits = ChunkLimits(max_step_s=lowered_s, step_sizes=sizes)
        serve(view, builder, _OFFLINE, limits, reserved_blocks=reserved)

    def _fill_offline_step(self, view: Snapshot[R], builder: BatchBuilder[R], reserved: int) -> None:
        """Without online requests: as large as throughput needs. An arrival waits for it, or stops it."""
        unstoppable_s = UNSTOPPABLE_TTFT_SHARE * self.default_slo.ttft_s * self._predictor.usable_share
        sizes = self._predictor.cost.efficient_step_sizes(self._offline_efficiency, self._max_step_tokens)
        limits = ChunkLimits(max_step_s=math.inf if self._can_stop else unstoppable_s, step_sizes=sizes)
        serve(view, builder, _PROMOTED, limits, may_preempt=_OFFLINE)
        serve(view, builder, _OFFLINE, limits, reserved_blocks=reserved)

    def _reserved_blocks(self, view: Snapshot[R]) -> int:
        """Blocks to keep free for online requests: their decaying peak, less those that they hold now.

        Blocks that can be reclaimed count as free.
        """
        wanted = int(self._peak_blocks.note(view.online_blocks, view.now_s)) - view.online_blocks
        return max(0, min(wanted, view.num_blocks // 2) - view.reclaimable_blocks)

    # What else the engine asks.

    def resume_s(self, view: Snapshot[RequestView]) -> float:
        """Slack of online requests less a step of theirs; 0 while a step could compute an online prompt.

        Relegated requests do not count: the blocks that they wait for may be those of the suspended slices.
        Nor do those whose owner gave way with these, and prompts of others only while it does.
        """
        waits = not view.stopped_owners or view.yielding_owner in view.stopped_owners
        view = leaving_out(view, view.stopped_owners)
        online, restoring = view.delayed(PriorityLevel.ONLINE), {each.request_id for each in view.restoring}
        prompts = {each.request_id for each in online if is_new(each)} - restoring
        if waits and (view.waiting[PriorityLevel.ONLINE] or prompts):
            return 0.0
        if not online or view.were_passed_over:
            return math.inf
        decodes_s = self._predictor.cost.step_time_s(decode_load(online))
        return max(0.0, self._usable_slack_s(online, online, view.now_s) - decodes_s)

    def preemption_key(self, request: RequestView, lost_tokens: float) -> PreemptionKey:
        """Offline requests first: by least lost work, then by least to restore. Then online, latest first."""
        level = request.priority_level
        if level in _ONLINE | _RELEGATED or self._victims == "latest":
            return (level.value, *request.order_key)
        return (level.value, -lost_tokens, -request.num_computed_tokens, *request.order_key)

    def step_limit_s(self, view: Snapshot[RequestView], num_tokens: Mapping[RequestId, int]) -> float:
        """The least slack of the online decodes, or less where prompts leave less (``least_spare_s``)."""
        now_s, predictor = view.now_s, self._predictor
        decodes, _ = split(view.running[PriorityLevel.ONLINE])
        _, prefills = split(view.delayed(PriorityLevel.ONLINE))
        waiting = view.waiting[PriorityLevel.ONLINE][:_MAX_WEIGHED]
        prompts, load = prompts_in_turn(prefills, waiting, view.served), decode_load(decodes)
        token_s = self._token_s(load, self._limit_s(decodes, now_s, predictor.cost.step_time_s(load)))
        spare_s = least_spare_s(prompts, now_s, token_s, num_tokens, predictor, self._max_step_tokens)
        late = prompts if spare_s == math.inf else ()
        slack_s = self._usable_slack_s(view.delayed_online, late, now_s)
        return min(slack_s, spare_s * predictor.usable_share)

    def _usable_slack_s(
        self, online: Sequence[RequestView], prompts: Sequence[RequestView], now_s: float
    ) -> float:
        """The longest that a step is to be predicted: the least slack of the online decodes, and of the
        prompts' first tokens that can still be in time; inf without any."""
        slacks_s = [
            e.last_token_at_s + self._tpot_s(e) - now_s for e in online if e.last_token_at_s is not None
        ]
        first_s = [each.next_token_by_s - now_s for each in prompts if is_new(each)]
        slacks_s += [slack_s for slack_s in first_s if slack_s > 0]
        return min(slacks_s, default=math.inf) * self._predictor.usable_share

    def _tpot_s(self, request: RequestView) -> float:
        """The TPOT objective by which it bounds offline work; a relegated one's is at least the server's."""
        if request.slo is None:
            return math.inf
        floor_s = self.default_slo.tpot_s if request.priority_level in _RELEGATED else 0.0
        return max(request.slo.tpot_s, floor_s)
