"""What one running server is made of, and whether it takes requests."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from backfill.api.config import ServerConfig
from backfill.api.metrics import Metrics
from backfill.core.config import EngineConfig
from backfill.core.errors import RequestError
from backfill.core.request import ServiceClass
from backfill.engine.client import EngineClient
from backfill.jobs.manager import JobManager
from backfill.protocol.service import CompletionService

_MAX_RETRY_AFTER_S = 120
_DRAIN_WINDOW = 64


class Phase(Enum):
    LOADING = "loading the model"
    READY = "ready"
    RESTARTING = "restarting the engine"
    DRAINING = "shutting down"


class Overloaded(Exception):
    """The queue is full; the client may retry after ``retry_after_s`` seconds."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"The server's queue is full. Please retry in {retry_after_s} s.")
        self.retry_after_s = retry_after_s


class Unavailable(Exception):
    """The server is not ready; the client may retry."""


@dataclass(slots=True)
class ServerState:
    """Shared by all routes of one application; owned by its event loop."""

    server_config: ServerConfig
    engine_config: EngineConfig
    client: EngineClient
    phase: Phase = Phase.LOADING
    service: CompletionService | None = None  # set once the model is loaded
    metrics: Metrics | None = None
    jobs: JobManager | None = None  # None where the Batch API is switched off
    num_open: int = 0  # accepted choices that have not ended
    _ended_at_s: deque[float] = field(default_factory=lambda: deque(maxlen=_DRAIN_WINDOW))

    def ready_service(self) -> CompletionService:
        """The service, if requests are taken now. Raises: Unavailable."""
        if self.phase is not Phase.READY or self.service is None:
            raise Unavailable(f"The server is {self.phase.value}. Please retry.")
        return self.service

    def ready_jobs(self) -> JobManager:
        """The keeper of files and batches, which needs no engine. Raises: Unavailable."""
        if self.phase is Phase.DRAINING or self.jobs is None:
            raise Unavailable(f"The server is {self.phase.value}. Please retry.")
        return self.jobs

    def admit(self, service_class: ServiceClass, num_choices: int) -> None:
        """Take a place for each choice; each ``release`` gives one back.

        Raises, taking none: Overloaded when the queue is full, RequestError when it could never be served.
        """
        limit = self.engine_config.scheduler.max_num_seqs + self.server_config.max_queued_requests
        if num_choices > limit:
            message = f"This server takes at most {limit} choices at once, got {num_choices}."
            raise RequestError(message, param="n")
        if self.num_open + num_choices > limit:
            if self.metrics is not None:
                self.metrics.requests.on_rejected(service_class, "queue_full")
            raise Overloaded(self._retry_after_s(self.num_open + num_choices - limit))
        self.num_open += num_choices
        if self.metrics is not None:
            self.metrics.requests.on_accepted(service_class, num_choices)

    def release(self, num_choices: int) -> None:
        self.num_open -= num_choices
        self._ended_at_s.extend([time.monotonic()] * num_choices)

    def _retry_after_s(self, num_excess: int) -> int:
        """Whole seconds until that many requests have ended at the recent rate, 1 to 120."""
        if len(self._ended_at_s) < 2:
            return 1
        elapsed_s = max(1e-3, time.monotonic() - self._ended_at_s[0])
        estimate_s = num_excess * elapsed_s / len(self._ended_at_s)
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(estimate_s)))
