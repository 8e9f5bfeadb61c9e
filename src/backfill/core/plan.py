"""The two objects between the control plane and an executor: a step's plan and its outcome.

Both are complete when built, immutable, and made of plain data, so that an executor may be another
process or a simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag

from backfill.core.block import BlockCopy, BlockRef
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
    tokens. ``samples`` says that the last token's logits yield the next output token. What ``yields`` may
    be taken out of the running step at a safepoint: the slices of offline requests.
    """

    request_id: RequestId
    start: int
    num_tokens: int
    blocks: tuple[BlockRef, ...]
    samples: bool
    yields: bool = False


@dataclass(frozen=True, slots=True)
class Safepoints:
    """Where a step may be stopped: between two layers, ``layers_apart`` of them from one point to the next.

    What is stopped is *suspended* where ``suspends``: its rows' hidden states are kept, and a later step goes
    on at the layer they reached. Else it is dropped and computed anew.
    """

    layers_apart: int
    suspends: bool


class CopyKinds(Flag):
    """Of the copies between device and host: none, those of one direction, or all."""

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
        released: requests whose state the executor drops before it takes in those admitted.
        predicted_s: what the cost model gives for the step; 0 without one.
        safepoints: None where they are not armed.
        resumes: the slices go on where they were suspended; they are all or some of the suspended ones, and
            the others are dropped.
        max_layers: of a step that resumes: it runs so many layers, and is suspended again if more are left.
        keeps_suspended: what is suspended stays so; else the executor may forget it.
        checkpoint: copies from the device to the host that begin now.
        restore: copies from the host to the device that begin now, after those of ``checkpoint``.
        waits_for: copies that are complete before a slice is computed, and are not reported; all others go on
            beside the step and those after it. No slice of this step reads or writes their blocks.
        awaits_copy: there are no slices; the executor waits until a copy that is under way is complete.
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
    waits_for: CopyKinds = CopyKinds.NONE
    awaits_copy: bool = False

    @property
    def stalls(self) -> bool:
        """The slices wait for copies."""
        return bool(
            (CopyKinds.CHECKPOINT in self.waits_for and self.checkpoint)
            or (CopyKinds.RESTORE in self.waits_for and self.restore)
        )

    @property
    def has_online(self) -> bool:
        return any(not piece.yields for piece in self.slices)

    @property
    def has_offline(self) -> bool:
        return any(piece.yields for piece in self.slices)

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
    """What a step produced.

    Attributes:
        sampled: one token for each slice that samples and was not stopped, in the plan's order.
        stopped: requests whose slices were taken out at a safepoint. What they wrote lies in slots not yet
            counted as computed.
        layers_done: layers that the stopped slices have behind them, those of earlier steps included.
        stopped_at_s: when they were taken out, on the executor's clock; None where nothing was.
        copied: copies, of this plan or of earlier ones, that have completed since the outcome before, in any
            order.
    """

    sampled: tuple[SampledToken, ...]
    stopped: tuple[RequestId, ...] = ()
    layers_done: int = 0
    stopped_at_s: float | None = None
    copied: tuple[BlockCopy, ...] = ()
