from __future__ import annotations

from backfill.core.plan import AdmittedRequest, Compute, ScheduledSlice, StepPlan
from backfill.core.request import Request
from tests.builders import ScriptedExecutor, make_info, make_request
from tests.models.tiny import CONFIGS


def first_tokens(request: Request, executor: ScriptedExecutor) -> tuple[int, ...]:
    """Admits the request and runs its prompt; returns what it sampled."""
    length = request.num_prompt_tokens
    admitted = AdmittedRequest(request.request_id, tuple(request.prompt_token_ids), request.sampling)
    scheduled = ScheduledSlice(request.request_id, 0, length, tuple(range(0, 2 * length, 2)), True)
    outcome = executor.run(StepPlan(0, Compute((scheduled,)), admitted=(admitted,)))
    return tuple(each.token_id for each in outcome.sampled)


def test_default_prompts_are_those_of_the_request_and_begin_with_blocks_of_their_own() -> None:
    assert list(make_request(9, request_id="a").prompt_token_ids) == list(
        make_request(9, request_id="a").prompt_token_ids
    )
    prompts = [tuple(make_request(40).prompt_token_ids) for _ in range(300)]
    assert len({prompt[:4] for prompt in prompts}) == len(prompts), "blocks of tests are of 4 tokens or more"
    smallest = min(values["vocab_size"] for _, values in CONFIGS.values())
    assert all(3 <= token_id < smallest for prompt in prompts for token_id in prompt)


def test_scripted_tokens_are_those_of_the_request_unless_one_is_named() -> None:
    executor = ScriptedExecutor(make_info())
    sampled = [first_tokens(make_request(request_id=name), executor) for name in "abcdefgh"]
    assert len(set(sampled)) > 6
    named = ScriptedExecutor(make_info(), next_token=2)
    assert first_tokens(make_request(), named) == (2,)
