"""Policies without objectives, to compare with: what engines do today."""

from __future__ import annotations

from backfill.core.request import PriorityLevel
from backfill.scheduling.policy import BatchBuilder, Policy, PreemptionKey, R, RequestView, Snapshot, serve

_ONLINE = frozenset({PriorityLevel.ONLINE, PriorityLevel.RELEGATED})
_OFFLINE = frozenset({PriorityLevel.PROMOTED, PriorityLevel.OFFLINE})


class OnlineOnlyPolicy(Policy):
    """Offline requests are never served: a lower bound on online latency."""

    def build(self, view: Snapshot[R], builder: BatchBuilder[R]) -> None:
        serve(view, builder, _ONLINE)


class FcfsPolicy(Policy):
    """One queue for both classes, in order of arrival: vLLM's default."""

    has_levels = False

    def build(self, view: Snapshot[R], builder: BatchBuilder[R]) -> None:
        serve(view, builder, _ONLINE | _OFFLINE)

    def preemption_key(self, request: RequestView, lost_tokens: float) -> PreemptionKey:
        return request.order_key


class PriorityPolicy(Policy):
    """Online first, always, and no time limit: ConServe's vLLM++ (section 6.1).

    A waiting online request does not preempt a running offline one; that is vLLM's rule too.
    """

    def build(self, view: Snapshot[R], builder: BatchBuilder[R]) -> None:
        serve(view, builder, _ONLINE)
        serve(view, builder, _OFFLINE)


class RoundRobinPolicy(Policy):
    """Steps of online requests alternate with steps of offline ones (BROS, section 2.2)."""

    def __init__(self) -> None:
        self._offline_first = False

    def build(self, view: Snapshot[R], builder: BatchBuilder[R]) -> None:
        first, second = (_OFFLINE, _ONLINE) if self._offline_first else (_ONLINE, _OFFLINE)
        serve(view, builder, first)
        if builder.batch.num_seqs == 0:
            serve(view, builder, second)
        if builder.batch.num_seqs:  # a batch that preemptions left empty is built again, and is no turn
            self._offline_first = not self._offline_first
