"""Fields that chat and text completions share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, NoReturn

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from backfill.core.errors import RequestError
from backfill.core.request import ServiceClass, check_cache_salt
from backfill.core.sampling import SamplingParams
from backfill.core.structured import StructuredOutputsParams
from backfill.protocol.parsing import FailFastList, told
from backfill.protocol.request_headers import (
    MIN_WINDOW_S,
    PRIORITY_HEADER,
    SLO_HEADERS,
    TIER_HEADER,
    Objective,
    ServiceTier,
    tier_of,
)
from backfill.protocol.response_format import ResponseFormat

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 128
MAX_LOGIT_BIASES = 300  # OpenAI's
MAX_ALLOWED_TOKENS = 8192
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_PRIORITY = 2**31 - 1
MAX_REQUEST_ID_CHARS = 128
# Not implemented, and they would change the answer, so a request that sets one is
# refused; and what to use instead.
UNSUPPORTED_FIELDS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "audio",
            "chat_template",
            "documents",
            "echo",
            "logits_processors",
            "modalities",
            "moderation",
            "prediction",
            "prompt_embeds",
            "reasoning_effort",
            "return_tokens_as_token_ids",
            "suffix",
            "use_beam_search",
            "web_search_options",
        ),
        "",
    ),
    **dict.fromkeys(
        ("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structural_tag"),
        "structured_outputs",
    ),
    "function_call": "tool_choice of /v1/chat/completions",
    "functions": "tools of /v1/chat/completions",
    "tools": "/v1/chat/completions",
}

# Not implemented, and they would not change the answer: accepted without a warning.
IGNORED_FIELDS = frozenset(
    {
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "kv_transfer_params",
        "length_penalty",
        "media_io_kwargs",
        "metadata",
        "mm_processor_kwargs",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "session_id",
        "spaces_between_special_tokens",
        "store",
        "verbosity",
        "vllm_xargs",
    }
)
IGNORED_STREAM_OPTIONS = frozenset({"include_obfuscation"})
Number = Annotated[float, Field(allow_inf_nan=False)]
BadWord = Annotated[str, Field(max_length=MAX_BAD_WORD_CHARS)]
Seconds = Annotated[float, Field(allow_inf_nan=False, gt=0)]


class SloFields(BaseModel):
    """The body's ``slo``, in seconds; the server's objectives stand in for absent ones."""

    model_config = ConfigDict(strict=True, extra="forbid")
    ttft: Seconds | None = None
    tpot: Seconds | None = None

    def as_dict(self) -> dict[str, float]:
        """The objectives that are set."""
        return self.model_dump(exclude_none=True)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(BaseModel):
    """The shared fields. An absent field and a null one mean the same."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Annotated[int, told(minimum=-1)] | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    allowed_token_ids: Annotated[FailFastList[int], Field(max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[FailFastList[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, told(minimum=1, maximum=MAX_CHOICES)] | None = None
    stop: str | Annotated[FailFastList[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[FailFastList[int], Field(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    service_tier: ServiceTier | None = None
    priority: Annotated[int, told(minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY)] | None = None
    slo: SloFields | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    user: str | None = None

    has_best_of: ClassVar[bool] = False  # the endpoint does
    prompt_field: ClassVar[str] = "prompt"
    _header_objectives: dict[str, Objective] = PrivateAttr(default_factory=dict)
    _window_s: float | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> GenerationFields:
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED_FIELDS and value not in (None, [], ["text"], False):
                refuse_unsupported(name)
        return self

    @classmethod
    def known_fields(cls) -> list[str]:
        """Names of the fields that have an effect; nested fields with their path."""
        return [
            *cls.model_fields,
            *(f"stream_options.{name}" for name in StreamOptions.model_fields),
            *(f"response_format.{name}" for name in ResponseFormat.known_fields()),
        ]

    @property
    def unknown_fields(self) -> list[str]:
        """Names in the body that this server does not know; nested fields with their path."""
        unknown = [
            name
            for name in self.model_extra or ()
            if name not in IGNORED_FIELDS and name not in UNSUPPORTED_FIELDS
        ]
        options = (self.stream_options and self.stream_options.model_extra) or ()
        unknown += [f"stream_options.{name}" for name in options if name not in IGNORED_STREAM_OPTIONS]
        if self.response_format is not None:
            unknown += [f"response_format.{name}" for name in self.response_format.unknown_fields]
        return unknown

    @property
    def json_schemas(self) -> list[tuple[str, object]]:
        """The field and the schema of each JSON schema in the body; not those in structural tags."""
        form = None if self.response_format is None else self.response_format.json_schema
        schemas: list[tuple[str, object]] = [] if form is None else [("response_format", form.schema_)]
        if (schema := (self.structured_outputs or {}).get("json")) is not None:
            schemas.append(("structured_outputs", schema))
        return schemas

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def num_candidates(self) -> int:
        """Outputs made for each prompt; the best ``num_choices`` of them are returned."""
        return max(self.num_choices, self.best_of or 1)

    @property
    @abstractmethod
    def requested_max_tokens(self) -> int | None:
        """``SamplingParams.max_tokens``."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """``SamplingParams.logprobs``."""

    @property
    def structured(self) -> StructuredOutputsParams | None:
        """What the output must be. Raises: RequestError."""
        in_format = None if self.response_format is None else self.response_format.structured
        fields = {name: value for name, value in (self.structured_outputs or {}).items() if value is not None}
        if not fields:
            return in_format
        if in_format is not None:
            raise RequestError(
                "Send either response_format or structured_outputs.", param="structured_outputs"
            )
        known = StructuredOutputsParams.__dataclass_fields__
        unknown = next((name for name in fields if name not in known), None)
        if unknown is not None:
            raise RequestError(
                f"structured_outputs may have {', '.join(known)}, got {unknown[:40]!r}.",
                param="structured_outputs",
            )
        return StructuredOutputsParams(**fields)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """``SamplingParams.prompt_logprobs``."""
        return self.prompt_logprobs

    @property
    def service_class(self) -> ServiceClass:
        return ServiceClass.OFFLINE if self.service_tier == "flex" else ServiceClass.ONLINE

    @property
    def objectives(self) -> dict[str, Objective]:
        """The request's objectives, by field of ``slo``. The body overrides headers."""
        fields = {} if self.slo is None else self.slo.as_dict()
        in_body = {field: Objective(seconds, f"slo.{field}") for field, seconds in fields.items()}
        return {**self._header_objectives, **in_body}

    @property
    def window_s(self) -> float | None:
        """Seconds that an offline request has to its end, from its arrival; None: as long as it takes."""
        return self._window_s

    def apply_headers(self, headers: Mapping[str, str]) -> None:
        """Take the tier, objectives and priority from headers where the body has none. Raises: RequestError.

        Of an offline request the objective to the first token is its window: a batch gateway sends the time
        that is left to its job there. It is a minute at least.
        """
        if self.service_tier is None and TIER_HEADER in headers:
            self.service_tier = tier_of(headers[TIER_HEADER])
        for field, name in SLO_HEADERS.items():
            if self.service_class is ServiceClass.OFFLINE and field == "ttft" and name in headers:
                self._window_s = max(MIN_WINDOW_S, Objective.from_header(name, headers[name]).seconds)
                continue
            if name in headers and field not in self.objectives:
                self._header_objectives[field] = Objective.from_header(name, headers[name])
        if self.priority is None and PRIORITY_HEADER in headers:
            text = headers[PRIORITY_HEADER]
            try:
                self.priority = int(text)
            except ValueError:
                raise RequestError(
                    f"{PRIORITY_HEADER} must be an integer, got {text[:40]!r}.", param="priority"
                ) from None

    def become_batch_line(self) -> None:
        """Make the request offline, whatever its tier. Raises: RequestError if it cannot be in a batch."""
        if self.stream:
            raise RequestError("stream must be false in a batch.", param="stream")
        self.service_tier = "flex"

    def check(self) -> None:
        """Raise RequestError for the first field, or combination of fields, that cannot be served."""
        if self.best_of not in (None, 1, self.num_choices) and not self.has_best_of:
            refuse_unsupported("best_of")
        objective = next(iter(self.objectives.values()), None)
        if self.service_class is ServiceClass.OFFLINE and objective is not None:
            name = objective.name.partition(".")[0]
            raise RequestError(
                f"{name} is for online requests, not for service_tier 'flex' or lines of a batch.",
                param=name,
            )
        request_id = self.request_id
        if request_id is not None and not (
            request_id.isascii() and request_id.isprintable() and 0 < len(request_id) <= MAX_REQUEST_ID_CHARS
        ):
            raise RequestError(
                f"request_id must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters.",
                param="request_id",
            )
        if self.cache_salt is not None:
            check_cache_salt(self.cache_salt)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is not available in a stream.", param="prompt_logprobs")
        if self.priority is not None and abs(self.priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, got {self.priority}.",
                param="priority",
            )

    @contextmanager
    def prompt_named(self) -> Iterator[None]:
        """Errors of the prompt name the field that it is of."""
        try:
            yield
        except RequestError as error:
            param = self.prompt_field if error.param == "prompt" else error.param
            raise RequestError(str(error), param=param, code=error.code) from None

    def truncated(self, token_ids: list[int]) -> list[int]:
        """The prompt's last ``truncate_prompt_tokens`` tokens, or all."""
        return token_ids if self.truncate_prompt_tokens is None else token_ids[-self.truncate_prompt_tokens :]

    def sampling(self, recommended: Mapping[str, Any]) -> SamplingParams:
        """The sampling that the body asks for. Absent fields are as the model's authors recommend.

        Raises: RequestError naming the first field that is out of range.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set & _SAMPLING_FIELDS}
        return SamplingParams(
            **{
                **recommended,
                **{name: value for name, value in given.items() if value is not None},
                "n": self.num_candidates,
                "max_tokens": self.requested_max_tokens,
                "logprobs": self.num_logprobs,
                "prompt_logprobs": self.num_prompt_logprobs,
                "logit_bias": _token_biases(self.logit_bias),
                "structured_outputs": self.structured,
            }
        )


# Those of ``SamplingParams`` that a body has under the same name and with the same meaning.
_SAMPLING_FIELDS = SamplingParams.__dataclass_fields__.keys() & GenerationFields.model_fields.keys()


def refuse_unsupported(name: str) -> NoReturn:
    """Raise RequestError for a field that is not implemented."""
    instead = UNSUPPORTED_FIELDS.get(name, "")
    text = f"{name} is not supported here.{instead and f' Use {instead}.'}"
    raise RequestError(text, param=name, code="unsupported_parameter")


def _token_biases(biases: Mapping[str, float] | None) -> dict[int, float]:
    parsed = {}
    for key, bias in (biases or {}).items():
        if not key.isascii() or not key.isdigit() or str(int(key[:20])) != key:
            raise RequestError(f"logit_bias keys must be token ids, got {key[:40]!r}.", param="logit_bias")
        parsed[int(key)] = bias
    return parsed
