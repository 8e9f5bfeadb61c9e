"""Runs prepared requests and turns their deltas into OpenAI's responses."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from backfill.generation.generator import TextDelta, TextGenerator
from backfill.generation.tokenizer import Tokenizer
from backfill.protocol.generation import Generation
from backfill.protocol.responses import (
    Attainment,
    ChatShape,
    ChoiceState,
    CompletionShape,
    Json,
    ResponseShape,
    Usage,
    chunk,
    chunk_choice,
    opening_choice,
    whole_body,
)


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
        on_choice_end: Callable[[], None] | None = None,
        on_first_token: Callable[[int], None] | None = None,
    ) -> Json:
        """The response body, for ``EncodedBody``, once every choice has ended.

        Args:
            arrived_at_s: when the request came in, on the monotonic clock; None for now.
            on_choice_end, on_first_token: see ``TextGenerator.stream``.
        """
        shape = self._shapes[generation.endpoint]
        states = [ChoiceState() for _ in generation.request.samplings]
        usage = Usage(generation.request.num_prompt_tokens)
        attainment = _attainment(generation)
        async with self._deltas(generation, arrived_at_s, on_choice_end, on_first_token) as deltas:
            async for index, delta in deltas:
                state = states[index]
                state.add_logprobs(shape.logprobs(delta, state.num_chars))
                if attainment is not None:
                    attainment.add(delta.waited_s, is_first=not state.token_ids)
                state.add(delta)
                usage.num_output_tokens += 1
        return whole_body(generation, shape, states, usage, attainment)

    async def run_stream(
        self,
        generation: Generation,
        arrived_at_s: float | None = None,
        on_choice_end: Callable[[], None] | None = None,
        on_first_token: Callable[[int], None] | None = None,
    ) -> AsyncGenerator[list[Json], None]:
        """Yield lists of chunks as tokens come; the chunks of one list belong into one write.

        The last chunk reports attainment if the client set objectives. Args: as for ``run_whole``.
        """
        shape = self._shapes[generation.endpoint]
        states = [ChoiceState() for _ in generation.request.samplings]
        usage = Usage(generation.request.num_prompt_tokens)
        attainment = _attainment(generation)
        num_open = len(states)
        async with self._deltas(generation, arrived_at_s, on_choice_end, on_first_token) as deltas:
            async for index, delta in deltas:
                state = states[index]
                usage.num_output_tokens += 1
                running_usage = usage if generation.usage_on_every_chunk else None
                chunks = []
                if attainment is not None:
                    attainment.add(delta.waited_s, is_first=not state.token_ids)
                if not state.token_ids:
                    opening = opening_choice(generation, shape, index)
                    if opening is not None:
                        chunks.append(chunk(generation, shape, [opening], running_usage))
                logprobs = shape.logprobs(delta, state.num_chars)
                choice = chunk_choice(generation, shape, index, delta, logprobs)
                state.num_chars += len(delta.text)
                state.token_ids.append(delta.token_id)
                num_open -= delta.finish_reason is not None
                is_last = num_open == 0 and not generation.includes_usage
                chunks.append(
                    chunk(generation, shape, [choice], running_usage, attainment if is_last else None)
                )
                yield chunks
        if generation.includes_usage:
            yield [chunk(generation, shape, [], usage, attainment)]

    def _deltas(
        self,
        generation: Generation,
        arrived_at_s: float | None,
        on_choice_end: Callable[[], None] | None,
        on_first_token: Callable[[int], None] | None,
    ) -> aclosing[AsyncGenerator[tuple[int, TextDelta], None]]:
        return aclosing(
            self._generator.stream(
                generation.request,
                arrived_at_s=time.monotonic() if arrived_at_s is None else arrived_at_s,
                on_first_token=on_first_token,
                on_choice_end=on_choice_end,
            )
        )


def _attainment(generation: Generation) -> Attainment | None:
    return None if generation.reported_slo is None else Attainment(generation.reported_slo)
