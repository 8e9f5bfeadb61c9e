"""Supplies an engine with requests of an offline pool, as far as the KV cache has room."""

from __future__ import annotations

from collections.abc import Sequence

from backfill.blending.memory_forecast import SLACK_BLOCKS, MemoryForecast, reserve_frac
from backfill.blending.pool import OfflinePool
from backfill.blending.requests import PlannedRequest, PoolRequest
from backfill.core.clock import Clock
from backfill.core.request import PriorityLevel, Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.engine.engine import Engine
from backfill.simulation.device import BLOCK_SIZE

_PROGRESS_STEPS = 32  # after which the pool learns how far requests are


class PoolFeed:
    """Keeps a few requests waiting in an engine, so that the order is the pool's.

    A request joins when the KV that all are expected to need fits the device (``MemoryForecast``). One that
    does not fit is put back. In every order the pool is told how far requests are; ``blend`` alone takes by
    kind, so that its memory-bound requests leave the others' part of the KV.

    Args:
        pool: with all its requests.
        requests: whose ids are the indices of ``outputs``.
        outputs: true output lengths.
        queue_depth: requests that wait in the engine at most, so that a step never lacks prompts.
        tells_reuse: the engine is told how much of a prompt is shared with requests that wait in the pool,
            and evicts the rest first.

    Attributes:
        in_flight: requests that joined and have not ended.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        pool: OfflinePool,
        requests: Sequence[PoolRequest],
        outputs: Sequence[int],
        *,
        queue_depth: int,
        tells_reuse: bool = False,
    ) -> None:
        self.in_flight: dict[RequestId, Request] = {}
        self._engine, self._clock, self._pool = engine, clock, pool
        self._requests, self._outputs = requests, outputs
        self._queue_depth, self._tells_reuse = queue_depth, tells_reuse
        self._waiting = engine.scheduler.requests.waiting[PriorityLevel.OFFLINE]
        self._forecast = MemoryForecast(
            engine.executor.info.num_blocks * BLOCK_SIZE, SLACK_BLOCKS * BLOCK_SIZE
        )
        self._reserve_frac = 0.0
        self._num_steps = 0
        self._set_reserve()

    def top_up(self, num_online_tokens: int = 0) -> None:
        """Fill the engine's queue as far as memory allows.

        Args:
            num_online_tokens: KV that is left to online requests.
        """
        if len(self._waiting) >= self._queue_depth:
            return
        self._forecast.online_tokens = num_online_tokens
        reserved_tokens = int(self._reserve_frac * self._forecast.offline_tokens)
        for request in self.in_flight.values():
            self._forecast.note_progress(request.request_id, len(request.output_token_ids))
        room = self._forecast.free()
        while len(self._waiting) < self._queue_depth:
            planned = self._pool.take(most_output_tokens=room.most_output_tokens(reserved_tokens))
            if planned is None:
                return
            most_output_tokens = room.most_output_tokens(self._num_own_tokens(planned))
            if planned.expected_output_tokens > most_output_tokens and self._engine.has_work:
                self._pool.put_back(planned.request_id)
                return
            self._join(planned)
            room = self._forecast.free()

    def on_step(self) -> None:
        """A step has been computed."""
        self._num_steps += 1
        if self._num_steps % _PROGRESS_STEPS == 0:
            self.note_progress()
            self._set_reserve()

    def note_progress(self) -> None:
        """Tell the pool how far requests are."""
        for request in self.in_flight.values():
            if request.output_token_ids:
                self._pool.note_progress(int(request.request_id), len(request.output_token_ids))

    def finish(self, request_id: RequestId) -> Request:
        """A request ended. Returns: the request."""
        self._forecast.remove(request_id)
        number = int(request_id)
        self._pool.finish(number, self._outputs[number])
        return self.in_flight.pop(request_id)

    def _set_reserve(self) -> None:
        self._reserve_frac = reserve_frac(self._pool.compute_bound_memory_frac)

    def _num_own_tokens(self, planned: PlannedRequest) -> int:
        """Prompt tokens that requests not yet taken do not begin with."""
        return len(self._requests[planned.request_id].prompt_token_ids) - planned.reused_tokens

    def _join(self, planned: PlannedRequest) -> None:
        number = planned.request_id
        request = Request(
            request_id=RequestId(str(number)),
            prompt_token_ids=self._requests[number].prompt_token_ids,
            sampling=SamplingParams(max_tokens=self._outputs[number], temperature=0.0, ignore_eos=True),
            service_class=ServiceClass.OFFLINE,
            arrived_at_s=self._clock.now_s(),
            num_reused_tokens=planned.reused_tokens if self._tells_reuse else None,
        )
        self.in_flight[request.request_id] = request
        self._forecast.add(request.request_id, self._num_own_tokens(planned), planned.expected_output_tokens)
        refusal = self._engine.add(request)
        assert refusal is None, f"{number}: {refusal}"
