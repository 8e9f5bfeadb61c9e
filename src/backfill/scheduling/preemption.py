"""Which request is preempted when blocks run out, and what happens to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backfill.core.counters import ClassCounters
from backfill.core.request import Request, RequestStatus, ServiceClass
from backfill.kvcache.host_tier import HostTier
from backfill.scheduling.policy import Policy, PreemptionKey
from backfill.scheduling.queues import UnfinishedRequests
from backfill.scheduling.suspension import Suspension


@dataclass(slots=True, eq=False)
class Preemption:
    """Orders the requests that hold device blocks by the policy's key, preempts and counts them."""

    policy: Policy
    requests: UnfinishedRequests
    host: HostTier
    suspension: Suspension
    counters: Mapping[ServiceClass, ClassCounters]

    @property
    def block_holders(self) -> tuple[Request, ...]:
        """Running and restoring requests: those that hold device blocks."""
        return (*self.requests.running.values(), *self.host.restoring)

    def key(self, request: Request) -> PreemptionKey:
        """The request with the greatest key is preempted first."""
        lost = 0.0
        if request.status is RequestStatus.RUNNING:
            lost = self.host.lost_tokens(request) + self.suspension.lost_tokens(request.request_id)
        return self.policy.preemption_key(request, lost)

    def preempt(self, request: Request, num_needed: int) -> None:
        """Take the request's device blocks and queue it again; tokens are kept, KV as far as possible.

        ``num_needed`` blocks are free when this returns, as far as the request has them.
        """
        if request.status is RequestStatus.RESTORING:
            self.host.cancel_restore(request)
            self.requests.requeue(request)
        else:
            self._requeue_running(request)
            self.host.reclaim(request, num_needed, self.requests.running.values())

    def preempt_without_kv(self, request: Request) -> None:
        """Take a running request's blocks in both tiers and queue it again. Only its tokens are kept."""
        self._requeue_running(request)
        self.host.forget(request.request_id)
        request.num_computed_tokens = 0

    def _requeue_running(self, request: Request) -> None:
        self.counters[request.service_class].num_preemptions += 1
        request.num_preemptions += 1
        self.suspension.discard(request.request_id)
        self.requests.requeue(request)
