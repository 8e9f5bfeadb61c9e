"""The state that a server's routes share, and whether it accepts requests."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from starlette.types import Receive

from backfill.api.admission import Admission
from backfill.api.metrics.registry import Metrics
from backfill.api.online_load import OnlineLoad
from backfill.api.replica_state import StateReporter
from backfill.api.stats_log import FieldWarnings
from backfill.core.clock import Clock, WallClock
from backfill.core.config import EngineConfig
from backfill.core.request import ServiceClass
from backfill.engine.client import EngineClient
from backfill.http.bodies import BodyBudget
from backfill.http.config import ServerConfig
from backfill.http.errors import Unavailable
from backfill.http.keys import ApiKeys
from backfill.http.limits import NO_LIMITS, OwnerLimiter, OwnerLimits
from backfill.http.streaming import while_connected
from backfill.jobs.manager import JobManager
from backfill.preparation.client import PreparationClient
from backfill.protocol.generation import Generation, GenerationEndpoint
from backfill.protocol.preparer import GrammarNeeded, RequestContext, RequestPreparer, TextEndpoint
from backfill.protocol.replica_state import ReplicaState
from backfill.protocol.service import CompletionService

# Preparing a body of this size takes about 3 ms, mostly for tokenizing; more would delay other streams.
_INLINE_BODY_BYTES = 4 << 10
_HELD_LOOK_S = 0.5  # at whether lines may begin again


class Phase(Enum):
    LOADING = "loading the model"
    READY = "ready"
    RESTARTING = "restarting the engine"
    DRAINING = "shutting down"


@dataclass(slots=True)
class ServerState:
    """Shared by all routes of one application. Its event loop owns it."""

    server_config: ServerConfig
    engine_config: EngineConfig
    client: EngineClient
    preparation: PreparationClient
    reporter: StateReporter
    preparer: RequestPreparer | None = None  # for small bodies; set once the model is loaded
    phase: Phase = Phase.LOADING
    service: CompletionService | None = None  # set once the model is loaded
    metrics: Metrics | None = None
    api_keys: ApiKeys | None = None  # None if requests need no key
    jobs: JobManager | None = None  # None if the Batch API is switched off
    online_load: OnlineLoad | None = None  # None without a cost model, and for policies that use none
    num_unanswered: int = 0  # accepted generation requests whose response is not complete
    clock: Clock = field(default_factory=WallClock)  # of arrivals and of what is measured at the socket
    field_warnings: FieldWarnings = field(default_factory=FieldWarnings)
    admission: Admission = field(init=False)
    limiter: OwnerLimiter = field(init=False)
    bodies: BodyBudget = field(init=False)
    _feeding: asyncio.TimerHandle | None = field(default=None, init=False)  # while lines are held back

    def __post_init__(self) -> None:
        config = self.server_config
        limits = {
            ServiceClass.ONLINE: self.engine_config.scheduler.max_num_seqs + config.max_queued_requests,
            ServiceClass.OFFLINE: config.max_queued_offline_requests,
        }
        self.admission = Admission(
            limits, num_lines=lambda: 0 if self.jobs is None else self.jobs.feeder.num_running
        )
        self.limiter = OwnerLimiter(self._limits_of, self.clock)
        self.bodies = BodyBudget(config.max_inflight_body_bytes, config.max_body_bytes)

    def _limits_of(self, owner: str) -> OwnerLimits:
        return NO_LIMITS if self.api_keys is None else self.api_keys.limits_of(owner)

    def weight_of(self, owner: str) -> float:
        return self._limits_of(owner).weight

    def ready_service(self) -> CompletionService:
        """The service, if requests are accepted now. Raises: Unavailable."""
        if self.phase is not Phase.READY or self.service is None:
            raise Unavailable(f"The server is {self.phase.value}. Please retry.")
        return self.service

    async def prepare(
        self,
        endpoint: GenerationEndpoint,
        body: bytes,
        context: RequestContext,
        service_class: ServiceClass,
        receive: Receive,
    ) -> Generation:
        """Check and tokenize a body.

        A body that is large or has a grammar is prepared in a preparation process, until its client
        disconnects. The two service classes do not wait for each other there.

        Raises: BackfillError, Unavailable, ClientDisconnect.
        """
        preparer = self.ready_preparer()
        if len(body) <= _INLINE_BODY_BYTES:
            with suppress(GrammarNeeded):
                return preparer.prepare(endpoint, body, context, compiles=False)
        preparing = self.preparation.prepare(endpoint, body, context, service_class)
        return await while_connected(preparing, receive)

    async def answer_text(self, endpoint: TextEndpoint, body: bytes, owner: str, receive: Receive) -> bytes:
        """The JSON response of ``/tokenize`` or ``/detokenize``; large bodies as in ``prepare``."""
        preparer = self.ready_preparer()
        if len(body) <= _INLINE_BODY_BYTES:
            return preparer.answer(endpoint, body)
        return await while_connected(self.preparation.answer(endpoint, body, owner), receive)

    def begin_answer(self, generation: Generation) -> None:
        """Count a generation request that is accepted; ``end_answer`` follows."""
        if self.metrics is not None:
            request = generation.request
            self.metrics.requests.on_accepted(request.service_class, request.num_choices)
        if generation.warning is not None:
            self.field_warnings.add(generation.warning)
        self.num_unanswered += 1

    def end_answer(self) -> None:
        """The response of a generation request is complete, or given up."""
        self.num_unanswered -= 1

    def ready_jobs(self) -> JobManager:
        """The manager of files and batches, which needs no engine. Raises: Unavailable."""
        if self.phase is Phase.DRAINING or self.jobs is None:
            raise Unavailable(f"The server is {self.phase.value}. Please retry.")
        return self.jobs

    def ready_preparer(self) -> RequestPreparer:
        """The preparer of small bodies. Raises: Unavailable."""
        self.ready_service()
        assert self.preparer is not None, "made with the service"
        return self.preparer

    def replica_state(self) -> ReplicaState:
        """What a router wants to know."""
        facts = None if self.preparer is None else self.preparer.facts
        return self.reporter.state(self.phase.value, self.admission, self.online_load, self.jobs, facts)

    def suspend_offline(self, is_suspended: bool) -> None:
        """Stop or resume accepting and running offline work; see engine/supervisor.py."""
        self.admission.is_offline_suspended = is_suspended
        if self.metrics is not None:
            self.metrics.engine.offline_suspended.set(is_suspended)
        self.feed_jobs()

    def feed_jobs(self) -> None:
        """Let batches use the engine if it is ready for them; ``JobManager.engine_lost`` ends that.

        While an offline request is alone, or is to be, no line begins.
        """
        if self._feeding is not None:
            self._feeding.cancel()
            self._feeding = None
        if self.jobs is None or self.service is None or self.phase is not Phase.READY:
            return
        if self.admission.is_offline_quarantined:
            self.jobs.hold()
            self._feeding = asyncio.get_running_loop().call_later(_HELD_LOOK_S, self.feed_jobs)
        elif not self.admission.is_offline_suspended:
            self.jobs.engine_ready(self.service, self.engine_config.scheduler.max_num_seqs)
