"""Admission control: each service class has its own limit of open choices."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from backfill.core.clock import Clock, WallClock
from backfill.core.errors import RequestError
from backfill.core.request import ServiceClass
from backfill.http.errors import MAX_RETRY_AFTER_S, RateLimited

_RATE_WINDOW = 64  # the last ended choices, from which the rate is estimated


class Overloaded(RateLimited):
    """A class's queue is full."""

    def __init__(self, service_class: ServiceClass, retry_after_s: int) -> None:
        super().__init__(
            f"The server's queue of {service_class.value} requests is full. "
            f"Please retry in {retry_after_s} s.",
            "resource_unavailable" if service_class is ServiceClass.OFFLINE else "rate_limit_exceeded",
            retry_after_s,
        )
        self.service_class = service_class


class OfflineSuspended(RateLimited):
    """Offline requests are not accepted now."""

    def __init__(self) -> None:
        message = "This server accepts no flex requests at the moment. Please retry later."
        super().__init__(message, "resource_unavailable", MAX_RETRY_AFTER_S)


class Admission:
    """Counts the choices in the server, each class against its own limit.

    Attributes:
        is_offline_suspended: refuse offline requests, also below their limit.

    Args:
        limits: maximum number of choices of each class at once.
        on_refused: called with the class of a refused request and the reason, a label value.
    """

    def __init__(
        self,
        limits: Mapping[ServiceClass, int],
        *,
        on_refused: Callable[[ServiceClass, str], None] = lambda *_: None,
        clock: Clock | None = None,
    ) -> None:
        clock = WallClock() if clock is None else clock
        self.is_offline_suspended = False
        self._on_refused = on_refused
        self._queues = {kind: _ClassQueue(kind, limit, on_refused, clock) for kind, limit in limits.items()}

    @property
    def num_open(self) -> int:
        """Choices that are reserved."""
        return sum(queue.num_open for queue in self._queues.values())

    @property
    def num_open_online(self) -> int:
        """Those of them that are online."""
        return self._queues[ServiceClass.ONLINE].num_open

    def check_capacity(self) -> None:
        """Raise Overloaded if every class is full, so that the request's body need not be read."""
        if all(queue.num_free < 1 for queue in self._queues.values()):
            self._queues[ServiceClass.ONLINE].refuse(1)

    def reserve(self, service_class: ServiceClass, num_choices: int) -> Reservation:
        """Reserve ``num_choices`` choices until they are released.

        Raises, reserving nothing: Overloaded when the queue is full, OfflineSuspended, RequestError when
        ``num_choices`` is over the limit.
        """
        reservation = Reservation(self, self._queues, service_class)
        reservation.resize(num_choices)
        return reservation

    def retry_after_s(self, service_class: ServiceClass, num_choices: int) -> int:
        """Whole seconds until so many choices of a class end at the recent rate, 1 to 120."""
        return self._queues[service_class].retry_after_s(num_choices)

    def check_class(self, service_class: ServiceClass) -> None:
        """Raise OfflineSuspended if the class is not accepted now."""
        if service_class is ServiceClass.OFFLINE and self.is_offline_suspended:
            self._on_refused(service_class, "offline_suspended")
            raise OfflineSuspended


@dataclass(slots=True)
class Reservation:
    """The choices of one request in the queue of its class; made by ``Admission.reserve``."""

    _admission: Admission
    _queues: Mapping[ServiceClass, _ClassQueue]
    _class: ServiceClass
    _num_choices: int = 0

    @property
    def _queue(self) -> _ClassQueue:
        return self._queues[self._class]

    def resize(self, num_choices: int, service_class: ServiceClass | None = None) -> None:
        """Change the number of choices, and the class if one is given.

        Raises, changing nothing: Overloaded, OfflineSuspended, RequestError.
        """
        service_class = service_class or self._class
        self._admission.check_class(service_class)
        queue = self._queues[service_class]
        num_held = self._num_choices if queue is self._queue else 0
        queue.occupy(num_choices, num_held)
        if queue is not self._queue:
            self._queue.vacate(self._num_choices)
        self._class, self._num_choices = service_class, num_choices

    def release_choice(self) -> None:
        """Release one choice that ran and has ended."""
        if self._num_choices > 0:
            self._num_choices -= 1
            self._queue.vacate(1, have_ended=True)

    def release(self) -> None:
        """Release the remaining choices, which never ran; further calls do nothing."""
        self._queue.vacate(self._num_choices)
        self._num_choices = 0


@dataclass(slots=True)
class _ClassQueue:
    """The open choices of one class, and the rate at which they end."""

    _service_class: ServiceClass
    _limit: int
    _on_refused: Callable[[ServiceClass, str], None]
    _clock: Clock
    num_open: int = 0
    _ended_at_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RATE_WINDOW))

    @property
    def num_free(self) -> int:
        return self._limit - self.num_open

    def occupy(self, num_choices: int, num_held: int) -> None:
        """Replace ``num_held`` choices. Raises, changing nothing: Overloaded, RequestError."""
        if num_choices > self._limit:
            which = self._service_class.value
            message = f"This server accepts at most {self._limit} {which} choices at once, got {num_choices}."
            raise RequestError(message, param="n")
        num_excess = num_choices - num_held - self.num_free
        if num_choices > num_held and num_excess > 0:
            self.refuse(num_excess)
        self.num_open += num_choices - num_held

    def vacate(self, num_choices: int, *, have_ended: bool = False) -> None:
        assert 0 <= num_choices <= self.num_open, (num_choices, self.num_open)
        self.num_open -= num_choices
        if have_ended:
            self._ended_at_s.extend([self._clock.now_s()] * num_choices)

    def refuse(self, num_excess: int) -> NoReturn:
        self._on_refused(self._service_class, "queue_full")
        raise Overloaded(self._service_class, self.retry_after_s(num_excess))

    def retry_after_s(self, num_choices: int) -> int:
        """Whole seconds until ``num_choices`` choices end at the recent rate, 1 to 120."""
        if len(self._ended_at_s) < 2:
            return 1
        elapsed_s = max(1e-3, self._clock.now_s() - self._ended_at_s[0])
        estimate_s = num_choices * elapsed_s / len(self._ended_at_s)
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(estimate_s)))
