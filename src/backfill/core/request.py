"""A request as the scheduler knows it: parameters, progress, and legal changes of status."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, Protocol, TypeAlias

from backfill.core.errors import RequestError
from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO

MAX_CACHE_SALT_CHARS = 256
MAX_PAUSES = 32  # that are kept of a request, for its trace; an offline one may be preempted without end
MAX_FORCED_TOKENS = 15  # with one sampled token; a step of more would be that of a prompt

RequestId = NewType("RequestId", str)
OrderKey: TypeAlias = tuple[int, float, int]


class HasOrderKey(Protocol):
    @property
    def order_key(self) -> OrderKey: ...


class ServiceClass(Enum):
    """What a request asks for: ``ONLINE`` latency objectives, ``OFFLINE`` throughput only."""

    __hash__ = object.__hash__  # Enum's own is slow Python code, called for every slice

    ONLINE = "online"
    OFFLINE = "offline"


class PriorityLevel(Enum):
    """The order in which the scheduler serves requests; the smaller value is the more urgent."""

    __hash__ = object.__hash__  # Enum's own is slow Python code, called for every slice

    ONLINE = 0
    RELEGATED = 1  # online, and too late for its TTFT objective
    PROMOTED = 2  # offline, near the end of its completion window
    OFFLINE = 3


class RequestStatus(Enum):
    WAITING = "waiting"  # not scheduled yet
    RUNNING = "running"  # holds blocks and takes part in steps
    PREEMPTED = "preempted"  # has run and holds no blocks; its KV stays cached until the blocks are needed
    RESTORING = "restoring"  # holds device blocks while KV is copied to them; not in steps yet
    FINISHED = "finished"


_LEGAL_MOVES: dict[RequestStatus, set[RequestStatus]] = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.RESTORING, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED, RequestStatus.FINISHED},
    RequestStatus.PREEMPTED: {RequestStatus.RUNNING, RequestStatus.RESTORING, RequestStatus.FINISHED},
    RequestStatus.RESTORING: {RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set(),
}


class FinishReason(Enum):
    """Why an output ended. STOP and LENGTH are OpenAI's; the other two end without a whole answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt, one output sequence. A client makes it and sends it to the engine, which schedules it.

    Progress is one variable: ``0 <= num_computed_tokens <= num_tokens``. The KV of the tokens in
    ``[num_computed_tokens, num_tokens)`` is not computed yet; computing the last of them yields the next
    output token. Prefill, a chunk of it, decode and recomputation differ only in this range. While the
    request holds no blocks, its computed tokens are those that the KV cache had when it was last asked.
    """

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    service_class: ServiceClass = ServiceClass.ONLINE
    slo: SLO | None = None  # None: no objective; an engine gives online requests its default
    complete_by_s: float | None = None  # end of an offline request's completion window, on the engine's clock
    priority: int = 0  # lower is sooner, within a class and among requests of one owner
    arrived_at_s: float = 0.0  # on the engine's clock
    owner: str = field(default="", repr=False)  # of the API key: whose prefix cache it uses; empty without
    owner_weight: float = 1.0  # of what its owner gets where requests of several owners wait
    # Requests share cached prefixes only with requests of the same salt.
    cache_salt: str = field(default="", repr=False)
    # Leading prompt tokens whose KV requests that are not submitted yet will need; None: not known.
    num_reused_tokens: int | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    first_scheduled_at_s: float | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    num_ever_computed_tokens: int = 0  # maximum so far of num_computed_tokens; tokens below it are recomputed
    num_cached_tokens: int = 0  # prompt tokens that it found in the prefix cache
    num_preemptions: int = 0
    num_given_way: int = 0  # of these, for another owner's prompt
    paused_at_s: float | None = None  # it was preempted then, and is not back in steps
    pauses: list[tuple[float, float]] = field(default_factory=list)  # the first: preempted at, and back at
    num_prefix_waits: int = 0  # steps in which it waited for others to compute its next block
    was_retried: bool = False  # it was in a step that failed, and runs once more
    # Stored, not derived: a step reads each of them for every running request.
    priority_level: PriorityLevel = field(init=False)
    num_tokens: int = field(init=False)  # of prompt and output
    max_tokens: int = field(init=False)  # of the output
    order_key: OrderKey = field(init=False)  # smaller is more urgent among requests of one priority level

    def __post_init__(self) -> None:
        assert len(self.prompt_token_ids) > 0, f"{self.request_id} has no prompt tokens"
        self.priority_level = (
            PriorityLevel.ONLINE if self.service_class is ServiceClass.ONLINE else PriorityLevel.OFFLINE
        )
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)
        assert self.sampling.max_tokens is not None, f"{self.request_id} has no limit of tokens"
        self.max_tokens = self.sampling.max_tokens
        self.enqueue(0)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def enqueue(self, sequence_number: int, *, by_deadline: bool = False) -> None:
        """Set the request's order: lower priority number first, then earlier arrival, then submission.

        ``by_deadline``: then the earlier deadline of the first token, if it has one, in place of the arrival.
        """
        at_s = self.arrived_at_s
        if by_deadline and self.slo is not None:
            at_s += self.slo.ttft_s
        self.order_key = (self.priority, at_s, sequence_number)

    def append(self, token_id: int) -> None:
        """Add an output token."""
        self.output_token_ids.append(token_id)
        self.num_tokens += 1

    @property
    def has_started(self) -> bool:
        """It has been in a step."""
        return self.first_scheduled_at_s is not None

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to compute before the next token can be sampled; >= 1 until the request finishes."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_matchable_tokens(self) -> int:
        """Leading tokens whose KV it may take from the cache instead of computing them.

        Not the last one, whose logits are needed, nor those of a prompt token that is still to be scored.
        """
        if self.sampling.prompt_logprobs is not None:
            return min(self.num_ever_computed_tokens, self.num_tokens - 1)
        return self.num_tokens - 1

    def num_logits_rows(self, num_tokens: int) -> int:
        """Of the next ``num_tokens`` tokens, those that need logits: to score or to sample the next one."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + num_tokens
        samples = end == self.num_tokens
        if self.sampling.prompt_logprobs is None:
            return samples
        first, last = max(start, self.num_ever_computed_tokens), min(end, self.num_prompt_tokens - 1)
        return max(0, last - first) + samples

    @property
    def next_token_by_s(self) -> float:
        """The deadline of the next token, on the engine's clock: of the first one by TTFT, then by TPOT."""
        slo = self.slo
        if slo is None:
            return math.inf
        if self.last_token_at_s is None:
            return self.arrived_at_s + slo.ttft_s
        return self.last_token_at_s + slo.tpot_s

    @property
    def banked_s(self) -> float:
        """Seconds by which its tokens so far came sooner than one a TPOT objective; negative if later."""
        if self.slo is None or self.first_token_at_s is None or self.last_token_at_s is None:
            return 0.0
        due_s = self.first_token_at_s + (self.num_tokens - self.num_prompt_tokens - 1) * self.slo.tpot_s
        return due_s - self.last_token_at_s

    @property
    def is_decoding(self) -> bool:
        """A step of its last token yields the next one; of its last few, if a grammar forced some."""
        pending = self.num_tokens - self.num_computed_tokens
        if pending == 1:
            return self.num_computed_tokens > 0
        behind = max(self.num_prompt_tokens, self.num_ever_computed_tokens)  # else it computes lost KV again
        return pending <= 1 + MAX_FORCED_TOKENS and self.num_computed_tokens >= behind

    def move_to(self, status: RequestStatus) -> None:
        assert status in _LEGAL_MOVES[self.status], f"{self.request_id}: {self.status} -> {status}"
        self.status = status

    def pause(self, now_s: float) -> None:
        """It is preempted."""
        self.num_preemptions += 1
        self.paused_at_s = now_s

    def resume(self, now_s: float) -> None:
        """It takes part in steps, again if it was preempted."""
        if self.paused_at_s is not None and len(self.pauses) < MAX_PAUSES:
            self.pauses.append((self.paused_at_s, now_s))
        self.paused_at_s = None

    def finish(self, reason: FinishReason) -> None:
        self.move_to(RequestStatus.FINISHED)
        self.finish_reason = reason


order_key: Callable[[HasOrderKey], OrderKey] = operator.attrgetter("order_key")


def check_cache_salt(salt: object) -> None:
    """Raise RequestError, without the salt, unless it is text of 1 to ``MAX_CACHE_SALT_CHARS`` characters."""
    if not isinstance(salt, str):
        problem = f"be a string, got a value of type {type(salt).__name__}"
    elif not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS:
        problem = f"have 1 to {MAX_CACHE_SALT_CHARS} characters, got {len(salt)}"
    elif any("\ud800" <= char <= "\udfff" for char in salt):
        problem = "be valid Unicode, got half of a surrogate pair"
    else:
        return
    raise RequestError(f"cache_salt must {problem}.", param="cache_salt")
