"""Which of several prompts can have their first tokens in time, and in which order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from heapq import heappop, heappush

from backfill.core.request import RequestId
from backfill.scheduling.objectives import lets_pass_until_s
from backfill.scheduling.policy import R, RequestView
from backfill.scheduling.prediction import StepPredictor


def is_new(request: RequestView) -> bool:
    """It has no output token yet."""
    return request.last_token_at_s is None


def most_in_time(prompts: Sequence[R], now_s: float, token_s: float) -> Collection[RequestId]:
    """The most prompts whose first tokens can all be in time (Moore and Hodgson's algorithm).

    They are computed one after another by deadline. Whenever one would be late, the longest so far is left
    out; of several, the one with the earliest deadline. So for each priority that clients gave, the more
    urgent first, and each owner's turn. Requests that compute lost KV again are in the middle of their
    answers: they are always in.

    Args:
        token_s: seconds that each token of a prompt takes.
    """
    resumed = [each for each in prompts if not is_new(each)]
    in_time = {each.request_id for each in resumed}
    ends_at_s = now_s + token_s * sum(each.num_pending_tokens for each in resumed)
    new = filter(is_new, prompts)
    for _, equals in itertools.groupby(new, lambda each: (each.order_key[0], each.owner)):
        chosen: list[tuple[int, float, RequestId]] = []  # a heap, the longest first
        for request in equals:
            num_tokens, by_s = request.num_pending_tokens, request.next_token_by_s
            heappush(chosen, (-num_tokens, by_s, request.request_id))
            ends_at_s += num_tokens * token_s
            if ends_at_s > by_s:
                ends_at_s += heappop(chosen)[0] * token_s
        in_time.update(request_id for _, _, request_id in chosen)
    return in_time


def shortest_first(prompts: Sequence[R], now_s: float, token_s: float) -> list[R]:
    """Prompts that can all be in time, in the order in which to compute them: shorter ones first.

    By Smith's backward rule: the longest of those that can wait for all others comes last, and so on. A
    prompt can wait while its first token comes within a part of its TTFT objective; where none can, the
    latest deadline comes last. Of the orders in which all can, this one has the least mean time to first
    token. So for each priority that clients gave, the more urgent first, and each owner's turn. Requests that
    compute lost KV again come before all.

    Args:
        prompts: by deadline, as ``most_in_time`` takes them.
        token_s: seconds that each token of a prompt takes.
    """
    order = [each for each in prompts if not is_new(each)]
    ends_at_s = now_s + token_s * sum(each.num_pending_tokens for each in order)
    new = filter(is_new, prompts)
    for _, equals in itertools.groupby(new, lambda each: (each.order_key[0], each.owner)):
        by_deadline = list(equals)
        by_wait = sorted(enumerate(by_deadline), key=lambda each: _waits_until_s(each[1]))
        ends_at_s += token_s * sum(each.num_pending_tokens for each in by_deadline)
        end_s, backwards, placed = ends_at_s, [], set[RequestId]()
        can_wait: list[tuple[int, int, R]] = []  # a heap, the longest first, then the latest deadline
        for _ in range(len(by_deadline)):
            while by_wait and _waits_until_s(by_wait[-1][1]) >= end_s:
                index, request = by_wait.pop()
                if request.request_id not in placed:
                    heappush(can_wait, (-request.num_pending_tokens, -index, request))
            while by_deadline[-1].request_id in placed:
                by_deadline.pop()
            last = heappop(can_wait)[-1] if can_wait else by_deadline[-1]
            backwards.append(last)
            placed.add(last.request_id)
            end_s -= token_s * last.num_pending_tokens
        order += reversed(backwards)
    return order


def _waits_until_s(request: RequestView) -> float:
    return lets_pass_until_s(request.arrived_at_s, request.next_token_by_s)


def least_spare_s(
    prompts: Sequence[R],
    now_s: float,
    token_s: float,
    num_tokens: Mapping[RequestId, int],
    predictor: StepPredictor,
    chunk_tokens: int,
) -> float:
    """Seconds that a step may take for the most first tokens to be in time; inf where none can be.

    The rest of the prompts comes after it, one after another, as ``most_in_time`` has them.

    Args:
        token_s: predicted seconds that each token of a prompt takes beside the decodes, without a context.
        num_tokens: that the step computes of each of its requests.
        chunk_tokens: of a prompt alone in a step. What a longer one has left takes at least as long as alone.
    """
    scale = predictor.time_scale
    in_time = most_in_time(prompts, now_s, scale * token_s)
    rest_s, least_s = 0.0, math.inf
    for request in sorted((each for each in prompts if each.request_id in in_time), key=is_new):
        computed = num_tokens.get(request.request_id, 0)
        start, size = request.num_computed_tokens + computed, request.num_prompt_tokens
        seconds = token_s * (request.num_pending_tokens - computed)
        if size > chunk_tokens:
            alone_s = predictor.cost.prefill_time_s(size, chunk_tokens, num_computed_tokens=start)
            seconds = max(seconds, alone_s)
        rest_s += scale * seconds
        if is_new(request):
            least_s = min(least_s, request.next_token_by_s - now_s - rest_s)
    return least_s
