"""The online requests in the server, and what the cost model predicts for one more.

The server sees every online request before the engine does, so a prediction includes those that the engine
has not reported yet.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter, itemgetter, sub
from typing import NamedTuple

from backfill.api.predictions import AskedPrompts, Passing, Prediction
from backfill.core.config import SchedulerConfig
from backfill.core.prefixes import CachedPrefixes
from backfill.core.slo import SLO
from backfill.costs.correction import BiasCorrection
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.engine.messages import StepReport
from backfill.scheduling.objectives import paying_step_s, prompt_step_s

_MAX_PASSED = 64  # prompts; those beyond count as ahead
_UNKNOWN_SHARE = 0.25  # of a prediction for a request that passes others


class _Queue(NamedTuple):
    """Prompts that are served one after the other."""

    owner: str
    priority: int


@dataclass(slots=True, eq=False)
class OpenChoice:
    """A choice that has not ended; made by ``OnlineLoad.add``. Repeated calls do nothing."""

    load: OnlineLoad
    asked: AskedPrompts
    prompt_tokens: int
    num_cached: int  # of them, when it came, or to be shared with choices before it
    num_computed: int  # of them by now, likewise
    keys: Sequence[int]
    queue: _Queue
    number: int  # of all choices
    relegated_at_s: float
    bounds_steps: bool  # once it decodes, if it is in time
    is_relegated: bool = False
    first_token_in_step: int | None = None  # None while its prompt waits
    has_ended: bool = False

    @property
    def num_pending(self) -> int:
        """Prompt tokens."""
        return self.prompt_tokens - self.num_computed

    def on_prompt_progress(self, num_computed: int) -> None:
        """So many tokens of its prompt are computed, cached ones included. It may have lost some."""
        if self.first_token_in_step is None:
            self.load.count_progress(self, min(num_computed, self.prompt_tokens - 1))

    def on_first_token(self) -> None:
        """Its prompt is computed."""
        if self.first_token_in_step is None:
            self.load.begin_decoding(self)
            self.load.note_computed(self)

    def on_end(self) -> None:
        if not self.has_ended:
            if self.first_token_in_step is None:
                self.load.begin_decoding(self)
            self.has_ended = True
            self.load.close(self)


class OnlineLoad:
    """Counts the prompts that wait for their first token, and the requests that decode or soon will.

    Prompts that the scheduler has relegated (``scheduling/queues.py``) are counted apart: they are served
    after those of their owner that can still be in time. Between owners there are turns
    (``scheduling/owner_shares.py``): prompts of each other one count up to the tokens of its own that a
    request has before it, as if all had one weight. What the prompts of one request share counts once. A
    prompt counts with what was missing of it after the last step that computed a part. The cache is taken to
    hold what prompts of online requests had computed lately: it may have lost some of it.

    A decode gains a token in each step with online work, so its context is counted in steps: about right, and
    without a look at every token.

    Attributes:
        bus_least_step_s: see ``EngineStats``.
        num_waiting_tokens: of choices without a first token, the prompt tokens that were to be computed when
            they came. Routers take off what they have sent.
    Args:
        kv_tokens: that the prefix cache holds at most.
    """

    def __init__(self, cost: CostModel, config: SchedulerConfig, kv_tokens: int = 0) -> None:
        self._cost = cost
        self._max_num_seqs = config.max_num_seqs
        self._step_tokens = config.max_chunk_tokens
        self._relegates = config.relegates
        self._correction = BiasCorrection()
        self.bus_least_step_s = 0.0
        self.num_waiting_tokens = 0
        self._in_time: dict[_Queue, StepLoad] = {}  # waiting prompts
        self._relegated: dict[_Queue, StepLoad] = {}  # the same of those that cannot be in time any more
        self._relegations: list[tuple[float, int, OpenChoice]] = []  # of prompts in time; sorted by instant
        self._num_opened = 0  # choices, ever
        self._num_open = 0  # choices
        self._num_prompt_tokens = 0  # of open choices
        self._num_decoding = 0
        self._num_bounding = 0  # of these, in time and with a TPOT objective no looser than the server's
        self._num_steps = 0  # with online work
        self._sum_first_steps = 0  # of decoding choices
        self._kv_tokens = kv_tokens
        self._prefixes = CachedPrefixes(kv_tokens)

    def set_cost_model(self, cost: CostModel) -> None:
        """Predict with ``cost`` from now on."""
        self._cost = cost
        self._correction = BiasCorrection()

    @property
    def num_open(self) -> int:
        """Choices that have not ended."""
        return self._num_open

    def num_relegated(self, now_s: float) -> int:
        """Choices whose prompts wait and cannot be in time any more."""
        self._relegate(now_s)
        return sum(load.num_sampled for load in self._relegated.values())

    @property
    def prefill_tokens_per_s(self) -> float:
        """Predicted for a step of prompt tokens without other requests."""
        load = StepLoad()
        load.put_prompt(self._step_tokens, self._step_tokens)
        return self._step_tokens / max(self._prefill_s(load), 1e-9)

    @property
    def num_context_tokens(self) -> int:
        """About the tokens of all open choices, prompts included."""
        num_generated = self._num_decoding * self._num_steps - self._sum_first_steps
        return self._num_prompt_tokens + num_generated

    def on_report(self, report: StepReport) -> None:
        """Count a step, and correct the cost model by its measured time."""
        self.bus_least_step_s = report.stats.bus_least_step_s
        step = report.stats.step
        if step.kind in ("online", "mixed"):
            self._num_steps += 1
        if step.kind != "none" and not step.stopped:
            self._correction.observe(step.predicted_s, step.seconds)

    def predict(self, asked: AskedPrompts, *, now_s: float) -> Prediction:
        """Of a request that is not in the load."""
        self._relegate(now_s)
        own, num_cached = self._own(asked)
        prompts = zip(asked.num_tokens, num_cached, strict=True)
        is_late = any(self._relegated_at_s(*each, asked.first_token_by_s) <= now_s for each in prompts)
        ahead = self._ahead(own, _Queue(asked.owner, asked.priority), is_late=is_late)
        waited_s = now_s - asked.arrived_at_s
        return Prediction(
            ttft_s=waited_s + self._prefill_s(ahead),
            ttft_alone_s=waited_s + self._prefill_s(own),
            decode_s=self._decode_s(asked.num_tokens, self._num_open),
            decode_alone_s=self._decode_s(asked.num_tokens, 0),
        )

    def _ahead(self, own: StepLoad, queue: _Queue, *, is_late: bool) -> StepLoad:
        """Of the waiting prompts: a request's own, and those that are served before it."""
        ahead, of_others = own.copy(), dict[str, StepLoad]()
        own_level = self._relegated if is_late else self._in_time
        for level in (self._in_time, self._relegated) if is_late else (self._in_time,):
            for other, load in level.items():
                if other.owner != queue.owner:
                    of_others.setdefault(other.owner, StepLoad()).add(load)
                elif level is not own_level or other.priority <= queue.priority:
                    ahead.add(load)
        num_tokens = ahead.num_tokens
        for load in of_others.values():
            ahead.add(load, min(1.0, num_tokens / load.num_tokens))
        return ahead

    def passing(self, asked: AskedPrompts, *, now_s: float, default: SLO) -> Passing:
        """``Prediction.ttft_s`` of a request in time, without the longer prompts that it passes.

        The longest of its owner that can wait for all others come last, as in
        ``first_tokens.shortest_first``. Some of them may be in the running step. A share is added for what
        cannot be known: a request that is late after all goes behind those that it was to pass.

        Args: default: the server's objectives, which bound steps.
        Returns: inf where others hold what it needs, no decode bounds the running step, or owners take turns.
        """
        self._relegate(now_s)
        own, num_cached = self._own(asked)
        num_longest = max(map(sub, asked.num_tokens, num_cached))
        queue = _Queue(asked.owner, asked.priority)
        has_place = self._num_open + len(asked.num_tokens) <= self._max_num_seqs
        has_memory = self.num_context_tokens + sum(asked.num_tokens) <= self._kv_tokens
        is_bounded = self._num_bounding or not self._num_decoding
        is_alone = all(other.owner == asked.owner for other in (*self._in_time, *self._relegated))
        if not (self._relegates and has_place and has_memory and is_bounded and is_alone):
            return Passing(math.inf, math.inf)
        ahead = self._ahead(own, queue, is_late=False)
        seconds, passed_s = self._prefill_s(ahead), 0.0
        beside = (each for _, _, each in self._relegations if each.queue == queue)
        may_wait = (e for e in beside if e.asked.lets_pass_until_s > now_s and e.num_pending > num_longest)
        for choice in nlargest(_MAX_PASSED, may_wait, key=attrgetter("num_pending")):
            if choice.asked.lets_pass_until_s >= now_s + seconds:
                self._take_from(ahead, choice)
                rest_s = self._prefill_s(ahead)
                seconds, passed_s = rest_s, passed_s + seconds - rest_s
        step_s = default.tpot_s
        if not self._num_bounding:
            paying_s = self._correction.mean * paying_step_s(self._cost, self._step_tokens)
            step_s = prompt_step_s(default, paying_s)
        own_s, in_step_s, certain = self._prefill_s(own), min(passed_s, step_s), 1.0 + _UNKNOWN_SHARE
        ahead_s = seconds - own_s
        if certain * (own_s + in_step_s) > asked.ttft_slo_s:
            ahead_s += passed_s
        return Passing(now_s - asked.arrived_at_s + certain * (seconds + in_step_s), ahead_s)

    def num_too_many(self, prompt_tokens: Sequence[int], limit_s: float) -> int:
        """The fewest open choices that must end before a step that decodes the others and this request takes
        at most ``limit_s``; all of them if none such is enough."""
        low, high = 0, self._num_open
        while low < high:
            middle = (low + high) // 2
            if self._decode_s(prompt_tokens, self._num_open - middle) <= limit_s:
                high = middle
            else:
                low = middle + 1
        return low

    def add(self, asked: AskedPrompts, *, bounds_steps: bool = True) -> list[OpenChoice]:
        """Count the choices of a request, whose prompts wait, until they end.

        Args:
            bounds_steps: its TPOT objective is no looser than the server's.
        """
        choices, queue = [], _Queue(asked.owner, asked.priority)
        keys = asked.keys or [()] * len(asked.num_tokens)
        cached = self._prefixes.num_cached(asked.num_tokens, keys)
        for tokens, num_cached, of_prompt in zip(asked.num_tokens, cached, keys, strict=True):
            (num_found,) = self._prefixes.num_cached([tokens], [of_prompt])  # without what it is to share
            at_s = self._relegated_at_s(tokens, num_found, asked.first_token_by_s)
            number = self._num_opened
            choice = OpenChoice(
                self, asked, tokens, num_cached, num_cached, of_prompt, queue, number, at_s, bounds_steps
            )
            self._num_opened += 1
            self._num_open += 1
            self._num_prompt_tokens += tokens
            self.num_waiting_tokens += tokens - num_cached
            self._in_time.setdefault(queue, StepLoad()).put_prompt(tokens, self._step_tokens, num_cached)
            self._note_relegation(choice)
            choices.append(choice)
        return choices

    def count_progress(self, choice: OpenChoice, num_computed: int) -> None:
        """This and the next three are called by ``OpenChoice``. A relegated one stays relegated."""
        load = (self._relegated if choice.is_relegated else self._in_time)[choice.queue]
        self._take_from(load, choice)
        choice.num_computed = num_computed
        load.put_prompt(choice.prompt_tokens, self._step_tokens, num_computed)
        if not choice.is_relegated:
            self._forget_relegation(choice)
            tokens, by_s = choice.prompt_tokens, choice.asked.first_token_by_s
            choice.relegated_at_s = self._relegated_at_s(tokens, num_computed, by_s)
            self._note_relegation(choice)

    def begin_decoding(self, choice: OpenChoice) -> None:
        choice.first_token_in_step = self._num_steps
        self.num_waiting_tokens -= choice.prompt_tokens - choice.num_cached
        self._num_decoding += 1
        choice.bounds_steps &= not choice.is_relegated
        self._num_bounding += choice.bounds_steps
        self._sum_first_steps += self._num_steps
        if choice.is_relegated:
            self._take(self._relegated, choice)
        else:
            self._take(self._in_time, choice)
            self._forget_relegation(choice)

    def note_computed(self, choice: OpenChoice) -> None:
        self._prefixes.note_computed(choice.keys)

    def on_new_engine(self) -> None:
        """Its prefix cache is empty."""
        self._prefixes = CachedPrefixes(self._kv_tokens)

    def close(self, choice: OpenChoice) -> None:
        assert choice.first_token_in_step is not None
        self._num_decoding -= 1
        self._num_bounding -= choice.bounds_steps
        self._sum_first_steps -= choice.first_token_in_step
        self._num_open -= 1
        self._num_prompt_tokens -= choice.prompt_tokens

    def _own(self, asked: AskedPrompts) -> tuple[StepLoad, list[int]]:
        """Of a request's prompts: what is to be computed, and the tokens of each that the cache has."""
        own, cached = StepLoad(), self._prefixes.num_cached(asked.num_tokens, asked.keys)
        for tokens, num_cached in zip(asked.num_tokens, cached, strict=True):
            own.put_prompt(tokens, self._step_tokens, num_cached)
        return own, cached

    def _relegated_at_s(self, num_tokens: int, num_computed: int, first_token_by_s: float) -> float:
        """From when on a prompt cannot be in time any more, even alone; as ``LevelRule`` has it."""
        if not self._relegates:
            return math.inf
        alone_s = self._cost.prefill_time_s(num_tokens, self._step_tokens, num_computed_tokens=num_computed)
        return first_token_by_s - self._correction.mean * alone_s

    def _note_relegation(self, choice: OpenChoice) -> None:
        bisect.insort(self._relegations, (choice.relegated_at_s, choice.number, choice))

    def _forget_relegation(self, choice: OpenChoice) -> None:
        del self._relegations[bisect.bisect_left(self._relegations, (choice.relegated_at_s, choice.number))]

    def _relegate(self, now_s: float) -> None:
        """Move the prompts that are due."""
        num_due = bisect.bisect_right(self._relegations, now_s, key=itemgetter(0))
        for _, _, choice in self._relegations[:num_due]:
            self._take(self._in_time, choice)
            load = self._relegated.setdefault(choice.queue, StepLoad())
            load.put_prompt(choice.prompt_tokens, self._step_tokens, choice.num_computed)
            choice.is_relegated = True
        del self._relegations[:num_due]

    def _take_from(self, load: StepLoad, choice: OpenChoice) -> None:
        load.put_prompt(choice.prompt_tokens, self._step_tokens, choice.num_computed, sign=-1)

    def _take(self, loads: dict[_Queue, StepLoad], choice: OpenChoice) -> None:
        load = loads[choice.queue]
        self._take_from(load, choice)
        if load.num_requests == 0:
            del loads[choice.queue]

    def _prefill_s(self, load: StepLoad) -> float:
        return self._correction.mean * self._cost.steps_time_s(load, self._step_tokens)

    def _decode_s(self, prompt_tokens: Sequence[int], num_others: int) -> float:
        """Of a step that decodes a new request and so many open choices of average context."""
        num_rows = len(prompt_tokens) + num_others
        context_tokens = float(sum(prompt_tokens))
        if num_others:
            context_tokens += self.num_context_tokens * num_others / self._num_open
        load = StepLoad.of_decodes(num_rows, context_tokens, self._max_num_seqs)
        return self._correction.mean * self._cost.step_time_s(load)
