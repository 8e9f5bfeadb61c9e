"""What a policy decides and what it sees: plain data, so that a policy can serve another engine too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from backfill.core.request import Rank, Request
from backfill.costs.model import CostModel

# The smallest prefill chunk that is worth a place in a step that is over its time.
LEAST_PREFILL_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Requests that are placed into a step together, under one set of limits.

    Attributes:
        ranks: whose requests; running ones are placed before waiting ones, decodes before prefills.
        limit_s: the step may take this long, predicted, once a slice of this lane is put into it. The first
            slice of a step is put in whatever it takes.
        beside_prefill: whether the lane is placed into a step in which a lane before it computes a prompt.
        step_sizes: tokens, ascending. Prefills of this lane fill the step up to the first of these that
            leaves room for half the smallest of them beside the decodes. Without any, all there is room for.
        protected: decodes are placed even past ``limit_s``, and one prefill gets ``least_tokens``.
        least_tokens: the smallest prefill chunk that is worth a place past the limit.
        displaces: waiting requests may take the blocks of running ones of later lanes.
        reserved_blocks: free blocks that admitting a waiting request must leave.
        only_if_empty: the lane is passed over once the step has a slice.
    """

    ranks: frozenset[Rank]
    limit_s: float = math.inf
    beside_prefill: bool = True
    step_sizes: Sequence[int] = ()
    protected: bool = False
    least_tokens: int = LEAST_PREFILL_TOKENS
    displaces: bool = False
    reserved_blocks: int = 0
    only_if_empty: bool = False


@dataclass(frozen=True, slots=True)
class StepView:
    """What a policy sees of the engine before a step.

    Attributes:
        running: requests that hold blocks, by rank.
        waiting: requests that hold no blocks, by rank, the most urgent first.
        online_blocks: blocks that running online requests hold.
        suspended_s: predicted seconds that the suspended step still takes; 0 where nothing is suspended.
        restoring: requests that hold blocks and take no part in steps before their KV is back.
        reclaimable_blocks: of requests that yield to online ones, with a whole host copy: taking them loses
            nothing and takes no time.
    """

    now_s: float
    running: Mapping[Rank, Sequence[Request]]
    waiting: Mapping[Rank, Sequence[Request]]
    num_blocks: int
    online_blocks: int
    suspended_s: float = 0.0
    restoring: Sequence[Request] = ()
    reclaimable_blocks: int = 0


class Policy(Protocol):
    """Chooses the lanes of each step and who yields when blocks run out."""

    name: str
    stops_steps: bool  # offline slices may be taken out of a running step when an online request arrives

    @property
    def time_scale(self) -> float:
        """Observed over predicted step times, lately."""
        ...

    def lanes(self, view: StepView) -> Sequence[Lane]:
        """Lanes of the next step, in the order in which they are placed. Called once a step."""
        ...

    def resume_s(self, view: StepView) -> float:
        """Seconds for which the suspended step may go on now; 0 for not now, inf to its end.

        Asked only where something is suspended, before ``lanes``, which is not called if it goes on.
        """
        ...

    def victim_key(self, request: Request, lost_tokens: float) -> Any:
        """The request with the greatest key is preempted first.

        Args:
            lost_tokens: computed tokens that would have to be computed again; those of a suspended step count
                by the part of the layers that they have passed.
        """
        ...

    def copy_s(self, view: StepView) -> float:
        """Seconds of copying between device and host that may be under way at once."""
        ...

    def first_token_by_s(self, request: Request) -> float:
        """Deadline of an online request's first token; inf without an objective."""
        ...

    def promote_at_s(self, request: Request) -> float:
        """Instant from which an offline request is served in the rank above its own; inf for never."""
        ...

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """A step that was predicted to take one time took another."""
        ...

    def adopt(self, cost: CostModel) -> None:
        """Predict with this model from now on. How far the one before was off says nothing of it."""
        ...
