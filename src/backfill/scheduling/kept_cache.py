"""How much of the prefix cache is kept for online requests, and how much of its memory offline ones get."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from backfill.core.config import SchedulerConfig
from backfill.core.decaying_peak import DecayingPeak
from backfill.core.request import PriorityLevel, Request
from backfill.costs.load import StepLoad
from backfill.kvcache.manager import KVCacheManager
from backfill.scheduling.batch import Batch
from backfill.scheduling.in_flight import StepsInFlight
from backfill.scheduling.memory_division import OFFLINE_LEVELS, ONLINE_LEVELS
from backfill.scheduling.objectives import least_tpot_slo
from backfill.scheduling.prediction import StepPredictor, decode_load
from backfill.scheduling.preemption import Preemption
from backfill.scheduling.queues import UnfinishedRequests

_EVERY_S = 1.0  # seconds between two decisions
_NUM_PARTS = 16  # parts in which the pool is divided
# Part of a TTFT objective that computing again what was not kept may take.
_TTFT_SHARE = 0.25


@dataclass(slots=True, eq=False)
class KeptCache:
    """Decides once a second how many blocks are kept, from one cost model for both uses.

    - A kept block saves the time in which it would be computed again beside the decodes of a step, as often
      as such blocks are used again (``CacheReuse``).
    - One block more makes the batch of offline decodes larger, as far as requests wait, a step may have them,
      and TPOT objectives leave time. That counts for the part of the time that prompts do not take.

    Where computing again would take too much of a TTFT objective, as much is kept as is used again.
    """

    config: SchedulerConfig
    kv: KVCacheManager
    requests: UnfinishedRequests
    preemption: Preemption
    predictor: StepPredictor
    in_flight: StepsInFlight
    _decided_at_s: float = field(init=False, default=-math.inf)
    # Predicted, of the steps since then, and less and less of those before: all of it, and decodes alone.
    _steps_s: float = field(init=False, default=0.0)
    _decodes_s: float = field(init=False, default=0.0)
    # One over the tightest objectives of online requests that are not late: one moment's would say little.
    _per_ttft: DecayingPeak = field(init=False, default_factory=DecayingPeak)
    _per_tpot: DecayingPeak = field(init=False, default_factory=DecayingPeak)

    def observe(self, batch: Batch, predicted_s: float) -> None:
        """A step was planned."""
        decodes_s = predicted_s
        if batch.num_prefill_tokens:
            count = batch.load.num_tokens - batch.num_prefill_tokens
            context_tokens = batch.load.decode_context_tokens
            decodes = StepLoad(count, count, count, decode_context_tokens=context_tokens)
            decodes_s = self.predictor.cost.step_time_s(decodes)
        self._steps_s += predicted_s
        self._decodes_s += decodes_s

    def decide(self, now_s: float) -> None:
        """Set how many blocks are kept at most, if it is time to."""
        if now_s < self._decided_at_s + _EVERY_S:
            return
        self._decided_at_s = now_s
        self.kv.protection.max_blocks = self._best(now_s)
        self._steps_s /= 2
        self._decodes_s /= 2

    def _best(self, now_s: float) -> float:
        """Inf where what is used again is to be kept, whatever it costs offline requests."""
        kv, cost, holders = self.kv, self.predictor.cost, self.preemption.block_holders
        num_blocks, online_blocks = kv.num_blocks, kv.counts.online
        slos = [each.slo for each in holders if each.priority_level is PriorityLevel.ONLINE and each.slo]
        per_ttft = self._per_ttft.note(max((1.0 / slo.ttft_s for slo in slos), default=0.0), now_s)
        per_tpot = self._per_tpot.note(max((1.0 / slo.tpot_s for slo in slos), default=0.0), now_s)
        offline = [each for each in holders if each.priority_level in OFFLINE_LEVELS] or self._first_waiting()
        num_tokens = round(kv.protection.reuse.blocks * kv.block_size)
        if not offline or not num_tokens:
            return math.inf
        online = [each for each in holders if each.priority_level in ONLINE_LEVELS]
        decodes = decode_load(online[:: self.in_flight.max_steps])
        limit_s = self.predictor.usable_share / per_tpot if per_tpot else math.inf
        limit_s = max(limit_s, least_tpot_slo(cost.step_time_s(decodes)))
        if not self._is_in_time(num_tokens, 1.0 / per_ttft if per_ttft else math.inf, decodes, limit_s):
            return math.inf
        reuse = kv.protection.reuse
        # Computed beside the decodes of a step.
        saved_s = cost.time_with_s(decodes, 0, num_tokens, 1) - cost.step_time_s(decodes)
        saved_share = self.predictor.time_scale * saved_s / reuse.blocks * reuse.per_s
        decode_share = self._decodes_s / self._steps_s if self._steps_s else 1.0
        per_s = self._offline_per_s(offline, decodes, limit_s)

        def gain(kept: int) -> float:
            rate = per_s(num_blocks - online_blocks - kept)
            return saved_share * kept + decode_share * math.log(rate) if rate > 0.0 else -math.inf

        return max((num_blocks * part // _NUM_PARTS for part in range(_NUM_PARTS, -1, -1)), key=gain)

    def _offline_per_s(
        self, offline: Sequence[Request], online: StepLoad, limit_s: float
    ) -> Callable[[float], float]:
        """Tokens a second of steps that decode offline requests like these, by the blocks for them.

        Args:
            online: decodes of online requests in one step, of the several that may be in flight.
        """
        cost, num_steps = self.predictor.cost, self.in_flight.max_steps
        blocks = sum(self.kv.blocks_for(each.num_tokens) for each in offline) / len(offline)
        tokens = sum(each.num_tokens for each in offline) // len(offline)
        num_waiting = sum(len(self.requests.waiting[level]) for level in OFFLINE_LEVELS)
        num_places = max(1, self.config.max_num_seqs - num_steps * online.num_requests)
        decode = StepLoad()
        decode.put_decodes([max(1, tokens)])

        def step_s(count: float) -> float:
            load = online.copy()
            load.add(decode, count / num_steps)
            return cost.step_time_s(load)

        least_s = step_s(0.0)

        def per_s(num_blocks: float) -> float:
            most = min(len(offline) + num_waiting, num_places, max(0.0, num_blocks / blocks))
            most_s = step_s(most)
            if most_s > max(limit_s, least_s):  # it grows about evenly
                most *= max(0.0, limit_s - least_s) / (most_s - least_s)
                most_s = step_s(most)
            return most / most_s if most_s > 0.0 else 0.0

        return per_s

    def _is_in_time(self, num_tokens: int, ttft_s: float, decodes: StepLoad, limit_s: float) -> bool:
        """Whether prompts have time to compute so many tokens again, with others like them before them."""
        cost, config = self.predictor.cost, self.config
        at_most = min(num_tokens, config.max_chunk_tokens)
        chunk = cost.max_tokens(decodes, 0, num_tokens, limit_s, at_most)
        if not chunk:
            return False
        chunk_s = cost.time_with_s(decodes, (num_tokens - chunk) // 2, chunk, 1)  # in the mean
        prompt_s = self.predictor.worst_scale * chunk_s * num_tokens / chunk
        return prompt_s < _TTFT_SHARE * ttft_s * (1.0 - prompt_s / self.kv.protection.reuse.interval_s)

    def _first_waiting(self) -> list[Request]:
        queues = [self.requests.waiting[level].requests for level in OFFLINE_LEVELS]
        return [requests[0] for requests in queues if requests]
