"""A limit on the size of one response, which stays in memory until its client has read it."""

from __future__ import annotations

from backfill.core.errors import RequestError
from backfill.core.sampling import MAX_LOGPROBS

MAX_RESPONSE_TOKENS = 1 << 20


def bounded_max_tokens(
    requested: int | None, default: int, *, num_choices: int, num_logprobs: int | None, most: int
) -> int:
    """``max_tokens`` of each choice, so that choices x max_tokens x (1 + logprobs) is at most ``most``.

    Args:
        requested: the request's ``max_tokens``; None takes ``default`` or as much of it as is allowed.
        num_choices: prompts times n.
        num_logprobs: the request's, not yet checked; a value out of range counts as the nearest allowed one.
    Raises: RequestError if ``requested`` is too large, or if not even one token is allowed.
    """
    num_logprobs = min(MAX_LOGPROBS, max(0, num_logprobs or 0))
    allowed = most // (num_choices * (1 + num_logprobs))
    if allowed < 1 or (requested is not None and requested > allowed):
        raise RequestError(
            f"The response would be too large: choices x max_tokens x (1 + logprobs) may be at most {most}. "
            f"With {num_choices} choices and {num_logprobs} logprobs, "
            f"max_tokens may be {allowed} at most.",
            param="max_tokens",
        )
    return min(default, allowed) if requested is None else requested
