"""Unknown fields. Errors of batch lines are in tests/preparation/test_validation.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from backfill.core.config import SchedulerConfig
from backfill.core.errors import RequestError
from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO
from backfill.execution import json_schemas
from backfill.generation.message_format import MessageFormat
from backfill.generation.tokenizer import Tokenizer
from backfill.models.generation_config import GenerationDefaults
from backfill.protocol.body_check import bounded_max_tokens, has_warning, refuse_unknown_fields, warning_of
from backfill.protocol.generation import GenerationBody, GenerationEndpoint, parse_generation
from backfill.protocol.generation_fields import MAX_ALLOWED_TOKENS, MAX_BAD_WORDS, ServiceTier
from backfill.protocol.options import MAX_RESPONSE_TOKENS
from backfill.protocol.preparer import EngineFacts, RequestContext, RequestPreparer, ServedModel
from tests.builders import make_info

PROMPT = {"prompt": "x"}
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def body_of(fields: dict[str, Any], endpoint: GenerationEndpoint = "/v1/completions") -> GenerationBody:
    required = PROMPT if endpoint == "/v1/completions" else CHAT
    return parse_generation(endpoint, json.dumps({**required, **fields}).encode())


@pytest.mark.parametrize(
    ("endpoint", "params"),
    [
        ("/v1/completions", completion_create_params.CompletionCreateParamsBase),
        ("/v1/chat/completions", chat_create_params.CompletionCreateParamsBase),
    ],
)
def test_the_official_clients_fields_are_known(endpoint: GenerationEndpoint, params: type) -> None:
    required = {"prompt", "messages", "model"}
    fields = dict.fromkeys(set(get_type_hints(params)) - required)
    assert len(fields) > 10
    assert warning_of(body_of(fields, endpoint)) is None
    stream_options = {"include_usage": True, "include_obfuscation": False}
    assert warning_of(body_of({"stream": True, "stream_options": stream_options}, endpoint)) is None


def test_the_official_clients_tiers_are_accepted() -> None:
    hint = get_type_hints(chat_create_params.CompletionCreateParamsBase)["service_tier"]
    tiers = {tier for option in get_args(hint) for tier in get_args(option)}
    assert tiers
    assert tiers <= set(get_args(ServiceTier))


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"max_tokns": 1}, "unknown fields: max_tokns (did you mean max_tokens?)"),
        ({"max_new_tokens": 1}, "unknown fields: max_new_tokens (did you mean max_tokens?)"),
        ({"qwxz": 1, "b": None}, "unknown fields: qwxz, b"),
        (dict.fromkeys("abcdefg"), "unknown fields: a, b, c, d, e and 2 more"),
        (
            {"stream": True, "stream_options": {"include_usge": True}},
            "unknown fields: stream_options.include_usge (did you mean stream_options.include_usage?)",
        ),
        ({"slo": {}}, "slo has neither ttft nor tpot, so it has no effect"),
        ({"slo": {"ttft": None}}, "slo has neither ttft nor tpot, so it has no effect"),
        ({"slo": {"ttft": 1.0}}, None),
        ({"slo": None, "temperature": None, "priority": 1}, None),
        ({"tools": [], "guided_json": None, "echo": True}, None),
    ],
)
def test_unknown_fields_are_warned_about(fields: dict[str, Any], warning: str | None) -> None:
    assert warning_of(body_of(fields)) == warning
    assert has_warning(body_of(fields)) == (warning is not None)


def of_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}
    }


def of_tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        (
            of_schema({"propertes": {}, "items": {"requred": [], "optional": True}}),
            "unknown keywords in schemas: propertes at # (did you mean properties?), requred at #/items "
            "(did you mean required?), optional at #/items",
        ),
        (of_schema({"$ref": "#/parts/a", "parts": {"a": {"x-order": 1, "examples": [{"b": 1}]}}}), None),
        (of_schema({"properties": {"propertes": {"$comment": ""}}}), None),
        (of_schema(None, strict=True, description="d"), None),
        (
            {"structured_outputs": {"json": '{"maxlength": 3}'}},
            "unknown keywords in schemas: maxlength at # (did you mean maxLength?)",
        ),
        ({"structured_outputs": {"json": "{"}}, None),
        (
            of_schema({}, shema={}),
            "unknown fields: response_format.json_schema.shema "
            "(did you mean response_format.json_schema.schema?)",
        ),
        (
            {"response_format": {"type": "json_object", "strict": True}},
            "unknown fields: response_format.strict",
        ),
        ({"response_format": {"type": "structural_tag", "format": {}}}, None),
        (
            of_tool(parameters={"properties": {"a": {"descripton": "d"}}}, strict=True),
            "unknown keywords in schemas: descripton at #/properties/a (did you mean description?)",
        ),
        (
            of_tool(paramters={}),
            "unknown fields: tools.function.paramters (did you mean tools.function.parameters?)",
        ),
    ],
)
def test_what_is_misspelt_in_a_schema_is_warned_about(fields: dict[str, Any], warning: str | None) -> None:
    body = body_of(fields, "/v1/chat/completions")
    assert warning_of(body) == warning
    assert has_warning(body) == (warning is not None)
    if warning is None:
        refuse_unknown_fields(body)
        return
    with pytest.raises(RequestError) as refused:
        refuse_unknown_fields(body)
    assert refused.value.code == "unknown_parameter"


def test_nullable_is_warned_about_and_not_refused() -> None:
    schema = {"properties": {"a": {"type": "string", "nullable": True}}}
    body = body_of({"structured_outputs": {"json": schema}})
    refuse_unknown_fields(body)
    assert warning_of(body) == (
        "unknown keywords in schemas: nullable at #/properties/a (without effect: add null to type)"
    )
    with pytest.raises(RequestError, match="optional"):
        refuse_unknown_fields(body_of({"structured_outputs": {"json": {**schema, "optional": True}}}))


def test_most_parts_of_schemas_cost_no_more_than_a_look_at_their_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_schemas, "_target", None)  # asked where there is a $ref alone
    names = {f"p{index}": {"type": "string"} for index in range(20)}
    assert not has_warning(body_of(of_tool(parameters={"properties": names}), "/v1/chat/completions"))


@pytest.mark.parametrize("name", ["", "a\r\nset-cookie: x", "\0", "caf\u00e9", "\U0001f600", "x" * 100_000])
def test_a_warning_can_be_a_header_for_any_name(name: str) -> None:
    warning = warning_of(body_of({f"{name}{number}" if number else name: 1 for number in range(50)}))
    assert warning is not None
    assert warning.isascii()
    assert warning.isprintable()
    assert len(warning) < 600
    keywords = warning_of(body_of({"structured_outputs": {"json": {f"{name}{n}": {} for n in range(50)}}}))
    assert keywords is not None and keywords.isascii() and keywords.isprintable() and len(keywords) < 600
    with pytest.raises(RequestError) as refused:
        refuse_unknown_fields(body_of({name: 1}))
    assert refused.value.param is not None
    assert refused.value.param.isprintable()
    assert len(refused.value.param) < 50


def test_a_refusal_names_the_field_that_was_meant() -> None:
    with pytest.raises(RequestError, match="did you mean temperature") as refused:
        refuse_unknown_fields(body_of({"temprature": 1}))
    assert (refused.value.param, refused.value.code) == ("temprature", "unknown_parameter")
    refuse_unknown_fields(body_of({"user": "u", "store": True}))
    message = {"role": "user", "content": "x", "contnet": "y"}
    refuse_unknown_fields(body_of({"messages": [message]}, "/v1/chat/completions"))


def test_what_a_chat_cannot_echo_is_refused() -> None:
    with pytest.raises(RequestError) as refused:
        body_of({"echo": True}, "/v1/chat/completions")
    assert refused.value.param == "echo"


CHOICE = '\'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": ...}}'


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        *(
            ({"tool_choice": choice}, "tool_choice", CHOICE)
            for choice in ("any", 5, {"type": "function", "name": "f"})
        ),
        (of_schema("a" * 200), "response_format", f'must be|should be an object, got "{"a" * 79}\\.\\.\\.'),
    ],
)
def test_an_error_shows_what_is_allowed_and_where_a_value_is_cut(
    fields: dict[str, Any], param: str, message: str
) -> None:
    pattern = message if param == "response_format" else re.escape(message)
    with pytest.raises(RequestError, match=pattern) as refused:
        body_of(fields, "/v1/chat/completions")
    assert refused.value.param == param


class TwoTokens:
    """A tokenizer that encodes every text as two tokens."""

    message_format = MessageFormat()

    def encode(self, text: str, **_: object) -> list[int]:
        return [5, 6]

    def spellings(self, words: Sequence[str]) -> list[list[int]]:
        return [self.encode(word) for word in words]

    def render_chat(self, messages: object, **_: object) -> str:
        return "two tokens"


def make_preparer(**options: Any) -> RequestPreparer:
    model = ServedModel(names=("m",), root="m", folder=Path(), created=0)
    preparer = RequestPreparer(model, cast(Tokenizer, TwoTokens()), GenerationDefaults(), **options)
    preparer.facts = EngineFacts(
        info=make_info(), default_slo=SLO(1.0, 0.1), profile=None, scheduler=SchedulerConfig()
    )
    return preparer


def refusal_of(work: Callable[[], object]) -> tuple[str, str | None, str | None] | None:
    try:
        work()
    except RequestError as error:
        return str(error), error.param, error.code
    return None


@pytest.mark.parametrize(
    ("fields", "is_refused"),
    [
        ({}, False),
        ({"max_tokens": 61, "n": 3, "stop": ["a"], "seed": 1, "user": "u", "service_tier": "auto"}, False),
        ({"slo": {}, "max_tokns": 1}, False),
        ({"stream": True}, True),
        ({"service_tier": "Flex"}, True),
        ({"slo": {"ttft": 1.0}}, True),
        ({"n": 0}, True),
        ({"best_of": 3, "n": 3}, False),
        ({"best_of": 129}, True),
        ({"best_of": 2, "n": 3}, True),
        ({"best_of": 0}, True),
        ({"max_tokens": 0}, True),
        ({"max_tokens": 2**40}, True),
        ({"min_tokens": 50, "max_tokens": 4}, True),
        ({"temperature": 3}, True),
        ({"top_k": 2**70}, True),
        ({"seed": 2**70}, True),
        ({"logit_bias": {"07": 1}}, True),
        ({"logit_bias": {"5000": 1}}, True),
        ({"stop_token_ids": [5000]}, True),
        ({"allowed_token_ids": [5, 6], "bad_words": ["a", "b"]}, False),
        ({"allowed_token_ids": [5000]}, True),
        ({"allowed_token_ids": []}, True),
        ({"allowed_token_ids": [1] * (MAX_ALLOWED_TOKENS + 1)}, True),
        ({"bad_words": [""]}, True),
        ({"bad_words": ["a"] * (MAX_BAD_WORDS + 1)}, True),
        ({"priority": 2**70}, True),
        ({"response_format": {"type": "text"}, "structured_outputs": {}}, False),
        ({"response_format": {"type": "json_schema"}}, True),
        ({"response_format": {"type": "json"}}, True),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, True),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, True),
        ({"structured_outputs": {"regexp": "a"}}, True),
        ({"structured_outputs": {"choice": []}}, True),
        ({"structured_outputs": {"grammar": "a" * 2**17}}, True),
        ({"truncate_prompt_tokens": 0}, True),
        ({"prompt_logprobs": 5}, False),
        ({"prompt_logprobs": 21}, True),
        ({"cache_salt": "s" * 256}, False),
        ({"cache_salt": "s" * 257}, True),
        ({"cache_salt": 5}, True),
    ],
)
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_a_line_is_refused_for_what_the_run_would_refuse_it_for(
    endpoint: GenerationEndpoint, fields: dict[str, Any], is_refused: bool
) -> None:
    preparer = make_preparer()
    raw = json.dumps({**(PROMPT if endpoint == "/v1/completions" else CHAT), **fields}).encode()
    at_the_run = refusal_of(lambda: preparer.prepare(endpoint, raw, RequestContext(is_batch_line=True)))
    before = refusal_of(lambda: preparer.line_check.check(parse_generation(endpoint, raw)))
    assert before == at_the_run
    assert (before is not None) == is_refused


@pytest.mark.parametrize(
    ("sampling", "num_prompts", "max_tokens"),
    [
        ({"max_tokens": 100, "n": 128, "logprobs": 20}, 1, 100),
        ({"max_tokens": MAX_RESPONSE_TOKENS}, 1, MAX_RESPONSE_TOKENS),
        ({"max_tokens": None}, 1, 8192),
        ({"max_tokens": None, "n": 64, "logprobs": 20}, 2, 390),
    ],
)
def test_max_tokens_are_bounded_by_the_size_of_the_response(
    sampling: dict[str, Any], num_prompts: int, max_tokens: int
) -> None:
    params = SamplingParams(**sampling)
    assert bounded_max_tokens(params, 8192, num_prompts, MAX_RESPONSE_TOKENS) == max_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 20}, None),
        ({"prompt_logprobs": 11, "n": 2}, "prompt_logprobs"),
        ({"prompt": ["a", "b", "c"], "echo": True, "logprobs": 6}, None),
        ({"prompt": ["a", "b", "c"], "echo": True, "logprobs": 7}, "logprobs"),
    ],
)
def test_what_is_returned_of_prompts_is_bounded(fields: dict[str, Any], param: str | None) -> None:
    preparer = make_preparer(max_response_tokens=42)
    raw = json.dumps({**PROMPT, "max_tokens": 1, **fields}).encode()
    refused = refusal_of(lambda: preparer.prepare("/v1/completions", raw, RequestContext()))
    assert (refused and refused[1]) == param


def test_a_response_that_would_be_too_large_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(RequestError, match=r"max_tokens may be 390 at most") as refused:
        bounded_max_tokens(SamplingParams(max_tokens=1000, n=128, logprobs=20), 8192, 1, MAX_RESPONSE_TOKENS)
    assert refused.value.param == "max_tokens"
    with pytest.raises(RequestError):
        bounded_max_tokens(SamplingParams(max_tokens=None, n=5), 8, 1, most=4)
