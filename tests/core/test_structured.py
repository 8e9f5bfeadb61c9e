from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from backfill.core.errors import InvalidRequest
from backfill.core.sampling import SamplingParams
from backfill.core.structured import MAX_GRAMMAR_CHARS, StructuredOutputsParams

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
