"""Messages between the engine process and its client: msgspec structs encoded with MessagePack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from backfill.core.counters import ClassCounters, TierBlocks
from backfill.core.plan import TokenLogprobs
from backfill.core.request import FinishReason, Request, RequestId
from backfill.core.slo import SLO
from backfill.costs.profile import CostProfile
from backfill.execution.executor import ExecutorInfo

if TYPE_CHECKING:  # only the engine makes outputs of it
    from backfill.scheduling.committed import CommittedToken


class AddRequest(msgspec.Struct, tag=True, frozen=True):
    """Client to engine: serve this request. Its scheduling state is initial: it has not run yet."""

    request: Request


class AbortRequests(msgspec.Struct, tag=True, frozen=True):
    """Client to engine: end these requests without further outputs. Unknown ids are ignored."""

    request_ids: list[RequestId]


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Client to engine: end the process now, with whatever requests it still has."""


ToEngine = AddRequest | AbortRequests | Stop


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Engine to client, once: the model is loaded.

    ``default_slo`` is that of online requests that bring none; ``profile`` is None if it is not known. After
    ``hang_timeout_s`` without a report the engine counts as hanging; 0 for never.
    """

    info: ExecutorInfo
    default_slo: SLO
    profile: CostProfile | None = None
    hang_timeout_s: float = 0.0


class ProfileRefined(msgspec.Struct, tag=True, frozen=True):
    """Engine to client: steps are predicted with this profile from now on, and these are the objectives."""

    profile: CostProfile
    default_slo: SLO


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """Engine to client, in place of Ready: the engine cannot start. The message is for the user."""

    message: str


class EngineFailed(msgspec.Struct, tag=True, frozen=True):
    """Engine to client, as its last message: why the process ends. Without one, its exit code is all."""

    message: str


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One step's output of one request.

    Attributes:
        token_id: None where the request ended without a token (error).
        finish_reason: set on the last output.
        stop_token_id: the requested stop token that ended the request.
        message: why the request failed.
        first_scheduled_at_s, num_preemptions, num_cached_tokens, pauses (``Request.pauses``): on the first
            and the last output only.
        num_lost: requests in the failed step that ended this one; 0 without one.
        prompt_logprobs: of all prompt tokens but the first, on the first output; None if not asked for.
    """

    request_id: RequestId
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    message: str | None = None
    first_scheduled_at_s: float | None = None
    num_preemptions: int = 0
    num_lost: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    pauses: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(cls, committed: CommittedToken) -> TokenOutput:
        request, sampled = committed.request, committed.sampled
        if committed.finish_reason is None and committed.number > 1:
            return cls(request.request_id, sampled.token_id, sampled.logprobs)
        return cls(
            request.request_id,
            sampled.token_id,
            sampled.logprobs,
            finish_reason=committed.finish_reason,
            stop_token_id=committed.stop_token_id,
            first_scheduled_at_s=request.first_scheduled_at_s,
            num_preemptions=request.num_preemptions,
            num_cached_tokens=request.num_cached_tokens,
            prompt_logprobs=committed.prompt_logprobs,
            pauses=tuple(request.pauses),
        )

    @classmethod
    def failed(cls, request_id: RequestId, message: str, num_lost: int = 0) -> TokenOutput:
        return cls(request_id, None, finish_reason=FinishReason.ERROR, message=message, num_lost=num_lost)


class ClassStats(msgspec.Struct, frozen=True, array_like=True):
    """State and totals since start of one service class."""

    num_running: int
    num_waiting: int
    totals: ClassCounters


StepKind = Literal["none", "online", "mixed", "offline"]


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """One step.

    Attributes:
        kind: service classes of its slices; none also for a step that failed.
        num_tokens: of its plan.
        seconds, predicted_s: time taken and predicted; 0 without a cost model.
        stopped: its offline slices were stopped, by an arrival or at the end of their time.
        stop_latency_s: from the request to stop, made at an arrival, to the stop; None without one.
        failed_request_ids: requests of a step that failed.
        prompt_progress: the online requests whose prompts it was to compute in part, and the tokens of each
            that are computed by then, cached ones included; 0 if they are lost.
    """

    kind: StepKind
    num_tokens: int
    seconds: float
    predicted_s: float
    stopped: bool = False
    stop_latency_s: float | None = None
    failed_request_ids: tuple[RequestId, ...] = ()
    prompt_progress: tuple[tuple[RequestId, int], ...] = ()


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """State, totals since start, and the step since the last report (of kind none without one).

    Attributes:
        kv_usage_frac: share of the device's blocks in use; content that is only cached does not count.
        num_checkpointed_blocks: device blocks in use with a copy in host memory, complete or in flight.
        host_kv_usage_frac: share of the host's blocks in use; 0 without any.
        num_empty_blocks: device blocks without content.
        num_cached_copied_blocks: device blocks of preempted requests with a copy in host memory, complete
            or in flight.
        num_protected_blocks: device blocks with content that is kept for online requests.
        num_cached_blocks: other device blocks with content that no request uses.
        num_referenced_blocks: device blocks in use, by requests or by copies.
        num_shared_blocks: those among them that two requests fill from both ends.
        num_paired_blocks: those among them with a running request at each end.
        num_entered_blocks: blocks that were entered from their other end.
        num_overwritten_slots: slots of preempted requests that were overwritten in shared blocks.
        num_copied_slots: slots of shared blocks that were copied to host memory.
        offload_interval: every so many layers one is offloaded; 0 for none.
        num_transferred_weight_bytes: weights of offloaded layers that were transferred to the device.
        weight_stall_s: time for which steps waited for them.
        num_blocks: device blocks that may be used; it changes with the memory of the weights.
        num_draining_blocks: blocks that the pool is to lose, and that are still in use.
        bus_wait_s: time for which transfers waited for a shared bus; on CPU.
        bus_share: of its bandwidth, what this engine may use; 0 while it is idle or shares none.
        bus_load: what the engines on it need over its bandwidth, as last known; 0 if it shares none.
        bus_least_step_s: what a step's transfers take at least beside what the others on it need; infinite
            if they leave nothing, 0 if it shares none.
        device_blocks, host_blocks: the blocks of each tier by use.
    """

    online: ClassStats
    offline: ClassStats
    kv_usage_frac: float
    num_checkpointed_blocks: int
    host_kv_usage_frac: float
    num_stopped_steps: int
    step: StepStats
    num_empty_blocks: int = 0
    num_cached_blocks: int = 0
    num_cached_copied_blocks: int = 0
    num_referenced_blocks: int = 0
    num_protected_blocks: int = 0
    num_shared_blocks: int = 0
    num_paired_blocks: int = 0
    num_entered_blocks: int = 0
    num_overwritten_slots: int = 0
    num_copied_slots: int = 0
    offload_interval: int = 0
    num_transferred_weight_bytes: int = 0
    weight_stall_s: float = 0.0
    num_blocks: int = 0
    num_draining_blocks: int = 0
    bus_wait_s: float = 0.0
    bus_share: float = 0.0
    bus_load: float = 0.0
    bus_least_step_s: float = 0.0
    device_blocks: TierBlocks = TierBlocks()
    host_blocks: TierBlocks = TierBlocks()


class StepReport(msgspec.Struct, tag=True, frozen=True):
    """Engine to client: after each step, when a request ends outside a step, and every few idle seconds."""

    outputs: list[TokenOutput]
    stats: EngineStats


FromEngine = Ready | StartFailed | ProfileRefined | StepReport | EngineFailed
