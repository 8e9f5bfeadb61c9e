"""The bodies of generation requests, field by field, and what each means to the engine."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from backfill.core.errors import RequestError
from backfill.core.request import ServiceClass
from backfill.core.sampling import SamplingParams, choice_seed
from backfill.models.generation_config import GenerationDefaults
from backfill.protocol.body_shape import check_shape

MAX_CHOICES = 128
MAX_MESSAGES = 2048  # OpenAI's
MAX_PARTS = 2048
MAX_STOP_STRINGS = 16
MAX_PRIORITY = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's

GenerationEndpoint = Literal["/v1/chat/completions", "/v1/completions"]

# Known to clients, would change the answer, not built: refused and never silently ignored.
_UNSUPPORTED_FIELDS = frozenset(
    {
        "allowed_token_ids",
        "audio",
        "bad_words",
        "chat_template",
        "documents",
        "echo",
        "function_call",
        "functions",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "logits_processors",
        "modalities",
        "moderation",
        "prediction",
        "prompt_embeds",
        "prompt_logprobs",
        "reasoning_effort",
        "return_tokens_as_token_ids",
        "structural_tag",
        "structured_outputs",
        "suffix",
        "tools",
        "use_beam_search",
        "web_search_options",
    }
)

# Clients of OpenAI and vLLM send these too. They change nothing here: accepted without a warning.
_IGNORED_FIELDS = frozenset(
    {
        "cache_salt",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "include_reasoning",
        "kv_transfer_params",
        "length_penalty",
        "media_io_kwargs",
        "metadata",
        "mm_processor_kwargs",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "session_id",
        "spaces_between_special_tokens",
        "store",
        "tool_choice",
        "verbosity",
        "vllm_xargs",
    }
)
_IGNORED_STREAM_OPTIONS = frozenset({"include_obfuscation"})

MAX_LOGIT_BIASES = 300  # OpenAI's
MAX_STOP_TOKENS = 128
MAX_REQUEST_ID_CHARS = 128
SERVICE_TIERS = (
    "auto",
    "default",
    "fast",
    "flex",
    "priority",
    "scale",
    "standard",
)  # all but flex are online
SLO_HEADERS = {"ttft": "x-slo-ttft-ms", "tpot": "x-slo-tpot-ms"}  # by the field of ``slo``
PRIORITY_HEADER = "x-vllm-priority"
REQUEST_HEADERS = (*SLO_HEADERS.values(), PRIORITY_HEADER)

T = TypeVar("T")

# Stops at the first wrong item: a list of a million wrong ones would otherwise be a million errors.
FailFastList = Annotated[list[T], Field(fail_fast=True)]


def _check_num_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"at most {MAX_LOGIT_BIASES} entries are allowed")
    return value


LogitBias = Annotated[dict[str, float], BeforeValidator(_check_num_biases)]
Number = Annotated[float, Field(allow_inf_nan=False)]
StrictModel = ConfigDict(strict=True, extra="ignore")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(BaseModel):
    model_config = StrictModel
    type: str


class SloFields(BaseModel):
    """Objectives a request brings, in seconds; the server's own stand in for absent ones."""

    model_config = ConfigDict(strict=True, extra="forbid")
    ttft: Number | None = None
    tpot: Number | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """One objective a request brings, and what the client calls it and in which unit."""

    seconds: float
    name: str
    unit: Literal["s", "ms"] = "s"

    def show(self, seconds: float) -> str:
        """A time in the client's unit, such as ``0.5 s``."""
        return f"{seconds * (1000 if self.unit == 'ms' else 1):g} {self.unit}"


