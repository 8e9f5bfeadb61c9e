"""Runs prepared requests: choices to engine requests, deltas to OpenAI's bodies."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

from backfill.generation.generator import GenerationRequest, TextDelta, TextGenerator, merge
from backfill.generation.tokenizer import Tokenizer
from backfill.protocol.preparer import Generation, ServedModel
from backfill.protocol.responses import (
    Attainment,
    ChatShape,
    ChoiceState,
    CompletionShape,
    Json,
    ResponseHead,
    Shape,
    Usage,
    chunk,
    chunk_choice,
    opening_choice,
    whole_body,
)


class CompletionService:
    """Runs generations on an engine and shapes their answers."""

    def __init__(self, model: ServedModel, tokenizer: Tokenizer, generator: TextGenerator) -> None:
        self.model = model
        self._generator = generator
        self._shapes: dict[str, Shape] = {
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
            on_choice_end: called when the engine is done with a choice.
            on_first_token: called with a choice's index when its first token comes, read or not.
        """
        head, shape = self._head(generation), self._shapes[generation.endpoint]
        states = [ChoiceState() for _ in generation.samplings]
        usage = Usage(head.num_prompt_tokens)
        attainment = _attainment(generation)
        streams = self._streams(generation, arrived_at_s, on_choice_end, on_first_token)
        async with aclosing(merge(streams)) as deltas:
            async for index, delta in deltas:
                states[index].add_logprobs(shape.logprobs(delta, states[index]))
                if attainment is not None:
                    attainment.add(delta.waited_s, is_first=not states[index].token_ids)
                states[index].add(delta)
                usage.num_output_tokens += 1
        return whole_body(head, shape, states, usage, attainment)

    async def run_stream(
        self,
        generation: Generation,
        arrived_at_s: float | None = None,
        on_choice_end: Callable[[], None] | None = None,
        on_first_token: Callable[[int], None] | None = None,
    ) -> AsyncGenerator[list[Json], None]:
        """Chunks as tokens come; those in one list belong into one write.

        Objectives that the client brought are accounted for in the last chunk, whichever that is.

        Args:
            arrived_at_s, on_first_token: as for ``run_whole``.
            on_choice_end: likewise; the chunks of the choice may be unread still.
        """
        head, shape = self._head(generation), self._shapes[generation.endpoint]
        states = [ChoiceState() for _ in generation.samplings]
        usage = Usage(head.num_prompt_tokens)
        attainment = _attainment(generation)
        num_open = len(states)
        streams = self._streams(generation, arrived_at_s, on_choice_end, on_first_token)
        async with aclosing(merge(streams)) as deltas:
            async for index, delta in deltas:
                state = states[index]
                usage.num_output_tokens += 1
                running_usage = usage if generation.usage_on_every_chunk else None
                chunks = []
                if attainment is not None:
                    attainment.add(delta.waited_s, is_first=not state.token_ids)
                if not state.token_ids:
                    opening = opening_choice(head, shape, index)
                    if opening is not None:
                        chunks.append(chunk(head, shape, [opening], running_usage))
                choice = chunk_choice(head, shape, index, delta, shape.logprobs(delta, state))
                state.num_chars += len(delta.text)
                state.token_ids.append(delta.token_id)
                num_open -= delta.finish_reason is not None
                is_last = num_open == 0 and not generation.includes_usage
                chunks.append(chunk(head, shape, [choice], running_usage, attainment if is_last else None))
                yield chunks
        if generation.includes_usage:
            yield [chunk(head, shape, [], usage, attainment)]

    def _head(self, generation: Generation) -> ResponseHead:
        prompts = [generation.prompt_of(choice) for choice in range(generation.num_choices)]
        return ResponseHead(
            response_id=generation.response_id,
            created=generation.created,
            model=self.model.names[0],
            service_tier=generation.service_tier,
            num_prompt_tokens=generation.num_prompt_tokens,
            returns_token_ids=generation.returns_token_ids,
            prompt_token_ids=[generation.prompts[index] for index in prompts],
            echoed=[generation.echoed[index] for index in prompts],
        )

    def _streams(
        self,
        generation: Generation,
        arrived_at_s: float | None,
        on_choice_end: Callable[[], None] | None,
        on_first_token: Callable[[int], None] | None,
    ) -> list[AsyncGenerator[TextDelta, None]]:
        """One for each choice; none has begun."""
        arrived_at_s = time.monotonic() if arrived_at_s is None else arrived_at_s
        group = object()
        return [
            self._generator.stream(
                GenerationRequest(
                    prompt_token_ids=generation.prompts[generation.prompt_of(choice)],
                    sampling=sampling,
                    stop=generation.stop,
                    include_stop_str_in_output=generation.include_stop_str_in_output,
                    skip_special_tokens=generation.skip_special_tokens,
                    service_class=generation.service_class,
                    priority=generation.priority,
                    slo=generation.slo,
                    complete_by_s=generation.complete_by_s,
                    arrived_at_s=arrived_at_s,
                    group=group,
                ),
                None if on_first_token is None else partial(on_first_token, choice),
                on_choice_end,
            )
            for choice, sampling in enumerate(generation.samplings)
        ]


def _attainment(generation: Generation) -> Attainment | None:
    return None if generation.reported_slo is None else Attainment(generation.reported_slo)
