"""Online traffic of a fleet: a trace's arrivals and lengths, with prefixes that its prompts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from backfill.core.errors import ConfigError
from backfill.simulation.replay import FILLER, unique_prompt
from backfill.simulation.workloads import drawn_conversations, num_requests, within_context
from backfill.workloads.lengths import LengthDistribution
from backfill.workloads.traces import Trace, read_trace

VOCABULARY = 32_000
NUM_NAMING = 2
"""The first tokens of a text that say which it is."""

_FIRST_ANSWER = 1 << 28
_LEAST_OWN_TOKENS = 16  # of a prompt, after what it shares
_JITTER_S = 5.0  # of the trace, divided by its speed
_DRAWN_PER_S = 5.5  # the rate of Azure's trace
_LONGER = 1.03  # a trace's last seconds may lack arrivals
_SYSTEM_PROMPT = LengthDistribution(800, 0.8, "lognormal")
# From a turn of a conversation to the next at least.
_THINK_S = 30.0
_FORGOTTEN_S = 900.0
_MOST_OPEN = 400  # conversations of an application that may go on


class Segment(NamedTuple):
    """A run of tokens that only prompts with the same number have."""

    number: int
    length: int


class FleetArrival(NamedTuple):
    """An online request: when it arrives, what its prompt is made of, and the length of its output."""

    at_s: float
    prompt: tuple[Segment, ...]
    output_len: int

    @property
    def input_len(self) -> int:
        return sum(segment.length for segment in self.prompt)


@dataclass(frozen=True, slots=True)
class FleetTraffic:
    """Online requests of a trace, at a multiple of its rate.

    Applications have a system prompt each and a share of the requests by Zipf's law. A request goes on
    with a conversation of its application, if one fits, or begins one. Its prompt is the
    system prompt, the turns before with their answers, and text of its own, and as long as in the trace.

    Attributes:
        trace: CSV with arrival times; None draws requests with the means and variation of Azure's.
        rate_per_s: mean over the duration, to which the trace's requests are repeated or thinned out; None
            for each of them once.
        duration_s: of the run; the part of the trace that falls into it is used.
        speed: how many seconds of the trace pass in a second.
        zipf: exponent; 0 spreads requests evenly.
        turn_share: of the requests that go on with a conversation if one fits.
        seed: of all draws.
    """

    trace: Path | None
    rate_per_s: float | None
    duration_s: float
    speed: float
    num_applications: int
    zipf: float
    turn_share: float
    seed: int

    def arrivals(self, max_len: int) -> tuple[FleetArrival, ...]:
        """In order of arrival; longer requests of the trace are left out. Raises: ConfigError."""
        rng = np.random.default_rng(self.seed)
        source = self._source(max_len, rng)
        assert source.arrivals_at_s is not None
        rate_per_s = self.rate_per_s
        count = len(source) if rate_per_s is None else num_requests(rate_per_s, self.duration_s)
        # Whole copies of the trace and a random part of one more.
        rows = np.concatenate(
            [
                np.tile(np.arange(len(source)), count // len(source)),
                rng.choice(len(source), count % len(source), replace=False),
            ]
        )
        # Copies of a request do not arrive at one instant.
        at_s = (
            source.arrivals_at_s[rows] + rng.uniform(0.0, _JITTER_S / self.speed, count)
        ) % self.duration_s
        order = np.argsort(at_s, kind="stable")
        rows = rows[order]
        return _with_prefixes(
            at_s[order].tolist(),
            source.input_lens[rows].tolist(),
            source.output_lens[rows].tolist(),
            self,
            rng,
        )

    def _source(self, max_len: int, rng: np.random.Generator) -> Trace:
        if self.trace is None:
            count = max(200, num_requests(_DRAWN_PER_S * self.speed, self.duration_s))
            drawn = drawn_conversations(count, max_len, rng)
            assert drawn.arrivals_at_s is not None
            scale = self.duration_s / float(drawn.arrivals_at_s[-1])
            return Trace(drawn.input_lens, drawn.output_lens, drawn.arrivals_at_s * scale)
        whole = within_context(self.trace, read_trace(self.trace), max_len)
        if whole.arrivals_at_s is None:
            raise ConfigError(
                f"{self.trace} has no arrival times; a fleet's traffic needs them.", field="online"
            )
        lasts_s = float(whole.arrivals_at_s[-1]) / self.speed
        if self.duration_s > _LONGER * lasts_s:
            raise ConfigError(f"must be at most {lasts_s:g}: {self.trace} lasts no longer.", field="duration")
        at_s = whole.arrivals_at_s / self.speed
        used = whole.select(np.flatnonzero(at_s <= self.duration_s).tolist())
        assert used.arrivals_at_s is not None
        return replace(used, arrivals_at_s=used.arrivals_at_s / self.speed)


class _Conversation(NamedTuple):
    at_s: float  # of its last turn
    history: tuple[Segment, ...]
    length: int


def _with_prefixes(
    at_s: Sequence[float],
    input_lens: Sequence[int],
    output_lens: Sequence[int],
    traffic: FleetTraffic,
    rng: np.random.Generator,
) -> tuple[FleetArrival, ...]:
    count, num_applications = len(at_s), traffic.num_applications
    weights = np.arange(1, num_applications + 1) ** -traffic.zipf
    applications = rng.choice(num_applications, count, p=weights / weights.sum()).tolist()
    goes_on = (rng.uniform(size=count) < traffic.turn_share).tolist()
    system_lens = _SYSTEM_PROMPT.sample(num_applications, rng).tolist()
    is_open: list[list[_Conversation]] = [[] for _ in range(num_applications)]
    arrivals = []
    for number, (now_s, input_len, output_len, application) in enumerate(
        zip(at_s, input_lens, output_lens, applications, strict=True)
    ):
        known = is_open[application]
        history: tuple[Segment, ...] = ()
        length = 0
        if goes_on[number]:
            found = _longest_that_fits(known, now_s, input_len - _LEAST_OWN_TOKENS)
            if found is not None:
                _, history, length = known.pop(found)
        if not history:
            length = max(0, min(system_lens[application], input_len - _LEAST_OWN_TOKENS))
            history = (Segment(application, length),) if length else ()
        own = Segment(text_number(num_applications, number), input_len - length)
        prompt = (*history, own)
        arrivals.append(FleetArrival(now_s, prompt, output_len))
        answered = (*prompt, Segment(answer_number(number), output_len))
        known.append(_Conversation(now_s, answered, input_len + output_len))
        if len(known) > _MOST_OPEN:
            del known[0]
    return tuple(arrivals)


def _longest_that_fits(known: Sequence[_Conversation], now_s: float, most_tokens: int) -> int | None:
    """Index of the longest conversation of at most so many tokens whose user may have read the answer."""
    best, best_length = None, 0
    for index, (at_s, _, length) in enumerate(known):
        if best_length < length <= most_tokens and _THINK_S <= now_s - at_s <= _FORGOTTEN_S:
            best, best_length = index, length
    return best


def text_number(num_applications: int, request: int) -> int:
    """Number of the text that a request adds to its prompt."""
    return num_applications + request


def answer_number(request: int) -> int:
    """Number of a request's answer; texts and system prompts have smaller ones."""
    return _FIRST_ANSWER + request


def answer_token(request: int, position: int) -> int:
    """The token of a request's output at a position from 0."""
    if position >= NUM_NAMING:
        return FILLER
    number = answer_number(request)
    return number // VOCABULARY % VOCABULARY if position else number % VOCABULARY


def prompt_tokens(prompt: Sequence[Segment]) -> tuple[int, ...]:
    """The token ids of a prompt. Prompts share a prefix as far as their segments are the same."""
    token_ids: tuple[int, ...] = ()
    for number, length in prompt:
        token_ids += unique_prompt(number, length, VOCABULARY)
    return token_ids
