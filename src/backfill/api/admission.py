"""Admission control: each service class has its own limit of open choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from backfill.api.quarantine import Quarantine
from backfill.core.clock import Clock, WallClock
from backfill.core.errors import RequestError
from backfill.core.request import ServiceClass
from backfill.http.errors import MAX_RETRY_AFTER_S, RateLimited
from backfill.http.limits import EndRate, EvenParts


class Overloaded(RateLimited):
    """A class's queue is full."""

    def __init__(self, service_class: ServiceClass, retry_after_s: int) -> None:
        super().__init__(
            f"The server's queue of {service_class.value} requests is full. "
            f"Please retry in {retry_after_s} s.",
            "resource_unavailable" if service_class is ServiceClass.OFFLINE else "rate_limit_exceeded",
            retry_after_s,
            service_class,
            "queue_full",
        )


class OfflineSuspended(RateLimited):
    """Offline requests are not accepted now."""

    def __init__(self) -> None:
        message = "This server accepts no flex requests at the moment. Please retry later."
        super().__init__(
            message, "resource_unavailable", MAX_RETRY_AFTER_S, ServiceClass.OFFLINE, "offline_suspended"
        )


class Admission:
    """Counts the choices in the server, each class against its own limit, of which owners get even parts.

    Attributes:
        is_offline_suspended: refuse offline requests, also below their limit.

    Args:
        limits: maximum number of choices of each class at once.
        num_lines: lines of the server's own batches in the engine.
    """

    def __init__(
        self,
        limits: Mapping[ServiceClass, int],
        clock: Clock | None = None,
        num_lines: Callable[[], int] = lambda: 0,
    ) -> None:
        self.is_offline_suspended = False
        self._limits, self._num_lines = limits, num_lines
        self._open = {which: EvenParts() for which in limits}
        clock = clock or WallClock()
        self._quarantine = Quarantine(clock)
        self._ends = {which: EndRate(clock) for which in limits}

    @property
    def num_open(self) -> int:
        """Choices that are reserved."""
        return sum(parts.total for parts in self._open.values())

    @property
    def num_open_online(self) -> int:
        """Those of them that are online."""
        return self._open[ServiceClass.ONLINE].total

    @property
    def is_offline_quarantined(self) -> bool:
        """One offline request is alone, or is to be: others are refused, and no line may begin."""
        return self._quarantine.is_on(self._open[ServiceClass.OFFLINE].total)

    def check_capacity(self, owner: str) -> None:
        """Raise Overloaded if every class is full for the owner, so that the body need not be read."""
        if all(parts.num_excess(owner, 1, self._limits[which]) for which, parts in self._open.items()):
            raise self._overloaded(ServiceClass.ONLINE, 1)

    def reserve(
        self, owner: str, service_class: ServiceClass, num_choices: int, *, alone: str = ""
    ) -> Reservation:
        """Reserve ``num_choices`` choices until they are released.

        Args:
            alone: names an offline request that is to be the only one; empty for others.
        Raises, reserving nothing: Overloaded when the queue is full and the owner has its even part of it,
        OfflineSuspended, LineAlone, RequestError when ``num_choices`` is over the limit.
        """
        self.occupy(owner, service_class, num_choices, alone=alone)
        return Reservation(self, owner, service_class, num_choices)

    def occupy(
        self, owner: str, which: ServiceClass, num_choices: int, num_held: int = 0, *, alone: str = ""
    ) -> None:
        """Count so many choices of a class in place of ``num_held``; called by ``Reservation``.

        Raises, changing nothing: as ``reserve``.
        """
        if which is ServiceClass.OFFLINE and self.is_offline_suspended:
            raise OfflineSuspended
        limit = self._limits[which]
        if num_choices > limit:
            message = f"This server accepts at most {limit} {which.value} choices at once, got {num_choices}."
            raise RequestError(message, param="n")
        parts = self._open[which]
        if which is ServiceClass.OFFLINE and num_held == 0:
            self._quarantine.check(alone, parts.total, self._num_lines())
        num_excess = parts.num_excess(owner, num_choices, limit, num_released=num_held)
        if num_choices > num_held and num_excess > 0:
            raise self._overloaded(which, num_excess)
        parts.add(owner, num_choices - num_held)

    def vacate(self, owner: str, which: ServiceClass, num_choices: int, *, have_ended: bool = False) -> None:
        """Count so many choices less; called by ``Reservation``. ``have_ended``: they have run."""
        self._open[which].add(owner, -num_choices)
        if have_ended:
            self._ends[which].on_end(num_choices)

    def retry_after_s(self, service_class: ServiceClass, num_choices: int) -> int:
        """Whole seconds until so many choices of a class end at the recent rate, 1 to 120."""
        return self._ends[service_class].retry_after_s(num_choices)

    def _overloaded(self, which: ServiceClass, num_excess: int) -> Overloaded:
        return Overloaded(which, self.retry_after_s(which, num_excess))


@dataclass(slots=True)
class Reservation:
    """The choices of one request in the queue of its class; made by ``Admission.reserve``."""

    _admission: Admission
    _owner: str
    _class: ServiceClass
    _num_choices: int

    def resize(self, num_choices: int, service_class: ServiceClass) -> None:
        """Change the number of choices, and perhaps the class.

        Raises, changing nothing: Overloaded, OfflineSuspended, LineAlone, RequestError.
        """
        is_same = service_class is self._class
        num_held = self._num_choices if is_same else 0
        self._admission.occupy(self._owner, service_class, num_choices, num_held)
        if not is_same:
            self._admission.vacate(self._owner, self._class, self._num_choices)
        self._class, self._num_choices = service_class, num_choices

    def release_choice(self) -> None:
        """Release one choice that ran and has ended."""
        if self._num_choices > 0:
            self._num_choices -= 1
            self._admission.vacate(self._owner, self._class, 1, have_ended=True)

    def release(self) -> None:
        """Release the remaining choices, which never ran; further calls do nothing."""
        self._admission.vacate(self._owner, self._class, self._num_choices)
        self._num_choices = 0
