"""Load shedding: refuses online requests that would miss their TTFT objective by far (``--shed-hopeless``).

The server knows the prompts that wait for their first token, and a cost model of prefill. From both it
predicts the TTFT of a new request before the engine sees the request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from backfill.api.admission import MAX_RETRY_AFTER_S
from backfill.core.config import SchedulerConfig
from backfill.costs.correction import BiasCorrection
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.engine.messages import StepReport

# A prompt that is partly computed counts in full, so the true wait may be half of the prediction.
SHED_FACTOR = 2.0


class RequestShed(Exception):
    """The request would miss its objective by far; the client may retry after ``retry_after_s`` seconds."""

    code = "slow_down"

    def __init__(self, predicted_s: float, objective_s: float, retry_after_s: int) -> None:
        super().__init__(
            f"The first token would come after about {predicted_s:.1f} s, and the objective is "
            f"{objective_s:g} s. Please retry in {retry_after_s} s."
        )
        self.retry_after_s = retry_after_s


def prefill_time_s(cost: CostModel, load: StepLoad, step_tokens: int) -> float:
    """Seconds to compute all slices of a load in full steps of ``step_tokens``, without other requests."""
    num_full, num_rest = divmod(load.num_tokens, step_tokens)
    num_steps = num_full + (num_rest > 0)
    if num_steps == 0:
        return 0.0
    return (
        num_full * cost.rows_s(step_tokens)
        + (cost.rows_s(num_rest) if num_rest else 0.0)
        + num_steps * cost.sampled_s(load.num_sampled / num_steps)
        + cost.request_s * load.num_requests
        + cost.prefill_pair_s * load.prefill_pairs
        + cost.prefill_context_s * load.prefill_context_tokens
        + cost.decode_context_s * load.decode_context_tokens
    )


def should_shed(predicted_s: float, alone_s: float, objective_s: float) -> bool:
    """Whether a request would miss its TTFT objective by far because of the requests ahead of it.

    ``alone_s``, the time that it takes without others, is no reason to shed: a retry would not change it.
    """
    return predicted_s > SHED_FACTOR * max(objective_s, alone_s)


class WaitingPrompts:
    """The prompts of one request, one a choice, until their first tokens; made by ``Shedder.admit``."""

    def __init__(self, shedder: Shedder, priority: int, lengths: Sequence[int]) -> None:
        self._shedder = shedder
        self._priority = priority
        self._lengths = dict(enumerate(lengths))  # by choice
        for length in lengths:
            shedder.put(priority, length)

    def on_first_token(self, choice: int) -> None:
        """Remove a choice's prompt; further calls do nothing."""
        length = self._lengths.pop(choice, None)
        if length is not None:
            self._shedder.take(self._priority, length)

    def release(self) -> None:
        """Remove the prompts without a token; further calls do nothing."""
        while self._lengths:
            self.on_first_token(next(iter(self._lengths)))


class Shedder:
    """Tracks the load of waiting online prompts, and refuses requests that would wait too long."""

    def __init__(self, cost: CostModel, config: SchedulerConfig) -> None:
        self._cost = cost
        self._step_tokens = min(config.max_num_batched_tokens, config.max_prefill_chunk_tokens)
        self._correction = BiasCorrection()
        self._waiting: dict[int, StepLoad] = {}  # by priority

    def set_cost_model(self, cost: CostModel) -> None:
        """Predict with ``cost`` from now on."""
        self._cost = cost
        self._correction = BiasCorrection()

    @property
    def num_waiting_tokens(self) -> int:
        return sum(load.num_tokens for load in self._waiting.values())

    def on_report(self, report: StepReport) -> None:
        """Correct the cost model by a step's measured time."""
        step = report.stats.step
        if step.kind != "none" and not step.stopped:
            self._correction.observe(step.predicted_s, step.seconds)

    def admit(
        self, lengths: Sequence[int], *, priority: int, objective_s: float, waited_s: float
    ) -> WaitingPrompts:
        """Count a request's prompts as waiting. Raises, counting nothing: RequestShed.

        Args:
            lengths: tokens of each choice's prompt.
            objective_s: the request's TTFT objective.
            waited_s: since the request arrived.
        """
        own = StepLoad()
        for length in lengths:
            self._put(own, length)
        ahead = own.copy()
        for other, load in self._waiting.items():
            if other <= priority:
                _add(ahead, load)
        alone_s, predicted_s = (
            waited_s + self._correction.mean * prefill_time_s(self._cost, load, self._step_tokens)
            for load in (own, ahead)
        )
        if should_shed(predicted_s, alone_s, objective_s):
            wait_s = math.ceil(predicted_s - max(objective_s, alone_s))
            raise RequestShed(predicted_s, objective_s, min(MAX_RETRY_AFTER_S, max(1, wait_s)))
        return WaitingPrompts(self, priority, lengths)

    def put(self, priority: int, length: int) -> None:
        """Add a waiting prompt; called by WaitingPrompts."""
        self._put(self._waiting.setdefault(priority, StepLoad()), length)

    def take(self, priority: int, length: int) -> None:
        """Undo one ``put``; called by WaitingPrompts."""
        load = self._waiting[priority]
        for slice_ in _slices(length, self._step_tokens):
            load.take(*slice_)
        if load.num_requests == 0:
            del self._waiting[priority]

    def _put(self, load: StepLoad, length: int) -> None:
        for slice_ in _slices(length, self._step_tokens):
            load.put(*slice_)


def _slices(length: int, step_tokens: int) -> list[tuple[int, int, bool]]:
    """The chunks of a prompt: (start, number of tokens, whether a token is sampled at the end)."""
    return [
        (start, min(step_tokens, length - start), start + step_tokens >= length)
        for start in range(0, length, step_tokens)
    ]


def _add(load: StepLoad, other: StepLoad) -> None:
    load.num_tokens += other.num_tokens
    load.num_sampled += other.num_sampled
    load.num_requests += other.num_requests
    load.prefill_pairs += other.prefill_pairs
    load.prefill_context_tokens += other.prefill_context_tokens
    load.decode_context_tokens += other.decode_context_tokens
