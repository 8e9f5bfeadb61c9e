"""One engine behind a router, and the requests that it has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp

from backfill.protocol.replica_state import ReplicaState
from backfill.router.health import Health
from backfill.router.looks import EngineLost, reason_of
from backfill.router.replica import Replica


@dataclass(slots=True, eq=False)
class Engine:
    """A server as the router knows it.

    Attributes:
        state: as last seen.
        phase: of the looks at it, as a part of the interval between two.
        replica: what the policy knows of it; None until it is up, and again once it is lost.
        is_leaving: it gets no more requests, and is forgotten once those that it has have ended.
        attempts: requests that it has, see ``attempt``, in their order.
        serves_others: as last seen, it had requests that this router did not send.
    """

    url: str
    state: ReplicaState
    phase: float = 0.0
    replica: Replica | None = None
    is_leaving: bool = False
    poll_now: asyncio.Event = field(default_factory=asyncio.Event)
    watcher: asyncio.Task[None] | None = None
    attempts: dict[_Attempt, None] = field(default_factory=dict)
    health: Health = field(default_factory=Health)
    serves_others: bool = False

    @property
    def is_up(self) -> bool:
        """It accepts requests."""
        return self.replica is not None and self.replica.is_open

    @property
    def num_in_flight(self) -> int:
        """Requests and lines of this router."""
        return len(self.attempts)

    def note_load(self, num_choices: int) -> None:
        """So many are in the engine. More than this router sent are of other routers and clients."""
        self.serves_others = num_choices > self.num_in_flight
        if self.serves_others:
            # Others may be what an engine that knows of turns has yet to end: nothing runs beside it then.
            spares_alone = self.state.is_offline_quarantined and not self.state.num_online
            for attempt in self.attempts:
                attempt.had_others = attempt.had_others or not (attempt.is_alone and spares_alone)

    @contextmanager
    def attempt(self, *, is_alone: bool = False) -> Iterator[None]:
        """Send a request to the engine in the block.

        Args:
            is_alone: it begins once all offline requests have ended, whatever was last seen of them.
        Raises: EngineLost as soon as the engine is lost.
        """
        task = asyncio.current_task()
        assert task is not None
        serves_others = self.serves_others and (self.state.num_online > 0 or not is_alone)
        attempt = _Attempt(task, is_alone, had_others=bool(self.attempts) or serves_others)
        if len(self.attempts) == 1:  # that one was alone until now
            for other in self.attempts:
                other.had_others = True
        self.attempts[attempt] = None
        try:
            yield
        except asyncio.CancelledError:
            if attempt.is_lost and task.uncancel() == 0:
                raise EngineLost("it does not answer", had_others=attempt.had_others) from None
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineLost(reason_of(error), was_reached=False) from error
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise EngineLost(reason_of(error), had_others=attempt.had_others) from error
        finally:
            del self.attempts[attempt]


@dataclass(slots=True, eq=False)
class _Attempt:
    task: asyncio.Task[object]
    is_alone: bool
    had_others: bool
    is_lost: bool = False