class GenerationFields(BaseModel):
    """Fields that chat and text completions share. An absent field and a null one mean the same."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: LogitBias | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    stop: str | FailFastList[str] | None = None
    stop_token_ids: FailFastList[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    service_tier: str | None = None
    priority: int | None = None
    slo: SloFields | None = None
    request_id: str | None = None
    user: str | None = None

    _header_objectives: dict[str, Objective] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> GenerationFields:
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED_FIELDS and value not in (None, [], ["text"], False):
                _unsupported(name)
        return self

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def service_class(self) -> ServiceClass:
        return ServiceClass.OFFLINE if self.service_tier == "flex" else ServiceClass.ONLINE

    @property
    def objectives(self) -> dict[str, Objective]:
        """What the request brings, by field of ``slo``."""
        fields = {} if self.slo is None else self.slo.model_dump(exclude_none=True)
        in_body = {field: Objective(seconds, f"slo.{field}") for field, seconds in fields.items()}
        return {**self._header_objectives, **in_body}

    def take_headers(self, headers: Mapping[str, str]) -> None:
        """Note what the headers say and the body does not. Raises: RequestError."""
        for field, name in SLO_HEADERS.items():
            if name in headers and field not in self.objectives:
                seconds = _milliseconds(name, headers[name]) / 1000
                self._header_objectives[field] = Objective(seconds, name, "ms")
        if self.priority is None and PRIORITY_HEADER in headers:
            self.priority = _integer(PRIORITY_HEADER, headers[PRIORITY_HEADER], "priority")

    @classmethod
    def known_fields(cls) -> list[str]:
        """Names of the fields that have an effect, nested ones with their path."""
        return [*cls.model_fields, *(f"stream_options.{name}" for name in StreamOptions.model_fields)]

    @property
    def unknown_fields(self) -> list[str]:
        """Names of which this server knows nothing, as the body has them; nested ones with their path."""
        unknown = [
            name
            for name in self.model_extra or ()
            if name not in _IGNORED_FIELDS and name not in _UNSUPPORTED_FIELDS
        ]
        options = (self.stream_options and self.stream_options.model_extra) or ()
        return unknown + [f"stream_options.{name}" for name in options if name not in _IGNORED_STREAM_OPTIONS]

    def become_batch_line(self) -> None:
        """Be offline, whatever the body says. Raises: RequestError for what a line of a batch cannot have."""
        if self.stream:
            raise RequestError("stream must be false in a batch.", param="stream")
        self._check_service_tier()
        self.service_tier = "flex"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self) -> None:
        """Raise RequestError for the first combination of fields that cannot be served."""
        if not 1 <= self.num_choices <= MAX_CHOICES:
            raise RequestError(f"n must be between 1 and {MAX_CHOICES}, got {self.n}.", param="n")
        if self.best_of not in (None, 1) and self.best_of != self.num_choices:
            raise RequestError(
                "best_of other than 1 is not supported.", param="best_of", code="unsupported_parameter"
            )
        self._check_service_tier()
        self._check_slo()
        if len(self.stop_strings) > MAX_STOP_STRINGS or "" in self.stop_strings:
            raise RequestError(
                f"stop must be at most {MAX_STOP_STRINGS} strings, none of them empty.", param="stop"
            )
        if len(self.stop_token_ids or ()) > MAX_STOP_TOKENS:
            raise RequestError(
                f"stop_token_ids must be at most {MAX_STOP_TOKENS} tokens.", param="stop_token_ids"
            )
        request_id = self.request_id
        if request_id is not None and not (
            request_id.isascii() and request_id.isprintable() and 0 < len(request_id) <= MAX_REQUEST_ID_CHARS
        ):
            raise RequestError(
                f"request_id must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters.",
                param="request_id",
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")
        if self.response_format is not None and self.response_format.type != "text":
            _unsupported("response_format")
        if self.priority is not None and abs(self.priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, got {self.priority}.",
                param="priority",
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RequestError("seed must fit 64 signed bits.", param="seed")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise RequestError(
                f"truncate_prompt_tokens must be at least 1, got {self.truncate_prompt_tokens}.",
                param="truncate_prompt_tokens",
            )

    def _check_service_tier(self) -> None:
        if self.service_tier is not None and self.service_tier not in SERVICE_TIERS:
            raise RequestError(
                f"service_tier must be one of {', '.join(SERVICE_TIERS)}, got {self.service_tier[:40]!r}.",
                param="service_tier",
            )

    def _check_slo(self) -> None:
        objectives = self.objectives.values()
        if self.service_class is ServiceClass.OFFLINE and objectives:
            name = next(iter(objectives)).name.partition(".")[0]
            raise RequestError(
                f"{name} is for online requests, not for service_tier 'flex' or lines of a batch.",
                param=name,
            )
        for objective in objectives:
            if objective.seconds <= 0:
                raise RequestError(
                    f"{objective.name} must be a number of seconds above 0, got {objective.seconds:g}.",
                    param=objective.name,
                )

    def truncated(self, token_ids: list[int]) -> list[int]:
        """The prompt's last ``truncate_prompt_tokens`` tokens, or all."""
        return token_ids if self.truncate_prompt_tokens is None else token_ids[-self.truncate_prompt_tokens :]

    def sampling(
        self, defaults: GenerationDefaults, *, max_tokens: int, num_logprobs: int | None, choice: int
    ) -> SamplingParams:
        """Sampling of one choice, absent fields taken from the model's generation config."""
        seed = random.getrandbits(63) if self.seed is None else self.seed
        top_k = _first(self.top_k, defaults.top_k, 0)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=_first(self.min_tokens, None, 0),
            temperature=_first(self.temperature, defaults.temperature, 1.0),
            top_k=0 if top_k == -1 else top_k,
            top_p=_first(self.top_p, defaults.top_p, 1.0),
            min_p=_first(self.min_p, defaults.min_p, 0.0),
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty, 1.0),
            presence_penalty=_first(self.presence_penalty, None, 0.0),
            frequency_penalty=_first(self.frequency_penalty, None, 0.0),
            seed=choice_seed(seed, choice),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logit_bias=_token_biases(self.logit_bias),
            num_logprobs=num_logprobs,
        )


