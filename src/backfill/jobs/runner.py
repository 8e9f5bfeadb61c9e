"""Runs one line on the engine, as the online API would."""

from __future__ import annotations

from collections.abc import Callable

from backfill.core.errors import EngineDead
from backfill.jobs.lines import LineResult, completed, refused, unanswered
from backfill.preparation.lines import BatchLine
from backfill.protocol.service import CompletionService


class ServiceRunner:
    """A ``LineRunner`` on the current service.

    Args:
        service: returns None while no engine is ready.
    """

    def __init__(self, service: Callable[[], CompletionService | None]) -> None:
        self._service = service

    async def run(self, line: BatchLine) -> LineResult:
        """Raises: RequestLost."""
        if line.refusal is not None:
            return refused(line)
        if line.generation is None:
            return unanswered(line, "internal_error")
        service = self._service()
        if service is None:
            raise EngineDead("The engine is not running.")
        return completed(line, await service.run_whole(line.generation))
