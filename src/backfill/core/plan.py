"""The two objects between the control plane and an executor: a step's plan and its outcome.

Both are complete when built, immutable, and made of plain data, so that an executor may be another
process or a simulation.
"""

from __future__ import annotations

from dataclasses import dataclass

from backfill.core.block import BlockRef
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request the executor has not seen before. It keeps the tokens until the request is released."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledSlice:
    """What one request computes in one step: its tokens at positions ``[start, start + num_tokens)``.

    ``blocks`` are all the blocks of the request, in token order, enough for ``start + num_tokens``
    tokens. ``samples`` says that the last token's logits yield the next output token.
    """

    request_id: RequestId
    start: int
    num_tokens: int
    blocks: tuple[BlockRef, ...]
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass over a batch.

    Attributes:
        step: counts plans made, from 0.
        admitted: requests that appear in ``slices`` for the first time.
        slices: at most one for each request.
        released: requests whose state the executor drops before the step runs.
        has_online, has_offline: whether a slice is of a request of that class. A step without online
            requests may be stopped at a safepoint.
        predicted_s: what the cost model gives for the step; 0 without one.
    """

    step: int
    admitted: tuple[AdmittedRequest, ...]
    slices: tuple[ScheduledSlice, ...]
    released: tuple[RequestId, ...]
    has_online: bool = True
    has_offline: bool = False
    predicted_s: float = 0.0

    @property
    def preemptible(self) -> bool:
        return not self.has_online

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.slices)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one output position, of the logits before any shaping.

    ``top`` holds (token id, log probability) pairs, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    request_id: RequestId
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step produced: one token for each slice that samples, in the plan's order.

    An ``aborted`` step was stopped at a safepoint and produced nothing: what it wrote lies in slots not yet
    counted as computed.
    """

    sampled: tuple[SampledToken, ...]
    aborted: bool = False
