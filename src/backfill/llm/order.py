"""The order in which the requests of a call run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from backfill.blending.pool import OfflinePool
from backfill.blending.requests import PoolRequest
from backfill.llm.engine import LocalEngine
from backfill.llm.outputs import RequestOutput
from backfill.llm.request import PreparedRequest
from backfill.preparation.resources import as_pool_request, create_pool


class CallOrder:
    """A call's requests in the order in which they run: by priority, and those of one as a pool says.

    Args:
        create_pool: an empty one.
    """

    def __init__(self, requests: Sequence[PreparedRequest], create_pool: Callable[[], OfflinePool]) -> None:
        self._requests = requests
        self._pools: dict[int, OfflinePool] = {}  # by priority, lower first
        if len(requests) < 2:
            return  # alone it has no order, and what later calls need of its prompt is not known
        namespaces: dict[str, int] = {}  # by salt
        pooled = defaultdict[int, list[PoolRequest]](list)
        for index, request in enumerate(requests):
            generation, namespace = request.generation, None
            if generation.cache_salt:
                namespace = namespaces.setdefault(generation.cache_salt, len(namespaces))
            pooled[generation.priority].append(as_pool_request(generation, index, namespace))
        for priority in sorted(pooled):
            self._pools[priority] = create_pool()
            self._pools[priority].add(pooled[priority])

    @classmethod
    def on(cls, engine: LocalEngine, requests: Sequence[PreparedRequest]) -> CallOrder:
        """Raises: ModelError."""
        preparer, folder = engine.preparer, Path(engine.generator.client.config.model_dir)
        return cls(requests, lambda: create_pool("blend", preparer.info, preparer.profile, folder)[0])

    def __iter__(self) -> Iterator[tuple[int, PreparedRequest]]:
        """Requests with their indices, each chosen when it is asked for."""
        if not self._pools:
            yield from enumerate(self._requests)
        for pool in self._pools.values():
            while (planned := pool.take()) is not None:
                request = self._requests[planned.request_id]
                num_reused = planned.reused_tokens - bool(request.generation.cache_salt)
                if num_reused > 0:  # else other priorities, or later calls, may need it
                    request = replace(request, generation=request.generation.as_planned(num_reused))
                yield planned.request_id, request

    def note_end(self, index: int, output: RequestOutput) -> None:
        """A request has ended: its length tells of others like it."""
        pool = self._pools.get(self._requests[index].generation.priority)
        if pool is not None:
            num_tokens = sum(len(each.token_ids) for each in output.outputs)
            pool.finish(index, num_tokens // len(output.outputs))
