"""Runs one line on the engine, as the online API would."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TypeVar

from backfill.core.errors import EngineDead, RequestError
from backfill.jobs.feeder import EngineAbsent
from backfill.jobs.lines import BatchLine, LineResult, completed, refused
from backfill.protocol.requests import ChatCompletionRequest, CompletionRequest, GenerationFields, parse_body
from backfill.protocol.responses import error_of
from backfill.protocol.service import CompletionService, Generation

Fields = TypeVar("Fields", bound=GenerationFields)

# Of the online API: makes the request one of the OFFLINE class.
_OFFLINE_TIER = {"service_tier": "flex"}


class ServiceRunner:
    """A ``LineRunner`` on the service that is there when a line begins.

    Args:
        service: None while no engine is ready.
    """

    def __init__(self, service: Callable[[], CompletionService | None]) -> None:
        self._service = service

    async def run(self, line: BatchLine) -> LineResult:
        """Raises: EngineAbsent, EngineDead."""
        service = self._service()
        if service is None:
            raise EngineAbsent("The engine is not running.")
        request_id = f"req_{uuid.uuid4().hex}"
        try:
            generation = self._prepare(service, line, request_id)
        except EngineDead as error:
            raise EngineAbsent(str(error)) from error
        except RequestError as error:
            status, answer = error_of(error)
            return refused(line, status, answer, request_id)
        return completed(line, await service.run_whole(generation), request_id)

    def _prepare(self, service: CompletionService, line: BatchLine, request_id: str) -> Generation:
        if line.url == "/v1/chat/completions":
            chat = _offline(parse_body(ChatCompletionRequest, line.body))
            return service.prepare_chat(chat, request_id, complete_by_s=line.complete_by_s)
        completion = _offline(parse_body(CompletionRequest, line.body))
        return service.prepare_completion(completion, request_id, complete_by_s=line.complete_by_s)


def _offline(request: Fields) -> Fields:
    if request.stream:
        raise RequestError("stream must be false in a batch.", param="stream")
    return request.model_copy(update=_OFFLINE_TIER)
