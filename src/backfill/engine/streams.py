"""The outputs of requests in flight, on their way from the engine's reports to their readers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from backfill.core.errors import BackfillError, EngineDead, StepFailed
from backfill.core.request import RequestId, ServiceClass
from backfill.engine.messages import StepReport, TokenOutput


@dataclass(slots=True, eq=False)
class RequestStream:
    """Queues one request's outputs for its reader.

    Attributes:
        group: equal for the choices of one client request.
        on_prompt_progress: called with the prompt tokens that are computed, after steps before the first
            output.
        on_first_token: called once, when the first output is put.
        on_end: called once, when the engine is done with the request, whether or not its outputs were read.
    """

    service_class: ServiceClass
    group: Hashable
    on_prompt_progress: Callable[[int], None] | None
    on_first_token: Callable[[], None] | None
    on_end: Callable[[], None] | None
    queue: asyncio.Queue[TokenOutput | BackfillError] = field(init=False, default_factory=asyncio.Queue)

    def put(self, output: TokenOutput | BackfillError) -> None:
        self.queue.put_nowait(output)
        if self.on_first_token is not None and isinstance(output, TokenOutput):
            self.on_first_token()
            self.on_first_token = None
        if isinstance(output, BackfillError) or output.finish_reason is not None:
            self.end()

    def end(self) -> None:
        """The engine is done with the request."""
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()


class RequestStreams:
    """The streams of all requests in flight: those that the engine has."""

    def __init__(self) -> None:
        self._streams: dict[RequestId, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, request_id: RequestId, stream: RequestStream) -> None:
        assert request_id not in self._streams, f"{request_id} is in flight already"
        self._streams[request_id] = stream

    def remove(self, request_id: RequestId, stream: RequestStream) -> None:
        """End the stream. It may have been removed before, and its id be in use by a new one."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
        stream.end()

    def put(self, report: StepReport) -> None:
        """Give each request of a report its output, or its progress."""
        for request_id, num_tokens in report.stats.step.prompt_progress:
            stream = self._streams.get(request_id)
            if stream is not None and stream.on_prompt_progress is not None:
                stream.on_prompt_progress(num_tokens)
        failed = [self._streams.get(request_id) for request_id in report.stats.step.failed_request_ids]
        groups = Counter(stream.group for stream in failed if stream is not None)
        for output in report.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:  # aborted here while the engine still worked on it
                continue
            if output.num_lost:
                num_others = output.num_lost - groups[stream.group]
                message = output.message or "The step failed."
                stream.put(StepFailed(message, num_lost=output.num_lost, num_others=num_others))
            else:
                stream.put(output)
            if output.finish_reason is not None:  # no longer in flight, even if its outputs are unread
                del self._streams[output.request_id]

    def fail(self, is_meant: Callable[[RequestStream], bool], error: BackfillError) -> list[RequestId]:
        """End streams with ``error``; returns their requests, which the engine still has."""
        request_ids = [request_id for request_id, stream in self._streams.items() if is_meant(stream)]
        for request_id in request_ids:
            self._streams.pop(request_id).put(error)
        return request_ids

    def lose_all(self, message: str) -> None:
        """The engine has ended: end every stream with EngineDead."""
        lost, self._streams = self._streams, {}
        groups = Counter(stream.group for stream in lost.values())
        for stream in lost.values():
            num_others = len(lost) - groups[stream.group]
            stream.put(EngineDead(message, num_lost=len(lost), num_others=num_others))