class TextPart(BaseModel):
    model_config = StrictModel
    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[FailFastList[TextPart], Field(max_length=MAX_PARTS)] | None = None

    def as_template_input(self) -> dict[str, Any]:
        """The message as chat templates expect it: text parts joined, ``developer`` as ``system``."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text or "" for part in content)
        role = "system" if self.role == "developer" else self.role
        return {**(self.model_extra or {}), "role": role, "content": content or ""}


Messages = Annotated[FailFastList[ChatMessage], Field(max_length=MAX_MESSAGES)]


class ChatCompletionRequest(GenerationFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def token_prompts(self) -> list[list[int]]:
        return []

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise RequestError("messages must have at least one message.", param="messages")
        _check_messages(self.messages)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
        if self.continue_final_message:
            _check_continued(self.messages)


class CompletionRequest(GenerationFields):
    """Body of ``POST /v1/completions``."""

    prompt: str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def asked_max_tokens(self) -> int:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One entry for each prompt, text or token ids."""
        match self.prompt:
            case str() as text:
                return [text]
            case [int(), *_]:
                return [cast(list[int], self.prompt)]
            case several:
                return cast(Sequence[str | list[int]], several)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def token_prompts(self) -> list[list[int]]:
        """The prompts that come as token ids, truncated as asked."""
        return [self.truncated(prompt) for prompt in self.prompts if not isinstance(prompt, str)]

    def check(self) -> None:
        super().check()
        if not self.prompts or any(len(prompt) == 0 for prompt in self.prompts):
            raise RequestError("prompt must not be empty.", param="prompt")
        if len(self.prompts) * self.num_choices > MAX_CHOICES:
            raise RequestError(
                f"Prompts times n must be at most {MAX_CHOICES}, got {len(self.prompts) * self.num_choices}.",
                param="prompt",
            )
        if self.echo and self.logprobs is not None:
            raise RequestError(
                "echo together with logprobs is not supported.", param="echo", code="unsupported_parameter"
            )


