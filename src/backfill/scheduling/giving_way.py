"""An owner that floods the server gives way to the prompts of the others, for a part of its time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

from backfill.core.plan import StepPlan
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.scheduling.queues import UnfinishedRequests

# Others may have so much of what it has, before turns alone decide.
_GIVEN_SHARE = 0.5
# What others have beyond that counts up to so many times what it gives at once: it gives again soon.
_MOST_OWED = 4.0
# For so long after another owner's last online request, steps can be stopped for the next one.
_YIELDS_FOR_S = 600.0


class GivingWay:
    """Which slices may be stopped for other owners' requests, and the time that their owner has given.

    What others have of the device's time counts against half of what it has itself. Of a step with tokens of
    both, each has its share of them; a step without online requests is the owner's own. What steps took
    counts, as one that was stopped had little.

    Attributes:
        owner: who gives way in the next step; None if nobody does.
        yielding: online requests of an owner that gives way, with slices in flight or suspended, and the
            owner. Replaced and not changed, because another thread reads it.
        stopped: those of them with suspended slices.
        were_passed_over: the last step went before those, and had no prompt that their owner gives way to.
    """

    def __init__(self) -> None:
        self.owner: str | None = None
        self.yielding: Mapping[RequestId, str] = {}
        self.stopped: Collection[RequestId] = ()
        self.were_passed_over = False
        self._owner: str | None = None  # who floods the server, also while it gives nothing
        self._last_owner: str | None = None  # whose the given time is
        self._given_s = 0.0
        self._most_given_s = 0.0
        self._met_at_s = -math.inf  # when several owners last had online requests

    @property
    def stopped_owners(self) -> Collection[str]:
        return {self.yielding[each] for each in self.stopped}

    def advance(
        self,
        now_s: float,
        requests: UnfinishedRequests,
        in_flight: Collection[RequestId],
        suspended: Collection[RequestId],
        most_given_s: float,
    ) -> None:
        """A step is to be planned.

        Args:
            in_flight, suspended: requests with slices that are.
            most_given_s: see ``Policy.most_given_s``.
        """
        self._most_given_s = most_given_s
        if requests.num_online_owners > 1:
            self._met_at_s = now_s
        owner = requests.flooding_owner if now_s - self._met_at_s < _YIELDS_FOR_S else None
        if owner is not None and owner != self._last_owner:
            self._last_owner, self._given_s = owner, 0.0
        self._owner = owner
        self.owner = self._owner if self._given_s < most_given_s else None
        if self.yielding:
            self.yielding = {
                name: owner for name, owner in self.yielding.items() if name in in_flight or name in suspended
            }
        self.stopped = [each for each in self.yielding if each in suspended]
        self.were_passed_over &= bool(self.stopped)

    def begin(self, members: Mapping[RequestId, tuple[Request, int]]) -> None:
        """A step of these requests and numbers of tokens begins; none: it resumes what was stopped."""
        requests = [request for request, _ in members.values()] if self.stopped else []
        gives = self.owner is not None and any(not each.is_decoding for each in requests)
        gives &= not any(
            each.owner == self.owner and each.service_class is ServiceClass.ONLINE for each in requests
        )
        self.were_passed_over = bool(requests) and not gives

    def end(self, plan: StepPlan, by_id: Mapping[RequestId, Request], seconds: float) -> None:
        """A step has ended that had the device for so long. A prediction may have said longer: then none."""
        if self._owner is None and not self._given_s:
            return
        num_of_owner = Counter[str]()
        for scheduled in plan.slices:
            request = by_id[scheduled.request_id]
            if request.service_class is ServiceClass.ONLINE:
                num_of_owner[request.owner] += scheduled.num_tokens
        own_share = 1.0
        if self._owner is not None and num_of_owner:
            own_share = num_of_owner[self._owner] / num_of_owner.total()
        given_s = self._given_s + (1.0 - own_share - _GIVEN_SHARE * own_share) * max(0.0, seconds)
        self._given_s = min(max(0.0, given_s), _MOST_OWED * self._most_given_s)

    def mark(self, members: Mapping[RequestId, tuple[Request, int]], owner: str) -> Collection[RequestId]:
        """Those requests of the next step whose slices may be stopped, as the owner gives way."""
        marked = {
            request_id: owner
            for request_id, (request, _) in members.items()
            if request.owner == owner and request.service_class is ServiceClass.ONLINE
        }
        self.yielding = {**self.yielding, **marked}
        return marked.keys()
