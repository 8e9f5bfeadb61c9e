"""How long to wait before a process that has ended is started again."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Restarts:
    """The delay before a start. It doubles with each quick death in a row after the first.

    Attributes:
        name: of the process, for log lines.
        first_s, longest_s: bounds of the delay, in seconds.
        num_quick: quick deaths in a row: processes that ended soon, and those that could not be started.
    """

    name: str
    first_s: float
    longest_s: float
    num_quick: int = field(init=False, default=0)

    def on_death(self, *, is_quick: bool) -> None:
        self.num_quick = self.num_quick + 1 if is_quick else 0

    @property
    def delay_s(self) -> float:
        return min(self.longest_s, self.first_s * 2.0 ** max(0, self.num_quick - 1))

    async def wait(self, reason: str) -> None:
        """Return when the next process may be started. ``reason``: why the last one does not run."""
        logger.error("%s is started again in %g s: %s", self.name, self.delay_s, reason)
        await asyncio.sleep(self.delay_s)