class TokenizeRequest(BaseModel):
    """Body of ``POST /tokenize``: a prompt, or messages."""

    model_config = StrictModel
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # None: for a prompt, and not for messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise RequestError for the first combination of fields that cannot be served."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        _check_messages(self.messages or ())
        if self.continue_final_message:
            _check_continued(self.messages)


class DetokenizeRequest(BaseModel):
    """Body of ``POST /detokenize``."""

    model_config = StrictModel
    model: str | None = None
    tokens: FailFastList[int]


GenerationBody = ChatCompletionRequest | CompletionRequest
Body = TypeVar("Body", bound=BaseModel)


def parse_generation(endpoint: GenerationEndpoint, raw: bytes) -> GenerationBody:
    """The body of a generation request. Raises: RequestError naming the first field that is wrong."""
    if endpoint == "/v1/chat/completions":
        return parse_body(ChatCompletionRequest, raw)
    return parse_body(CompletionRequest, raw)


def parse_body(kind: type[Body], raw: bytes) -> Body:
    """Parse a JSON body, naming in a RequestError the first field that is wrong."""
    check_shape(raw)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _request_error(error) from None


def _request_error(error: ValidationError) -> RequestError:
    errors = error.errors(include_url=False)
    # A list that is too long for one member of a union is also said to be no string, which helps nobody.
    first = next((each for each in errors if each["type"] == "too_long"), errors[0])
    if first["type"] == "json_invalid":
        return RequestError(f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    path = first["loc"]
    name = str(path[0]) if path else None
    if first["type"] == "missing":
        where = ".".join(map(str, path))
        return RequestError(
            f"Missing required parameter: '{where}'.", param=name, code="missing_required_parameter"
        )
    if first["type"] == "too_long":
        where = ".".join(str(part) for part in path if not _names_a_type(part))
        return RequestError(f"'{where}' may have at most {first['ctx']['max_length']} items.", param=name)
    if name is None:
        return RequestError(f"The body must be a JSON object: {first['msg']}.")
    got = json.dumps(first["input"], default=repr)[:80]
    where = ".".join(str(part) for part in path if not _names_a_type(part))
    return RequestError(
        f"Invalid value for '{where}': {first['msg']}, got {got}.", param=where if name == "slo" else name
    )


def _names_a_type(part: int | str) -> bool:
    """Pydantic puts the tried member of a union into the path; users know only fields and indices."""
    return isinstance(part, str) and (part in {"str", "int"} or "[" in part)


def _check_messages(messages: Sequence[ChatMessage]) -> None:
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise RequestError(f"messages[{index}] of role {message.role} has no content.", param="messages")
    check_parts(messages)


def check_parts(messages: Sequence[ChatMessage]) -> None:
    """Raises: RequestError for a part that is no text."""
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if part.type != "text" or part.text is None:
                raise RequestError(
                    f"Message parts of type {part.type[:40]!r} are not supported, only text.",
                    param="messages",
                )


def _check_continued(messages: Sequence[ChatMessage] | None) -> None:
    if not messages or messages[-1].role != "assistant":
        raise RequestError(
            "continue_final_message needs a last message of role assistant.", param="continue_final_message"
        )


def _unsupported(name: str) -> NoReturn:
    raise RequestError(f"{name} is not supported by this server.", param=name, code="unsupported_parameter")


def _first(asked: T | None, default: T | None, fallback: T) -> T:
    if asked is not None:
        return asked
    return fallback if default is None else default


def _token_biases(biases: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    parsed = []
    for key, bias in (biases or {}).items():
        if not key.isascii() or not key.isdigit() or str(int(key[:20])) != key:
            raise RequestError(f"logit_bias keys must be token ids, got {key[:40]!r}.", param="logit_bias")
        parsed.append((int(key), bias))
    return tuple(parsed)


def _milliseconds(name: str, text: str) -> float:
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise RequestError(f"{name} must be a number of milliseconds above 0, got {text[:40]!r}.", param=name)
    return value


def _integer(name: str, text: str, param: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RequestError(f"{name} must be an integer, got {text[:40]!r}.", param=param) from None
