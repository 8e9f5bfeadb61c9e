"""What a pool is given and what it hands out."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from backfill.core.errors import RequestError

TokenIds: TypeAlias = "bytes | bytearray | memoryview | array[int]"
"""uint32 token ids in the machine's byte order. Of a numpy array: its ``data``."""

OrderName = Literal["fcfs", "dfs", "random", "batchllm", "blend"]
PLANNED_BY_LENGTH: frozenset[OrderName] = frozenset(("blend", "batchllm"))
"""Orders that expected lengths decide."""
TOKEN_BYTES = 4


class Batch(NamedTuple):
    """The requests of a group with one deadline."""

    group: str
    complete_by_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class PoolRequest:
    """A request as a pool is given it.

    Attributes:
        request_id: unique among the requests that a pool has not seen finish.
        max_output_tokens: at least 1.
        known_output_tokens: how many it will generate, where that is known (``ignore_eos``, a preset length).
        group: whose request it is; ``take`` can be limited to a group.
        complete_by_s: deadline on the clock of ``OfflinePool.take``.
        num_choices: outputs of the prompt, which is computed once; lengths are of each.
        observed_output_tokens: of a request that has ended elsewhere: it never runs, and is there for the
            estimates of others.
    """

    request_id: int
    prompt_token_ids: TokenIds
    max_output_tokens: int
    known_output_tokens: int | None = None
    group: str = ""
    complete_by_s: float | None = None
    num_choices: int = 1
    observed_output_tokens: int | None = None


class PlannedRequest(NamedTuple):
    """A request as a pool hands it out.

    Attributes:
        reused_tokens: leading prompt tokens that requests not yet taken begin with too. A cache may drop
            the rest as soon as this request no longer needs it.
        expected_output_tokens: mean of the estimate.
    """

    request_id: int
    reused_tokens: int
    expected_output_tokens: float


def prompt_bytes(request: PoolRequest) -> bytes:
    """The prompt's token ids as bytes of uint32.

    Raises: RequestError if they are not, or if another field of the request is out of range.
    """
    _check_lengths(request)
    token_ids = request.prompt_token_ids
    view = memoryview(token_ids)
    if view.itemsize not in {1, TOKEN_BYTES} or view.nbytes % TOKEN_BYTES:
        raise RequestError(
            f"request {request.request_id}: token ids must be uint32 or bytes of uint32,"
            f" got {view.nbytes} bytes in items of {view.itemsize}",
            param="prompt_token_ids",
        )
    if view.nbytes == 0:
        raise RequestError(f"request {request.request_id}: the prompt is empty", param="prompt_token_ids")
    return token_ids if isinstance(token_ids, bytes) else view.tobytes()


def _check_lengths(request: PoolRequest) -> None:
    limit, known, deadline = request.max_output_tokens, request.known_output_tokens, request.complete_by_s
    if request.num_choices < 1:
        raise RequestError(
            f"request {request.request_id}: at least 1 choice is needed, got {request.num_choices}",
            param="num_choices",
        )
    if limit < 1:
        raise RequestError(
            f"request {request.request_id}: at least 1 output token is needed, got {limit}",
            param="max_output_tokens",
        )
    if known is not None and not 1 <= known <= limit:
        raise RequestError(
            f"request {request.request_id}: a known length must be from 1 to {limit}, got {known}",
            param="known_output_tokens",
        )
    if deadline is not None and not math.isfinite(deadline):
        raise RequestError(
            f"request {request.request_id}: a deadline must be finite, got {deadline}", param="complete_by_s"
        )
