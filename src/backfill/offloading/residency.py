"""How much device memory weights and KV have while serving: offloading and batching as one decision.

*Residency* is how many layers' weights have device memory. It changes slowly, because KV has to leave before
weights can take its memory. *Streaming* is which of these layers a step fetches: the interval, which may be
another one in every step, as far as residency has room for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backfill.offloading.interval import num_device_layers, step_bounds


@dataclass(frozen=True, slots=True)
class Residency:
    """A division of device memory.

    Attributes:
        interval: the largest offloading interval that it has room for.
        num_layers: layers' worth of weights, staging buffers included.
        num_blocks: KV blocks.
    """

    interval: int
    num_layers: int
    num_blocks: int


def residencies(
    num_layers: int, min_interval: int, max_interval: int, num_blocks: int, layer_bytes: int, block_bytes: int
) -> tuple[Residency, ...]:
    """Divisions of the same memory for these intervals, ascending. Of those with equal weights, the largest.

    Args:
        num_blocks: with the largest interval.
    """
    most_layers = num_device_layers(num_layers, max_interval)
    found: dict[int, Residency] = {}
    for interval in range(min_interval, max_interval + 1):
        of_weights = num_device_layers(num_layers, interval)
        freed_bytes = (most_layers - of_weights) * layer_bytes
        found[of_weights] = Residency(interval, of_weights, num_blocks + freed_bytes // block_bytes)
    return tuple(sorted(found.values(), key=lambda each: each.interval))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyConfig:
    """
    Attributes:
        offline_hold_s: seconds without online requests before residency is chosen for offline work.
        least_stay_s: seconds that a residency lasts at least, unless online requests need another one.
        least_gain: by which share offline work must get faster for a change.
        online_margin: part of what a TPOT objective allows that a step may take in a residency newly chosen.
    """

    offline_hold_s: float = 10.0
    least_stay_s: float = 5.0
    least_gain: float = 0.05
    online_margin: float = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What residency and interval are chosen for.

    Attributes:
        transfer_s: of one layer's weights; 0 where it is not known yet, and then nothing changes.
        num_online: online requests that wait or run.
        online_limit_s: what a step of their decodes may take; inf without any.
        online_compute_s: what such a step takes where it does not wait for weights.
        used_blocks: KV blocks that running requests hold.
        wanted_blocks: that requests would hold if there were enough, those that wait as well.
        most_scale: how many times as many requests as now a step may have.
        compute_s: what a step of the running requests takes, without waiting for weights, if there are so
            many times as many of them.
    """

    now_s: float
    transfer_s: float
    num_online: int
    online_limit_s: float
    online_compute_s: float
    used_blocks: int
    wanted_blocks: float
    most_scale: float
    compute_s: Callable[[float], float]


class ResidencyPolicy:
    """Chooses among residencies, each of which trades KV blocks for time to transfer weights.

    - While there are online requests, residency stays if a step of their decodes meets the objective. If not,
      it becomes the smallest interval that meets it with a margin. If none does, it is the smallest of those
      with the shortest steps. This is at once: nothing but the drain of the KV delays it. If offline requests
      wait for blocks, they get those that cost the online ones no time.
    - Where only offline requests are, and have been alone for a while, it becomes the one with which they
      advance fastest: requests in a step, which the KV bounds, over the time of the step, which computation
      or transfers bound. A small gain changes nothing.

    Args:
        choices: ascending by interval; the last one is in use at the start.
        num_layers: of the model.
    """

    def __init__(
        self, choices: Sequence[Residency], num_layers: int, config: ResidencyConfig | None = None
    ) -> None:
        self.choices = self._allowed = choices
        self.target = choices[-1]
        self.num_layers = num_layers
        self._config = config or ResidencyConfig()
        self._changed_at_s = -math.inf
        self._online_at_s = -math.inf  # when online requests were last seen

    def choose(self, situation: Situation) -> Residency:
        """The residency to be reached, which is ``target`` from now on."""
        if situation.num_online:
            self._online_at_s = situation.now_s
        if situation.transfer_s > 0.0:
            self._change(
                self._for_online(situation) if situation.num_online else self._for_offline(situation),
                situation.now_s,
            )
        return self.target

    def step_s(self, compute_s: float, interval: int, transfer_s: float) -> float:
        """Time of a step whose layers take ``compute_s`` together without waiting for weights."""
        return step_bounds(self.num_layers, interval, transfer_s).step_s(compute_s)

    def _change(self, wanted: Residency, now_s: float) -> None:
        if wanted is not self.target:
            self.target, self._changed_at_s = wanted, now_s

    def _online_steps_s(self, situation: Situation, choices: Sequence[Residency]) -> dict[Residency, float]:
        return {
            each: self.step_s(situation.online_compute_s, each.interval, situation.transfer_s)
            for each in choices
        }

    def _without_delay(self, situation: Situation, choices: Sequence[Residency]) -> Residency:
        """The smallest of those with the shortest steps of online requests."""
        steps_s = self._online_steps_s(situation, choices)
        least_s = min(steps_s.values())
        return next(each for each in choices if steps_s[each] <= least_s)

    def _for_online(self, situation: Situation) -> Residency:
        steps_s = self._online_steps_s(situation, self._allowed)
        least_s, limit_s = min(steps_s.values()), situation.online_limit_s
        if steps_s[self.target] > max(limit_s, least_s):
            limit_s = max(limit_s * self._config.online_margin, least_s)
            return next(each for each in self._allowed if steps_s[each] <= limit_s)
        free = self._without_delay(situation, self._allowed)
        is_wanted = situation.wanted_blocks > self.target.num_blocks and not self._is_early(situation.now_s)
        return free if is_wanted and free.interval < self.target.interval else self.target

    def _for_offline(self, situation: Situation) -> Residency:
        config, now_s = self._config, situation.now_s
        is_held = now_s < self._online_at_s + config.offline_hold_s
        if is_held or self._is_early(now_s) or not situation.used_blocks:
            return self.target
        best = self._fastest(situation, self._allowed)
        gain = self._rate(best, situation) / self._rate(self.target, situation)
        return best if gain > 1.0 + config.least_gain else self.target

    def _fastest(self, situation: Situation, choices: Sequence[Residency]) -> Residency:
        """That with which offline requests advance fastest; the largest of several."""
        rates = {each: self._rate(each, situation) for each in choices}
        return max(reversed(choices), key=lambda each: rates[each])

    def _is_early(self, now_s: float) -> bool:
        return now_s < self._changed_at_s + self._config.least_stay_s

    def _rate(self, residency: Residency, situation: Situation) -> float:
        """Steps a second, times the requests in them over those that run now."""
        scale = min(
            min(situation.wanted_blocks, residency.num_blocks) / situation.used_blocks, situation.most_scale
        )
        step_s = self.step_s(situation.compute_s(scale), residency.interval, situation.transfer_s)
        return scale / step_s if step_s > 0.0 else 0.0

    def fastest_interval(self, residency: Residency, situation: Situation) -> int:
        """Of those that a residency has room for. It is not always the largest: see ``step_time_s``."""
        compute_s = situation.online_compute_s if situation.num_online else situation.compute_s(1.0)
        intervals = range(residency.interval, self.choices[0].interval - 1, -1)
        return min(intervals, key=lambda interval: self.step_s(compute_s, interval, situation.transfer_s))
