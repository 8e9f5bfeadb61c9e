"""The library for scripts and notebooks: prompts in, outputs out."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import aclosing, closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from backfill.core.errors import BackfillError
from backfill.core.request import ServiceClass
from backfill.core.sampling import RequestOutputKind, SamplingParams
from backfill.llm.engine import BaseLLM, LocalEngine
from backfill.llm.inputs import (
    Conversation,
    Prompt,
    PromptInput,
    one_each,
    parse_conversations,
    parse_prompts,
)
from backfill.llm.options import in_library_terms
from backfill.llm.outputs import RequestOutput
from backfill.llm.progress import GenerationBar, UseTqdm
from backfill.llm.request import AbortHandle, PreparedRequest, run_request

if TYPE_CHECKING:
    from backfill.llm.order import CallOrder

Result = TypeVar("Result")

# Requests in flight, as a multiple of a step's requests, so that the engine never waits for the next.
_STEPS_AHEAD = 2
# How late a signal is seen that did not end a wait, in seconds.
_SIGNALS_S = 0.2


class LLM(BaseLLM):
    """A model in an engine process of its own, for callers that wait for whole outputs.

    Its requests are offline: they have no latency objectives, so steps are as large as possible, and the
    policy is ``priority`` unless another is given. Its event loop runs in a thread, so it works in notebooks.

    When the engine dies, the call in progress raises EngineDead, and the next call restarts it. It ends with
    ``close``, a ``with`` block, garbage collection or the interpreter. In a forked process every call raises
    EngineDead.

    Raises: ModelError, and BackfillError with the reason when the engine cannot start.
    """

    _is_offline = True

    def _open(self) -> None:
        self._max_in_flight = _STEPS_AHEAD * self._max_num_seqs
        self._loop = LoopThread("backfill-llm")
        self._finalizer = weakref.finalize(self, _end, self._engine, self._loop, os.getpid())
        try:
            self._loop.run(self._engine.start())
        except BaseException:
            self.close()
            raise

    def get_tokenizer(self) -> Any:
        """The ``transformers`` tokenizer."""
        return self._engine.generator.tokenizer.wrapped

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling of calls without ``sampling_params``: the model's recommendation, and 16 tokens."""
        return self._engine.default_params

    def close(self) -> None:
        """End the engine. Calls in other threads and later calls raise EngineDead."""
        self._finalizer()

    shutdown = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Return whole outputs, in the order of the prompts. They run in that of ``CallOrder``.

        All prompts are checked before any runs. KeyboardInterrupt aborts the requests and leaves the engine.

        Args:
            prompts: text, token ids, ``{"prompt": text}``, ``{"prompt_token_ids": [...]}``, or a list. A dict
                may have a ``cache_salt``: only requests of the same salt share cached prefixes.
            sampling_params: one for all prompts, or one for each; None for the model's.
            use_tqdm: show a bar on standard error; a callable replaces ``tqdm.auto``'s.
            priority: one for each prompt; lower is sooner.
        Raises: InvalidRequest, a ValueError, for a prompt that can never be served; RequestLost, such as
            EngineDead, if the engine lost a request.
        """
        return self._run(parse_prompts(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        priority: Sequence[int] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """``generate`` for one conversation or a list of them, with the model's chat template.

        Args:
            continue_final_message: continue the last message, which must be the assistant's.
            chat_template_kwargs: variables of the template.
            tools: functions in OpenAI's form, for the template. An output's text has the model's calls as it
                writes them, its ``message`` has them apart.
            cache_salt: one for all conversations, or one for each; only requests of the same salt share
                cached prefixes.
        """
        conversations = parse_conversations(messages)
        salts: list[str | None] = one_each(cache_salt, len(conversations), "cache_salt")
        with in_library_terms():
            prompts = [
                self._engine.preparer.render_chat(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template_kwargs=chat_template_kwargs,
                    tools=tools,
                    cache_salt=salt,
                )
                for conversation, salt in zip(conversations, salts, strict=True)
            ]
        return self._run(prompts, sampling_params, use_tqdm, priority)

    def _run(
        self,
        prompts: Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: UseTqdm,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        self._engine.check_usable()  # before the loop, which has ended or belongs to the parent otherwise
        self._loop.run(self._engine.start())  # restarts an engine that has died
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = one_each(given, len(prompts), "sampling_params")
        priorities = one_each(0 if priority is None else priority, len(prompts), "priority")
        requests = []
        for index, prompt in enumerate(prompts):
            with in_library_terms(f"prompts[{index}]: " if len(prompts) > 1 else ""):
                requests.append(
                    self._engine.preparer.prepare(
                        prompt,
                        params[index],
                        request_id=str(index),
                        seed=self._engine.preparer.next_seed(),
                        service_class=ServiceClass.OFFLINE,
                        priority=priorities[index],
                    )
                )
        return self._collect(requests, use_tqdm)

    def _collect(self, requests: Sequence[PreparedRequest], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Run the requests. Returns: their outputs, in their order."""
        from backfill.llm.order import CallOrder  # here, as numpy takes long to import

        arrivals: queue.SimpleQueue[tuple[int, RequestOutput] | None] = queue.SimpleQueue()
        order = CallOrder.on(self._engine, requests)
        most = min(self._max_in_flight, len(requests))
        work = self._loop.submit(_run_all(self._engine, order, most, arrivals.put))
        work.add_done_callback(lambda _: arrivals.put(None))
        outputs: dict[int, RequestOutput] = {}
        try:
            with closing(GenerationBar(use_tqdm, len(requests))) as bar:
                while (arrival := arrivals.get()) is not None:
                    index, output = arrival
                    outputs[index] = output
                    bar.add(output)
        except BaseException:  # mostly KeyboardInterrupt
            work.cancel()
            raise
        work.result()
        return [outputs[index] for index in range(len(requests))]


async def _run_all(
    engine: LocalEngine,
    order: CallOrder,
    max_in_flight: int,
    on_output: Callable[[tuple[int, RequestOutput]], None],
) -> None:
    """Run requests in order. The first error aborts the others and is raised."""
    waiting = iter(order)

    async def run_waiting() -> None:
        for index, request in waiting:
            stream = run_request(request, engine.generator, AbortHandle(), RequestOutputKind.FINAL_ONLY)
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    order.note_end(index, output)
                    on_output((index, output))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_in_flight):
                group.create_task(run_waiting())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _end(engine: LocalEngine, loop: LoopThread, pid: int) -> None:
    """End an LLM's engine, then its thread. Called in any thread, also by garbage collection."""
    if os.getpid() != pid:
        return  # a fork: engine and thread are the parent's
    if loop.is_current:
        engine.abandon()
    else:
        loop.run(engine.close())
    loop.close()


class LoopThread:
    """Runs coroutines for other threads until it is closed. It does not keep the interpreter alive."""

    def __init__(self, name: str) -> None:
        self._loop = _new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and return its result. KeyboardInterrupt in this thread cancels it."""
        future = self.submit(coroutine)
        try:
            return self.result_of(future)
        except BaseException:
            future.cancel()
            raise

    @staticmethod
    def result_of(future: Future[Result]) -> Result:
        """Wait for a result or a signal, also one that came just before the wait or to another thread."""
        while not wait([future], _SIGNALS_S).done:
            pass
        try:
            return future.result()
        except BackfillError as error:
            raise error.with_traceback(None) from None  # of the loop's thread

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Stop the loop, which must be idle. Waits for its end, unless called in the loop's thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        if not self.is_current:
            self._thread.join()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
