"""The online requests in the server, and what the cost model predicts for one more.

The server sees every online request before the engine does, so a prediction includes those that the engine
has not reported yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backfill.core.config import SchedulerConfig
from backfill.costs.correction import BiasCorrection
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.engine.messages import StepReport


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds of a request beside the online requests in the server.

    Attributes:
        ttft_s: from its arrival to its first token, after all prompts that are served before it.
        ttft_alone_s: the same without other prompts.
        decode_s: of a step that decodes all online requests and this one.
        decode_alone_s: of a step that decodes this request alone.
    """

    ttft_s: float
    ttft_alone_s: float
    decode_s: float
    decode_alone_s: float


@dataclass(slots=True)
class _OpenChoice:
    """A choice that has not ended."""

    prompt_tokens: int
    first_token_in_step: int | None = None  # None while its prompt waits


class OpenRequest:
    """The choices of one request until they end; made by ``OnlineLoad.add``. Repeated calls do nothing."""

    def __init__(self, load: OnlineLoad, priority: int, prompt_tokens: Sequence[int]) -> None:
        self._load = load
        self._priority = priority
        self._choices = {choice: _OpenChoice(tokens) for choice, tokens in enumerate(prompt_tokens)}
        for choice in self._choices.values():
            load.open(choice, priority)

    def on_first_token(self, choice: int) -> None:
        """A choice's prompt is computed."""
        state = self._choices.get(choice)
        if state is not None:
            self._load.begin_decoding(state, self._priority)

    def on_choice_end(self, choice: int) -> None:
        state = self._choices.pop(choice, None)
        if state is not None:
            self._load.close(state, self._priority)

    def release(self) -> None:
        """End every choice that has not ended."""
        while self._choices:
            self.on_choice_end(next(iter(self._choices)))


class OnlineLoad:
    """Counts the prompts that wait for their first token, and the requests that decode or soon will.

    A decode gains a token in each step with online work, so its context is counted in steps: about right, and
    without a look at every token.
    """

    def __init__(self, cost: CostModel, config: SchedulerConfig) -> None:
        self._cost = cost
        self._max_num_seqs = config.max_num_seqs
        self._step_tokens = min(config.max_num_batched_tokens, config.max_prefill_chunk_tokens)
        self._correction = BiasCorrection()
        self._waiting: dict[int, StepLoad] = {}  # by priority
        self._num_open = 0  # choices
        self._num_prompt_tokens = 0  # of open choices
        self._num_decoding = 0
        self._num_steps = 0  # with online work
        self._sum_first_steps = 0  # of decoding choices

    def set_cost_model(self, cost: CostModel) -> None:
        """Predict with ``cost`` from now on."""
        self._cost = cost
        self._correction = BiasCorrection()

    @property
    def num_open(self) -> int:
        """Choices that have not ended."""
        return self._num_open

    @property
    def num_waiting_tokens(self) -> int:
        """Of prompts without a first token."""
        return sum(load.num_tokens for load in self._waiting.values())

    @property
    def num_context_tokens(self) -> int:
        """About the tokens of all open choices, prompts included."""
        num_generated = self._num_decoding * self._num_steps - self._sum_first_steps
        return self._num_prompt_tokens + num_generated

    def on_report(self, report: StepReport) -> None:
        """Count a step, and correct the cost model by its measured time."""
        step = report.stats.step
        if step.kind in ("online", "mixed"):
            self._num_steps += 1
        if step.kind != "none" and not step.stopped:
            self._correction.observe(step.predicted_s, step.seconds)

    def predict(self, prompt_tokens: Sequence[int], *, priority: int, waited_s: float) -> Prediction:
        """
        Args:
            prompt_tokens: of each choice's prompt.
            waited_s: since the request arrived.
        """
        own = StepLoad()
        for tokens in prompt_tokens:
            self._put(own, tokens)
        ahead = own.copy()
        for other, load in self._waiting.items():
            if other <= priority:
                _add(ahead, load)
        return Prediction(
            ttft_s=waited_s + self._prefill_s(ahead),
            ttft_alone_s=waited_s + self._prefill_s(own),
            decode_s=self._decode_s(prompt_tokens, self._num_open),
            decode_alone_s=self._decode_s(prompt_tokens, 0),
        )

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

    def add(self, prompt_tokens: Sequence[int], *, priority: int) -> OpenRequest:
        """Count a request until its choices end."""
        return OpenRequest(self, priority, prompt_tokens)

    def open(self, choice: _OpenChoice, priority: int) -> None:
        """Count a choice, whose prompt waits. This and the next two are called by OpenRequest."""
        self._num_open += 1
        self._num_prompt_tokens += choice.prompt_tokens
        self._put(self._waiting.setdefault(priority, StepLoad()), choice.prompt_tokens)

    def begin_decoding(self, choice: _OpenChoice, priority: int) -> None:
        if choice.first_token_in_step is not None:
            return
        choice.first_token_in_step = self._num_steps
        self._num_decoding += 1
        self._sum_first_steps += self._num_steps
        load = self._waiting[priority]
        for slice_ in _slices(choice.prompt_tokens, self._step_tokens):
            load.take(*slice_)
        if load.num_requests == 0:
            del self._waiting[priority]

    def close(self, choice: _OpenChoice, priority: int) -> None:
        self.begin_decoding(choice, priority)
        assert choice.first_token_in_step is not None
        self._num_decoding -= 1
        self._sum_first_steps -= choice.first_token_in_step
        self._num_open -= 1
        self._num_prompt_tokens -= choice.prompt_tokens

    def _put(self, load: StepLoad, num_tokens: int) -> None:
        for slice_ in _slices(num_tokens, self._step_tokens):
            load.put(*slice_)

    def _prefill_s(self, load: StepLoad) -> float:
        return self._correction.mean * prefill_time_s(self._cost, load, self._step_tokens)

    def _decode_s(self, prompt_tokens: Sequence[int], num_others: int) -> float:
        """Of a step that decodes a new request and so many open choices of average context."""
        num_rows = len(prompt_tokens) + num_others
        context_tokens = float(sum(prompt_tokens))
        if num_others:
            context_tokens += self.num_context_tokens * num_others / self._num_open
        num_in_step = min(num_rows, self._max_num_seqs)
        load = StepLoad(
            num_tokens=num_in_step,
            num_sampled=num_in_step,
            num_requests=num_in_step,
            decode_context_tokens=round(context_tokens * num_in_step / num_rows),
        )
        return self._correction.mean * self._cost.step_time_s(load)


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
