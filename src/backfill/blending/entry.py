"""A request inside a pool."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from backfill.blending.requests import TOKEN_BYTES, Batch, PoolRequest, prompt_bytes

if TYPE_CHECKING:
    from backfill.blending.run import Run


class State(Enum):
    WAITING = auto()  # in the plan of its run
    IN_FLIGHT = auto()  # taken
    RETURNED = auto()  # put back, to be taken before those of any plan
    ENDED = auto()  # finished or cancelled


class Expected(NamedTuple):
    """Expected costs of a request, fixed when it is taken."""

    output_tokens: float
    compute_s: float
    memory_s: float


NOTHING = Expected(1.0, 0.0, 0.0)


class Left(NamedTuple):
    """Expected seconds of what a request has yet to do."""

    compute_s: float
    memory_s: float


class Entry:
    """A request and where it is.

    Attributes:
        sequence: its place in the order of arrival.
        random_key: uniform in [0, 1), its place in the random order.
        num_output_tokens: what it generated, once it has finished; 0 before.
        num_so_far: what it has generated in flight, as far as the pool was told; else 0.
        run, index: the run that it belongs to and its place there.
        expected: valid from when it is taken.
        left: of this, what it has yet to do; valid from when it is taken.
        is_dense: whether it counts as compute-bound, from when it is taken.
    """

    __slots__ = (
        "batch",
        "expected",
        "index",
        "is_dense",
        "known_output_tokens",
        "left",
        "max_output_tokens",
        "num_output_tokens",
        "num_so_far",
        "prompt",
        "random_key",
        "request_id",
        "run",
        "sequence",
        "state",
    )

    def __init__(self, request: PoolRequest, sequence: int, random_key: float) -> None:
        self.request_id = request.request_id
        self.prompt = prompt_bytes(request)
        self.batch = Batch(request.group, request.complete_by_s)
        self.max_output_tokens = request.max_output_tokens
        self.known_output_tokens = request.known_output_tokens
        self.sequence = sequence
        self.random_key = random_key
        self.num_output_tokens = 0
        self.num_so_far = 0
        self.state = State.WAITING
        self.run: Run | None = None
        self.index = -1
        self.expected = NOTHING
        self.left = Left(0.0, 0.0)
        self.is_dense = True

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES
