from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backfill import InvalidRequest, RequestOutputKind, SamplingParams
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
        ("top_k", -2, "between 0"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("min_p", 1.5, "between 0 and 1"),
        ("repetition_penalty", 0, "above 0"),
        ("presence_penalty", 3, "between -2 and 2"),
        ("frequency_penalty", -3, "between -2 and 2"),
        ("seed", 2**63, "between"),
        ("seed", 1.5, "an integer or None"),
        ("stop", ["a", ""], "empty"),
        ("stop", [1], "a string or a list of strings"),
        ("stop_token_ids", [-1], "between 0"),
        ("stop_token_ids", ["a"], "a list of token ids"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("logit_bias", {"5": 1.0}, "a dict of numbers by token id"),
        ("logit_bias", {5: 101.0}, "between -100 and 100"),
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


def test_every_field_reaches_the_engine() -> None:
    params = SamplingParams(
        n=2,
        max_tokens=np.int64(7),  # type: ignore[arg-type]  # numbers of numpy's are numbers
        min_tokens=2,
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=-1,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=5,
        stop_token_ids=[9],
        ignore_eos=True,
        logit_bias={3: -1},
        logprobs=4,
    )
    first, second = params.choices(most_tokens=100, seed=77)
    assert (first.seed, second.seed) == (5, 6)
    assert first.max_tokens == 7 and type(first.max_tokens) is int
    assert (first.min_tokens, first.temperature, first.top_k, first.top_p, first.min_p) == (
        2,
        0.5,
        0,
        0.9,
        0.1,
    )
    assert (first.repetition_penalty, first.presence_penalty, first.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (first.stop_token_ids, first.ignore_eos, first.logit_bias) == ((9,), True, ((3, -1.0),))
    assert first.num_logprobs == 4


@pytest.mark.parametrize(("requested", "expected"), [(None, 40), (16, 16), (100, 40)])
def test_an_output_ends_where_the_context_does(requested: int | None, expected: int) -> None:
    (choice,) = SamplingParams(max_tokens=requested).choices(most_tokens=40, seed=0)
    assert choice.max_tokens == expected


def test_a_request_without_a_seed_takes_the_one_it_is_given() -> None:
    assert SamplingParams().choices(most_tokens=5, seed=9)[0].seed == 9


def test_defaults_are_those_of_vllm_but_for_what_the_model_recommends() -> None:
    assert SamplingParams() == SamplingParams(
        max_tokens=16, temperature=1.0, top_p=1.0, top_k=0, output_kind=RequestOutputKind.CUMULATIVE
    )
    recommended = SamplingParams.recommended(
        GenerationDefaults(temperature=0.6, top_k=20, eos_token_ids=(2,))
    )
    assert recommended == SamplingParams(temperature=0.6, top_k=20)
