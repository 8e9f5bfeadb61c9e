"""A request's stream of text, from the engine's tokens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Hashable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from backfill.core.clock import Clock, WallClock
from backfill.core.errors import BackfillError, EngineDead, RequestError
from backfill.core.plan import TokenLogprobs
from backfill.core.request import FinishReason, Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO
from backfill.engine.client import EngineClient
from backfill.engine.messages import TokenOutput
from backfill.generation.detokenizer import IncrementalDetokenizer, StopStrings
from backfill.generation.timeline import Deliveries, Observer, Timeline
from backfill.generation.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A client's request: tokenized prompts, and the sampling of every choice.

    Attributes:
        prompts: token ids, one list a prompt.
        samplings: one a choice, complete (``SamplingParams.choices``); those of the first prompt come first.
        slo: None for the engine's default, and for offline requests.
        complete_by_s: end of an offline request's completion window, on the monotonic clock.
        owner, cache_salt: who shares cached prefixes with it (``core.request.Request``). Never logged.
        owner_weight: see ``Request``.
        response_id, traceparent: see ``RequestRecord``.
        num_reused_tokens: leading tokens of its prompt that waiting requests need too; None if not known.
    """

    prompts: list[list[int]]
    samplings: list[SamplingParams]
    service_class: ServiceClass = ServiceClass.ONLINE
    priority: int = 0
    slo: SLO | None = None
    complete_by_s: float | None = None
    owner: str = field(default="", repr=False)
    owner_weight: float = 1.0
    cache_salt: str = field(default="", repr=False)
    num_reused_tokens: int | None = None
    response_id: str = ""
    traceparent: str = field(default="", repr=False)

    def as_planned(self, num_reused_tokens: int) -> GenerationRequest:
        """As a plan hands it out. The choices of one prompt share it, whatever others need."""
        return self if self.num_choices > 1 else replace(self, num_reused_tokens=num_reused_tokens)

    @property
    def num_choices(self) -> int:
        return len(self.samplings)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def prompt_index(self, choice: int) -> int:
        """Index of the prompt that a choice continues."""
        return choice * len(self.prompts) // len(self.samplings)

    def prompt_of(self, choice: int) -> list[int]:
        """Token ids of the prompt that a choice continues."""
        return self.prompts[self.prompt_index(choice)]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text of one output token.

    ``text`` is empty while a character or a stop string is incomplete. ``waited_s`` is the time since the
    previous token, and for the first token since the request's arrival, up to now; with ``Deliveries``, which
    measure it later, it is 0. ``num_cached_tokens`` counts the request's prompt tokens that were found in the
    prefix cache, as the engine last reported it. ``prompt_logprobs`` are of all prompt tokens but the first,
    with the first output token, where the request asks for them.
    """

    text: str
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended the output
    waited_s: float = 0.0
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprobs] | None = None


class ChoiceListener(Protocol):
    """Hears of a choice what the engine reports, which may not have been yielded yet."""

    def on_prompt_progress(self, choice: int, num_computed_tokens: int) -> None: ...
    def on_first_token(self, choice: int) -> None: ...
    def on_choice_end(self, choice: int) -> None: ...


@dataclass(eq=False)
class TextGenerator:
    """Runs requests on an engine and turns their tokens into text."""

    client: EngineClient
    tokenizer: Tokenizer
    observer: Observer
    clock: Clock = field(default_factory=WallClock)
    _request_numbers: Iterator[int] = field(default_factory=itertools.count, init=False)

    def stream(
        self,
        request: GenerationRequest,
        *,
        arrived_at_s: float | None = None,
        group: Hashable | None = None,
        listener: ChoiceListener | None = None,
        deliveries: Deliveries | None = None,
    ) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield one delta for each token, with the index of its choice; a choice's last has a finish reason.

        Closing the iterator aborts the request.

        Args:
            arrived_at_s: when the client's request came in, on the monotonic clock; None for now. Its latency
                counts from then.
            group: names the request to ``EngineClient.interrupt_group``; None for a name of its own.
            deliveries: where the caller tells when it has written a token, and at last that there are no
                more; None if a token has arrived when it is yielded.
        Raises: RequestLost when the engine lost it, BackfillError when it refuses it.
        """
        group = object() if group is None else group
        arrived_at_s = self.clock.now_s() if arrived_at_s is None else arrived_at_s
        streams = []
        for choice, sampling in enumerate(request.samplings):
            engine_request = Request(
                # Clients choose response ids and may repeat them; the engine's are unique and short.
                request_id=RequestId(str(next(self._request_numbers))),
                prompt_token_ids=request.prompt_of(choice),
                sampling=sampling,
                service_class=request.service_class,
                slo=request.slo,
                complete_by_s=request.complete_by_s,
                priority=request.priority,
                owner=request.owner,
                owner_weight=request.owner_weight,
                cache_salt=request.cache_salt,
                num_reused_tokens=request.num_reused_tokens,
                arrived_at_s=arrived_at_s,
            )
            tokens = self.client.generate(
                engine_request,
                group=group,
                on_prompt_progress=None if listener is None else partial(listener.on_prompt_progress, choice),
                on_first_token=None if listener is None else partial(listener.on_first_token, choice),
                on_end=None if listener is None else partial(listener.on_choice_end, choice),
            )
            timeline = Timeline(
                engine_request,
                self.observer,
                self.clock,
                response_id=request.response_id,
                traceparent=request.traceparent,
            )
            streams.append(self._stream_choice(choice, tokens, timeline, deliveries))
        return merge(streams)

    async def _stream_choice(
        self,
        choice: int,
        tokens: AsyncGenerator[TokenOutput, None],
        timeline: Timeline,
        deliveries: Deliveries | None,
    ) -> AsyncGenerator[TextDelta, None]:
        """``deliveries`` takes over the timeline's arrivals and its end."""
        request, sampling = timeline.request, timeline.request.sampling
        detokenizer = IncrementalDetokenizer(
            self.tokenizer, request.prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        stops = StopStrings(sampling.stop_strings, include_in_output=sampling.include_stop_str_in_output)
        if deliveries is not None:
            deliveries.add(choice, timeline)
        try:
            async with aclosing(tokens):
                async for output in tokens:
                    if output.token_id is None:
                        # No step failed: the request can never be served, or not go on, as it stands.
                        raise RequestError(output.message or "The engine refused the request.")
                    timeline.count_token(output)
                    waited_s = timeline.arrive().seconds if deliveries is None else 0.0
                    delta = _delta(output, detokenizer, stops, timeline, waited_s)
                    if delta.finish_reason is not None:
                        timeline.record.finish_reason = delta.finish_reason
                    yield delta
                    if delta.finish_reason is not None:
                        return
        except BackfillError:
            timeline.record.finish_reason = FinishReason.ERROR
            raise
        finally:
            if deliveries is None:
                timeline.close()


def _delta(
    output: TokenOutput,
    detokenizer: IncrementalDetokenizer,
    stops: StopStrings,
    timeline: Timeline,
    waited_s: float,
) -> TextDelta:
    assert output.token_id is not None
    is_end_token = output.finish_reason is FinishReason.STOP
    hides_token = is_end_token and not timeline.request.sampling.include_stop_str_in_output
    shown = "" if hides_token else detokenizer.push(output.token_id)
    finish_reason = output.finish_reason
    stop_reason: int | str | None = output.stop_token_id
    if finish_reason is not None:
        shown += detokenizer.flush()
    if timeline.record.num_output_tokens >= timeline.request.sampling.min_tokens:
        shown, found = stops.push(shown)
        if found is not None:
            finish_reason, stop_reason = FinishReason.STOP, found
        elif finish_reason is not None:
            shown += stops.flush()
    return TextDelta(
        shown,
        output.token_id,
        output.logprobs,
        finish_reason,
        stop_reason,
        waited_s,
        timeline.record.num_cached_tokens,
        output.prompt_logprobs,
    )


async def merge(
    streams: Sequence[AsyncGenerator[TextDelta, None]],
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield the deltas of all streams as they arrive, each with its stream's index.

    If a stream raises, the others are closed and the error is raised here.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield 0, delta
        return
    arrivals: asyncio.Queue[tuple[int, TextDelta | Exception | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[TextDelta, None]) -> None:
        ending: Exception | None = EngineDead("The request was cancelled.")
        try:
            async with aclosing(stream):
                async for delta in stream:
                    arrivals.put_nowait((index, delta))
            ending = None
        except Exception as error:
            ending = error
        finally:
            arrivals.put_nowait((index, ending))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            index, arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                num_open -= 1
            else:
                yield index, arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
