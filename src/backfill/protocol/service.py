"""Serves parsed OpenAI requests: prompt to tokens, choices to engine requests, deltas to bodies."""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from backfill.core.errors import EngineDead, RequestError
from backfill.core.request import RequestId, ServiceClass
from backfill.core.slo import SLO
from backfill.engine.client import EngineClient
from backfill.execution.executor import ExecutorInfo
from backfill.generation.generator import GenerationRequest, TextGenerator, merge
from backfill.generation.tokenizer import Tokenizer
from backfill.models.generation_config import GenerationDefaults
from backfill.protocol.requests import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationFields,
    Objective,
)
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
from backfill.scheduling.objectives import achievable_slo


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The one model a service answers for.

    Attributes:
        names: what clients may call it; the first is echoed.
        root: folder or hub id, from which clients can load the tokenizer.
    """

    names: tuple[str, ...]
    root: str
    folder: Path
    created: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A checked request, ready to run: one engine request for each choice, and the shape of its answer.

    ``reported_slo`` are the objectives whose attainment the answer says, None where the client brought none.
    """

    head: ResponseHead
    shape: Shape
    requests: Sequence[GenerationRequest]
    streams: bool
    includes_usage: bool
    usage_on_every_chunk: bool
    reported_slo: SLO | None


class CompletionService:
    """Turns request bodies into generations, and runs them."""

    def __init__(
        self,
        model: ServedModel,
        client: EngineClient,
        tokenizer: Tokenizer,
        generator: TextGenerator,
        defaults: GenerationDefaults,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._client = client
        self._generator = generator
        self._defaults = defaults
        self._chat_shape = ChatShape(tokenizer)
        self._completion_shape = CompletionShape(tokenizer)
        self._num_requests = itertools.count()

    def prepare_chat(
        self,
        body: ChatCompletionRequest,
        request_id: str | None = None,
        *,
        complete_by_s: float | None = None,
    ) -> Generation:
        """Check and tokenize; nothing runs yet.

        Args:
            complete_by_s: end of an offline request's completion window, on the monotonic clock.
        Raises: RequestError, EngineDead.
        """
        self.check_model(body.model)
        body.check()
        token_ids = self.encode_messages(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
            most_tokens=self._most_prompt_tokens(body),
        )
        return self._prepare(
            body,
            self._chat_shape,
            "chatcmpl",
            request_id,
            prompts=[body.truncated(token_ids)],
            echoed=[""],
            max_tokens=body.asked_max_tokens,
            num_logprobs=body.num_logprobs,
            complete_by_s=complete_by_s,
        )

    def prepare_completion(
        self,
        body: CompletionRequest,
        request_id: str | None = None,
        *,
        complete_by_s: float | None = None,
    ) -> Generation:
        """As ``prepare_chat``."""
        self.check_model(body.model)
        body.check()
        prompts = [
            body.truncated(
                self.tokenizer.encode(
                    prompt,
                    add_special_tokens=body.add_special_tokens,
                    most_tokens=self._most_prompt_tokens(body),
                )
                if isinstance(prompt, str)
                else prompt
            )
            for prompt in body.prompts
        ]
        for prompt in prompts:
            self.info.check_prompt(prompt)
        echoed = [
            "" if not body.echo else prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
            for prompt in body.prompts
        ]
        return self._prepare(
            body,
            self._completion_shape,
            "cmpl",
            request_id,
            prompts=prompts,
            echoed=echoed,
            max_tokens=body.asked_max_tokens,
            num_logprobs=body.num_logprobs,
            complete_by_s=complete_by_s,
        )

    def encode_messages(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Json | None = None,
        most_tokens: int | None = None,
    ) -> list[int]:
        return self.tokenizer.encode_chat(
            [message.as_template_input() for message in messages],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            most_tokens=most_tokens,
        )

    async def run_whole(self, generation: Generation) -> Json:
        """The response body, once every choice has ended."""
        states = [ChoiceState() for _ in generation.requests]
        usage = Usage(generation.head.num_prompt_tokens)
        attainment = _attainment(generation)
        streams = [self._generator.stream(request) for request in generation.requests]
        async with aclosing(merge(streams)) as deltas:
            async for index, delta in deltas:
                logprobs = generation.shape.logprobs(delta, states[index])
                if logprobs is not None:
                    states[index].logprobs.append(logprobs)
                if attainment is not None:
                    attainment.add(delta.waited_s, is_first=not states[index].token_ids)
                states[index].add(delta)
                usage.num_output_tokens += 1
        return whole_body(generation.head, generation.shape, states, usage, attainment)

    async def run_stream(self, generation: Generation) -> AsyncGenerator[list[Json], None]:
        """Chunks as tokens come; those in one list belong into one write.

        Objectives that the client brought are accounted for in the last chunk, whichever that is.
        """
        head, shape = generation.head, generation.shape
        states = [ChoiceState() for _ in generation.requests]
        usage = Usage(head.num_prompt_tokens)
        attainment = _attainment(generation)
        num_open = len(states)
        streams = [self._generator.stream(request) for request in generation.requests]
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

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.model.names:
            raise RequestError(
                f"The model '{name}' does not exist. This server has: {', '.join(self.model.names)}.",
                param="model",
                code="model_not_found",
            )

    @property
    def info(self) -> ExecutorInfo:
        """What the running engine can do. Raises: EngineDead when none runs."""
        if self._client.info is None:
            raise EngineDead("The engine is not running; it is being started. Please retry.")
        return self._client.info

    def _most_prompt_tokens(self, body: GenerationFields) -> int | None:
        """Beyond this a prompt is refused unread; None where it will be truncated."""
        return self.info.max_model_len if body.truncate_prompt_tokens is None else None

    def _prepare(
        self,
        body: GenerationFields,
        shape: Shape,
        prefix: str,
        request_id: str | None,
        *,
        prompts: Sequence[list[int]],
        echoed: Sequence[str],
        max_tokens: int | None,
        num_logprobs: int | None,
        complete_by_s: float | None,
    ) -> Generation:
        info = self.info
        response_id = f"{prefix}-{body.request_id or request_id or uuid.uuid4().hex}"
        options = body.stream_options
        objectives = body.objectives
        self._check_achievable(objectives, max(map(len, prompts)))
        slo = self._slo(body.service_class, objectives)
        requests = []
        for prompt, choice in itertools.product(prompts, range(body.num_choices)):
            room = max(1, info.max_model_len - len(prompt))
            sampling = body.sampling(
                self._defaults,
                max_tokens=room if max_tokens is None else max_tokens,
                num_logprobs=num_logprobs,
                choice=choice,
            )
            info.check_request(prompt, sampling)
            requests.append(
                GenerationRequest(
                    # Clients choose response ids and may repeat them; the engine's are unique and short.
                    request_id=RequestId(str(next(self._num_requests))),
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    stop=body.stop_strings,
                    include_stop_str_in_output=bool(body.include_stop_str_in_output),
                    skip_special_tokens=body.skip_special_tokens is not False,
                    service_class=body.service_class,
                    priority=body.priority or 0,
                    slo=slo,
                    complete_by_s=complete_by_s,
                )
            )
        head = ResponseHead(
            response_id=response_id,
            created=int(time.time()),
            model=self.model.names[0],
            service_tier="flex" if body.service_tier == "flex" else "default",
            num_prompt_tokens=sum(map(len, prompts)),
            returns_token_ids=bool(body.return_token_ids),
            prompt_token_ids=[request.prompt_token_ids for request in requests],
            echoed=[text for text in echoed for _ in range(body.num_choices)],
        )
        return Generation(
            head=head,
            shape=shape,
            requests=requests,
            streams=bool(body.stream),
            includes_usage=options is not None and bool(options.include_usage),
            usage_on_every_chunk=options is not None and bool(options.continuous_usage_stats),
            reported_slo=slo if objectives else None,
        )

    def _slo(self, service_class: ServiceClass, objectives: Mapping[str, Objective]) -> SLO | None:
        """What the request brings, the server's own where it brings none; an offline request has none."""
        if service_class is ServiceClass.OFFLINE:
            return None
        default, ttft, tpot = self._client.default_slo, objectives.get("ttft"), objectives.get("tpot")
        assert default is not None, "known since the engine was ready"
        return SLO(
            ttft_s=default.ttft_s if ttft is None else ttft.seconds,
            tpot_s=default.tpot_s if tpot is None else tpot.seconds,
        )

    def _check_achievable(self, objectives: Mapping[str, Objective], num_prompt_tokens: int) -> None:
        """Raise RequestError for an objective that the request could not meet even alone.

        Only under the policy that works towards objectives: elsewhere they are but measured.
        """
        cost, config = self._client.cost, self._client.config.scheduler
        if not objectives or cost is None or config.policy != "slo":
            return
        least = achievable_slo(cost, config, num_prompt_tokens)
        for field, least_s in (("ttft", least.ttft_s), ("tpot", least.tpot_s)):
            objective = objectives.get(field)
            if objective is not None and objective.seconds < least_s:
                least_ms = math.ceil(1000 * least_s)
                raise RequestError(
                    f"{objective.name} of {objective.seconds:g} s cannot be met: on this server the request "
                    f"needs {least_ms / 1000:g} s ({least_ms} ms) even alone. Ask for at least that.",
                    param=objective.name,
                )


def _attainment(generation: Generation) -> Attainment | None:
    return None if generation.reported_slo is None else Attainment(generation.reported_slo)
