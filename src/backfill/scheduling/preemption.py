"""Which request is preempted when blocks run out, and what happens to it."""

from __future__ import annotations

from collections.abc import Mapping

from backfill.core.counters import ClassCounters
from backfill.core.request import Request, RequestStatus, ServiceClass
from backfill.kvcache.host_tier import HostTier
from backfill.scheduling.policy import Policy, PreemptionKey
from backfill.scheduling.queues import UnfinishedRequests
from backfill.scheduling.suspension import Suspension


class Preemption:
    """Orders the requests that hold device blocks by the policy's key, and preempts them.

    Args:
        counters: preemptions are added to them.
    """

    def __init__(
        self,
        policy: Policy,
        requests: UnfinishedRequests,
        host: HostTier,
        suspension: Suspension,
        counters: Mapping[ServiceClass, ClassCounters],
    ) -> None:
        self._policy = policy
        self._requests = requests
        self._host = host
        self._suspension = suspension
        self._counters = counters

    @property
    def block_holders(self) -> tuple[Request, ...]:
        """Running and restoring requests: those that hold device blocks."""
        return (*self._requests.running.values(), *self._host.restoring)

    def key(self, request: Request) -> PreemptionKey:
        """The request with the greatest key is preempted first."""
        lost = 0.0
        if request.status is RequestStatus.RUNNING:
            lost = self._host.lost_tokens(request) + self._suspension.lost_tokens(request.request_id)
        return self._policy.preemption_key(request, lost)

    def preempt(self, request: Request, num_needed: int) -> None:
        """Take the request's device blocks and queue it again; tokens are kept, KV as far as possible.

        Args:
            num_needed: blocks that must be free when this returns, as far as the request has them.
        """
        if request.status is RequestStatus.RESTORING:
            self._host.cancel_restore(request)
            self._requests.requeue(request)
        else:
            self._requeue_running(request)
            self._host.reclaim(request, num_needed, self._requests.running.values())

    def preempt_without_kv(self, request: Request) -> None:
        """Take a running request's blocks in both tiers and queue it again. Only its tokens are kept."""
        self._requeue_running(request)
        self._host.forget(request.request_id)
        request.num_computed_tokens = 0

    def _requeue_running(self, request: Request) -> None:
        self._counters[request.service_class].num_preemptions += 1
        request.num_preemptions += 1
        self._suspension.discard(request.request_id)
        self._requests.requeue(request)
