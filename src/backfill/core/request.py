"""A request as the scheduler knows it: what it asks, how far it is, and its legal changes of status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from backfill.core.sampling import SamplingParams

RequestId = NewType("RequestId", str)


class ServiceClass(Enum):
    """Whose objective a request has: ``ONLINE`` latency, ``OFFLINE`` throughput only."""

    ONLINE = "online"
    OFFLINE = "offline"


class RequestStatus(Enum):
    WAITING = "waiting"  # admitted to no batch yet
    RUNNING = "running"  # holds blocks and takes part in steps
    PREEMPTED = "preempted"  # its blocks were taken back; its tokens are kept and will be recomputed
    FINISHED = "finished"


_LEGAL_MOVES: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


class FinishReason(Enum):
    """Why an output ended. STOP and LENGTH are OpenAI's; the other two end without a whole answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt, one output sequence.

    The law of progress: ``0 <= num_computed_tokens <= num_tokens``. The tokens in
    ``[num_computed_tokens, num_tokens)`` are known but their KV is not computed; computing the last
    of them yields the next output token. Prefill, chunks of it, decode and recomputation are all
    this one difference.
    """

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    service_class: ServiceClass = ServiceClass.ONLINE
    priority: int = 0  # lower is sooner, within a class
    arrived_at_s: float = 0.0
    sequence_number: int = 0  # order of submission; breaks ties of arrival
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    first_scheduled_at_s: float | None = None
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        assert len(self.prompt_token_ids) > 0, f"{self.request_id} has no prompt tokens"

    @property
    def order_key(self) -> tuple[int, int, float, int]:
        """Smaller is more urgent: online before offline, lower priority number, earlier arrival."""
        rank = 0 if self.service_class is ServiceClass.ONLINE else 1
        return (rank, self.priority, self.arrived_at_s, self.sequence_number)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose KV must be computed before the next token can be sampled; >= 1 until finished."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """One step of one token yields the next output token."""
        return self.num_pending_tokens == 1 and self.num_computed_tokens > 0

    def move_to(self, status: RequestStatus) -> None:
        assert status in _LEGAL_MOVES[self.status], f"{self.request_id}: {self.status} -> {status}"
        self.status = status

    def finish(self, reason: FinishReason) -> None:
        self.move_to(RequestStatus.FINISHED)
        self.finish_reason = reason
