"""How much device memory weights and KV have while serving: offloading and batching as one decision.

*Residency* is how many layers' weights have device memory. It changes slowly, because KV has to leave before
weights can take its memory. *Streaming* is which of these layers a step fetches: the interval, which may be
another one in every step, as far as residency has room for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from backfill.offloading.interval import StagesBounds, StepBounds, num_device_layers, stages_bounds

# Seconds without online requests before residency is chosen for offline work, and for which what online
# prompts needed holds.
_OFFLINE_HOLD_S = 10.0
_LEAST_STAY_S = 5.0  # that a residency lasts, unless online requests need another one
_LEAST_GAIN = 0.05  # by which share offline work must get faster for a change
_ONLINE_MARGIN = 0.8  # part of what a TPOT objective allows that a step may take in a residency newly chosen
_NOTICED = 0.1  # a change of the objective by less is not told to others on the link


@dataclass(frozen=True, slots=True)
class Residency:
    """A division of device memory.

    Attributes:
        interval: the largest offloading interval that it has room for.
        num_blocks: KV blocks.
    """

    interval: int
    num_blocks: int


def residencies(
    num_layers: int,
    min_interval: int,
    max_interval: int,
    num_blocks: int,
    layer_bytes: int,
    block_bytes: int,
    stage_layers: Sequence[int] = (),
) -> tuple[Residency, ...]:
    """Divisions of one memory for these intervals, ascending. Of those with equal weights, the largest.

    Args:
        num_layers: with weights in this memory.
        num_blocks: with the largest interval.
        layer_bytes, block_bytes: of what this memory has of a layer and of a block.
        stage_layers: layers of each stage, if these are the layers of one stage of a pipeline.
    """
    most_layers = num_device_layers(num_layers, max_interval)
    found: dict[int, Residency] = {}
    for interval in range(min_interval, max_interval + 1):
        freed_bytes = (most_layers - num_device_layers(num_layers, interval)) * layer_bytes
        of_all = sum(num_device_layers(each, interval) for each in stage_layers or (num_layers,))
        found[of_all] = Residency(interval, num_blocks + freed_bytes // block_bytes)
    return tuple(sorted(found.values(), key=lambda each: each.interval))


def common_residencies(ranks: Sequence[Sequence[Residency]]) -> tuple[Residency, ...]:
    """Of several ranks, each with its own memory: a block exists where all have memory for their part."""
    divisions = zip(*ranks, strict=True)
    return tuple(min(division, key=lambda each: each.num_blocks) for division in divisions)


@dataclass(frozen=True, slots=True)
class StepNeed:
    """Of the steps of one phase of online requests.

    Attributes:
        limit_s: what a step may take; inf where nothing limits it.
        compute_s: what it takes where it does not wait for weights.
    """

    limit_s: float
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What residency and interval are chosen for.

    Attributes:
        transfer_s: of one layer's weights; 0 where it is not known yet, and then nothing changes.
        num_online: online requests that wait or run.
        decodes: of theirs, for their TPOT objectives.
        prompts: of theirs, for the first tokens that can be in time; None without any.
        used_blocks: KV blocks that running requests hold.
        wanted_blocks: that requests would hold if there were enough, those that wait as well.
        most_scale: how many times as many requests as now a step may have.
        compute_s: what a step of the running requests takes, without waiting for weights, if there are so
            many times as many of them.
    """

    now_s: float
    transfer_s: float
    num_online: int
    decodes: StepNeed
    prompts: StepNeed | None = None
    used_blocks: int
    wanted_blocks: float
    most_scale: float
    compute_s: Callable[[float], float]


