"""The two objects between the control plane and an executor: a step's plan and its outcome.

Both are complete when built, immutable, and plain data, so that an executor may be another process or a
simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag

from backfill.core.block import BlockCopy, BlockRef
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that is new to the executor, which keeps its tokens until it is released."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledSlice:
    """What one request computes in one step: its tokens at positions ``[start, start + num_tokens)``.

    Attributes:
        blocks: the request's block table, with slots for at least ``start + num_tokens`` tokens.
        samples: the last token's logits yield the next output token.
        preemptible: the slice may be stopped at a safepoint; true for offline requests.
    """

    request_id: RequestId
    start: int
    num_tokens: int
    blocks: tuple[BlockRef, ...]
    samples: bool
    preemptible: bool = False


@dataclass(frozen=True, slots=True)
class Safepoints:
    """A step may be stopped between two layers, after every ``layers_apart`` layers.

    With ``suspends``, stopped slices are suspended: the executor keeps their hidden states, and a later step
    resumes them at their layer. Otherwise they are discarded and computed again.
    """

    layers_apart: int
    suspends: bool


class CopyDirections(Flag):
    """Directions of copies: device to host (checkpoint), host to device (restore)."""

    NONE = 0
    CHECKPOINT = 1
    RESTORE = 2


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass over a batch.

    Attributes:
        step: counts plans made, from 0.
        admitted: requests that appear in ``slices`` for the first time, or again after a failed step.
        slices: at most one for each request.
        released: requests whose state the executor drops before it admits others.
        predicted_s: the cost model's prediction for the step; 0 without one.
        safepoints: None if the step cannot be stopped.
        resumes: the step resumes suspended slices. Suspended slices that are not in ``slices`` are dropped.
        max_layers: layers that a resuming step runs; it is suspended again if more are left. None: all.
        keeps_suspended: the executor keeps the suspended slices; otherwise it may drop them.
        checkpoint: copies from the device to the host that begin with this step.
        restore: copies from the host to the device that begin with this step, after those of ``checkpoint``.
        blocking_copies: copies of these directions complete before a slice is computed and are not reported.
            Other copies run beside this step and later ones; no slice of this step uses their blocks.
        is_idle_until_copy: there are no slices; the executor waits until a copy in flight completes.
    """

    step: int
    admitted: tuple[AdmittedRequest, ...]
    slices: tuple[ScheduledSlice, ...]
    released: tuple[RequestId, ...]
    predicted_s: float = 0.0
    safepoints: Safepoints | None = None
    resumes: bool = False
    max_layers: int | None = None
    keeps_suspended: bool = False
    checkpoint: tuple[BlockCopy, ...] = ()
    restore: tuple[BlockCopy, ...] = ()
    blocking_copies: CopyDirections = CopyDirections.NONE
    is_idle_until_copy: bool = False

    @property
    def stalls(self) -> bool:
        """The slices wait for blocking copies."""
        return bool(
            (CopyDirections.CHECKPOINT in self.blocking_copies and self.checkpoint)
            or (CopyDirections.RESTORE in self.blocking_copies and self.restore)
        )

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_tokens for scheduled in self.slices)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one output position, from the logits before any shaping.

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
    """What a step produced.

    Attributes:
        sampled: one token for each slice that samples and was not stopped, in the plan's order.
        suspended: requests whose slices were stopped at a safepoint and kept. The KV that they wrote does not
            count as computed yet.
        discarded: requests whose slices were stopped at a safepoint and dropped.
        layers_done: layers that the stopped slices have passed, in earlier steps as well.
        stopped_at_s: time of the stop on the executor's clock; None without one.
        completed_copies: copies of this plan or earlier ones that completed since the previous outcome, in
            any order.
    """

    sampled: tuple[SampledToken, ...]
    suspended: tuple[RequestId, ...] = ()
    discarded: tuple[RequestId, ...] = ()
    layers_done: int = 0
    stopped_at_s: float | None = None
    completed_copies: tuple[BlockCopy, ...] = ()

    @property
    def stopped(self) -> tuple[RequestId, ...]:
        """Requests whose slices were stopped."""
        return self.suspended + self.discarded
