"""Which objectives are refused before the request is queued; who may share cached prefixes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backfill.core.config import PolicyName, SchedulerConfig
from backfill.core.errors import RequestError
from backfill.core.request import ServiceClass
from backfill.core.slo import SLO
from backfill.costs.profile import CostProfile, FitError
from backfill.generation.generator import GenerationRequest
from backfill.models.generation_config import GenerationDefaults
from backfill.protocol.generation import Generation
from backfill.protocol.preparer import EngineFacts, RequestContext, RequestPreparer, ServedModel
from tests.builders import linear_cost, make_info, make_profile

NO_TOKENIZER: Any = None  # prompts are token ids
# A millisecond a token; certain to 70 %, for prompts of up to 1000 tokens.
FULL = replace(make_profile(linear_cost(0.001)), error=FitError(0.01, 0.05, 40), known_tokens=1000)
COARSE = replace(FULL, quality="coarse")


def make_preparer(
    profile: CostProfile | None = None, policy: PolicyName = "slo", *, prefix_caching: bool = True
) -> RequestPreparer:
    model = ServedModel(names=("m",), root="m", folder=Path(), created=0)
    preparer = RequestPreparer(model, NO_TOKENIZER, GenerationDefaults())
    preparer.facts = EngineFacts(
        info=make_info(num_blocks=1000, block_size=16),
        default_slo=SLO(1.0, 0.15),
        profile=profile,
        scheduler=SchedulerConfig(policy=policy, prefix_caching=prefix_caching),
    )
    return preparer


def ask(preparer: RequestPreparer, context: RequestContext | None = None, **fields: object) -> Generation:
    """Prepare a short request with these fields."""
    raw = json.dumps({"prompt": [5], "max_tokens": 1, **fields}).encode()
    return preparer.prepare("/v1/completions", raw, context or RequestContext())


def prepare(
    profile: CostProfile | None,
    slo: dict[str, float],
    num_tokens: int = 100,
    policy: PolicyName = "slo",
    *,
    prefix_caching: bool = False,
) -> Generation:
    preparer = make_preparer(profile, policy, prefix_caching=prefix_caching)
    return ask(preparer, prompt=[5] * num_tokens, slo=slo)


@pytest.mark.parametrize(
    ("slo", "param", "told"),
    [
        ({"ttft": 0.069}, "slo.ttft", "need 0.1 s even alone. Ask for 0.1 s or more."),
        (
            {"tpot": 0.0006},
            "slo.tpot",
            "need 0.001 s even alone, and a third is left for prompts. Ask for 0.002 s or more.",
        ),
    ],
)
def test_objectives_that_a_good_profile_rules_out_are_refused(
    slo: dict[str, float], param: str, told: str
) -> None:
    for profile in (FULL, replace(FULL, quality="refined")):
        with pytest.raises(
            RequestError, match=f"cannot be met: .* the request is predicted to {told}"
        ) as caught:
            prepare(profile, slo)
        assert caught.value.param == param


@pytest.mark.parametrize(
    "profile",
    [COARSE, replace(FULL, quality="refined", error=FitError(0.2, 0.6, 40)), None],
    ids=["coarse", "refined with a large error", "none"],
)
def test_without_a_good_profile_every_objective_is_accepted_and_reported(profile: CostProfile | None) -> None:
    assert prepare(profile, {"ttft": 1e-6, "tpot": 1e-6}).reported_slo == SLO(1e-6, 1e-6)


def test_what_is_only_predicted_to_be_missed_is_accepted() -> None:
    assert prepare(FULL, {"ttft": 0.071}).request.slo == SLO(0.071, 0.15)


def test_of_a_long_prompt_only_the_known_part_is_certain() -> None:
    assert prepare(FULL, {"ttft": 0.71}, num_tokens=8000).request.slo == SLO(0.71, 0.15)
    with pytest.raises(RequestError, match="need 8 s"):
        prepare(FULL, {"ttft": 0.69}, num_tokens=8000)


def test_a_first_token_is_possible_where_its_prompt_may_be_cached() -> None:
    assert prepare(FULL, {"ttft": 0.01}, prefix_caching=True).request.slo == SLO(0.01, 0.15)
    with pytest.raises(RequestError, match=r"need 0\.001 s even alone, its prompt cached\. Ask for 0\.001 s"):
        prepare(FULL, {"ttft": 0.0006}, prefix_caching=True)


def test_a_policy_without_objectives_refuses_none() -> None:
    assert prepare(FULL, {"ttft": 1e-6}, policy="priority").request.slo == SLO(1e-6, 0.15)


@pytest.mark.parametrize(
    ("slo", "headers", "name", "asked", "least"),
    [
        ({"ttft": 0.4}, {}, "slo.ttft", "0.4 s", "0.5 s"),
        ({"tpot": 0.04}, {}, "slo.tpot", "0.04 s", "0.05 s"),
        ({}, {"x-slo-ttft-ms": "499"}, "x-slo-ttft-ms", "499 ms", "500 ms"),
        ({"ttft": 9.0}, {"x-slo-tpot-ms": "49.5"}, "x-slo-tpot-ms", "49.5 ms", "50 ms"),
    ],
)
def test_an_objective_below_its_floor_is_refused_with_the_least_one_offered(
    slo: dict[str, float], headers: dict[str, str], name: str, asked: str, least: str
) -> None:
    preparer = make_preparer(policy="priority")
    floors = SchedulerConfig(policy="priority", min_ttft_slo=0.5, min_tpot_slo=0.05)
    preparer.facts = replace(preparer.engine_facts, scheduler=floors)
    with pytest.raises(RequestError) as refused:
        ask(preparer, RequestContext(headers=headers), slo=slo)
    assert refused.value.param == name
    assert str(refused.value) == f"{name} of {asked} is not offered: the least on this server is {least}."
    assert ask(preparer, slo={"ttft": 0.5, "tpot": 0.05}).request.slo == SLO(0.5, 0.05)


def test_a_field_out_of_range_is_refused_before_the_prompt_is_tokenized() -> None:
    """Tokenizing a long text takes a hundred times as long as parsing it."""
    with pytest.raises(RequestError) as refused:
        ask(make_preparer(), prompt="a long text", max_tokens=-1)
    assert refused.value.param == "max_tokens"


def test_a_batch_line_brings_no_objectives() -> None:
    with pytest.raises(RequestError, match="slo") as refused:
        ask(make_preparer(), RequestContext(is_batch_line=True), slo={"ttft": 50.0})
    assert refused.value.param == "slo"


@pytest.mark.parametrize("is_batch_line", [False, True])
def test_owner_and_salt_go_to_the_engine_and_never_into_a_log(is_batch_line: bool) -> None:
    context = RequestContext(owner="a-digest", is_batch_line=is_batch_line)

    def request_of(**fields: object) -> GenerationRequest:
        return ask(make_preparer(), context, **fields).request

    request = request_of(cache_salt="a-secret")
    assert (request.owner, request.cache_salt) == ("a-digest", "a-secret")
    for logged in (repr(request), repr(context)):
        assert "a-digest" not in logged and "a-secret" not in logged
    assert request_of().cache_salt == request_of(cache_salt=None).cache_salt == ""


def prepare_with(headers: dict[str, str], **fields: object) -> Generation:
    return ask(make_preparer(), RequestContext(headers=headers), **fields)


def test_a_gateway_s_time_for_an_offline_request_is_its_window() -> None:
    before_s = time.monotonic()
    for headers, fields in (({}, {"service_tier": "flex"}), ({"x-service-tier": "flex"}, {})):
        request = prepare_with({"x-slo-ttft-ms": "60000", **headers}, **fields).request
        assert request.service_class is ServiceClass.OFFLINE and request.slo is None
        assert request.complete_by_s is not None and 60 <= request.complete_by_s - before_s < 120
    assert prepare_with({"x-service-tier": "flex"}).request.complete_by_s is None
    hasty = prepare_with({"x-service-tier": "flex", "x-slo-ttft-ms": "1"}).request.complete_by_s
    assert hasty is not None and hasty - before_s >= 60, "else it would go before all batches at once"
    with pytest.raises(RequestError, match="x-slo-tpot-ms is for online requests"):
        prepare_with({"x-service-tier": "flex", "x-slo-tpot-ms": "50"})


def test_a_tier_in_the_body_goes_before_the_header() -> None:
    assert prepare_with({"x-service-tier": "flex"}, service_tier="default").service_tier == "default"
    with pytest.raises(RequestError, match=r"x-service-tier must be .*flex.*, got 'batch'"):
        prepare_with({"x-service-tier": "batch"})
