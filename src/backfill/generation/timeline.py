"""When a request's tokens reached its client: what metrics and objectives are measured by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from backfill.core.clock import Clock
from backfill.core.request import FinishReason, Request, ServiceClass
from backfill.core.slo import SLO
from backfill.engine.messages import TokenOutput


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A request, for metrics; complete when it has finished. Instants are on the monotonic clock.

    Attributes:
        response_id: of the answer that it is a choice of.
        traceparent: header of the trace that the request belongs to (W3C Trace Context); empty for none.
        pauses: when it was preempted and when it was back in steps; the first ``MAX_PAUSES`` times.
        client_stalled_s: between its first and last token, seconds in which its client kept the server from
            writing.
    """

    service_class: ServiceClass
    slo: SLO | None
    num_prompt_tokens: int
    max_tokens: int
    arrived_at_s: float
    response_id: str = ""
    traceparent: str = ""
    finish_reason: FinishReason = FinishReason.ABORT  # unless the output ends otherwise
    num_output_tokens: int = 0
    num_preemptions: int = 0
    pauses: tuple[tuple[float, float], ...] = ()
    num_cached_tokens: int = 0
    first_scheduled_at_s: float | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    client_stalled_s: float = 0.0
    finished_at_s: float = math.inf


class Observer:
    """Notified of tokens, of their arrivals, and of finished requests. This one does nothing."""

    def on_token(self, service_class: ServiceClass) -> None: ...
    def on_first_token(
        self, service_class: ServiceClass, since_arrival_s: float, slo: SLO | None
    ) -> None: ...
    def on_next_token(self, service_class: ServiceClass, since_last_s: float, slo: SLO | None) -> None: ...
    def on_client_stalled(self, service_class: ServiceClass, seconds: float) -> None: ...
    def on_finished(self, record: RequestRecord) -> None: ...


class Wait(NamedTuple):
    """Seconds until tokens reached the client: since the request's arrival, or since the tokens before.

    The time in which the client kept the server from writing is left out.
    """

    seconds: float
    is_first: bool


class Timeline:
    """The tokens of one choice, from the engine to its client."""

    def __init__(
        self,
        request: Request,
        observer: Observer,
        clock: Clock,
        *,
        response_id: str = "",
        traceparent: str = "",
    ) -> None:
        self.request = request
        self.record = RequestRecord(
            service_class=request.service_class,
            slo=request.slo,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            arrived_at_s=request.arrived_at_s,
            response_id=response_id,
            traceparent=traceparent,
        )
        self._observer = observer
        self._clock = clock
        self._stalled_s = 0.0  # of the client, at the last arrival

    def count_token(self, output: TokenOutput) -> None:
        """Count a token that the engine has made."""
        record = self.record
        record.num_output_tokens += 1
        self._observer.on_token(record.service_class)
        if record.num_output_tokens > 1 and output.finish_reason is None:
            return  # only the first and the last output have the counts
        record.num_preemptions = output.num_preemptions
        record.pauses = output.pauses
        record.num_cached_tokens = output.num_cached_tokens
        if output.first_scheduled_at_s is not None:
            record.first_scheduled_at_s = output.first_scheduled_at_s

    def wait(self, stalled_s: float = 0.0) -> Wait:
        """What ``arrive`` would return now."""
        return self._wait(self._clock.now_s(), stalled_s)

    def arrive(self, stalled_s: float = 0.0) -> Wait:
        """One or more tokens have reached the client together.

        Args:
            stalled_s: seconds, since the request's arrival, in which its client kept the server from writing.
        """
        now_s, record = self._clock.now_s(), self.record
        wait = self._wait(now_s, stalled_s)
        if wait.is_first:
            record.first_token_at_s = now_s
            self._observer.on_first_token(record.service_class, wait.seconds, record.slo)
        else:
            record.client_stalled_s += stalled_s - self._stalled_s
            self._observer.on_next_token(record.service_class, wait.seconds, record.slo)
        record.last_token_at_s = now_s
        self._stalled_s = stalled_s
        return wait

    def count_stall(self, seconds: float) -> None:
        """The request's client kept the server from writing."""
        self._observer.on_client_stalled(self.record.service_class, seconds)

    def close(self) -> None:
        self.record.finished_at_s = self._clock.now_s()
        self._observer.on_finished(self.record)

    def _wait(self, now_s: float, stalled_s: float) -> Wait:
        last_at_s = self.record.last_token_at_s
        since_s = self.record.arrived_at_s if last_at_s is None else last_at_s
        return Wait(max(0.0, now_s - since_s - (stalled_s - self._stalled_s)), last_at_s is None)


class Deliveries:
    """Tells when the tokens of a streamed request were written to its client's connection.

    Args:
        stalled_s: total seconds in which the client has kept the server from writing, by not reading.
    """

    def __init__(self, stalled_s: Callable[[], float] = lambda: 0.0) -> None:
        self._stalled_s = stalled_s
        self._stalled_before_s = stalled_s()
        self._counted_s = 0.0  # of the client's time
        self._timelines: dict[int, Timeline] = {}

    def add(self, choice: int, timeline: Timeline) -> None:
        """Called by the generator when it starts a choice."""
        self._timelines[choice] = timeline

    def wait(self, choice: int) -> Wait:
        """The wait for a choice's next token, if it were written now."""
        return self._timelines[choice].wait(self._stalled_since_s())

    def written(self, choice: int) -> Wait:
        """A chunk with one or more tokens of a choice was written."""
        stalled_s = self._stalled_since_s()
        self._count_stalls(stalled_s)
        return self._timelines[choice].arrive(stalled_s)

    def finish(self, choice: int) -> None:
        """A choice's last token was written."""
        self._timelines.pop(choice).close()

    def close(self) -> None:
        """Nothing more will be written: choices that have not finished end here. Further calls do nothing."""
        self._count_stalls(self._stalled_since_s())
        timelines, self._timelines = self._timelines, {}
        for timeline in timelines.values():
            timeline.close()

    def _stalled_since_s(self) -> float:
        """Since the request's arrival."""
        return self._stalled_s() - self._stalled_before_s

    def _count_stalls(self, stalled_s: float) -> None:
        """Once for all choices, which share the connection."""
        added_s = stalled_s - self._counted_s
        if added_s > 0 and self._timelines:
            self._counted_s = stalled_s
            next(iter(self._timelines.values())).count_stall(added_s)
