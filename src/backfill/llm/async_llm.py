"""The library for asyncio programs: streams of both service classes."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Literal, Self

from backfill.core.errors import InvalidRequest
from backfill.core.request import ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO
from backfill.llm.engine import BaseLLM
from backfill.llm.inputs import Conversation, Prompt, PromptInput, parse_conversation, parse_prompt
from backfill.llm.options import in_library_terms
from backfill.llm.outputs import RequestOutput
from backfill.llm.request import AbortHandle, PreparedRequest, Preparer, run_request

# Longer texts are tokenized in a thread, so that the loop can serve other requests.
_MAX_INLINE_CHARS = 4096

ServiceClassName = Literal["online", "offline"]


class AsyncLLM(BaseLLM):
    """A model in an engine process of its own, for one event loop.

    ``async with AsyncLLM(...) as llm`` starts the engine and ends it. Otherwise the first request starts the
    engine, and ``await llm.shutdown()`` ends it.

    Online requests have latency objectives; offline requests use the capacity that online ones leave
    (``policy="slo"``, as in the server). When the engine dies, its requests raise EngineDead, and the next
    request starts it again.
    """

    _is_offline = False

    def _open(self) -> None:
        self._handles: dict[str, AbortHandle] = {}
        self._request_numbers = itertools.count()
        self._finalizer = weakref.finalize(self, self._engine.abandon)

    async def start(self) -> None:
        """Start the engine and wait until it is ready, as the first request does. Raises: BackfillError."""
        await self._engine.start()

    async def get_tokenizer(self) -> Any:
        """The ``transformers`` tokenizer."""
        await self.start()
        return self._engine.generator.tokenizer.wrapped

    async def get_default_sampling_params(self) -> SamplingParams:
        """Sampling of requests without ``sampling_params``: the model's recommendation, and 16 tokens."""
        await self.start()
        return self._engine.default_params

    async def shutdown(self) -> None:
        """End the engine. Requests in flight and later ones raise EngineDead."""
        await self._engine.close()
        self._finalizer.detach()

    close = shutdown

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        service_class: ServiceClassName = "online",
        priority: int = 0,
        slo: SLO | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs as tokens arrive. Each holds the whole text so far, unless ``output_kind`` differs.

        Closing the iterator early aborts the request.

        Args:
            prompt: as for ``LLM.generate``.
            request_id: of the outputs, and for ``abort``; None generates one.
            service_class: "online" has objectives; "offline" uses the capacity that online requests leave.
            priority: lower is sooner, within a class.
            slo: objectives of an online request; None for the engine's.
        Raises: InvalidRequest, a ValueError, for a request that can never be served; RequestLost, such as
            EngineDead, if the engine lost the request.
        """
        return self._stream(
            lambda _: parse_prompt(prompt),
            sampling_params,
            request_id,
            service_class=service_class,
            priority=priority,
            slo=slo,
        )

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        service_class: ServiceClassName = "online",
        priority: int = 0,
        slo: SLO | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """``generate`` for a conversation, with the model's chat template.

        Args:
            continue_final_message: continue the last message, which must be the assistant's.
            chat_template_kwargs: variables of the template.
            tools: functions in OpenAI's form, for the template. An output's text has the model's calls as it
                writes them, its ``message`` has them apart.
            cache_salt: only requests of the same salt share cached prefixes.
        """

        def prompt_of(preparer: Preparer) -> PromptInput:
            return preparer.render_chat(
                parse_conversation(messages),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                tools=tools,
                cache_salt=cache_salt,
            )

        return self._stream(
            prompt_of,
            sampling_params,
            request_id,
            service_class=service_class,
            priority=priority,
            slo=slo,
        )

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests: each yields a last output with finish reason "abort". Unknown ids are ignored."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            handle = self._handles.get(each)
            if handle is not None:
                self._engine.abort(handle)

    async def _stream(
        self,
        prompt_of: Callable[[Preparer], PromptInput],
        params: SamplingParams | None,
        request_id: str | None,
        *,
        service_class: str,
        priority: int,
        slo: SLO | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        request_id = f"request-{next(self._request_numbers)}" if request_id is None else request_id
        if request_id in self._handles:
            raise InvalidRequest(f"request_id {request_id!r} is in flight already.", param="request_id")
        handle = self._handles[request_id] = AbortHandle()
        try:
            await self.start()
            with in_library_terms():
                prompt = prompt_of(self._engine.preparer)
                seed = self._engine.preparer.next_seed()  # here, in the order of requests

                def prepare() -> PreparedRequest:
                    return self._engine.preparer.prepare(
                        prompt,
                        self._engine.default_params if params is None else params,
                        request_id=request_id,
                        seed=seed,
                        service_class=_service_class(service_class),
                        priority=priority,
                        slo=slo,
                    )

                is_long = prompt.text is not None and len(prompt.text) > _MAX_INLINE_CHARS
                request = await asyncio.to_thread(prepare) if is_long else prepare()
            async with aclosing(run_request(request, self._engine.generator, handle)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            del self._handles[request_id]


def _service_class(name: str) -> ServiceClass:
    try:
        return ServiceClass(name)
    except ValueError:
        raise InvalidRequest(
            f"service_class must be 'online' or 'offline', got {name!r}.", param="service_class"
        ) from None