class ResidencyPolicy:
    """Chooses among residencies, each of which trades KV blocks for time to transfer weights.

    It is the one with which requests advance fastest, of those that keep the objectives of online ones:
    requests in a step, which the KV bounds, over the time of the step, which computation or transfers bound.

    - Objectives are kept if steps of the online requests' decodes and of their prompts take no longer than
      they may. A phase that no residency serves in time has the shortest steps that it can have. Where one is
      not kept, another residency is chosen at once, with a margin: only the drain of the KV delays it.
      What prompts need holds for a while, each need from when it was last seen.
    - Otherwise a small gain changes nothing, nor does a gain soon after a change, or soon after the last
      online request.

    Args:
        choices: ascending by interval; the last one is in use at the start.
        stage_layers: of the model, by stage.
    """

    def __init__(self, choices: Sequence[Residency], stage_layers: Sequence[int]) -> None:
        self.choices = self._allowed = choices
        self.target = choices[-1]
        self._stage_layers = stage_layers
        self._changed_at_s = -math.inf
        self._online_at_s = -math.inf  # when online requests were last seen
        # When, and what prompts needed, unless later ones needed as much: tightest first.
        self._prompts: deque[tuple[float, StepNeed]] = deque()

    def choose(self, situation: Situation) -> Residency:
        """The residency to be reached, which is ``target`` from now on."""
        if situation.num_online:
            self._online_at_s = situation.now_s
        if situation.transfer_s > 0.0:
            self._decide(situation)
        return self.target

    def bounds(self, interval: int, transfer_s: float) -> StepBounds | StagesBounds:
        """Of a step that passes all stages."""
        return stages_bounds(self._stage_layers, interval, transfer_s)

    def step_s(self, compute_s: float, interval: int, transfer_s: float) -> float:
        """Time of a step whose layers take ``compute_s`` together without waiting for weights."""
        return self.bounds(interval, transfer_s).step_s(compute_s)

    def _change(self, wanted: Residency, now_s: float) -> None:
        if wanted is not self.target:
            self.target, self._changed_at_s = wanted, now_s

    def _decide(self, situation: Situation) -> None:
        now_s = situation.now_s
        tightest = self._with_tightest_prompts(situation)  # notes the need, whatever is decided
        is_in_time = self.target in self._in_time(situation, self._allowed, 1.0)
        is_held = not situation.num_online and now_s < self._online_at_s + _OFFLINE_HOLD_S
        if is_in_time and (is_held or now_s < self._changed_at_s + _LEAST_STAY_S):
            return
        best = self._fastest(tightest, self._allowed)
        least_rate = (1.0 + _LEAST_GAIN) * self._rate(self.target, situation)
        if not is_in_time or self._rate(best, situation) > least_rate:
            self._change(best, now_s)

    def _with_tightest_prompts(self, situation: Situation) -> Situation:
        """Others like the latest prompts may come soon, and would be late while the KV is drained."""
        needs, need, now_s = self._prompts, situation.prompts, situation.now_s
        while needs and now_s >= needs[0][0] + _OFFLINE_HOLD_S:
            needs.popleft()
        if need is not None:
            while needs and needs[-1][1].limit_s >= need.limit_s:
                needs.pop()
            needs.append((now_s, need))
        return replace(situation, prompts=needs[0][1]) if needs else situation

    def _in_time(
        self, situation: Situation, choices: Sequence[Residency], margin: float
    ) -> Sequence[Residency]:
        """Those with which steps of online requests take no longer than ``margin`` of what they may take, or
        as long as in any of the choices if that is more; the largest if there is none."""
        found = choices
        for need in (situation.decodes, situation.prompts) if situation.num_online else ():
            if need is not None:
                transfer_s = situation.transfer_s
                steps_s = {each: self.step_s(need.compute_s, each.interval, transfer_s) for each in choices}
                limit_s = max(margin * need.limit_s, min(steps_s.values()))
                found = [each for each in found if steps_s[each] <= limit_s]
        return found or choices[-1:]

    def _fastest(self, situation: Situation, choices: Sequence[Residency]) -> Residency:
        """That with which requests advance fastest, in time with a margin; the largest of several."""
        in_time = self._in_time(situation, choices, _ONLINE_MARGIN)
        rates = {each: self._rate(each, situation) for each in in_time}
        return max(reversed(in_time), key=lambda each: rates[each])

    def _rate(self, residency: Residency, situation: Situation) -> float:
        """Steps a second, times the requests in them over those that run now, as many as are in time."""
        if not situation.used_blocks:
            return 0.0
        scale = min(
            min(situation.wanted_blocks, residency.num_blocks) / situation.used_blocks, situation.most_scale
        )
        least_s, compute_s = situation.compute_s(1.0), situation.compute_s(scale)
        if compute_s > max(least_s, situation.decodes.limit_s):  # it grows about evenly
            in_time = max(0.0, situation.decodes.limit_s - least_s) / (compute_s - least_s)
            scale = 1.0 + (scale - 1.0) * in_time
            compute_s = situation.compute_s(scale)
        step_s = self.step_s(compute_s, residency.interval, situation.transfer_s)
        return scale / step_s if step_s > 0.0 else 0.0

    def fastest_interval(self, residency: Residency, situation: Situation) -> int:
        """Of those that a residency has room for. It is not always the largest: see ``step_time_s``."""
        compute_s = situation.decodes.compute_s if situation.num_online else situation.compute_s(1.0)
        intervals = range(residency.interval, self.choices[0].interval - 1, -1)
        return min(intervals, key=lambda interval: self.step_s(compute_s, interval, situation.transfer_s))


