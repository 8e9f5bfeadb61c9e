"""Turns request bodies into generations: parses, checks, templates and tokenizes. No engine, no I/O."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from backfill.core.config import SchedulerConfig
from backfill.core.errors import RequestError
from backfill.core.request import ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO
from backfill.core.structured import StructuredOutputsParams
from backfill.costs.profile import CostProfile
from backfill.engine.messages import Ready
from backfill.execution.executor import ExecutorInfo
from backfill.execution.grammars import GrammarCompiler
from backfill.generation.generator import GenerationRequest
from backfill.generation.tokenizer import Tokenizer
from backfill.models.generation_config import GenerationDefaults
from backfill.protocol.body_check import (
    BodyCheck,
    bounded_max_tokens,
    check_prompt_logprobs,
    refuse_unknown_fields,
    warning_of,
)
from backfill.protocol.chat import (
    ChatCompletionRequest,
    ChatMessage,
    ConversationFields,
    DetokenizeRequest,
    TokenizeRequest,
)
from backfill.protocol.generation import (
    CompletionRequest,
    Generation,
    GenerationBody,
    GenerationEndpoint,
    parse_generation,
)
from backfill.protocol.options import MAX_RESPONSE_TOKENS
from backfill.protocol.parsing import parse_body
from backfill.protocol.request_headers import TRACE_HEADER, Objective
from backfill.protocol.tools import MessagePlan, Tool, plan_message, tool_inputs
from backfill.scheduling.objectives import never_offered, objectives_below_floor

TextEndpoint = Literal["/tokenize", "/detokenize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model of this server.

    Attributes:
        names: names that clients may use; responses name the first.
        root: folder or hub id from which clients can load the tokenizer.
    """

    names: tuple[str, ...]
    root: str
    folder: Path
    created: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What requests are checked against: limits and objectives of the running engine.

    Attributes:
        default_slo: of online requests that set no objectives.
        profile: predicts step times; None if unknown, and then objectives are not checked.
    """

    info: ExecutorInfo
    default_slo: SLO
    profile: CostProfile | None
    scheduler: SchedulerConfig

    @classmethod
    def of(cls, ready: Ready, scheduler: SchedulerConfig) -> EngineFacts:
        return cls(info=ready.info, default_slo=ready.default_slo, profile=ready.profile, scheduler=scheduler)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """A request without its body.

    Attributes:
        headers: the headers of ``REQUEST_HEADERS``, by lower-case name; fields of the body override them.
        is_batch_line: the request is offline, whatever the body says, and does not stream.
        complete_by_s: end of its batch's completion window, on the monotonic clock.
        owner: of the API key that it came with, or of its batch; empty without keys. Never logged.
        owner_weight: see ``Request``.
    """

    request_id: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_batch_line: bool = False
    complete_by_s: float | None = None
    owner: str = field(default="", repr=False)
    owner_weight: float = 1.0


class GrammarNeeded(Exception):
    """The body has a grammar, which takes too long to compile for who called."""


@dataclass(eq=False)
class RequestPreparer:
    """Turns bodies into generations.

    Attributes:
        defaults: sampling where a body sets none.
        max_response_tokens: most choices x max_tokens x (1 + logprobs) of one request.
        is_strict: refuse what ``warning_of`` would warn of.
        facts: of the running engine; None until it is ready, and then only ``check_model`` may be called.
    """

    model: ServedModel
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    _: KW_ONLY
    max_response_tokens: int = MAX_RESPONSE_TOKENS
    is_strict: bool = False
    facts: EngineFacts | None = None
    _compiler: GrammarCompiler | None = field(default=None, init=False)

    @property
    def line_check(self) -> BodyCheck:
        """Checks batch lines before they are prepared."""
        return BodyCheck(
            is_strict=self.is_strict,
            max_response_tokens=self.max_response_tokens,
            info=None if self.facts is None else self.facts.info,
        )

    def prepare(
        self, endpoint: GenerationEndpoint, raw: bytes, context: RequestContext, *, compiles: bool = True
    ) -> Generation:
        """Parse, check and tokenize a body.

        Raises: RequestError; GrammarNeeded for a body with a grammar, unless it ``compiles`` it.
        """
        body = self._checked(endpoint, raw, context)
        sampling = body.sampling(self.defaults.recommended)  # refuses before a long prompt is tokenized
        texts = self._prompts(body)
        plan = self._plan(body, texts)
        if plan.structured is not None:
            if not compiles:
                raise GrammarNeeded
            self._check_grammar(plan.structured, plan.field, body)
        with body.prompt_named():
            prompts = self._tokenized(body, texts)
            samplings = self._samplings(body, sampling, prompts, plan)
        objectives = body.objectives
        of_choices = [len(prompt) for prompt in prompts for _ in range(body.num_candidates)]
        self._check_achievable(objectives, of_choices)
        slo = self._slo(body.service_class, objectives)
        prefix = "chatcmpl" if endpoint == "/v1/chat/completions" else "cmpl"
        response_id = f"{prefix}-{body.request_id or context.request_id or uuid.uuid4().hex}"
        options = body.stream_options
        completion = body if isinstance(body, CompletionRequest) else None
        return Generation(
            request=GenerationRequest(
                prompts=prompts,
                samplings=samplings,
                service_class=body.service_class,
                priority=body.priority or 0,
                slo=slo,
                complete_by_s=_complete_by_s(body, context),
                response_id=response_id,
                traceparent=context.headers.get(TRACE_HEADER, ""),
                owner=context.owner,
                owner_weight=context.owner_weight,
                cache_salt=body.cache_salt or "",
            ),
            endpoint=endpoint,
            response_id=response_id,
            created=int(time.time()),
            model=self.model.names[0],
            service_tier="flex" if body.service_tier == "flex" else "default",
            echoed=self._echoed(body, prompts),
            echoes_only=completion is not None and completion.echoes_only,
            echoes_logprobs=completion is not None and completion.echoes_logprobs,
            num_best=body.num_choices if body.num_candidates > body.num_choices else None,
            returns_logprobs=body.logprobs is not None,
            returns_prompt_logprobs=body.prompt_logprobs is not None,
            returns_token_ids=bool(body.return_token_ids),
            streams=bool(body.stream),
            includes_usage=options is not None and bool(options.include_usage),
            usage_on_every_chunk=options is not None and bool(options.continuous_usage_stats),
            parsing=plan.parsing,
            objectives=objectives,
            warning=warning_of(body),
        )

    def _checked(self, endpoint: GenerationEndpoint, raw: bytes, context: RequestContext) -> GenerationBody:
        """The body with what its headers add. Raises: RequestError."""
        body = parse_generation(endpoint, raw)
        self.check_model(body.model)
        if context.is_batch_line:
            body.become_batch_line()
        body.apply_headers(context.headers)
        body.check()
        if self.is_strict:
            refuse_unknown_fields(body)
        return body

    def answer(self, endpoint: TextEndpoint, raw: bytes) -> bytes:
        """The JSON answer of ``/tokenize`` or ``/detokenize``. Raises: RequestError."""
        if endpoint == "/tokenize":
            return msgspec.json.encode(self._tokenize(parse_body(TokenizeRequest, raw)))
        return msgspec.json.encode(self._detokenize(parse_body(DetokenizeRequest, raw)))

    def check_model(self, name: str | None) -> None:
        """Raise RequestError unless this server serves the model."""
        if name is not None and name not in self.model.names:
            raise RequestError(
                f"The model '{name}' does not exist. This server has: {', '.join(self.model.names)}.",
                param="model",
                code="model_not_found",
            )

    def _prompts(self, body: GenerationBody) -> Sequence[str | list[int]]:
        """The body's prompts, text or token ids; a conversation as its template writes it."""
        if isinstance(body, ChatCompletionRequest):
            return [self._render_chat(body, body.messages, body.tools)]
        return body.prompts

    def _render_chat(
        self, fields: ConversationFields, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None
    ) -> str:
        return self.tokenizer.render_chat(
            [message.as_template_input() for message in messages],
            tools=tool_inputs(tools),
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            template_kwargs=fields.chat_template_kwargs,
        )

    def _plan(self, body: GenerationBody, prompts: Sequence[str | list[int]]) -> MessagePlan:
        """What the output must be, and how it is parsed. Raises: RequestError."""
        field = "response_format" if body.response_format else "structured_outputs"
        if not isinstance(body, ChatCompletionRequest):
            return MessagePlan(body.structured, field)
        (prompt,) = prompts
        assert isinstance(prompt, str), "a conversation is text"
        continued = body.messages[-1].text if body.continue_final_message else ""
        message_format = self.tokenizer.message_format
        return plan_message(
            body,
            body.structured,
            field,
            message_format,
            message_format.begun(prompt, continued),
            returns_reasoning=body.include_reasoning is not False,
        )

    def _tokenized(self, body: GenerationBody, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """The prompts as token ids, truncated to ``truncate_prompt_tokens``."""
        last_tokens = body.truncate_prompt_tokens
        # A prompt that is known to be too long is not tokenized to its end.
        most_tokens = None if last_tokens is not None else self.engine_facts.info.max_model_len
        token_ids = [
            self.tokenizer.encode(
                prompt,
                add_special_tokens=bool(body.add_special_tokens),
                most_tokens=most_tokens,
                last_tokens=last_tokens,
            )
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
        return [body.truncated(prompt) for prompt in token_ids]

    def _samplings(
        self, body: GenerationBody, sampling: SamplingParams, prompts: list[list[int]], plan: MessagePlan
    ) -> list[SamplingParams]:
        """The sampling of every choice. Raises: RequestError for a request the engine can never serve."""
        info = self.engine_facts.info
        sampling = replace(sampling, structured_outputs=plan.structured)
        if plan.parsing is not None and self.tokenizer.needs_marks(plan.parsing):
            sampling = replace(sampling, skip_special_tokens=False)
        check_prompt_logprobs(body, sampling, sum(map(len, prompts)), self.max_response_tokens)
        samplings = []
        bad_words = self.tokenizer.spellings(sampling.bad_words) if sampling.bad_words else ()
        for prompt in prompts:
            left = max(1, info.max_model_len - len(prompt))
            max_tokens = bounded_max_tokens(sampling, left, len(prompts), self.max_response_tokens)
            choices = sampling.choices(max_tokens, random.getrandbits(62), bad_words)
            info.check_request(prompt, choices[0])  # the others differ in their seeds alone
            samplings += choices
        return samplings

    def _check_grammar(self, structured: StructuredOutputsParams, field: str, body: GenerationBody) -> None:
        """Raises: RequestError naming the field or the tool whose grammar cannot be used."""
        if self._compiler is None:
            info = self.engine_facts.info
            self._compiler = GrammarCompiler(self.model.folder, info.vocab_size, info.end_token_ids)
        try:
            self._compiler.matcher(structured)
        except RequestError as error:
            if isinstance(body, ChatCompletionRequest):
                body.check_schemas(self._compiler.matcher)
            raise RequestError(str(error), param=field) from None

    def _echoed(self, body: GenerationBody, prompts: list[list[int]]) -> list[str]:
        """Text that precedes the output, one a prompt."""
        if isinstance(body, ChatCompletionRequest) or not body.echo:
            return [""] * len(prompts)
        return [
            prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt) for prompt in body.prompts
        ]

    def _tokenize(self, body: TokenizeRequest) -> dict[str, int | list[int]]:
        self.check_model(body.model)
        body.check()
        if body.messages is not None:
            text = self._render_chat(body, body.messages, body.tools)
            tokens = self.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
        else:
            tokens = self.tokenizer.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens is not False
            )
        return {"count": len(tokens), "max_model_len": self.engine_facts.info.max_model_len, "tokens": tokens}

    def _detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        self.check_model(body.model)
        vocab_size = self.engine_facts.info.vocab_size
        if not all(0 <= token_id < vocab_size for token_id in body.tokens):
            raise RequestError(f"tokens must be between 0 and {vocab_size - 1}.", param="tokens")
        return {"prompt": self.tokenizer.decode(body.tokens)}

    @property
    def engine_facts(self) -> EngineFacts:
        """``facts``, which must be set."""
        assert self.facts is not None, "set before requests are prepared"
        return self.facts

    def _slo(self, service_class: ServiceClass, objectives: Mapping[str, Objective]) -> SLO | None:
        """The request's objectives, with the server's for absent ones. Offline requests have none."""
        if service_class is ServiceClass.OFFLINE:
            return None
        default, ttft, tpot = self.engine_facts.default_slo, objectives.get("ttft"), objectives.get("tpot")
        return SLO(
            ttft_s=default.ttft_s if ttft is None else ttft.seconds,
            tpot_s=default.tpot_s if tpot is None else tpot.seconds,
        )

    def _check_achievable(self, objectives: Mapping[str, Objective], prompt_tokens: Sequence[int]) -> None:
        """Raise RequestError for an objective below its floor, or that the request cannot have even alone.

        ``prompt_tokens``: of each choice's prompt.
        """
        requested = {name: objective.seconds for name, objective in objectives.items()}
        for name, floor_s in objectives_below_floor(requested, self.engine_facts.scheduler).items():
            objective = objectives[name]
            raise RequestError(
                f"{objective.name} of {objective.show(objective.seconds)} is not offered: the least on this "
                f"server is {objective.show(floor_s)}.",
                param=objective.name,
            )
        engine = self.engine_facts
        refused = never_offered(
            requested, engine.default_slo, engine.profile, engine.scheduler, prompt_tokens
        )
        for name, (needed_s, least_s) in refused.items():
            objective = objectives[name]
            cached = ", its prompt cached" if engine.scheduler.prefix_caching else ""
            counted = ", and a third is left for prompts" if name == "tpot" else cached
            raise RequestError(
                f"{objective.name} of {objective.show(objective.seconds)} cannot be met: on this server "
                f"the request is predicted to need {objective.show(needed_s)} even alone{counted}. Ask for "
                f"{objective.show(least_s)} or more.",
                param=objective.name,
            )


def _complete_by_s(body: GenerationBody, context: RequestContext) -> float | None:
    """When an offline request must have ended, on the monotonic clock; None: at no time."""
    if context.complete_by_s is not None or body.window_s is None:
        return context.complete_by_s
    return time.monotonic() + body.window_s
