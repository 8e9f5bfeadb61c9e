from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from backfill import RequestOutputKind
from backfill.core.errors import InvalidRequest
from backfill.core.sampling import SamplingParams
from backfill.core.structured import MAX_GRAMMAR_CHARS, StructuredOutputsParams
from backfill.models.generation_config import GenerationDefaults


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("n", 0, "at least 1"),
        ("n", "2", "an integer"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", True, "an integer or None"),
        ("min_tokens", 17, "between 0 and 16"),
        ("temperature", -0.1, "between 0 and 2"),
        ("temperature", float("nan"), "between 0 and 2"),
        ("temperature", None, "a number"),
        ("top_k", -2, "between -1"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.1, "above 0 and at most 1"),
        ("min_p", 1.5, "between 0 and 1"),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", float("inf"), "above 0"),
        ("presence_penalty", 3, "between -2 and 2"),
        ("frequency_penalty", -3, "between -2 and 2"),
        ("seed", 2**63, "between"),
        ("seed", 1.5, "an integer or None"),
        ("stop", ["a", ""], "entry 1 is empty"),
        ("stop", [1], "a string or a list of strings"),
        ("stop_token_ids", [-1], "between 0"),
        ("stop_token_ids", ["a"], "a list of token ids"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("logit_bias", {"5": 1.0}, "a dict of numbers by token id"),
        ("logit_bias", {5: 101.0}, "between -100 and 100"),
        ("logit_bias", {-1: 1.0}, "between 0"),
        ("allowed_token_ids", [], "empty"),
        ("allowed_token_ids", [1, -1], "between 0"),
        ("allowed_token_ids", "12", "a list of token ids"),
        ("bad_words", "word", "a list of strings"),
        ("bad_words", ["a", ""], "empty"),
        ("bad_words_token_ids", [[1], []], "a list of lists of token ids"),
        ("bad_words_token_ids", [1], "a list of lists of token ids"),
        ("bad_words_token_ids", [[1, -2]], "between 0"),
        ("logprobs", 21, "between 0 and 20"),
        ("ignore_eos", 1, "True or False"),
        ("output_kind", "delta", "a RequestOutputKind"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must.*{allowed}") as refusal:
        SamplingParams(**{field: value})
    assert isinstance(refusal.value, InvalidRequest) and refusal.value.param == field


def test_an_unknown_field_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="max_token'"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]


EVERY_FIELD = SamplingParams(
    n=2,
    max_tokens=np.int64(7),  # type: ignore[arg-type]  # numbers of numpy's are numbers
    min_tokens=7,
    temperature=np.float32(2),  # type: ignore[arg-type]
    top_k=-1,
    top_p=1,
    min_p=1,
    repetition_penalty=0.01,
    presence_penalty=-2,
    frequency_penalty=2,
    seed=2**63 - 1,
    stop="a",
    stop_token_ids=[49],
    include_stop_str_in_output=True,
    ignore_eos=True,
    logit_bias={0: -100},
    allowed_token_ids=[5, 49],
    bad_words=["bad"],
    bad_words_token_ids=[[7, 8]],
    logprobs=20,
    skip_special_tokens=False,
    output_kind=RequestOutputKind.DELTA,
)


def test_an_engine_gets_one_for_each_output_with_nothing_left_open() -> None:
    first, second = choices = EVERY_FIELD.choices(max_tokens=9, seed=77, bad_words=[[9]])
    assert (first.seed, second.seed) == (2**63 - 1, -(2**63)), "seeds wrap around"
    assert (first.n, first.max_tokens, first.top_k, first.stop_strings) == (1, 9, 0, ("a",))
    assert first.logit_bias == {0: -100.0}
    assert (first.bad_words, first.bad_words_token_ids) == (None, ((7, 8), (9,)))
    sent = msgspec.msgpack.encode(choices)
    assert msgspec.msgpack.decode(sent, type=list[SamplingParams]) == choices
    assert [each.seed for each in SamplingParams(n=2).choices(max_tokens=5, seed=9)] == [9, 10]


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    EVERY_FIELD.check_token_ids(vocab_size=50)
    fields = {"stop_token_ids": [50], "logit_bias": {50: 1.0}, "allowed_token_ids": [3, 50]}
    for field, value in {**fields, "bad_words_token_ids": [[3], [50, 3]]}.items():
        with pytest.raises(InvalidRequest, match=f"^{field} must name tokens between 0 and 49, got 50"):
            SamplingParams(**{field: value}).check_token_ids(vocab_size=50)


def test_a_model_recommends_some_fields() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=20, eos_token_ids=(2,))
    assert SamplingParams(**defaults.recommended) == SamplingParams(temperature=0.6, top_k=20)


SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}}}


def test_a_schema_is_the_same_as_a_dict_and_as_its_text_also_in_another_process() -> None:
    given = StructuredOutputsParams(json=SCHEMA)
    assert given == StructuredOutputsParams(json=given.text)
    assert (given.kind, json.loads(given.text)) == ("json", SCHEMA)
    assert len({given, StructuredOutputsParams(json=given.text)}) == 1
    sampling = SamplingParams(structured_outputs=given)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams) == sampling
    choices = StructuredOutputsParams(choice=["a", "b"])
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(choices), type=StructuredOutputsParams)
    assert (decoded, hash(decoded)) == (choices, hash(choices))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "grammar": "b"},
        {"json_object": False},
        {"choice": []},
        {"choice": "ab"},
        {"choice": ["a", 1]},
        {"json": {"a": object()}},
        {"json": [1]},
        {"regex": 5},
        {"regex": "a" * (MAX_GRAMMAR_CHARS + 1)},
        {"json_object": True, "disable_any_whitespace": 1},
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        StructuredOutputsParams(**fields)


def test_sampling_takes_nothing_else() -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
