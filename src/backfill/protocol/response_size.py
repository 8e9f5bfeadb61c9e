"""How much one response may hold: it waits in memory for a client that reads it when it likes."""

from __future__ import annotations

from backfill.core.errors import RequestError
from backfill.core.sampling import MAX_LOGPROBS

MAX_RESPONSE_TOKENS = 1 << 20


def bounded_max_tokens(
    asked: int | None, default: int, *, num_choices: int, num_logprobs: int | None, most: int
) -> int:
    """``max_tokens`` of each choice, so that choices x max_tokens x (1 + logprobs) is at most ``most``.

    Args:
        asked: what the request says; None takes as much of ``default`` as is allowed.
        num_choices: prompts times n.
        num_logprobs: as the request says it; what is out of range counts as the nearest that is not.
    Raises: RequestError where ``asked`` is too much, or no token at all would be allowed.
    """
    num_logprobs = min(MAX_LOGPROBS, max(0, num_logprobs or 0))
    allowed = most // (num_choices * (1 + num_logprobs))
    if allowed < 1 or (asked is not None and asked > allowed):
        raise RequestError(
            f"The response would be too large: choices x max_tokens x (1 + logprobs) may be at most {most}. "
            f"With {num_choices} choices and {num_logprobs} logprobs, "
            f"max_tokens may be {allowed} at most.",
            param="max_tokens",
        )
    return min(default, allowed) if asked is None else asked