@dataclass(frozen=True, slots=True)
class LinkWish:
    """What an engine would do with the link.

    Attributes:
        min_interval: the smallest interval that would be of use if nobody else used the link.
        max_interval: the largest one that its memory can be divided for.
        objective_s: what a step may take; None without online requests.
    """

    min_interval: int
    max_interval: int
    objective_s: float | None


@dataclass(frozen=True, slots=True)
class LinkGrant:
    """What an engine gets.

    Attributes:
        interval: the smallest that leaves the others what they need.
        transfer_s: of a layer, at least, once all have the intervals that they get.
        is_bounded: a smaller interval was wished for.
    """

    interval: int
    transfer_s: float
    is_bounded: bool


class LinkBudget(Protocol):
    """Divides a link among engines. ``BusMember`` does."""

    @property
    def free_transfer_s(self) -> float:
        """Of a layer while nobody else uses the link."""

    def ask(self, wish: LinkWish) -> LinkGrant | None:
        """Wish for this from now on. Returns: the latest grant; None while there is none."""


class SharedLinkPolicy(ResidencyPolicy):
    """Chooses among the residencies that the others on the link leave. See ``ResidencyPolicy``.

    Select-N's coordinator (section 4.5) gives each engine an interval between the smallest that is of use to
    it and the largest that its memory allows. Here that interval is a bound: with a smaller one others would
    miss their objectives. Within it the engine decides as it does alone, with the transfers that its part of
    the link gives it.

    A larger interval that others need is taken at once. A smaller one is taken when it was free for as long
    as offline work has to be alone: each change costs a drain.
    """

    def __init__(self, choices: Sequence[Residency], stage_layers: Sequence[int], budget: LinkBudget) -> None:
        super().__init__(choices, stage_layers)
        self._budget = budget
        self._floor = 1
        self._floor_at_s = -math.inf  # when the floor was last needed
        self._shortest_s = math.inf  # the shortest transfers that were measured
        self._wished: LinkWish | None = None

    def choose(self, situation: Situation) -> Residency:
        """See ``ResidencyPolicy.choose``. Without a grant nothing changes."""
        grant = self._budget.ask(self._wish(situation))
        if situation.transfer_s > 0.0:
            self._shortest_s = min(self._shortest_s, situation.transfer_s)
        if grant is None or self._shortest_s == math.inf:
            return self.target
        self._allow(grant, situation.now_s)
        # The device behind the link may be slower than the part of the link.
        transfer_s = max(grant.transfer_s, self._shortest_s)
        return super().choose(replace(situation, transfer_s=transfer_s))

    def _allow(self, grant: LinkGrant, now_s: float) -> None:
        needed = grant.interval if grant.is_bounded else 1
        if 1 < needed >= self._floor:
            self._floor, self._floor_at_s = needed, now_s
        elif now_s >= self._floor_at_s + _OFFLINE_HOLD_S:
            self._floor = needed
        least = max(self._floor, grant.interval)
        allowed = [each for each in self.choices if each.interval >= least]
        self._allowed = allowed or self.choices[-1:]
        if self.target.interval < self._allowed[0].interval:
            self._change(self._allowed[0], now_s)

    def _wish(self, situation: Situation) -> LinkWish:
        free = replace(situation, transfer_s=self._budget.free_transfer_s)
        objective_s = situation.decodes.limit_s if situation.num_online else math.inf
        wanted = self._fastest(free, self.choices) if situation.used_blocks else self.target
        wish = LinkWish(
            wanted.interval, self.choices[-1].interval, None if objective_s == math.inf else objective_s
        )
        if self._wished is None or not _is_near(wish, self._wished):
            self._wished = wish
        return self._wished


def _is_near(wish: LinkWish, other: LinkWish) -> bool:
    """Whether others need not be told: the predictor's margins change a little with each step."""
    if wish.objective_s is None or other.objective_s is None:
        return wish == other
    change = abs(wish.objective_s - other.objective_s)
    return replace(wish, objective_s=other.objective_s) == other and change <= _NOTICED * other.objective_s
