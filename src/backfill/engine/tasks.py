"""Long-lived asyncio tasks that nobody awaits: their failures are logged and counted."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class TaskWatch:
    """Starts tasks, logs those that an exception ends, and counts them by name in ``failures``."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()

    def start(self, coroutine: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        """Run it in the running loop. The caller keeps a reference, and may await or cancel it."""
        self.failures[name] += 0  # a count that begins with a failure shows no growth
        task = asyncio.create_task(coroutine, name=name)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.failures[task.get_name()] += 1
            logger.error("the task %s was ended by an exception", task.get_name(), exc_info=error)
