"""What the commit of a step gives: output tokens, and log probabilities of the prompts that it completes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from backfill.core.plan import PromptLogprobs, SampledToken, StepPlan, TokenLogprobs
from backfill.core.request import FinishReason, Request, RequestId, ServiceClass


class CommittedToken(NamedTuple):
    """One output token that now belongs to its request.

    Attributes:
        number: of the output's tokens, from 1.
        stop_token_id: the requested stop token that ended the output, if one did.
        finish_reason: why the output has ended with this token; None if it has not.
        prompt_logprobs: see ``PromptScores``; with the first token.
    """

    request: Request
    sampled: SampledToken
    number: int
    stop_token_id: int | None
    finish_reason: FinishReason | None
    prompt_logprobs: list[TokenLogprobs] | None


def prompt_progress(plan: StepPlan, by_id: Mapping[RequestId, Request]) -> tuple[tuple[RequestId, int], ...]:
    """The online requests of a step whose first token is still to come, and the tokens of each that it left
    computed; to be asked once it is committed, or has failed."""
    if plan.num_tokens == len(plan.slices):  # decodes
        return ()
    return tuple(
        (request_id, min(start + num_tokens, request.num_computed_tokens))  # a later chunk may be in flight
        for request_id, start, num_tokens, _, samples, _ in plan.slices
        if not samples
        and (request := by_id.get(request_id)) is not None
        and request.service_class is ServiceClass.ONLINE
        and request.first_token_at_s is None
    )


class PromptScores:
    """Log probabilities of prompts in progress, collected over the steps that compute them.

    Each token's once: it may be computed again, and scored then too.
    """

    def __init__(self) -> None:
        self._by_id: dict[RequestId, list[TokenLogprobs]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(
        self, scored: Iterable[PromptLogprobs], known: Collection[RequestId], lost: Collection[RequestId]
    ) -> None:
        """Those of a step. ``known``: requests that have not ended; ``lost``: those that lost a chunk."""
        for request_id, start, tokens in scored:
            if request_id in known and request_id not in lost:
                so_far = self._by_id.setdefault(request_id, [])
                assert start <= len(so_far) + 1, f"{request_id}: from {start} on, up to {len(so_far)}"
                so_far += tokens[len(so_far) + 1 - start :]

    def take(self, request_id: RequestId) -> list[TokenLogprobs] | None:
        """Of all prompt tokens but the first, once they are complete; None if the request asks for none."""
        return self._by_id.pop(request_id, None)
