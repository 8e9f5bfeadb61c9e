"""What crosses the boundary of the engine process, as msgspec structs encoded with MessagePack."""

from __future__ import annotations

from typing import Literal

import msgspec

from backfill.core.counters import ClassCounters
from backfill.core.plan import TokenLogprobs
from backfill.core.request import FinishReason, Request, RequestId
from backfill.core.slo import SLO
from backfill.costs.model import CostModel
from backfill.costs.profile import CostProfile
from backfill.execution.executor import ExecutorInfo


class AddRequest(msgspec.Struct, tag=True, frozen=True):
    """Client to engine: serve this request, which has not run yet."""

    request: Request


class AbortRequests(msgspec.Struct, tag=True, frozen=True):
    """Client to engine: stop these; nothing more is said of them. Unknown ids are ignored."""

    request_ids: list[RequestId]


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Client to engine: end the process now. The client has drained or given up what was running."""


ToEngine = AddRequest | AbortRequests | Stop


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Engine to client, once: the model is loaded.

    ``default_slo`` is that of online requests that bring none; ``profile`` is what steps cost, None where it
    is not known. After ``hang_timeout_s`` without a report the engine hangs; 0 is never.
    """

    info: ExecutorInfo
    load_s: float
    default_slo: SLO
    profile: CostProfile | None = None
    hang_timeout_s: float = 0.0

    @property
    def cost(self) -> CostModel | None:
        """The profile's model."""
        return None if self.profile is None else self.profile.cost


class ProfileRefined(msgspec.Struct, tag=True, frozen=True):
    """Engine to client: steps are predicted with this profile from now on."""

    profile: CostProfile


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """Engine to client, in place of Ready: it cannot start, for a reason meant for the user."""

    message: str


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One step's news of one request; a finished request has no further ones.

    ``token_id`` is None where the request ended without a token (abort, error). ``message`` says why
    it failed, and ``num_lost``, where a failed step is the reason, how many requests were in that step.
    ``stop_token_id`` is the requested stop token that ended it. ``first_scheduled_at_s`` and
    ``num_preemptions`` are set on the first and the last output only.
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


class ClassStats(msgspec.Struct, frozen=True, array_like=True):
    """State and totals since start of one service class."""

    num_running: int
    num_waiting: int
    totals: ClassCounters


StepKind = Literal["none", "online", "mixed", "offline"]


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """One step: whose requests it served, tokens of its plan, seconds taken and predicted (0: no cost model).

    A step is ``stopped`` whose offline part was taken out on the way: for an arrival, ``stop_latency_s``
    after it, or because it had no more time. One that failed is of kind none, with the requests that it was
    for in ``failed_request_ids``.
    """

    kind: StepKind
    num_tokens: int
    seconds: float
    predicted_s: float
    stopped: bool = False
    stop_latency_s: float | None = None
    failed_request_ids: tuple[RequestId, ...] = ()


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """State, totals since start, and the step since the report before (of kind none where there was none).

    Attributes:
        num_checkpointed_blocks: device blocks that have a copy in host memory.
        host_kv_usage_frac: share of the host's blocks in use; 0 without any.
    """

    online: ClassStats
    offline: ClassStats
    kv_usage_frac: float
    num_free_blocks: int
    num_checkpointed_blocks: int
    host_kv_usage_frac: float
    num_stopped_steps: int
    step: StepStats


class StepReport(msgspec.Struct, tag=True, frozen=True):
    """Engine to client, after each step, whenever a request ended outside one, and every few seconds else."""

    outputs: list[TokenOutput]
    stats: EngineStats


FromEngine = Ready | StartFailed | ProfileRefined | StepReport
