"""The life of a request: it is checked and tokenized, then run until its outputs are finished."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from backfill.core.config import SchedulerConfig
from backfill.core.errors import InvalidRequest, RequestAborted
from backfill.core.plan import TokenLogprobs
from backfill.core.request import ServiceClass, check_cache_salt
from backfill.core.sampling import RequestOutputKind, SamplingParams
from backfill.core.slo import SLO
from backfill.costs.profile import CostProfile
from backfill.execution.executor import ExecutorInfo
from backfill.execution.grammars import GrammarCompiler
from backfill.generation.generator import GenerationRequest, TextDelta, TextGenerator
from backfill.generation.message_parser import MessageParser, MessageParsing
from backfill.generation.tokenizer import Tokenizer
from backfill.llm.inputs import PromptInput, parse_tools
from backfill.llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from backfill.protocol.shapes import whole_message
from backfill.scheduling.objectives import impossible_objectives, objectives_below_floor

_MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A checked and tokenized request, which the engine can serve.

    Attributes:
        prompt: the prompt's text; None if token ids were given.
        parsing: of a chat's outputs.
    """

    request_id: str
    prompt: str | None
    generation: GenerationRequest
    parsing: MessageParsing | None = None


@dataclass(eq=False)
class Preparer:
    """Checks and tokenizes prompts. All methods but ``next_seed`` may be called from any thread.

    All methods raise RequestError for a request that can never be served.
    """

    tokenizer: Tokenizer
    info: ExecutorInfo
    profile: CostProfile | None  # predicts step times, as the engine does now; None if unknown
    scheduler: SchedulerConfig
    seeds: random.Random
    grammars: GrammarCompiler

    def next_seed(self) -> int:
        """A seed for the next request. Called in the order of the requests; ``prepare`` may not be."""
        return self.seeds.getrandbits(62)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
        cache_salt: str | None,
    ) -> PromptInput:
        if continue_final_message and messages[-1]["role"] != "assistant":
            raise InvalidRequest(
                "continue_final_message needs a last message of role assistant.",
                param="continue_final_message",
            )
        text = self.tokenizer.render_chat(
            messages,
            tools=None if tools is None else parse_tools(tools),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=chat_template_kwargs,
        )
        known = self.tokenizer.message_format
        begun = known.begun(text, messages[-1]["content"] if continue_final_message else "")
        parsing = MessageParsing(calls="free" if tools and known.calls else "none", begun=begun)
        # The template writes the special tokens.
        return PromptInput(text=text, cache_salt=cache_salt, add_special_tokens=False, parsing=parsing)

    def prepare(
        self,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        request_id: str,
        seed: int,
        service_class: ServiceClass,
        priority: int = 0,
        slo: SLO | None = None,
    ) -> PreparedRequest:
        """``seed`` is used if ``params`` sets none."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"sampling_params must be SamplingParams, got {params!r:.80}.", param="sampling_params"
            )
        if type(priority) is not int or abs(priority) > _MAX_PRIORITY:
            allowed = f"an integer between {-_MAX_PRIORITY} and {_MAX_PRIORITY}"
            raise InvalidRequest(f"priority must be {allowed}, got {priority!r:.80}.", param="priority")
        if prompt.cache_salt is not None:
            check_cache_salt(prompt.cache_salt)
        token_ids = prompt.token_ids
        if token_ids is None:
            assert prompt.text is not None
            token_ids = self.tokenizer.encode(
                prompt.text,
                add_special_tokens=prompt.add_special_tokens,
                most_tokens=self.info.max_model_len,
            )
        self._check_slo(slo, service_class, len(token_ids))
        parsing = prompt.parsing
        if parsing is not None and params.structured_outputs is not None:
            parsing = MessageParsing()  # the grammar holds the whole output
        if parsing is not None and self.tokenizer.needs_marks(parsing):
            params = replace(params, skip_special_tokens=False)
        left = max(1, self.info.max_model_len - len(token_ids))
        max_tokens = left if params.max_tokens is None else min(params.max_tokens, left)
        bad_words = self.tokenizer.spellings(params.bad_words) if params.bad_words else ()
        choices = params.choices(max_tokens, seed, bad_words)
        self.info.check_request(token_ids, choices[0])  # the others differ in their seeds alone
        if params.structured_outputs is not None:
            self.grammars.matcher(params.structured_outputs)
        return PreparedRequest(
            request_id=request_id,
            prompt=prompt.text,
            parsing=parsing,
            generation=GenerationRequest(
                prompts=[token_ids],
                samplings=choices,
                service_class=service_class,
                priority=priority,
                slo=slo,
                cache_salt=prompt.cache_salt or "",
            ),
        )

    def _check_slo(self, slo: SLO | None, service_class: ServiceClass, num_prompt_tokens: int) -> None:
        """Refuse objectives below their floors, and those that the profile knows to be impossible."""
        if slo is None:
            return
        if not isinstance(slo, SLO) or not (_is_positive(slo.ttft_s) and _is_positive(slo.tpot_s)):
            raise InvalidRequest(f"slo must be an SLO of seconds above 0, got {slo!r:.80}.", param="slo")
        if service_class is ServiceClass.OFFLINE:
            raise InvalidRequest("slo is for online requests, not for offline ones.", param="slo")
        requested = {"ttft": slo.ttft_s, "tpot": slo.tpot_s}
        floors_s = objectives_below_floor(requested, self.scheduler)
        if floors_s:
            least = " and ".join(f"{name}_s={floor_s:g}" for name, floor_s in floors_s.items())
            raise InvalidRequest(f"{slo} is not offered: the least is {least}.", param="slo")
        impossible = impossible_objectives(requested, self.profile, self.scheduler, num_prompt_tokens)
        if impossible:
            needs = " and ".join(f"{name}_s={needed_s:g}" for name, needed_s in impossible.items())
            cached = ", its prompt cached," if self.scheduler.prefix_caching else ""
            raise InvalidRequest(
                f"{slo} cannot be met: even alone{cached} the request needs {needs}. Ask for at least that.",
                param="slo",
            )


def _is_positive(seconds: object) -> bool:
    return type(seconds) in (int, float) and cast(float, seconds) > 0


@dataclass(eq=False, slots=True)
class AbortHandle:
    """Whether a request was aborted. It also is the group of the request's choices in the engine's client."""

    is_aborted: bool = False

    def check(self) -> None:
        if self.is_aborted:
            raise RequestAborted("The request was aborted.")


async def run_request(
    request: PreparedRequest,
    generator: TextGenerator,
    handle: AbortHandle,
    kind: RequestOutputKind | None = None,
) -> AsyncGenerator[RequestOutput, None]:
    """Yield outputs of this kind, else of the kind that the request's sampling names; the last is finished.

    Closing the iterator aborts the request. When the handle is aborted, unfinished outputs end with finish
    reason "abort".

    Raises: RequestLost if the engine lost the request.
    """
    kind = kind or request.generation.samplings[0].output_kind
    arrived_at_s = time.monotonic()  # when it was taken, of several: the engine keeps to their order
    outputs = OutputsSoFar(request, arrived_at_s)
    try:
        handle.check()
        stream = generator.stream(request.generation, arrived_at_s=arrived_at_s, group=handle)
        async with aclosing(stream) as deltas:
            async for index, delta in deltas:
                handle.check()  # it may have been aborted before the client had all choices
                outputs.add(index, delta, generator.tokenizer)
                if kind is RequestOutputKind.CUMULATIVE:
                    yield outputs.all()
                elif kind is RequestOutputKind.DELTA:
                    yield outputs.take_delta(index)
    except RequestAborted:
        outputs.abort()
        yield outputs.all()
        return
    if kind is RequestOutputKind.FINAL_ONLY:
        yield outputs.all()


class OutputsSoFar:
    """A request's outputs as they grow."""

    def __init__(self, request: PreparedRequest, arrived_at_s: float) -> None:
        self._request = request
        self._outputs = [
            CompletionOutput(
                index=index,
                text="",
                token_ids=[],
                cumulative_logprob=None if sampling.logprobs is None else 0.0,
                logprobs=None if sampling.logprobs is None else [],
            )
            for index, sampling in enumerate(request.generation.samplings)
        ]
        self._metrics = RequestMetrics(arrival_time=arrived_at_s)
        self._num_cached_tokens: dict[int, int] = {}  # by index, of outputs that have a token
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def add(self, index: int, delta: TextDelta, tokenizer: Tokenizer) -> None:
        output, metrics = self._outputs[index], self._metrics
        output.text += delta.text
        output.token_ids.append(delta.token_id)
        if output.logprobs is not None and delta.logprobs is not None:
            output.logprobs.append(_logprobs_by_token(delta.token_id, delta.logprobs, tokenizer))
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + delta.logprobs.logprob
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason.value, delta.stop_reason
            if self._request.parsing is not None:
                parser = MessageParser(tokenizer.message_format, self._request.parsing)
                output.message = whole_message(parser.push(output.text, is_last=True))
        metrics.last_token_time = time.monotonic()
        if metrics.first_token_time is None:
            metrics.first_token_time = metrics.arrival_time + delta.waited_s
        if index in self._num_cached_tokens:
            metrics.max_token_gap = max(metrics.max_token_gap or 0.0, delta.waited_s)
        generation = self._request.generation
        if self._prompt_logprobs is None and generation.samplings[0].prompt_logprobs is not None:
            scored = zip(generation.prompts[0][1:], delta.prompt_logprobs or (), strict=True)
            self._prompt_logprobs = [None, *(_logprobs_by_token(*each, tokenizer) for each in scored)]
        self._num_cached_tokens[index] = delta.num_cached_tokens

    def abort(self) -> None:
        for output in self._outputs:
            output.finish_reason = output.finish_reason or "abort"

    def all(self) -> RequestOutput:
        return self._with(self._outputs)

    def take_delta(self, index: int) -> RequestOutput:
        """What one output has gained since the previous call for it."""
        output = self._outputs[index]
        taken = self._with([output])
        output.text, output.token_ids = "", []
        if output.logprobs is not None:
            output.logprobs = []
        return taken

    def _with(self, outputs: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self._request.request_id,
            prompt=self._request.prompt,
            prompt_token_ids=self._request.generation.prompts[0],
            outputs=[
                replace(
                    each,
                    token_ids=list(each.token_ids),
                    logprobs=None if each.logprobs is None else list(each.logprobs),
                )
                for each in outputs
            ],
            finished=all(each.finished for each in self._outputs),
            # The least of all outputs: others may find what one of them computed.
            num_cached_tokens=min(self._num_cached_tokens.values(), default=None),
            metrics=replace(self._metrics),
            prompt_logprobs=self._prompt_logprobs,
        )


def _logprobs_by_token(token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Log probabilities by token id: the sampled token, then the most likely ones."""
    ranks = {other: rank for rank, (other, _) in enumerate(logprobs.top, start=1)}
    entries = [(token_id, logprobs.logprob), *logprobs.top]
    ranks.setdefault(token_id, logprobs.rank)
    return {each: Logprob(logprob, ranks[each], tokenizer.token_text(each)) for each, logprob in entries}
