"""Runs prepared requests and turns their deltas into OpenAI's responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from backfill.generation.generator import ChoiceListener, TextGenerator
from backfill.generation.timeline import Deliveries
from backfill.generation.tokenizer import Tokenizer
from backfill.protocol.generation import Generation
from backfill.protocol.responses import Response
from backfill.protocol.shapes import ChatShape, CompletionShape, Json, ResponseShape


@dataclass(slots=True, eq=False)
class TokenCount:
    """Output tokens of a generation so far, of all its choices together."""

    num_tokens: int = 0


class CompletionService:
    """Runs generations on an engine and shapes their responses."""

    def __init__(self, tokenizer: Tokenizer, generator: TextGenerator) -> None:
        self._generator = generator
        self._shapes: dict[str, ResponseShape] = {
            "/v1/chat/completions": ChatShape(tokenizer),
            "/v1/completions": CompletionShape(tokenizer),
        }

    async def run_whole(
        self,
        generation: Generation,
        arrived_at_s: float | None = None,
        listener: ChoiceListener | None = None,
        count: TokenCount | None = None,
    ) -> Json:
        """The response body, for ``EncodedBody``, once every choice has ended.

        Args:
            arrived_at_s: when the request came in, on the monotonic clock; None for now.
            count: counts its tokens as they come; for a caller that looks now and then.
        """
        response = Response(generation, self._shapes[generation.endpoint])
        stream = self._generator.stream(generation.request, arrived_at_s=arrived_at_s, listener=listener)
        async with aclosing(stream) as deltas:
            async for index, delta in deltas:
                response.add(index, delta)
                if count is not None:
                    count.num_tokens += 1
        return response.whole()

    async def run_stream(
        self,
        generation: Generation,
        arrived_at_s: float | None = None,
        listener: ChoiceListener | None = None,
        stalled_s: Callable[[], float] = lambda: 0.0,
    ) -> AsyncGenerator[list[Json], None]:
        """Yield lists of chunks as tokens come; the chunks of one list belong into one write.

        Latencies are measured until the caller asks for the next list: then it has written the last one. The
        last chunk reports attainment if the client set objectives.

        Args:
            stalled_s: total seconds in which the client has kept the caller from writing.
        """
        response = Response(generation, self._shapes[generation.endpoint])
        deliveries = Deliveries(stalled_s)
        stream = self._generator.stream(
            generation.request, arrived_at_s=arrived_at_s, listener=listener, deliveries=deliveries
        )
        try:
            async with aclosing(stream) as deltas:
                async for index, delta in deltas:
                    response.count_wait(deliveries.wait(index))  # so far, for a chunk that reports it
                    if chunks := response.chunks(index, delta):
                        yield chunks
                    response.count_wait(deliveries.written(index))
                    if delta.finish_reason is not None:
                        deliveries.finish(index)
        finally:
            deliveries.close()
        if generation.includes_usage:
            yield [response.usage_chunk()]
