"""A request's stream of text, from the engine's tokens."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from backfill.core.errors import BackfillError, EngineDead
from backfill.core.plan import TokenLogprobs
from backfill.core.request import FinishReason, Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO
from backfill.engine.client import EngineClient
from backfill.engine.messages import TokenOutput
from backfill.generation.detokenizer import IncrementalDetokenizer, StopStrings
from backfill.generation.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A client's request: tokenized prompts, and the sampling of every choice.

    Attributes:
        prompts: token ids, one list a prompt.
        samplings: one a choice; the choices of the first prompt come first.
        slo: None for the engine's default, and for offline requests.
        complete_by_s: end of an offline request's completion window, on the monotonic clock.
        owner, cache_salt: who shares cached prefixes with it (``core.request.Request``). Never logged.
    """

    prompts: list[list[int]]
    samplings: list[SamplingParams]
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    service_class: ServiceClass = ServiceClass.ONLINE
    priority: int = 0
    slo: SLO | None = None
    complete_by_s: float | None = None
    owner: str = field(default="", repr=False)
    cache_salt: str = field(default="", repr=False)

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
    previous token, and for the first token since the request's arrival. ``num_cached_tokens`` counts the
    request's prompt tokens that were found in the prefix cache, as the engine last reported it.
    """

    text: str
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended the output
    waited_s: float = 0.0
    num_cached_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A request, for metrics; complete when it has finished. Instants are on the monotonic clock."""

    service_class: ServiceClass
    slo: SLO | None
    num_prompt_tokens: int
    max_tokens: int
    arrived_at_s: float
    finish_reason: FinishReason = FinishReason.ABORT  # unless the output ends otherwise
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    first_scheduled_at_s: float | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    finished_at_s: float = math.inf


class Observer:
    """Notified of every token and every finished request. This one does nothing."""

    def on_first_token(
        self, service_class: ServiceClass, since_arrival_s: float, slo: SLO | None
    ) -> None: ...
    def on_next_token(self, service_class: ServiceClass, since_last_s: float, slo: SLO | None) -> None: ...
    def on_finished(self, record: RequestRecord) -> None: ...


@dataclass(eq=False)
class TextGenerator:
    """Runs requests on an engine and turns their tokens into text."""

    client: EngineClient
    tokenizer: Tokenizer
    observer: Observer
    _request_numbers: Iterator[int] = field(default_factory=itertools.count, init=False)

    def stream(
        self,
        request: GenerationRequest,
        *,
        arrived_at_s: float,
        group: Hashable | None = None,
        on_first_token: Callable[[int], None] | None = None,
        on_choice_end: Callable[[int], None] | None = None,
    ) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield one delta for each token, with the index of its choice; a choice's last has a finish reason.

        Closing the iterator aborts the request.

        Args:
            arrived_at_s: when the client's request came in, on the monotonic clock; its latency counts from
                then.
            group: names the request to ``EngineClient.interrupt_group``; None for a name of its own.
            on_first_token: called with a choice's index when the engine reports its first token, which may
                not have been yielded yet.
            on_choice_end: called with a choice's index when the engine has finished it; its deltas may not
                have been yielded yet.
        Raises: RequestLost when the engine lost it, BackfillError when it refuses it.
        """
        group = object() if group is None else group
        return merge(
            [
                self._stream_choice(
                    request,
                    Request(
                        # Clients choose response ids and may repeat them; the engine's are unique and short.
                        request_id=RequestId(str(next(self._request_numbers))),
                        prompt_token_ids=request.prompt_of(choice),
                        sampling=sampling,
                        service_class=request.service_class,
                        slo=request.slo,
                        complete_by_s=request.complete_by_s,
                        priority=request.priority,
                        owner=request.owner,
                        cache_salt=request.cache_salt,
                        arrived_at_s=arrived_at_s,
                    ),
                    group,
                    None if on_first_token is None else partial(on_first_token, choice),
                    None if on_choice_end is None else partial(on_choice_end, choice),
                )
                for choice, sampling in enumerate(request.samplings)
            ]
        )

    async def _stream_choice(
        self,
        text: GenerationRequest,
        request: Request,
        group: Hashable,
        on_first_token: Callable[[], None] | None,
        on_end: Callable[[], None] | None,
    ) -> AsyncGenerator[TextDelta, None]:
        detokenizer = IncrementalDetokenizer(
            self.tokenizer, request.prompt_token_ids, skip_special_tokens=text.skip_special_tokens
        )
        stops = StopStrings(text.stop, include_in_output=text.include_stop_str_in_output)
        timeline = _Timeline(request, self.observer)
        tokens = self.client.generate(request, group=group, on_first_token=on_first_token, on_end=on_end)
        try:
            async with aclosing(timeline.watch(tokens)) as outputs:
                async for output in outputs:
                    delta = _delta(text, output, detokenizer, stops, timeline)
                    if delta.finish_reason is not None:
                        timeline.record.finish_reason = delta.finish_reason
                    yield delta
                    if delta.finish_reason is not None:
                        return
        except BackfillError:
            timeline.record.finish_reason = FinishReason.ERROR
            raise
        finally:
            timeline.close()


def _delta(
    text: GenerationRequest,
    output: TokenOutput,
    detokenizer: IncrementalDetokenizer,
    stops: StopStrings,
    timeline: _Timeline,
) -> TextDelta:
    assert output.token_id is not None
    is_end_token = output.finish_reason is FinishReason.STOP
    hides_token = is_end_token and not text.include_stop_str_in_output
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
        timeline.waited_s,
        timeline.record.num_cached_tokens,
    )


class _Timeline:
    """Records when a request's tokens arrive, and notifies the observer."""

    def __init__(self, request: Request, observer: Observer) -> None:
        self.request = request
        self.record = RequestRecord(
            service_class=request.service_class,
            slo=request.slo,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.sampling.max_tokens,
            arrived_at_s=request.arrived_at_s,
        )
        self.waited_s = 0.0  # of the last token
        self._observer = observer

    async def watch(self, outputs: AsyncGenerator[TokenOutput, None]) -> AsyncGenerator[TokenOutput, None]:
        """Yield the outputs. Raises: BackfillError for one that refuses the request."""
        async with aclosing(outputs):
            async for output in outputs:
                if output.token_id is None:
                    raise BackfillError(output.message or "The engine failed.")
                self._take_counts(output)
                self._count_token()
                yield output

    def close(self) -> None:
        self.record.finished_at_s = time.monotonic()
        self._observer.on_finished(self.record)

    def _take_counts(self, output: TokenOutput) -> None:
        record = self.record
        if record.num_output_tokens > 0 and output.finish_reason is None:
            return  # only the first and the last output have them
        record.num_preemptions = output.num_preemptions
        record.num_cached_tokens = output.num_cached_tokens
        if output.first_scheduled_at_s is not None:
            record.first_scheduled_at_s = output.first_scheduled_at_s

    def _count_token(self) -> None:
        now_s, record = time.monotonic(), self.record
        record.num_output_tokens += 1
        if record.last_token_at_s is None:
            record.first_token_at_s = now_s
            self.waited_s = now_s - record.arrived_at_s
            self._observer.on_first_token(record.service_class, self.waited_s, record.slo)
        else:
            self.waited_s = now_s - record.last_token_at_s
            self._observer.on_next_token(record.service_class, self.waited_s, record.slo)
        record.last_token_at_s = now_s


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
